"""Train a model that is too large for each of the processes that train it.

Each may take as much memory of its own as ``--memory-mb`` says (Linux keeps to it), less than the model takes. So it is
built on torch's meta device, each process makes room for its own stages only, and checkpoints are written in parts.

    python -m examples.large.train                      four stages
    python -m examples.large.train --resume --max-steps 8 --num-stages 5 --devices 5
    python -m examples.large.train --plain              what one such process says to it
"""

import argparse
import logging
import os
import resource
import warnings
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy

from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT
from lightning_swarm import Limits, SwarmStrategy


class SayMemory(L.Callback):
    """Says at the end what each of this machine's processes has held at most; Linux knows."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask for each process."""
        others = getattr(trainer.strategy, "local_processes", [])
        said = [Path(f"/proc/{pid}/status") for pid in (os.getpid(), *others)]
        peaks = [int(one.read_text().partition("VmHWM:")[2].split()[0]) // 1000 for one in said if one.exists()]
        print(f"memory of each process, at most: {', '.join(map(str, peaks))} MB", flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="use Lightning's own strategy instead of a swarm")
    parser.add_argument("--in-memory", action="store_true", help="have each process build the whole model at first")
    parser.add_argument("--devices", type=int, default=4, help="local peers of the swarm (default: 4)")
    parser.add_argument("--num-stages", type=int, default=4, help="parts the model is cut into (default: 4)")
    parser.add_argument("--max-steps", type=int, default=4, help="steps to train in all (default: 4)")
    parser.add_argument("--d-model", type=int, default=768, help="width (default: 768)")
    parser.add_argument("--num-blocks", type=int, default=24, help="transformer blocks (default: 24)")
    parser.add_argument("--batch-size", type=int, default=4, help="windows of text in a batch (default: 4)")
    parser.add_argument(
        "--memory-mb", type=int, default=2300, help="what each process may take; 0: all (default: 2300)"
    )
    parser.add_argument("--precision", default="32-true", help="as the Trainer's (default: 32-true)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/large"), help="for checkpoints (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    return parser.parse_args()


def main() -> None:
    """Train, and say how well."""
    arguments = parse_arguments()
    # Small data in memory needs no worker processes.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    # Lightning's own business with a torch that is newer than it.
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if arguments.memory_mb:
        # The swarm's other processes run this script, too.
        resource.setrlimit(resource.RLIMIT_DATA, (arguments.memory_mb << 20, arguments.memory_mb << 20))

    last = arguments.folder / "last.ckpt"
    strategy: str | Strategy = "auto"
    if not arguments.plain:
        # Snapshots are copies of stages. Here a run that has lost one is started again from its checkpoint.
        limits = Limits(snapshot_interval=None)
        strategy = SwarmStrategy(num_stages=arguments.num_stages, state_dict_type="sharded", limits=limits)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if arguments.plain else arguments.devices,
        strategy=strategy,
        max_steps=arguments.max_steps,
        limit_val_batches=2,
        val_check_interval=arguments.max_steps,
        num_sanity_val_steps=0,
        precision=arguments.precision,
        logger=False,
        callbacks=[ModelCheckpoint(arguments.folder, "last", enable_version_counter=False), SayMemory()],
        enable_model_summary=False,
    )
    with trainer.init_module(empty_init=not (arguments.plain or arguments.in_memory)):
        model = ByteGPT(d_model=arguments.d_model, num_blocks=arguments.num_blocks, num_heads=8, context=64)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if trainer.is_global_zero:
        print(
            f"{num_parameters / 1e6:.0f}M parameters: with gradients and AdamW's state they take "
            f"{16 * num_parameters / 1e6:.0f} MB in one process",
            flush=True,
        )
    data = PythonSource(context=64, batch_size=arguments.batch_size)
    trainer.fit(model, data, ckpt_path=last if arguments.resume else None)
    print(f"step {trainer.global_step}:", end=" ")
    print(", ".join(f"{name} {float(loss):.4f}" for name, loss in sorted(trainer.callback_metrics.items())))


if __name__ == "__main__":
    main()
