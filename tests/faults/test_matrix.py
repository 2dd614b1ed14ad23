"""Whatever goes wrong whenever: the run's weights are those of one process, and nothing is left anywhere."""

from __future__ import annotations

import pytest

from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm
from tests.faults.plans import BETWEEN, CLOSING, LONG_S, STAGES, TRAINERS, TRAINING, VOTERS, Case, cases, pairs

NUM_PAIRS = 150


def is_borne(case: Case) -> bool:
    """For now: all but what the coordinator suffers, and what needs the trainers' own calls to be made again."""
    if case.kind == "drop":
        return case.phase in CLOSING
    if case.whom == "other":
        return case.kind == "kill" or case.for_s < LONG_S
    if case.groups or case.whom:
        return "b" in case.groups or case.whom in ("b", "e")
    return case.kind != "corrupt" or case.phase not in TRAINING


CASES = [case for case in cases() if is_borne(case)]
PAIRS = [pair for pair in pairs(20 * NUM_PAIRS) if all(map(is_borne, pair))][:NUM_PAIRS]


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_fault(case: Case) -> None:
    check(case, seed=0)


@pytest.mark.parametrize("case", list(enumerate(PAIRS)), ids=lambda case: f"{case[1][0]}+{case[1][1]}")
def test_a_pair_of_faults(case: tuple[int, tuple[Case, Case]]) -> None:
    seed, faults = case
    check(*faults, seed=seed)
