"""Choice of a newcomer's stages of a served model."""

from __future__ import annotations

import random

import pytest

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.serving.placement import choose_span

SIZES = [10, 10, 20, 10]


@pytest.mark.parametrize(
    ("capacity", "rates", "span"),
    [
        (None, [0.0] * 4, range(4)),
        (50, [9.0] * 4, range(4)),
        (30, [0.0] * 4, range(2)),  # the longest span, and the first such span
        (30, [1.0, 1.0, 0.0, 0.5], range(2, 4)),
        (20, [1.0, 1.0, 0.5, 0.7], range(2, 3)),
        (10, [1.0, 0.0, 0.0, 1.0], range(1, 2)),
        (30, [2.0, 1.0, 0.0, 0.0], range(2, 4)),
    ],
)
def test_a_newcomer_goes_where_the_model_is_served_worst(capacity: int | None, rates: list[float], span: range) -> None:
    assert choose_span(SIZES, capacity, rates) == span


def test_where_no_stage_fits_the_error_says_how_much_is_needed() -> None:
    with pytest.raises(
        ConfigError,
        match=r"got 9 bytes for weights. The smallest of 4 stages has 10 bytes: 1 bytes are.*--memory.*--quantize",
    ):
        choose_span(SIZES, 9, [0.0] * 4)


@pytest.mark.parametrize("seed", range(20))
def test_newcomers_one_after_the_other_leave_no_stage_empty(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 12))]
    rates = [0.0] * len(sizes)
    for _ in range(4 * len(sizes)):
        span = choose_span(sizes, rng.randint(max(sizes), sum(sizes)), rates)
        for stage in span:
            rates[stage] += 1.0 / len(span)
    assert min(rates) > 0.0
