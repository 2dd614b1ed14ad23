"""Whatever goes wrong whenever: the run's weights are those of one process, and nothing is left anywhere."""

from __future__ import annotations

import pytest

from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm
from tests.faults.plans import BETWEEN, STAGES, TRAINERS, VOTERS, Case, cases, pair

NUM_PAIRS = 50


def check(*faults: Case, seed: int) -> None:
    """Train under the faults, then look."""
    plan = FaultPlan()
    for fault in faults:
        fault.add(plan)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, seed=seed)
    try:
        swarm.train()
        assert not [fault for fault in swarm.struck_idly if fault.at not in BETWEEN]
        swarm.audit()
    finally:
        swarm.close()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_one_fault(case: Case) -> None:
    check(case, seed=0)


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_a_pair_of_faults(seed: int) -> None:
    check(*pair(seed), seed=seed)
