"""Train a GPT whose blocks are in a `ModuleList` on a swarm of local peers, or with ``--plain`` on none.

The model is cut by the name of its list, ``pipeline="transformer.h"``, and was not edited for it. Embeddings, norm and
head stay where the Trainer is.
"""

import argparse
import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy

from examples.bytes.data import PythonSource
from examples.nanogpt.model import GPT
from lightning_swarm import SwarmStrategy

PROMPT = b"def "


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="use Lightning's own strategy instead of a swarm")
    parser.add_argument("--devices", type=int, default=3, help="local peers of the swarm (default: 3)")
    parser.add_argument("--num-stages", type=int, default=3, help="parts the blocks are cut into (default: 3)")
    parser.add_argument("--max-steps", type=int, default=200, help="steps to train (default: 200)")
    parser.add_argument("--n-layer", type=int, default=6, help="blocks (default: 6)")
    parser.add_argument("--n-embd", type=int, default=64, help="width (default: 64)")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text in a batch (default: 16)")
    parser.add_argument("--precision", default="32-true", help="as the Trainer's (default: 32-true)")
    return parser.parse_args()


def main() -> None:
    """Train, say how well, and write a little."""
    arguments = parse_arguments()
    # Small data in memory needs no worker processes.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own business with a torch that is newer than it.
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    strategy: str | Strategy = "auto"
    if not arguments.plain:
        strategy = SwarmStrategy(pipeline="transformer.h", num_stages=arguments.num_stages)
    L.seed_everything(0, verbose=False)
    model = GPT(n_layer=arguments.n_layer, n_embd=arguments.n_embd)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if arguments.plain else arguments.devices,
        strategy=strategy,
        max_steps=arguments.max_steps,
        limit_train_batches=arguments.max_steps,
        limit_val_batches=10,
        num_sanity_val_steps=0,
        precision=arguments.precision,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, PythonSource(batch_size=arguments.batch_size))
    tokens = model.generate(torch.tensor([list(PROMPT)]), 200)
    print(bytes(tokens[0].tolist()).decode("utf-8", errors="replace"))
    print(", ".join(f"{name} {float(loss):.4f}" for name, loss in sorted(trainer.callback_metrics.items())))


if __name__ == "__main__":
    main()
