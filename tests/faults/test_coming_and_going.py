"""Faults strike servers that join or leave, and the peers that admit them; audited like the matrix."""

from __future__ import annotations

import pytest

from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm
from tests.faults.plans import JOINER, LEAVER, SMALL_STAGES, STAGES, TRAINERS, VOTERS, Case, joining, leaving


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("case", list(joining()), ids=str)
def test_a_server_joins(case: Case) -> None:
    """A joiner is a member at the end unless it died. A server that was frozen for long has time to return."""
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
    """Under each fault the leaver is out at the end."""
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
