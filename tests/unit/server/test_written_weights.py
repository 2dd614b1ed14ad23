"""A step begins with weights that the lead's user code wrote."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.client import model_state
from lightning_swarm.core.errors import PeerError, ProtocolError
from lightning_swarm.protocol.messages.run import StepChange, WrittenWeights
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import Swarm

WRITTEN = StepChange(written=WrittenWeights(number=1, stages=[0]))


def lend(swarm: Swarm, number: int = 1) -> None:
    with torch.no_grad():
        for parameter in swarm.stages[0].parameters():
            parameter.fill_(0.25)
    swarm.run(model_state.set_evaluation_weights(swarm.trainer, swarm.steps.run, swarm.stages[:1], number, timeout=1.0))


def weights(swarm: Swarm) -> list[torch.Tensor]:
    return [tensor for server in swarm.servers.values() for tensor in server.steps.stage(0).weights().values()]


def test_all_replicas_begin_a_step_with_what_was_lent(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b")
    lend(swarm)
    assert not any(bool((tensor == 0.25).all()) for tensor in weights(swarm))
    swarm.run(swarm.steps.change(WRITTEN))
    assert len(weights(swarm)) == 4
    assert all(bool((tensor == 0.25).all()) for tensor in weights(swarm))


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("number", [0, 2])
def test_what_was_not_lent_is_not_to_be_had(make_swarm: MakeSwarm, number: int) -> None:
    swarm = make_swarm("a b")
    if number:
        lend(swarm, number)
    before = swarm.state()
    with pytest.raises(PeerError, match="has no evaluation weights 1"):
        swarm.run(swarm.steps.change(WRITTEN))
    assert swarm.state() == before


def test_a_stage_that_is_not_there(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b")
    before = swarm.state()
    with pytest.raises(ProtocolError, match=r"there are 1 stages, got weights written in \[7\]"):
        swarm.run(swarm.steps.change(StepChange(written=WrittenWeights(number=1, stages=[7]))))
    assert swarm.state() == before


def test_a_later_change_of_a_step_keeps_the_earlier_one() -> None:
    later = StepChange(written=WrittenWeights(number=2, stages=[0, 1]))
    assert WRITTEN.then(later) == later
    assert later.then(StepChange()) == later
    assert (StepChange().number, later.number) == (0, 2)
