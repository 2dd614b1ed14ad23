"""The training of `benchmarks.startup --join`, for the first peer and for the one that joins; says how far they are.

The first peer ends when the other one has computed a microbatch that counts.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.train import Blocks, Noise
from lightning_swarm import SwarmStrategy

WIDTH, BATCH_SIZE = 64, 8
PAUSE_S = 0.3  # between two steps


def say(what: str) -> None:
    """Print that something has happened."""
    print(what, file=sys.stderr, flush=True)


class Watch(L.Callback):
    """Ends the run once a step counts the work of a second peer. It leaves the cores to that peer until then."""

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, SwarmStrategy)
        status = trainer.strategy.status()
        if trainer.global_step == 1:
            say("first step")
        time.sleep(PAUSE_S)
        others = [peer for stage in status.stages for peer in stage.peers if peer.peer_id != status.peer_id]
        if any(peer.num_microbatches and peer.samples_per_s for peer in others):
            say("counted")
            trainer.should_stop = True


def main() -> None:
    """Train."""
    say("imported")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SwarmStrategy(num_stages=2, microbatch_size=1),
        max_epochs=-1,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Blocks(WIDTH, 4), DataLoader(Noise(WIDTH, 64 * BATCH_SIZE), batch_size=BATCH_SIZE))


if __name__ == "__main__":
    main()
