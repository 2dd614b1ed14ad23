"""Bugs that were planted on purpose are seen by the comparison in float64, so that passing it means something."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from lightning_swarm.averaging import butterfly
from lightning_swarm.errors import StepError
from lightning_swarm.pipeline.passage import Passage
from lightning_swarm.pipeline.policy import Charge
from lightning_swarm.server import stepping
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stepping import Stepping
from lightning_swarm.steps import servers
from lightning_swarm.steps.policy import clip_factor
from lightning_swarm.types.calls import CallKey
from lightning_swarm.types.steps import Record
from tests.parity.harness import LOSS_TOLERANCE, Run, SwarmRun, assert_exact, deviation, run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader

MAX_NORM = 1.0
OPTIONS: dict[str, Any] = {"max_steps": 20, "gradient_clip_val": MAX_NORM}
STEP = 5
"""In which the bug strikes: one microbatch of one step is enough."""


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_plain(DigitsMLP, loader(digits()), **OPTIONS)


def train() -> SwarmRun:
    return run_swarm(DigitsMLP, loader(digits()), num_stages=2, num_servers=4, **OPTIONS)


def assert_seen(swarm: SwarmRun, plain: Run) -> None:
    """The comparison fails, and not by a hair."""
    with pytest.raises(AssertionError, match=r"batch \d+: loss"):
        assert_exact(swarm, plain)
    assert deviation(swarm, plain)[0] > 1e3 * LOSS_TOLERANCE


def test_without_a_bug_nothing_is_seen(plain: Run) -> None:
    swarm = train()
    assert_exact(swarm, plain)
    assert swarm.num_clipped > 0


# ---------------------------------------------------------------------- a microbatch twice


@pytest.fixture
def double_count(monkeypatch: pytest.MonkeyPatch) -> list[CallKey]:
    """A backward whose answer came is sent to the stage's other replica too, as a careless retry would."""
    planted: list[CallKey] = []
    backward = Passage.backward

    async def twice(self: Passage, gradients: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        result = await backward(self, gradients)
        if self.key.step == STEP and not planted:
            planted.append(self.key)
            last = len(self._route) - 1
            (other,) = (peer for peer in self.link.routers[last].peers if peer != self._route[last].peer)
            self._route[last] = Charge(other, self.num_rows, 0.0)
            await self._send_backward(last, gradients, recompute=True)
            await self._settle(last, gradients)
        return result

    monkeypatch.setattr(Passage, "backward", twice)
    return planted


def test_the_ledgers_show_a_double_count(double_count: list[CallKey]) -> None:
    with pytest.raises(StepError, match=f"step {STEP}: .* stage 1 .* more than once"):
        train()
    assert len(double_count) == 1


def test_a_double_count_is_seen(plain: Run, double_count: list[CallKey], disarmed: None) -> None:
    swarm = train()
    assert len(double_count) == 1
    assert_seen(swarm, plain)


# ---------------------------------------------------------------------- a microbatch lost


@pytest.fixture
def lost_microbatch(monkeypatch: pytest.MonkeyPatch) -> list[CallKey]:
    """One gradient is acknowledged but never added."""
    planted: list[CallKey] = []
    add = Stepping.add

    def lose(self: Stepping, stage: Stage, key: CallKey, gradients: Sequence[Tensor | None], weight: float) -> bool:
        if key.step == STEP and stage.index == 0 and not planted:
            planted.append(key)
            return True
        return add(self, stage, key, gradients, weight)

    monkeypatch.setattr(Stepping, "add", lose)
    return planted


def test_the_ledgers_show_a_lost_microbatch(lost_microbatch: list[CallKey]) -> None:
    with pytest.raises(StepError, match=f"step {STEP}: .* stage 0 .* not at all"):
        train()
    assert len(lost_microbatch) == 1


def test_a_lost_microbatch_is_seen(plain: Run, lost_microbatch: list[CallKey], disarmed: None) -> None:
    swarm = train()
    assert len(lost_microbatch) == 1
    assert_seen(swarm, plain)


@pytest.fixture
def disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol's own check would stop the run first."""
    monkeypatch.setattr(servers, "check_ledgers", lambda *_, **__: None)


# ---------------------------------------------------------------------- wrong arithmetic


def test_clipping_per_stage_is_seen(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[tuple[float, float]] = []
    apply = Stage.apply

    def clip_own_part(self: Stage, record: Record, mean_gradient: Tensor, touched: Sequence[bool]) -> None:
        own = clip_factor(float(mean_gradient.square().sum()), MAX_NORM)
        factors.append((own, record.clip_factor))
        apply(self, msgspec.structs.replace(record, clip_factor=own), mean_gradient, touched)

    monkeypatch.setattr(Stage, "apply", clip_own_part)
    swarm = train()
    assert any(not math.isclose(own, whole) for own, whole in factors)
    assert_seen(swarm, plain)


def test_averaging_in_float16_is_seen(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[float] = []
    average = butterfly.average

    async def coarse(vector: Tensor, total_weight: float, **rest: Any) -> tuple[Tensor, float]:
        half = vector.to(torch.float16).to(vector)
        rounded.append(float((half - vector).abs().max()))
        return await average(half, total_weight, **rest)

    monkeypatch.setattr(stepping, "average", coarse)
    swarm = train()
    assert max(rounded) > 0.0
    assert_seen(swarm, plain)
