"""Train the byte-level GPT on a swarm of local peers, or with ``--plain`` on none.

The two differ in the Trainer's strategy and in nothing else. In a swarm each further peer runs this
script again, so whatever is slow waits until ``fit`` asks for it.
"""

import argparse
import logging
import os
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy

from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT
from lightning_swarm import SampleText, SwarmView

PROMPT = "def "
NUM_SAMPLED = 300


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="use Lightning's own strategy instead of a swarm")
    parser.add_argument("--devices", type=int, default=4, help="local peers of the swarm (default: 4)")
    parser.add_argument("--num-stages", type=int, default=2, help="parts the model is cut into (default: 2)")
    parser.add_argument("--max-steps", type=int, default=300, help="steps to train (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="decides initial weights and batches (default: 0)")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="then kill a local peer; a new one joins")
    parser.add_argument("--threads", type=int, help="of torch, here and in each peer (default: the cores by the peers)")
    parser.add_argument("--out", type=Path, default=Path("runs/bytes"), help="folder for the log and the checkpoints")
    return parser.parse_args()


def build_trainer(arguments: argparse.Namespace) -> L.Trainer:
    """A Trainer for this run; nothing is started or written yet."""
    devices = 1 if arguments.plain else arguments.devices
    strategy: str | Strategy = "auto"
    if not arguments.plain:
        from lightning_swarm import SwarmStrategy

        strategy = SwarmStrategy(num_stages=arguments.num_stages)
        # The peers share this machine's cores; with all of them each, they would get in each other's way.
        torch.set_num_threads(arguments.threads or max(1, (os.cpu_count() or 1) // devices))
    interval = max(1, arguments.max_steps // 3)
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=arguments.max_steps,
        limit_train_batches=arguments.max_steps,
        val_check_interval=interval,
        limit_val_batches=10,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(arguments.out, name="", version=""),
        callbacks=[
            ModelCheckpoint(arguments.out / "checkpoints", filename="{step}", monitor="val_loss", save_last=True),
            SwarmView(),
            SampleText([PROMPT], every_n_steps=arguments.max_steps, generate=partial(write, arguments.seed)),
            *([_replacement(arguments)] if arguments.kill_at is not None else []),
        ],
        enable_model_summary=False,
    )


def write(seed: int, model: ByteGPT, prompt: str) -> str:
    """What follows the prompt. During a run of a swarm its stages compute it."""
    text = model.generate(prompt.encode(), NUM_SAMPLED, generator=torch.Generator().manual_seed(seed))
    return text.decode("utf-8", errors="replace")


def _replacement(arguments: argparse.Namespace) -> L.Callback:
    from examples.bytes.replacement import Replacement

    # The new peer is one process of the same program, and shares this machine's cores as the others do.
    options = {
        "devices": 1,
        "threads": arguments.threads or torch.get_num_threads(),
        "num-stages": arguments.num_stages,
        "max-steps": arguments.max_steps,
        "seed": arguments.seed,
        "out": arguments.out,
    }
    program = ["-m", "examples.bytes.train", *(f"--{name}={value}" for name, value in options.items())]
    return Replacement(arguments.kill_at, arguments.out, program)


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    # Small data in memory needs no worker processes, and a few cores have no room for them.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own business with a torch that is newer than it.
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # The view shows them.
    logging.getLogger("lightning_swarm.events").setLevel(logging.ERROR)
    L.seed_everything(arguments.seed, verbose=False)
    trainer = build_trainer(arguments)
    trainer.fit(ByteGPT(), PythonSource(seed=arguments.seed))
    if trainer.is_global_zero:
        losses = "  ".join(f"{name} {float(value):.3f}" for name, value in sorted(trainer.callback_metrics.items()))
        print(f"{trainer.global_step} steps done: {losses}", flush=True)


if __name__ == "__main__":
    main()
