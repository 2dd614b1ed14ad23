"""An optimizer's state travels between servers unchanged, for any optimizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_optimizer import Lamb
from torch import nn
from torch.optim import Optimizer

from lightning_swarm.client import model_state
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.model.optimizer_state import GROUP
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Selection, StepChange
from lightning_swarm.server import stage_builder
from lightning_swarm.server.optimizer import StageOptimizer
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import Swarm, rows

A = PeerId("a")


def of(kind: Callable[..., Optimizer]) -> Any:
    def make(module: nn.Module) -> Optimizer:
        return kind(module.parameters(), lr=0.1)

    return make


def without_first_weight(swarm: Swarm) -> Selection:
    """Return a selection in which one parameter is frozen and in no group."""
    groups = {name: 0 for name, _ in swarm.module.named_parameters() if name != "0.0.weight"}
    return Selection(num_groups=1, groups=groups, frozen=["0.0.weight"])


def assert_one_joins(swarm: Swarm) -> None:
    """Let a server join; check its bytes one step after the record that admits it."""
    joiner = swarm.join("j")
    swarm.run(swarm.step(rows(2), rows(3)))
    swarm.run(asyncio.sleep(1.0))
    assert joiner.membership.is_member
    swarm.run(swarm.step(rows(4), rows(5)))
    stage = joiner.steps.stage(0)
    assert stage.optimizer.state()
    assert stage.fingerprint() == swarm.servers[A].steps.stage(0).fingerprint()


def adam_8bit(parameters: Any, lr: float) -> Optimizer:
    from bitsandbytes.optim import Adam8bit

    return Adam8bit(parameters, lr=lr, min_8bit_size=1)


@pytest.mark.parametrize(
    "kind",
    [
        adam_8bit,
        Lamb,
        torch.optim.ASGD,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Rprop,
    ],
)
def test_a_joiner_takes_over_any_optimizers_state(make_swarm: MakeSwarm, kind: Callable[..., Optimizer]) -> None:
    """Optimizers keep different kinds of state.

    NAdam and ASGD keep numbers in float32 beside float64 weights. Adagrad has state before its first step. This Lamb
    counts its steps in the parameter group.
    """
    swarm = make_swarm("a", "b", optimizer=of(kind))
    swarm.steps.hyperparameters = lambda: [{"lr": 0.1}]
    swarm.run(swarm.step(rows(0), rows(1)))
    assert_one_joins(swarm)


def test_a_joiner_takes_over_state_that_is_offloaded(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_builder, "StageOptimizer", partial(_offloaded, StageOptimizer))
    swarm = make_swarm("a", "b", optimizer=of(torch.optim.AdamW))
    swarm.run(swarm.step(rows(0), rows(1)))
    assert_one_joins(swarm)


def _offloaded(make: Callable[..., StageOptimizer], *args: Any, **options: Any) -> StageOptimizer:
    return make(*args, **{**options, "offload": True})


def test_a_joiner_takes_over_what_is_known_of_a_parameter_that_left(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(swarm.step(rows(0), rows(1)))
    swarm.run(swarm.steps.change(StepChange(selection=without_first_weight(swarm))))
    swarm.run(swarm.step(rows(2), rows(3)))
    assert_one_joins(swarm)


def test_state_from_before_the_first_step_is_loaded(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", optimizer=of(torch.optim.Adagrad))
    run = swarm.steps.run
    state = swarm.run(model_state.gather_optimizer(swarm.trainer, run, 0, timeout=1.0))
    assert state.keys() == dict(swarm.module.named_parameters()).keys()
    loaded = {name: {**one, "sum": one["sum"] + 0.5} for name, one in state.items()}
    swarm.run(model_state.scatter_optimizer(swarm.trainer, run, loaded, timeout=1.0))
    found = swarm.run(model_state.gather_optimizer(swarm.trainer, run, 0, timeout=1.0))
    torch.testing.assert_close(found, loaded, rtol=0.0, atol=0.0)


def test_a_stage_has_no_state_of_the_others_parameters(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", optimizer=of(torch.optim.Adagrad))
    for server in swarm.servers.values():
        (stage,) = server.steps.sums.stages.values()
        assert set(stage.optimizer.torch_optimizer.state) == set(stage.parameters.values())


def test_what_is_loaded_replaces_what_was_there(make_swarm: MakeSwarm) -> None:
    """The state of a parameter that left its group is replaced, too."""
    swarm = make_swarm("a", "b")
    swarm.run(swarm.step(rows(0), rows(1)))
    swarm.run(swarm.steps.change(StepChange(selection=without_first_weight(swarm))))
    stage = swarm.servers[A].steps.stage(0)
    state = {name: one for name, one in stage.optimizer.state().items() if name == "0.0.weight"}
    stage.load_optimizer_state(state)
    assert stage.optimizer.state().keys() == {"0.0.weight"}


@pytest.mark.parametrize("written", [3, {"params": 3, "lr": "much"}])
def test_nonsense_about_a_parameter_group_changes_nothing(make_swarm: MakeSwarm, written: Any) -> None:
    swarm = make_swarm("a", optimizer=of(torch.optim.AdamW))
    stage = swarm.servers[A].steps.stage(0)
    with contextlib.suppress(ProtocolError):
        stage.load_optimizer_state({"0.0.weight": {GROUP: written}})
    assert stage.optimizer.state() == {}
    swarm.run(swarm.step(rows(0), rows(1)))
    assert stage.version == 1
