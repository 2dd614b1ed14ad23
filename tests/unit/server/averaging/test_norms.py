"""The squared norm of a gradient."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_swarm.server.averaging.all_reduce import squared_norm


def test_a_squared_norm_is_one_of_blocks() -> None:
    vector = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    expected = math.fsum(number * number for number in vector.tolist())
    threads = torch.get_num_threads()
    try:
        found = set()
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.add(squared_norm(vector))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert found.pop() == pytest.approx(expected, rel=1e-14)
    assert squared_norm(torch.empty(0)) == 0.0
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan])))
    assert squared_norm(torch.tensor([1.0, math.inf])) == math.inf


def test_a_squared_norm_that_no_float_holds_is_infinite() -> None:
    vector = torch.zeros(1 << 15, dtype=torch.float64)  # two blocks
    vector[0] = vector[-1] = math.sqrt(1.5e308)
    assert squared_norm(vector) == math.inf
