"""Tensors and numbers that each peer computes itself are compared, up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_swarm.model.fidelity.constants import constants, differing
from lightning_swarm.model.fidelity.module_states import exempt
from lightning_swarm.model.partition import no_blocks
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel


def module(seed: int, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    found: Any = nn.Linear(2, 2)
    found.tensor = scale * torch.randn(16)
    found.permutation = torch.randperm(16)
    found.items = [torch.randn(3, dtype=torch.complex64), np.random.default_rng(seed).normal(size=4)]
    found.by_name = {"mask": torch.rand(16) < 0.5}
    found.heat = scale * float(torch.rand(()))
    found.rates = [scale * float(torch.rand(())) for _ in range(3)]
    found.order = tuple(torch.randperm(8).tolist())
    found.width = seed  # a size, or a number of modules
    found.register_buffer("buffer", torch.randn(2))
    return found


ARRAYS = {"net.0.tensor", "net.0.permutation", "net.0.items", "net.0.by_name"}
NAMES = ARRAYS | {"net.0.heat", "net.0.rates", "net.0.order"}


def test_other_numbers_are_found() -> None:
    ours, theirs, rounded = (constants([("net.0", module(*own))]) for own in [(1,), (2,), (1, 1.0 + 1e-6)])
    assert ours.keys() == NAMES
    assert differing(ours, ours) == differing(ours, rounded) == []
    assert {*differing(ours, theirs)} == NAMES


@pytest.mark.parametrize("change", [lambda x: 2 * x, lambda x: x.flip(0), lambda x: x[:8], lambda x: x.fill_(0)])
def test_what_differs_in_one_way_is_found(change: Any) -> None:
    ours, theirs = module(1), module(1)
    theirs.tensor = change(theirs.tensor)
    found = differing(constants([("net.0", ours)]), constants([("net.0", theirs)]))
    assert found == ["net.0.tensor"]


def test_what_only_one_peer_has_or_forwards_set_is_no_constant() -> None:
    ours, theirs = module(1), module(1)
    theirs.newest = torch.ones(1)
    theirs.tensor = torch.zeros(16)
    exempt(theirs, "tensor")
    assert differing(constants([("net.0", ours)]), constants([("net.0", theirs)])) == []


def test_values_that_are_no_numbers_are_passed_over() -> None:
    ours = module(1)
    ours.tensor = torch.empty(3, device="meta")
    ours.items = np.array(["a"])
    ours.by_name = torch.full((2,), float("nan"))
    found = constants([("net.0", ours)])
    assert found.keys() == NAMES - {"net.0.tensor", "net.0.items"}
    assert found["net.0.by_name"] == [0.0, 0.0]


def test_trainers_of_a_whole_model_must_have_built_the_same_numbers() -> None:
    """Numbers of the LightningModule itself are not compared: they are hyperparameters, or measurements of a run."""

    def described(rate: float) -> dict[str, list[float]]:
        module: Any = nn.Module()
        module.inner = nn.Dropout(rate)
        module.weights = nn.Linear(1, 1)
        module.weights.newest = torch.ones(1)  # set by a forward
        module.began_s = rate
        model = PeerModel(
            module,
            no_blocks(module),
            lambda _: torch.optim.SGD(module.parameters()),
            ComputeSettings(torch.device("cpu")),
        )
        [stage] = model.describe([], [[]])
        return stage.constants or {}

    assert described(0.1).keys() == {"inner.p"}
    assert differing(described(0.1), described(0.1)) == []
    assert differing(described(0.1), described(0.2)) == ["inner.p"]
