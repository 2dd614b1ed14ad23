"""The selection of trained parameters: sent before a step's first grant, checked, and part of its record."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model.optimizer_state import read_selection
from lightning_swarm.protocol.messages.run import Selection, StageManifest, StepChange, check_selection, first_trained
from lightning_swarm.protocol.messages.step import Record, SettleRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import SETTLE
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import Swarm, key, make_module, rows

STAGES = [
    StageManifest(
        first_block=index,
        end_block=index + 1,
        parameters=[(f"{index}.weight", [2], dtype) for dtype in dtypes],
        roster=[],
    )
    for index, dtypes in enumerate([["float64"], ["bfloat16"], ["int64"], ["complex64"]])
]
WHOLE = Selection(num_groups=2, groups={"0.weight": 0, "1.weight": 1}, frozen=["2.weight", "3.weight"])


def replaced(selection: Selection, **changes: Any) -> Selection:
    return msgspec.structs.replace(selection, **changes)


def test_the_users_word_is_read_from_module_and_optimizer() -> None:
    module = make_module(3)
    module[0].requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": module[2].parameters()}, {"params": [module[0][0].bias]}], lr=0.1)  # type: ignore[index]
    assert read_selection(module, optimizer) == Selection(
        num_groups=2,
        groups={"2.0.weight": 0, "2.0.bias": 0, "0.0.bias": 1},
        frozen=["0.0.weight", "0.0.bias"],
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
    with pytest.raises(ConfigError, match=r"group 2 has others, of the shapes \[\(4,\)\]"):
        read_selection(module, optimizer)


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (replaced(WHOLE, groups={"4.weight": 0}), r"only the run's parameters, got \['4.weight'\]"),
        (replaced(WHOLE, frozen=["2.weight", "3.weight", "bias"]), r"only the run's parameters, got \['bias'\]"),
        (replaced(WHOLE, num_groups=1), r"the optimizer's 1, got others for \['1.weight'\]"),
        (replaced(WHOLE, frozen=["3.weight"]), r"real floating point numbers, \['2.weight'\]"),
        (replaced(WHOLE, groups={"3.weight": 0}, frozen=["2.weight"]), r"real floating point numbers, \['3.weight'\]"),
    ],
)
def test_a_selection_of_something_else_is_refused(selection: Selection, words: str) -> None:
    check_selection(WHOLE, STAGES)
    check_selection(replaced(WHOLE, frozen=["2.weight"]), STAGES)  # a complex parameter in no group
    with pytest.raises(ProtocolError, match=words):
        check_selection(selection, STAGES)


def test_the_first_stage_that_trains() -> None:
    assert first_trained(WHOLE, STAGES) == 0
    assert first_trained(replaced(WHOLE, frozen=["0.weight"]), STAGES) == 1
    assert first_trained(replaced(WHOLE, groups={"1.weight": 0}), STAGES) == 1
    assert first_trained(replaced(WHOLE, groups={}), STAGES) == first_trained(None, STAGES) == 4


def bias_only(swarm: Swarm) -> Selection:
    assert swarm.manifest.selection is not None
    return replaced(swarm.manifest.selection, num_groups=2, groups={"1.0.bias": 1})


def test_a_selection_holds_from_the_open_step_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c")
    first = swarm.run(swarm.step(rows(1)))
    before = {name: weight.clone() for name, weight in swarm.weights().items()}
    assert first.change.selection is None

    swarm.run(swarm.steps.change(StepChange(selection=bias_only(swarm))))

    for roster, num_elements in zip(swarm.rosters, (0, 3), strict=True):
        for name in roster:
            (stage,) = swarm.servers[name].steps.sums.stages.values()
            assert stage.next_sum.values.numel() == num_elements
            assert len(stage.optimizer.torch_optimizer.param_groups) == 2
            assert stage.optimizer.state().keys() == stage.parameters.keys(), "what was learned of them is gone"
    assert all(torch.equal(weight, before[name]) for name, weight in swarm.weights().items())


def test_no_selection_after_the_first_grant(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    grant = swarm.run(swarm.steps.grant(2))
    before = swarm.state()
    with pytest.raises(ProtocolError, match="before the first grant of its step"):
        swarm.run(swarm.steps.change(StepChange(selection=bias_only(swarm))))
    assert swarm.state() == before
    swarm.run(swarm.steps.withdraw(grant.lease))
    swarm.run(swarm.steps.change(StepChange(selection=bias_only(swarm))))


def test_no_selection_where_a_gradient_is_in_the_sum(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(swarm.steps.grant(2))
    swarm.run(swarm.through(key(), rows(1)))
    before = swarm.state()
    request = SettleRequest(generation=0, step=0, change=StepChange(selection=bias_only(swarm)))
    with pytest.raises(ProtocolError, match="step 0 has some here"):
        swarm.run(
            swarm.servers[swarm.route()[0]]._transport.call(swarm.route()[1], SETTLE.name, encode(request), timeout=1.0)
        )
    assert swarm.state() == before


def test_a_record_is_all_that_a_stage_needs_to_follow(make_swarm: MakeSwarm) -> None:
    told, follower = make_swarm("a"), make_swarm("a")
    chosen = replaced(bias_only(told), groups={"0.0.bias": 1})
    told.run(told.steps.change(StepChange(selection=chosen)))
    stage = told.servers[told.route()[0]].steps.stage(0)
    two = [{"lr": 0.1}, {"lr": 0.3, "momentum": 0.0}]

    async def step() -> Record:
        grant = await told.steps.grant(2)
        await told.through(key(), rows(1))
        means.append(stage.next_sum.values.clone())
        told.steps.hyperparameters = lambda: two
        await told.steps.done(grant.lease, [key().receipt], close=True)
        return await told.record(0)

    means: list[Tensor] = []
    record = told.run(step())
    assert record.change.selection == chosen
    follower.servers[follower.route()[0]].steps.stage(0).apply(record, means[0], [True])

    moved = {name for name, weight in told.weights().items() if not torch.equal(weight, told.module.state_dict()[name])}
    assert moved == {"0.0.bias"}
    for name, weight in told.weights().items():
        assert torch.equal(follower.weights()[name], weight)
