"""A single trainer combines several reports and requests in one message; faults strike around that message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import pytest

from lightning_swarm.network import PeerId
from lightning_swarm.testing import FaultPlan, Phase
from tests.faults.harness import FaultySwarm
from tests.faults.plans import BRIEFLY_S, COORDINATOR, LATE_S, LEAD, LONG_S, STAGES, STEP, VOTERS

PHASES = [Phase.DONE, Phase.DONE_DONE]
BATCHES = [1, 2]
"""Batches of a step: the first leaves the step open, the second ends it."""
LATER_S = 300.0
"""When the repeated message arrives after the run has moved on."""
NUM_AHEAD = 2
"""Batches, of six, that have places before they begin even if two batches of their step are struck."""


def faults() -> Iterator[tuple[str, Callable[[FaultPlan], object]]]:
    """Yield faults by name; each strikes the message after a batch of the middle step, or its receiver."""
    for phase in PHASES:
        for nth in BATCHES:
            when: dict[str, Any] = {"at": phase, "step": STEP, "nth": nth}
            name = f"{phase.name}-{nth}"
            yield f"drop-{name}", methodcaller("drop", LEAD, **when)
            yield f"delay-{name}", methodcaller("delay", LEAD, by_s=LATE_S, **when)
            yield f"kill-{name}", methodcaller("kill", COORDINATOR, **when)
            yield f"freeze-{name}", methodcaller("freeze", COORDINATOR, for_s=LONG_S, **when)
            yield f"frozen-{name}", methodcaller("freeze", LEAD, for_s=BRIEFLY_S, **when)
            if phase is Phase.DONE:
                for after_s in (0.0, 0.05, LATER_S):
                    name = f"again-{nth}-after-{after_s:g}s"
                    yield name, methodcaller("duplicate", LEAD, again_after_s=after_s, **when)
    for phase in (Phase.CLOSE, Phase.AVERAGE_DONE, Phase.DECIDE, Phase.DECIDE_DONE, Phase.APPLY):
        for whom in (COORDINATOR, "e"):
            yield f"kill-{whom}-{phase.name}", methodcaller("kill", whom, at=phase, step=STEP)


FAULTS = dict(faults())


@pytest.mark.first_cells(6)
@pytest.mark.parametrize("delays", [False, True], ids=["waits", "late"])
@pytest.mark.parametrize("name", ["none", *FAULTS])
def test_a_fault(name: str, *, delays: bool) -> None:
    plan = FaultPlan()
    if name in FAULTS:
        FAULTS[name](plan)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=LEAD, voters=VOTERS, delays=delays)
    try:
        swarm.train()
        swarm.audit()
        assert swarm.trainers[PeerId(LEAD)].num_ahead >= NUM_AHEAD
    finally:
        swarm.close()
