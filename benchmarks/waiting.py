"""A training whose peers compute by waiting, each at a pace of its own; says when steps were over, and who was where.

Each peer takes one of the paces that are meant for the stage in which it begins, so the first assignment is what it was
chosen to be. It keeps that pace wherever it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.train import Clock
from lightning_swarm import Rebalancing, SwarmStrategy
from lightning_swarm.peer import process
from lightning_swarm.planner.simulator.microbatches import Simulated, SyntheticBlock, batches

PACES = "BENCHMARK_PACES"
"""The folder where paces are taken from: files named by stage, a dash, and microbatches/s."""

_own: float | None = None


def _pace(stage: int) -> float:
    """Microbatches/s of this process. The starter takes the last one of its stage, the others take the first."""
    global _own  # noqa: PLW0603 - a process has one
    while _own is None:
        left = sorted(Path(os.environ[PACES]).glob(f"{stage}-*"))
        chosen = left[-1 if process.local_rank() == 0 else 0]
        try:
            chosen.unlink()
        except FileNotFoundError:
            continue  # another one was quicker
        _own = float(chosen.name.split("-")[1])
    return _own


class _Wait(torch.autograd.Function):
    """A third of a microbatch's time goes into its forward, the rest into its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradients[0], None


def waited(hidden: Tensor, seconds: float) -> Tensor:
    """Return the same after a while, and let the gradient take twice as long: as a microbatch of so many seconds."""
    out: Tensor = _Wait.apply(hidden, seconds)
    return out


class Waiting(nn.Module):
    """A stage that waits, too."""

    def __init__(self, stage: int, block: SyntheticBlock) -> None:
        super().__init__()
        self._stage = stage
        self.block = block

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """As the block's."""
        out: Tensor = waited(self.block(hidden), 1.0 / _pace(self._stage))
        return out


class Places(L.Callback):
    """Says after each step who holds which stage."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, SwarmStrategy)
        stages = trainer.strategy.status().stages
        print(json.dumps({"held": [sorted(peer.peer_id for peer in stage.peers) for stage in stages]}), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Train; peers of the swarm run this, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-stages", type=int, required=True)
    parser.add_argument("--num-microbatches", type=int, required=True)
    parser.add_argument("--rebalancing", default="none")
    parser.add_argument("--rebalance-interval", type=float, default=300.0)
    parser.add_argument("--boundary-bytes", type=int, default=1 << 10)
    parser.add_argument("--stage-bytes", type=int, default=1 << 10)
    parser.add_argument("--role", default="auto")
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--initial-peers", nargs="*", default=())
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Simulated(arguments.num_stages, arguments.boundary_bytes, arguments.stage_bytes, Waiting)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=SwarmStrategy(
            num_stages=arguments.num_stages,
            microbatch_size=1,
            rebalancing=Rebalancing(arguments.rebalancing, interval=arguments.rebalance_interval),
            role=arguments.role,
            listen=arguments.listen,
            trust="open",  # its hosts are in a network of their own
            initial_peers=arguments.initial_peers,
        ),
        max_epochs=-1,
        callbacks=[Places(), Clock(arguments.seconds, None)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches(arguments.num_microbatches))


if __name__ == "__main__":
    main()
