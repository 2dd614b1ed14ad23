"""A lost request or answer of any method in a step costs seconds, and changes no weight."""

from __future__ import annotations

from functools import cache

import pytest

from lightning_swarm.core.limits import Limits
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol import tickets
from lightning_swarm.testing import FaultPlan, Phase
from tests.faults.harness import FaultySwarm
from tests.faults.plans import CLOSING, COMPUTING, SENDING, STAGES, STEP, TRAINERS, TRAINING, VOTERS

SOON_S = 5.0
"""Virtual seconds that one lost message may cost."""

LARGE_S = 9.0
"""Virtual seconds that one lost message with a stream of its own may cost."""

AUDITING = [
    Phase.SKETCH,
    Phase.SKETCH_DONE,
    Phase.AUDIT,
    Phase.AUDIT_DONE,
    Phase.KEPT_WORK,
    Phase.KEPT_WORK_DONE,
    Phase.FINDINGS,
    Phase.FINDINGS_DONE,
]


def run(plan: FaultPlan, *, audited: bool) -> float:
    """Train under the default limits; check the weights, and return when the last step was decided."""
    options = {"keepers": "a b", "audit_share": 1.0, "voters": "a b"} if audited else {"voters": VOTERS}
    network = MemoryNetwork(latency_s=0.01)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, limits=Limits(), network=network, **options)  # type: ignore[arg-type]
    try:
        swarm.train()
        swarm.audit()
        return max(swarm.books.decided_s.values())
    finally:
        swarm.close()


@cache
def undisturbed_s(*, audited: bool) -> float:
    return run(FaultPlan(), audited=audited)


@pytest.mark.first_cells(8)
@pytest.mark.parametrize("phase", [*COMPUTING, *CLOSING, *TRAINING], ids=lambda phase: phase.name)
def test_a_lost_message(phase: Phase) -> None:
    took_s = run(FaultPlan().drop(None, at=phase, step=STEP), audited=False)
    assert took_s < undisturbed_s(audited=False) + SOON_S


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("phase", AUDITING, ids=lambda phase: phase.name)
def test_a_lost_message_of_an_audited_step(phase: Phase) -> None:
    took_s = run(FaultPlan().drop(None, at=phase, step=STEP), audited=True)
    assert took_s < undisturbed_s(audited=True) + SOON_S


@pytest.mark.each_value
@pytest.mark.parametrize("phase", sorted(SENDING, key=lambda phase: phase.name), ids=lambda phase: phase.name)
def test_a_lost_message_with_a_stream_of_its_own(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "SMALL_BYTES", 0)
    took_s = run(FaultPlan().drop(None, at=phase, step=STEP), audited=False)
    assert took_s < undisturbed_s(audited=False) + LARGE_S
