"""Faults in a run with delayed steps: the result equals one process with gradients one step late."""

from __future__ import annotations

import contextlib

import pytest

from lightning_swarm.testing import FaultPlan
from lightning_swarm.testing.faults import DidNotHappen
from tests.faults.harness import FaultySwarm
from tests.faults.plans import (
    JOINER,
    LEAVER,
    SMALL_STAGES,
    STAGES,
    TRAINERS,
    VOTERS,
    Case,
    cases,
    caused,
    joining,
    leaving,
    pairs,
)

NUM_PAIRS = 12
NUM_WIRINGS = 3


def check(*faults: Case, seed: int = 0) -> None:
    """Train under the faults, then audit."""
    plan = FaultPlan()
    for fault in faults:
        fault.add_to(plan)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, seed=seed, delays=True)
    try:
        swarm.train()
        swarm.audit()
        away = swarm.unanswered.union(*(fault.away for fault in faults))
        assert swarm.servers.keys() - away <= swarm.survivors().keys(), "who was there all the time was left out"
    finally:
        swarm.close()


def test_records_come_while_the_next_step_takes_batches() -> None:
    swarm = FaultySwarm(*STAGES, plan=FaultPlan(), trainers=TRAINERS, voters=VOTERS, delays=True)
    try:
        swarm.train()
        swarm.audit()
        assert swarm.num_late
    finally:
        swarm.close()


@pytest.mark.first_cells(6)
@pytest.mark.parametrize("case", cases()[::8], ids=str)
def test_one_fault(case: Case) -> None:
    check(case)


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("case", list(enumerate(pairs(NUM_PAIRS))), ids=lambda case: f"{case[1][0]}+{case[1][1]}")
def test_a_pair_of_faults(case: tuple[int, tuple[Case, Case]]) -> None:
    seed, faults = case
    for wiring in range(1, NUM_WIRINGS):  # some wirings give the victim fewer calls than its fault needs
        with contextlib.suppress(DidNotHappen):
            check(*faults, seed=seed + NUM_PAIRS * wiring)
            return
    check(*faults, seed=seed)


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("faults", list(caused())[::6], ids=lambda faults: "+".join(map(str, faults)))
def test_a_fault_in_what_others_bring_about(faults: tuple[Case, ...]) -> None:
    check(*faults)


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("case", list(joining())[::6], ids=str)
def test_a_server_joins(case: Case) -> None:
    plan = FaultPlan()
    case.add_to(plan)
    swarm = FaultySwarm(*SMALL_STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, joiners=JOINER, delays=True)
    try:
        swarm.train()
        swarm.audit()
        assert swarm.survivors().keys() == swarm.servers.keys() - swarm.dead
    finally:
        swarm.close()


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("case", list(leaving())[::6], ids=str)
def test_a_server_leaves(case: Case) -> None:
    plan = FaultPlan()
    case.add_to(plan)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, leavers=LEAVER, delays=True)
    try:
        swarm.train()
        swarm.audit()
        assert LEAVER not in swarm.survivors()
    finally:
        swarm.close()
