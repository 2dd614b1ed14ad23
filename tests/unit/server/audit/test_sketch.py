"""Sketches are linear, keep norms on average, and show any difference of whole numbers."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.protocol.messages.parts import SKETCH_LENGTH
from lightning_swarm.server.audit.sketch import project

LENGTH = (1 << 20) + 4099  # more than one slice, and no multiple of anything


def test_parts_of_a_sum_add_up() -> None:
    one, other = torch.randn(2, LENGTH, dtype=torch.float64)
    torch.testing.assert_close(project(one, 7) + project(other, 7), project(one + other, 7), rtol=0, atol=1e-9)


@pytest.mark.parametrize("number", [1, 7, 64, 1000])
def test_the_squared_norm_is_kept_on_average(number: int) -> None:
    vector = torch.randn(number, dtype=torch.float64)
    found = [float(project(vector, seed).square().sum()) for seed in range(300)]
    assert torch.tensor(found).mean() == pytest.approx(float(vector.square().sum()), rel=0.15)


def test_seeds_and_slices_have_signs_of_their_own() -> None:
    ones = torch.ones(2 << 20)
    whole = project(ones, 1)
    assert len(whole) == SKETCH_LENGTH
    assert not torch.equal(whole, project(ones, 2))
    assert not torch.equal(project(ones[: 1 << 20], 1) * 2, whole)
