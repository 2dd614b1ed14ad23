"""A short run of the compression study: a small GPT on bytes learns with each kind of compression."""

from __future__ import annotations

import pytest
import torch

from benchmarks.compression import WAYS, Rate, train

SHORT, RATE = 50, Rate(warmup_steps=20)


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return train(WAYS["none"], seed=0, num_steps=SHORT, rate=RATE, every=SHORT)


@pytest.fixture(autouse=True)
def threads() -> None:
    torch.set_num_threads(1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "share"),
    [("8bit", 0.005), ("4bit, error feedback", 0.02), ("powersgd, 4", 0.05), ("8bit and bottleneck, 4", 0.05)],
)
def test_it_learns_nearly_as_fast(name: str, share: float, plain: list[float]) -> None:
    found = train(WAYS[name], seed=0, num_steps=SHORT, rate=RATE, every=SHORT)
    assert plain[-1] < 0.6 * plain[0]
    assert found[-1] != plain[-1], "nothing was compressed"
    assert found[-1] < (1 + share) * plain[-1]
