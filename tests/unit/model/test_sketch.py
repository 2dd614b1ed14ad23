"""Sketches are linear, keep norms on average, and show any difference of whole numbers."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.model.sketch import NUM_BUCKETS, project, project_exactly
from lightning_swarm.protocol.messages.audits import wrapped

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
    assert len(whole) == NUM_BUCKETS
    assert not torch.equal(whole, project(ones, 2))
    assert not torch.equal(project(ones[: 1 << 20], 1) * 2, whole)


def test_whole_numbers_add_up_however_they_wrap() -> None:
    one, other = torch.randint(-(2**62), 2**62, (2, 2, LENGTH))
    parts = [project_exactly(part, 5) for part in (one, other)]
    assert [wrapped(sum(pair)) for pair in zip(*parts, strict=True)] == project_exactly(one + other, 5)


@pytest.mark.parametrize("place", [0, 4000, LENGTH - 1])
@pytest.mark.parametrize("by", [1, -(2**40)])
def test_one_changed_number_is_seen(place: int, by: int) -> None:
    sums = torch.randint(-(2**40), 2**40, (2, LENGTH))
    before = project_exactly(sums, 9)
    sums[1, place] += by
    after = project_exactly(sums, 9)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_two_numbers_do_not_cancel() -> None:
    sums = torch.zeros(1, 1000, dtype=torch.int64)
    sums[0, 3], sums[0, 500] = 1 << 20, -(1 << 20)
    assert all(project_exactly(sums, seed) != [0] for seed in range(1000))
