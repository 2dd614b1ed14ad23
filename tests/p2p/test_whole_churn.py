"""Trainers of an uncut model, in real processes, join, leave and are killed; each sample counts once.

`test_whole_churn.py` in `tests/parity` tests this in memory, a hundred times. `SWARM_TIMES=5` runs five seeds.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.p2p.several import NUM_EPOCHS, Long, Several, let_go, said
from tests.p2p.test_killed import assert_undisturbed
from tests.p2p.warm import LIMITS, Server, Zygote, shared_zygote, wait_until
from tests.parity.test_shared_data import counted

# Cold starts in this file: 1, the process that all trainers are forked from.

EVENTS = {"comes": 5, "leaves": 2, "is killed": 2, "lead is killed": 1}
NUM_EVENTS = sum(EVENTS.values())
NUM_STARTERS = 3
LEAST, MOST = 3, Long.batches_of_a_step  # living trainers; two could not tell a dead lead from a broken link
NUM_STEPS = NUM_EPOCHS * Long.num_batches // Long.batches_of_a_step
STEPS_OF_AN_EVENT = 5  # a joining trainer takes two records: one for its server, one for itself
SEEDS = range(max(1, int(os.environ.get("SWARM_TIMES", "0"))))


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with shared_zygote() as made:
        yield made


def drawn(rng: random.Random) -> list[str]:
    """Draw the events in an order that keeps the number of living trainers within its bounds."""
    while True:
        events = rng.sample(list(EVENTS), NUM_EVENTS, counts=list(EVENTS.values()))
        living = accumulate((1 if event == "comes" else -1 for event in events), initial=NUM_STARTERS)
        if all(LEAST <= number <= MOST for number in living):
            return events


@dataclass
class Churn:
    """The trainers of a run, by their numbers."""

    zygote: Zygote
    folder: Path
    rng: random.Random
    trainers: list[Server] = field(default_factory=list)
    living: set[int] = field(default_factory=set)
    happened: list[str] = field(default_factory=list)

    def begin(self, **more: Any) -> None:
        """Start a trainer that knows the address of a living one. `more` are options of `Zygote.begin_trainer`."""
        known = [address for number in sorted(self.living) if (address := self.address(number))]
        options = {
            "folder": str(self.folder),
            "number": len(self.trainers),
            "others": 0,
            "initial_peers": [self.rng.choice(known)] if known else [],
            "limits": {**LIMITS, "silence_timeout": 2.0, "revive_timeout": 1.0, "snapshot_interval": 0.001},
            "cut": False,
            "gated": True,
            **more,
        }
        self.living.add(len(self.trainers))
        self.trainers.append(self.zygote.begin_trainer(**options))

    def notes(self, kind: str) -> list[tuple[list[Any], int]]:
        """Return the trainers' log lines of a kind, with the trainers' numbers."""
        lines = [(line, number) for number in range(len(self.trainers)) for line in said(self.folder, number)]
        return [(line[1:], number) for line, number in lines if line[0] == kind]

    def address(self, number: int) -> str:
        """Return a trainer's address; empty until it trains."""
        return next((line[3] for line in said(self.folder, number) if line[0] == "begun"), "")

    def is_held(self, step: int) -> bool:
        """Return whether the lead is held in this step or later, with a standby and all living trainers in the run."""
        assert all(self.trainers[one].alive for one in self.living), [self.trainers[one].said for one in self.living]
        if not (held := self.notes("held")):
            return False
        (_, at, trainers, servers), _ = max(held)
        peers = sorted(self.address(one).partition("/")[2] for one in self.living)
        return at >= step and trainers == servers == peers

    def wait(self, step: int) -> None:
        """Wait until the run is held in this step or a later one."""
        let_go(self.folder, *range(step))
        wait_until(lambda: self.is_held(step), f"not all take part in step {step} after {self.happened}")

    def act(self, event: str, until: int) -> None:
        """Carry out an event, and let the run continue until it is held in the step `until`."""
        if event == "comes":
            self.begin()
        else:
            (generation, at, *_), lead = max(self.notes("held"))
            victim = lead if event == "lead is killed" else self.rng.choice(sorted(self.living - {lead}))
            # Kill it at any moment after a record, not within a batch.
            if event == "is killed" and self.rng.random() < 0.5:
                let_go(self.folder, *range(max(until, at + 1)))
                wait_until(lambda: self.is_decided(generation, at), f"step {at} has no record")
            os.kill(self.trainers[victim].pid, signal.SIGTERM if event == "leaves" else signal.SIGKILL)
            self.living.remove(victim)
            if event == "leaves":  # like a preempted machine, it leaves after its current batch, by a record
                let_go(self.folder, *range(at + 2))
                wait_until(lambda: not self.trainers[victim].alive, f"{victim} is asked to leave and stays")
                assert "Received SIGTERM" in self.trainers[victim].said
                assert "Traceback" not in self.trainers[victim].said
        self.happened.append(event)

    def is_decided(self, generation: int, step: int) -> bool:
        """Return whether a trainer has the record of a step."""
        return any(of == generation and places[0][0] >= step for (of, places), _ in self.notes("record"))

    def finish(self) -> None:
        """Release all steps, and wait until all trainers have ended."""
        let_go(self.folder, *range(NUM_STEPS))
        wait_until(lambda: not any(one.alive for one in self.trainers), "a trainer outlived its run")

    def close(self) -> None:
        for one in self.trainers:
            if one.alive:
                os.kill(one.pid, signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_sample_counts_once(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    """Losses and weights are the plain Trainer's."""
    rng = random.Random(seed)
    events = drawn(rng)
    steps = [STEPS_OF_AN_EVENT * number + rng.randint(1, STEPS_OF_AN_EVENT) for number in range(NUM_EVENTS + 1)]
    with closing(Churn(zygote, tmp_path, rng)) as churn:
        churn.begin()
        wait_until(lambda: bool(churn.address(0)), "nobody begins a run")
        for _ in range(1, NUM_STARTERS):
            churn.begin()
        for event, (step, after) in zip(events, pairwise(steps), strict=True):
            churn.wait(step)
            churn.act(event, after)
        churn.wait(steps[-1])
        churn.finish()
    assert Counter(churn.happened) == EVENTS
    seen = Several.read(tmp_path)
    assert len(seen.generations) == 2, "the run rolled back for its lead alone"
    assert len(seen.steps) == NUM_STEPS
    assert len(counted(seen)) == NUM_EPOCHS * len(Long().train_dataloader().dataset)  # type: ignore[arg-type]
    assert len(seen.validated) == NUM_EPOCHS
    assert churn.living <= {seen.batches[place][0] for places in seen.steps for place in places}, "somebody idled"
    assert_undisturbed(seen, Long)
