"""The matrix: every fault in every phase, one at a time and in random pairs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.phases import LEAVING

STAGES = ("a b c", "d e f")
VOTERS = "a b c d e"
COORDINATOR = "a"
TRAINERS = "trainer other"

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
BETWEEN = frozenset({Phase.GRANT, Phase.GRANT_DONE, Phase.RECORD_DONE})
"""Phases in which no microbatch need be under way."""


@dataclass(frozen=True)
class Case:
    """One fault at one moment. `add` puts it into a plan."""

    name: str
    phase: Phase
    victims: frozenset[str]  # peers that are killed, or away for long
    add: Callable[[FaultPlan], object]


def cases() -> list[Case]:
    """Every fault in every phase that it can strike in."""
    return [*_message_faults()]


def _message_faults() -> Iterator[Case]:
    for phase in [*COMPUTING, *CLOSING, *TRAINING]:
        nth = 2 if phase in (Phase.GRANT, Phase.GRANT_DONE) else 1  # the other's batch is under way then
        for seconds in (5.0, 12.0):
            yield Case(
                f"delay-{seconds:g}s-{phase.name}",
                phase,
                frozenset(),
                lambda plan, phase=phase, seconds=seconds, nth=nth: plan.delay(
                    None, by_s=seconds, at=phase, step=1, nth=nth
                ),
            )
        if phase not in LEAVING:
            for seconds in (0.0, 3.0):
                yield Case(
                    f"duplicate-{seconds:g}s-{phase.name}",
                    phase,
                    frozenset(),
                    lambda plan, phase=phase, seconds=seconds: plan.duplicate(
                        None, at=phase, step=1, again_after_s=seconds
                    ),
                )


def pair(seed: int) -> tuple[Case, Case]:
    """Two different cases; together they leave each stage a peer and the voters a majority."""
    return tuple(random.Random(seed).sample(cases(), 2))  # type: ignore[return-value]
