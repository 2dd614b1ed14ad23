"""Whatever goes wrong whenever: the run's weights are those of one process, and nothing is left anywhere."""

from __future__ import annotations

import pytest

from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm
from tests.faults.plans import BETWEEN, STAGES, TRAINERS, VOTERS, Case, cases, pairs

NUM_PAIRS = 130
"""With the single faults these make more than 500 plans."""


def check(*faults: Case, seed: int) -> None:
    """Train under the faults, then look."""
    plan = FaultPlan()
    for fault in faults:
        fault.add_to(plan)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, seed=seed)
    try:
        swarm.train()
        assert not [fault for fault in swarm.struck_idly if fault.at not in BETWEEN]
        swarm.audit()
        away = frozenset[str]().union(*(fault.away for fault in faults))
        assert swarm.servers.keys() - away <= swarm.survivors().keys(), "who was there all the time was left out"
    finally:
        swarm.close()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_one_fault(case: Case) -> None:
    check(case, seed=0)


@pytest.mark.parametrize("case", list(enumerate(pairs(NUM_PAIRS))), ids=lambda case: f"{case[1][0]}+{case[1][1]}")
def test_a_pair_of_faults(case: tuple[int, tuple[Case, Case]]) -> None:
    seed, faults = case
    check(*faults, seed=seed)


BROKE_ONCE = [
    # What a coordinator had struck stayed struck for the one after it, who counted it.
    ("freeze-b-AVERAGE_REDUCE-40s", "freeze-a-FORWARD-40s", 11),
    ("partition-eother|abcdftrainer-BACKWARD-40s", "partition-a|bcdeftrainerother-BACKWARD-40s", 167),
]


@pytest.mark.parametrize(("one", "other", "seed"), BROKE_ONCE)
def test_what_broke_once(one: str, other: str, seed: int) -> None:
    named = {str(case): case for case in cases()}
    check(named[one], named[other], seed=seed)
