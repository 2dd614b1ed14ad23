"""Under any fault at any time the run has the weights of one process, and no resource is left over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from lightning_swarm.core.errors import StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.protocol import tickets
from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.faults import DidNotHappen
from tests.faults.harness import SETTLE_S, FaultySwarm
from tests.faults.plans import (
    BETWEEN,
    COMPUTING,
    LEAD,
    OF_TRAINERS,
    SENDING,
    STAGES,
    TRAINERS,
    VOTERS,
    Case,
    cases,
    caused,
    pairs,
)

NUM_PAIRS = 70
"""Number of pairs; with single faults and their consequences there are more than 600 plans."""

NUM_WIRINGS = 3


def check(*faults: Case, seed: int, num_input_only: int = 0) -> None:
    """Train under the faults, then audit."""
    plan = FaultPlan()
    for fault in faults:
        fault.add_to(plan)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, seed=seed)
    for trainer in swarm.trainers.values():
        trainer.num_input_only = num_input_only
    try:
        swarm.train()
        assert not [fault for fault in swarm.struck_idly if fault.at not in BETWEEN]
        swarm.audit()
        away = swarm.unanswered.union(*(fault.away for fault in faults))
        assert swarm.servers.keys() - away <= swarm.survivors().keys(), "who was there all the time was left out"
    finally:
        swarm.close()


@pytest.mark.first_cells(8)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_one_fault(case: Case) -> None:
    check(case, seed=0)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("case", [case for case in cases() if case.phase in SENDING], ids=str)
def test_one_fault_in_what_is_large(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are fetched by separate messages; small tensors travel with the announcement."""
    monkeypatch.setattr(tickets, "SMALL_BYTES", 0)
    check(case, seed=0)


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("case", list(enumerate(pairs(NUM_PAIRS))), ids=lambda case: f"{case[1][0]}+{case[1][1]}")
def test_a_pair_of_faults(case: tuple[int, tuple[Case, Case]]) -> None:
    seed, faults = case
    for wiring in range(1, NUM_WIRINGS):  # some wirings give the victim fewer calls than its fault needs
        with contextlib.suppress(DidNotHappen):
            check(*faults, seed=seed + NUM_PAIRS * wiring)
            return
    check(*faults, seed=seed)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("faults", list(caused()), ids=lambda faults: "+".join(map(str, faults)))
def test_a_fault_in_what_others_bring_about(faults: tuple[Case, ...]) -> None:
    check(*faults, seed=0)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("case", [case for case in cases() if case.phase in COMPUTING][2::12], ids=str)
def test_a_fault_among_backwards_for_the_input(case: Case) -> None:
    """Each microbatch has two backwards that add no gradient, and then the counted one."""
    check(case, seed=1, num_input_only=2)


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("phase", OF_TRAINERS, ids=lambda phase: phase.name)
def test_the_lead_dies(phase: Phase) -> None:
    """No peer inherits its loop: all peers end with an error that names the lead, and decided steps stay decided."""
    plan = FaultPlan()
    Case("kill", LEAD, phase).add_to(plan)
    limits = Limits(call_timeout=30.0, lead_timeout=100.0)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, limits=limits)
    try:
        for name in swarm.servers:
            swarm.live(name)
        with pytest.raises(StepError, match=f"the lead {LEAD} was silent for 100 s"):
            swarm.train()
        plan.check()
        assert swarm.loop.time() < swarm.struck_s[0] + limits.lead_timeout + 2 * limits.call_timeout
        swarm.run(asyncio.sleep(SETTLE_S))
        assert sorted(swarm.books.records) == list(range(swarm.newest + 1))
        assert swarm.newest < swarm.num_steps - 1
        assert swarm.survivors().keys() == swarm.servers.keys()
        ends = swarm.take_ends()
        assert ends.keys() == swarm.servers.keys(), "a server stays for ever"
        for error in ends.values():
            assert isinstance(error, StepError)
            assert f"the run is over: the lead {LEAD} was silent for 100 s" in str(error)
        swarm.audit_samples()
        swarm.audit_state()
    finally:
        swarm.close()


def test_every_kind_strikes_messages_of_every_peer() -> None:
    struck = {(case.kind, case.whom) for case in cases()}
    assert struck >= set(itertools.product(("delay", "drop", "duplicate", "corrupt"), (None, "a", "e", "other", LEAD)))


BROKE_ONCE = [
    # A batch that a coordinator had struck stayed struck for its successor, which counted it.
    ("freeze-b-AVERAGE_REDUCE-40s", "freeze-a-FORWARD-40s", 11),
    ("partition-eother|abcdftrainer-BACKWARD-40s", "partition-a|bcdeftrainerother-BACKWARD-40s", 167),
]


@pytest.mark.parametrize(("one", "other", "seed"), BROKE_ONCE)
def test_what_broke_once(one: str, other: str, seed: int) -> None:
    named = {str(case): case for case in cases()}
    check(named[one], named[other], seed=seed)
