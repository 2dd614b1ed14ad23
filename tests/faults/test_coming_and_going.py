"""Servers that join and leave while faults strike them, and those who let them in: audited like the matrix."""

from __future__ import annotations

import pytest

from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm
from tests.faults.plans import JOINER, LEAVER, SMALL_STAGES, STAGES, TRAINERS, VOTERS, Case, joining, leaving


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("case", list(joining()), ids=str)
def test_a_server_joins(case: Case) -> None:
    """It is in at the end unless it died, and so is whoever was frozen for long: there was time to come again."""
    plan = FaultPlan()
    case.add_to(plan)
    swarm = FaultySwarm(*SMALL_STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, joiners=JOINER)
    try:
        swarm.train()
        assert not swarm.struck_idly
        swarm.audit()
        assert swarm.survivors().keys() == swarm.servers.keys() - swarm.dead
        if JOINER not in swarm.dead:
            assert swarm.count("download") >= swarm.count("joined") > 0
    finally:
        swarm.close()


@pytest.mark.first_cells(6)
@pytest.mark.parametrize("case", list(leaving()), ids=str)
def test_a_server_leaves(case: Case) -> None:
    """At the end it is out, whatever happened on the way."""
    plan = FaultPlan()
    case.add_to(plan)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, leavers=LEAVER)
    try:
        swarm.train()
        assert not swarm.struck_idly
        swarm.audit()
        assert LEAVER not in swarm.survivors()
        assert swarm.servers.keys() - {LEAVER} - case.away - swarm.unanswered <= swarm.survivors().keys()
    finally:
        swarm.close()
