"""Trainers of an uncut model join and are killed at random, including the lead; each sample counts once.

Each model of `test_whole_models.py` has a seed. `SWARM_TIMES=100` runs a hundred seeds, in some ten minutes.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from typing_extensions import override

from tests.parity.test_lead_of_several import LIMITS, dead, rank_of, standby_of
from tests.parity.test_shared_data import counted
from tests.parity.test_trainers_come import under_way
from tests.parity.test_whole_models import (
    BATCH_SIZE,
    BATCHES_OF_A_STEP,
    MODELS,
    NUM_SAMPLES,
    NUM_STEPS,
    assert_plain,
    run,
)
from tests.parity.trainers import Seen, ThreadStrategy

SEEDS = range(max(len(MODELS), int(os.environ.get("SWARM_TIMES", "0"))))
LIMITS = replace(LIMITS, snapshot_interval=0.05)  # snapshots at every step would take half of the run time
ORDERS = [("one", "comes", "lead"), ("lead", "comes", "one"), ("comes", "one", "lead"), ("comes", "lead", "one")]
"""Two of three are a majority of the voters. A single survivor of two is not, so there another trainer joins first."""
NUM_STARTERS = 3
LEAST_STEPS = 3 * NUM_SAMPLES // (BATCH_SIZE * BATCHES_OF_A_STEP)  # three epochs
_MOMENTS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end")


class Churn(L.Callback):
    """A trainer joins, one is killed, and so is the lead, in random order and at random moments of the lead's loop."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.events = self.rng.choice(ORDERS)
        self.living = {f"peer-{rank}" for rank in range(NUM_STARTERS)}
        self.num_done = 0
        self.lead = 0
        self._draw(2)

    def _draw(self, after: int) -> None:
        self.moment, self.step = self.rng.choice(_MOMENTS), after + self.rng.randrange(3)

    @property
    def calls_another(self) -> bool:
        """Return whether another trainer is due to join now."""
        return "comes" in self.events[: self.num_done]

    def at(self, trainer: L.Trainer, moment: str) -> None:
        seen, rank = seen_by(trainer), rank_of(trainer)
        if not trainer.is_global_zero or rank in dead(seen):
            return
        self.lead = rank
        settled = set(seen.trainers_of_the_run) == self.living == members(seen)
        if self.num_done == len(self.events):
            trainer.should_stop = settled and len(seen.records) >= max(self.step, LEAST_STEPS)
        elif not settled and moment == _MOMENTS[0]:
            seen.pause(0.25)  # time to notice a death or to join before the run ends
        elif moment == self.moment and settled and len(seen.records) >= self.step:
            self.act(seen, f"peer-{rank}")

    def act(self, seen: Seen, lead: str) -> None:
        event = self.events[self.num_done]
        if event == "comes":
            self.living.add(f"peer-{NUM_STARTERS}")
        elif event == "one":
            self._kill(seen, self.rng.choice(sorted(self.living - {lead})))
        elif standby_of(seen) is not None:
            self._kill(seen, lead)
        else:
            return  # no standby could lead yet
        self.num_done += 1
        self._draw(len(seen.records))

    def _kill(self, seen: Seen, peer: str) -> None:
        self.living.remove(peer)
        seen.kill(peer)

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "on_train_batch_start")

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self.at(trainer, "on_before_backward")

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.at(trainer, "on_after_backward")

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.at(trainer, "on_train_batch_end")


def seen_by(trainer: L.Trainer) -> Seen:
    assert isinstance(trainer.strategy, ThreadStrategy)
    return trainer.strategy._seen


def members(seen: Seen) -> set[str]:
    """Return the peers that hold the model after the newest record."""
    return {member.peer_id for roster in seen.rosters[-1] for member in roster} if seen.rosters else set()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_sample_counts_once(seed: int) -> None:
    """The curve is the plain Trainer's."""
    churn, model = Churn(seed), list(MODELS)[seed % len(MODELS)]
    come: dict[int, Any] = dict.fromkeys(range(1, NUM_STARTERS), under_way)
    come[NUM_STARTERS] = lambda seen: seen.wait_for(lambda: churn.calls_another)
    options: dict[str, Any] = {"callbacks": lambda rank: [churn], "swarm": {"limits": LIMITS}, "raises": False}
    seen = run(model, NUM_STARTERS + 1, come=come, max_steps=NUM_STEPS, **options)
    assert not seen.errors.keys() - set(dead(seen)), seen.errors
    assert (churn.num_done, len(seen.killed), len(seen.went_back)) == (3, 2, 1)
    assert f"peer-{NUM_STARTERS}" in churn.living or f"peer-{NUM_STARTERS}" in seen.killed
    assert len(seen.steps) >= LEAST_STEPS
    samples = counted(seen)
    for begin in range(0, len(samples), NUM_SAMPLES):
        epoch = samples[begin : begin + NUM_SAMPLES]
        assert len(set(epoch)) == len(epoch)
    seen.weights = seen.modules[churn.lead].state_dict()
    assert_plain(seen, model, len(seen.steps))
