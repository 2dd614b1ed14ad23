"""Train the byte-level GPT by LAMB, in few large steps, on a swarm of local peers or with ``--plain`` on none.

LAMB (arXiv:1904.00962) is what the SWARM paper trained its language model with: batches may be so large that peers
average seldom. Each parameter's update is scaled to that parameter's own norm, so no stage needs to know anything of
another. Here it is that of pytorch_optimizer.
"""

import argparse
import logging
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from pytorch_optimizer import Lamb
from torch.optim.lr_scheduler import LambdaLR

from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT, warmup_cosine
from lightning_swarm import SwarmStrategy


class LambGPT(ByteGPT):
    """The byte-level GPT with another optimizer."""

    def configure_optimizers(self) -> Any:
        """LAMB in two parameter groups; warm-up and cosine, once per step."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        optimizer = Lamb(
            [{"params": matrices, "weight_decay": self.hparams["weight_decay"]}, {"params": vectors}],
            lr=self.hparams["learning_rate"],
            weight_decouple=False,  # the decay is part of what the trust ratio scales
            adam_debias=True,  # steps are as long as the trust ratio has them, the first ones too
        )
        num_steps, warmup_steps = self.trainer.estimated_stepping_batches, self.hparams["warmup_steps"]
        schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup_steps, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="use Lightning's own strategy instead of a swarm")
    parser.add_argument("--devices", type=int, default=3, help="local peers of the swarm (default: 3)")
    parser.add_argument("--num-stages", type=int, default=3, help="parts the model is cut into (default: 3)")
    parser.add_argument("--max-steps", type=int, default=40, help="steps to train (default: 40)")
    parser.add_argument("--d-model", type=int, default=64, help="width (default: 64)")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of text in a batch (default: 32)")
    parser.add_argument("--accumulate", type=int, default=4, help="batches in a step (default: 4)")
    parser.add_argument("--precision", default="32-true", help="as the Trainer's (default: 32-true)")
    return parser.parse_args()


def main() -> None:
    """Train, and say how well."""
    arguments = parse_arguments()
    # Small data in memory needs no worker processes.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own business with a torch that is newer than it.
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    strategy: str | Strategy = "auto"
    if not arguments.plain:
        strategy = SwarmStrategy(num_stages=arguments.num_stages)
    L.seed_everything(0, verbose=False)
    model = LambGPT(d_model=arguments.d_model, context=64, learning_rate=2e-2, warmup_steps=10, weight_decay=0.01)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if arguments.plain else arguments.devices,
        strategy=strategy,
        max_steps=arguments.max_steps,
        accumulate_grad_batches=arguments.accumulate,
        limit_val_batches=10,
        val_check_interval=arguments.max_steps * arguments.accumulate,
        num_sanity_val_steps=0,
        precision=arguments.precision,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, PythonSource(context=64, batch_size=arguments.batch_size))
    print(", ".join(f"{name} {float(loss):.4f}" for name, loss in sorted(trainer.callback_metrics.items())))


if __name__ == "__main__":
    main()
