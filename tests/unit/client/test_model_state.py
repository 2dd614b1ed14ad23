"""Snapshots of a swarm equal a single process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_swarm.client.model_state import gather_optimizer, gather_weights
from lightning_swarm.core.errors import ProtocolError, SwarmError, Unreachable
from lightning_swarm.model.optimizer_state import as_state_dict
from lightning_swarm.network import PeerId
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import Swarm, rows


def two_groups(module: nn.Module) -> Optimizer:
    """Biases are apart, and neither group has the module's order."""
    named = list(module.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    others = [parameter for name, parameter in reversed(named) if not name.endswith("bias")]
    return AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.02}], lr=0.01, betas=(0.8, 0.99))


HYPERPARAMETERS: list[dict[str, Any]] = [
    {"lr": 0.005, "betas": [0.8, 0.99], "weight_decay": 0.0},
    {"lr": 0.01, "betas": [0.8, 0.99]},
]


def trained(make_swarm: MakeSwarm, batches: list[Tensor], *rosters: str) -> Swarm:
    swarm = make_swarm(*rosters, optimizer=two_groups)
    swarm.steps.hyperparameters = lambda: HYPERPARAMETERS

    async def step(x: Tensor) -> None:
        await swarm.batch(x)
        await swarm.steps.close()
        await swarm.record(swarm.steps.version)

    for x in batches:
        swarm.run(step(x))
    return swarm


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    else:
        assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("rosters", [("a",), ("a", "b", "c"), ("a b", "b", "a b"), ("a", "a", "b")])
def test_gathered_and_renumbered_is_torchs_own_state_dict(make_swarm: MakeSwarm, rosters: tuple[str, ...]) -> None:
    batches = [rows(i) for i in range(3)]
    swarm = trained(make_swarm, batches, *rosters)
    weights = swarm.run(gather_weights(swarm.trainer, swarm.steps.run, 3, timeout=1.0))
    state = swarm.run(gather_optimizer(swarm.trainer, swarm.steps.run, 3, timeout=1.0))

    module = swarm.module
    optimizer = two_groups(module)
    for group, values in zip(optimizer.param_groups, HYPERPARAMETERS, strict=True):
        group.update(values, betas=tuple(values["betas"]))
    for x in batches:
        optimizer.zero_grad()
        (module(x).square().sum() / 2).backward()
        optimizer.step()

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = as_state_dict(optimizer, names, state)
    expected = optimizer.state_dict()
    assert_same(found["state"], expected["state"])
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(weights, dict(module.state_dict()), rtol=1e-12, atol=1e-14)
    two_groups(module).load_state_dict(found)


def test_before_the_first_step_there_is_no_optimizer_state(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", optimizer=two_groups)
    state = swarm.run(gather_optimizer(swarm.trainer, swarm.steps.run, 0, timeout=1.0))
    names = {id(parameter): name for name, parameter in swarm.module.named_parameters()}
    assert as_state_dict(two_groups(swarm.module), names, state)["state"] == {}


def test_a_stage_is_had_from_whoever_of_its_peers_is_left(make_swarm: MakeSwarm) -> None:
    """For example, a peer is killed between a step and its checkpoint, when no record has excluded it yet."""
    swarm = trained(make_swarm, [rows(0)], "a b c", "c")
    expected = swarm.run(gather_weights(swarm.trainer, swarm.steps.run, 1, timeout=1.0))
    for peer in ("a", "b"):
        swarm.network.kill(PeerId(peer))
        weights = swarm.run(gather_weights(swarm.trainer, swarm.steps.run, 1, timeout=1.0))
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=0.0)
    swarm.network.kill(PeerId("c"))
    with pytest.raises(Unreachable):
        swarm.run(gather_weights(swarm.trainer, swarm.steps.run, 1, timeout=1.0))


def test_nothing_in_a_snapshot_goes_on_training(make_swarm: MakeSwarm) -> None:
    swarm = trained(make_swarm, [rows(1)], "a")
    names = {id(parameter): name for name, parameter in swarm.module.named_parameters()}
    own = swarm.servers[swarm.rosters[0][0]]._transport
    state = swarm.run(gather_optimizer(own, swarm.steps.run, 1, timeout=1.0))
    snapshot = as_state_dict(two_groups(swarm.module), names, state)["state"]
    before = {index: one["exp_avg"].clone() for index, one in snapshot.items()}

    swarm.run(swarm.batch(rows(2)))
    swarm.run(swarm.steps.close())
    swarm.run(swarm.record(1))

    assert all(torch.equal(before[index], one["exp_avg"]) for index, one in snapshot.items())


def test_a_snapshot_of_another_version_is_refused(make_swarm: MakeSwarm) -> None:
    swarm = trained(make_swarm, [rows(1)], "a", "b")
    with pytest.raises(ProtocolError, match="at version 1"):
        swarm.run(gather_weights(swarm.trainer, swarm.steps.run, 0, timeout=1.0))
    with pytest.raises(SwarmError):
        swarm.run(gather_weights(swarm.trainer, swarm.steps.run, 2, timeout=100.0))
