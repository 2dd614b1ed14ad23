"""CenteredClip equals the mean if all agree, and is near the majority otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_swarm import Trust
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.settings import Compression, RunSettings
from lightning_swarm.server.averaging.clipped import centered_clip
from tests.adversaries.adversary import Adversary
from tests.unit.testing.linear import LR, NUM_STEPS, Net, run

LENGTH = 100


def honest(number: int, spread: float = 0.1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    center = torch.ones(LENGTH, dtype=torch.float64)
    return [center + spread * torch.randn(LENGTH, generator=generator, dtype=torch.float64) for _ in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_all_agree_it_is_what_they_say(number: int, dtype: torch.dtype) -> None:
    vector = torch.randn(LENGTH, dtype=dtype)
    assert torch.equal(centered_clip([vector] * number), vector)


def test_it_is_near_the_mean_of_the_honest() -> None:
    vectors = honest(16)
    mean = torch.stack(vectors).mean(dim=0)
    radius = max(float((one - mean).norm()) for one in vectors)
    assert float((centered_clip(vectors) - mean).norm()) < 0.1 * radius


@pytest.mark.parametrize("lie", [-1000.0, 1000.0, 1e30, math.nan, math.inf])
def test_outliers_pull_no_farther_than_the_honest_are_apart(lie: float) -> None:
    vectors = honest(9)
    mean = torch.stack(vectors).mean(dim=0)
    radius = max(float((one - mean).norm()) for one in vectors)
    liars = [torch.full((LENGTH,), lie, dtype=torch.float64)] * 7
    # Seven vectors pull one way by a radius, against nine, which pull back as much: the shift is at most 7/9.
    assert float((centered_clip([*vectors, *liars]) - mean).norm()) < 2.0 * radius


# ---------------------------------------------------------------------- in a swarm


def off(net: Net, clean: list[Tensor]) -> float:
    return max(float((one - other).norm()) for one, other in zip(net.weights(), clean, strict=True))


def test_a_swarm_that_clips_is_near_the_clean_run_whatever_a_liar_says() -> None:
    undefended, clipped, alone = Net(), Net(), Net()
    liar = Adversary("peer-1", "sign_flip", strength=1000.0)
    run(undefended, liar, num_peers=6)
    run(
        clipped,
        Adversary("peer-1", "sign_flip", strength=1000.0),
        num_peers=6,
        trust=Trust(robust_averaging="centered_clip"),
    )
    run(alone, num_peers=6, trust=Trust(robust_averaging="centered_clip"))
    clean = Net().clean(NUM_STEPS)
    way = max(float((one - other).norm()) for one, other in zip(Net().weights(), clean, strict=True))
    assert off(undefended, clean) > 50.0 * way
    assert off(clipped, clean) < 2.0 * way
    assert off(alone, clean) < way
    assert off(alone, clean) > 1e-6 * LR, "it is not what one machine computes"


def test_one_server_averages_with_nobody() -> None:
    net = Net()
    run(net, num_peers=1, trust=Trust(robust_averaging="centered_clip"), num_stages=1)
    torch.testing.assert_close(net.weights(), net.clean(NUM_STEPS), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {"deterministic": True, "microbatch_size": 1},
        {"audit_share": 0.1},
        {"compression": Compression(averaging="8bit")},
        {"compression": Compression(averaging="powersgd")},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_it_goes_without_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"`Trust\(robust_averaging='centered_clip'\)` clips .* Leave one of them out"
    ):
        RunSettings(target_batch_size=None, robust_averaging="centered_clip", **settings)  # type: ignore[arg-type]


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="robust_averaging"):
        RunSettings(target_batch_size=None, robust_averaging="krum")  # type: ignore[arg-type]
