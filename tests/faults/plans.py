"""The matrix: every fault in every phase, one at a time and in random pairs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.phases import LEAVING

STAGES = ("a b c", "d e f")
VOTERS = "a b c d e"
COORDINATOR = "a"
TRAINERS = "trainer other"
STEP = 1
"""The step in which faults strike: one before it, one after."""

COMPUTING = [
    Phase.FORWARD,
    Phase.FORWARD_ACCEPTED,
    Phase.FORWARD_DONE,
    Phase.SEND_OUTPUT,
    Phase.BACKWARD,
    Phase.BACKWARD_ACCEPTED,
    Phase.BACKWARD_DONE,
    Phase.RECEIPT_SEEN,
]
CLOSING = [
    Phase.CLOSE,
    Phase.CLOSE_DONE,
    Phase.AVERAGE,
    Phase.AVERAGE_SEND,
    Phase.AVERAGE_REDUCE,
    Phase.AVERAGE_DONE,
    Phase.DECIDE,
    Phase.DECIDE_DONE,
    Phase.APPLY,
    Phase.APPLY_DONE,
]
TRAINING = [Phase.GRANT, Phase.GRANT_DONE, Phase.DONE, Phase.DONE_DONE, Phase.RECORD, Phase.RECORD_DONE]
OF_TRAINERS = [
    Phase.FORWARD,
    Phase.FORWARD_ACCEPTED,
    Phase.BACKWARD,
    Phase.BACKWARD_ACCEPTED,
    Phase.RECEIPT_SEEN,
    *TRAINING,
]
BETWEEN = frozenset({Phase.GRANT, Phase.GRANT_DONE, Phase.RECORD_DONE, Phase.APPLY_DONE})
"""Phases in which no microbatch need be under way."""

BRIEFLY_S = 4.0
"""Shorter than a peer may be silent."""
LONG_S = 40.0
"""Longer."""
PARTITIONS = (
    ("b", "a c d e f trainer other"),
    ("a", "b c d e f trainer other"),
    ("a b d", "c e f trainer other"),
    ("e other", "a b c d f trainer"),
)


@dataclass(frozen=True)
class Case:
    """One fault at one moment."""

    kind: str
    whom: str | None
    phase: Phase
    for_s: float = 0.0
    groups: tuple[str, ...] = ()
    away: frozenset[str] = field(default=frozenset())  # who is killed, or away for so long that it may be left out

    def __str__(self) -> str:
        whom = "|".join(group.replace(" ", "") for group in self.groups) or self.whom or "any"
        for_ = f"-{self.for_s:g}s" if self.for_s else ""
        return f"{self.kind}-{whom}-{self.phase.name}{for_}"

    @property
    def struck(self) -> frozenset[str]:
        """Whom it is to strike, as far as it says."""
        return frozenset(self.groups[0].split() if self.groups else [self.whom] if self.whom else [])

    def add_to(self, plan: FaultPlan) -> None:
        """Put the fault into a plan."""
        when: dict[str, Any] = {"at": self.phase}
        if self.phase in TRAINING and self.whom == "other":
            pass  # it may not come to a second batch
        elif self.phase not in CLOSING and (self.whom or self.groups):
            when["nth"] = 2  # not everyone has work in every step
        elif self.phase in (Phase.GRANT, Phase.GRANT_DONE):
            when |= {"step": STEP, "nth": 2}  # of its two batches the first one is under way then
        else:
            when["step"] = STEP
        match self.kind:
            case "partition":
                plan.partition(*(group.split() for group in self.groups), for_s=self.for_s, **when)
            case "freeze":
                plan.freeze(self.whom, for_s=self.for_s, **when)
            case "delay":
                plan.delay(self.whom, by_s=self.for_s, **when)
            case "duplicate":
                plan.duplicate(self.whom, again_after_s=self.for_s, **when)
            case _:
                getattr(plan, self.kind)(self.whom, **when)


def cases() -> list[Case]:
    """Every fault in every phase that it can strike in."""
    return [*_to_messages(), *_to_peers(), *_partitions()]


def _to_messages() -> Iterator[Case]:
    for phase in [*COMPUTING, *CLOSING, *TRAINING]:
        yield Case("delay", None, phase, BRIEFLY_S)
        yield Case("delay", None, phase, 12.0)
        if phase in TRAINING:
            yield Case("drop", None, phase)
        else:  # who does not answer for long may be taken for gone
            yield from (Case("drop", whom, phase, away=frozenset({whom})) for whom in ("c", "e"))
        if phase is not Phase.RECEIPT_SEEN:  # it is in no message any more
            yield Case("corrupt", None, phase)
        if phase not in LEAVING:
            yield Case("duplicate", None, phase)
            yield Case("duplicate", None, phase, 3.0)


def _to_peers() -> Iterator[Case]:
    phases = {
        "b": [*COMPUTING, *CLOSING],
        "e": [*COMPUTING, *CLOSING],
        COORDINATOR: [*COMPUTING, *CLOSING, *TRAINING],
        "other": OF_TRAINERS,
    }
    for whom, theirs in phases.items():
        for phase in theirs:
            yield Case("kill", whom, phase, away=frozenset({whom}))
            yield Case("freeze", whom, phase, BRIEFLY_S)
            yield Case("freeze", whom, phase, LONG_S, away=frozenset({whom}))


def _partitions() -> Iterator[Case]:
    for groups in PARTITIONS:
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.CLOSE, Phase.AVERAGE, Phase.DECIDE, Phase.APPLY):
            yield Case("partition", None, phase, BRIEFLY_S, groups)
            parted = groups[0].split()
            if COORDINATOR in parted and len(parted) > 1:  # who is left out depends on who decides first
                parted = " ".join(groups).split()
            yield Case("partition", None, phase, LONG_S, groups, away=frozenset(parted))


def pairs(num_pairs: int) -> list[tuple[Case, Case]]:
    """Two faults each, drawn at random.

    They leave each stage a peer, the voters a majority, and a trainer; nobody is struck who is away.
    """
    rng = random.Random(0)
    found: list[tuple[Case, Case]] = []
    every = cases()
    while len(found) < num_pairs:
        one, other = rng.sample(every, 2)
        clash = (one.away and one.away & other.struck) or (other.away and other.away & one.struck)
        if not clash and _bearable(one.away | other.away):
            found.append((one, other))
    return found


def _bearable(away: frozenset[str]) -> bool:
    there = all(set(stage.split()) - away for stage in STAGES) and set(TRAINERS.split()) - away
    return bool(there) and len(set(VOTERS.split()) - away) * 2 > len(VOTERS.split())
