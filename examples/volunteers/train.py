"""A small language model, trained by whoever comes: each trainer holds all of it, and only gradients travel.

Start it once, and then, at any time, in other terminals or on other machines, with the address that it prints::

    python -m examples.volunteers.train --listen 0.0.0.0:31337
    lightning-swarm invite --role trainer --uses 20 --out swarm.invite
    SWARM_INVITE_FILE=swarm.invite python -m examples.volunteers.train --join 203.0.113.7:31337/12D3KooW...

Each step is LAMB with a state of 8 bits over 256 windows of text, whoever brings them. Kill any of them but the last.
"""

import argparse

import lightning as L
import torch
from bitsandbytes.optim import LAMB8bit  # type: ignore[attr-defined]  # it has no types
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT
from lightning_swarm import SwarmStrategy

SAMPLES_OF_A_STEP = 256


class VolunteersGPT(ByteGPT):
    """The byte-level GPT, uncut, with an optimizer for large steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """LAMB, whose two moments take a byte each for a parameter."""
        optimizer: torch.optim.Optimizer = LAMB8bit(self.parameters(), lr=0.01, weight_decay=0.1)  # type: ignore[no-untyped-call]
        return optimizer


def main() -> None:
    """Train along, or begin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", default="", help="address of the run; without it this process begins one")
    parser.add_argument("--listen", default="127.0.0.1", help="address and port where others reach this process")
    parser.add_argument("--max-steps", type=int, default=100, help="of the run (default: 100)")
    parser.add_argument("--d-model", type=int, default=64, help="width of the model (default: 64)")
    arguments = parser.parse_args()
    swarm = SwarmStrategy(
        role="both", target_batch_size=SAMPLES_OF_A_STEP, initial_peers=arguments.join or (), listen=arguments.listen
    )
    trainer = L.Trainer(
        devices=1,
        strategy=swarm,
        max_steps=arguments.max_steps,
        logger=False,
        callbacks=ModelCheckpoint("runs/volunteers", every_n_train_steps=20),
    )
    torch.manual_seed(0)
    model = VolunteersGPT(d_model=arguments.d_model, num_blocks=2, context=64)
    trainer.fit(model, PythonSource(context=64, max_bytes=2_000_000))
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
