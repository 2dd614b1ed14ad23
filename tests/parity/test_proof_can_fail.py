"""The comparison in float64 detects bugs that are planted on purpose, so it is a proof if it passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun, replay
from lightning_swarm.coordinator.step import reconcile
from lightning_swarm.coordinator.step.open_step import clip_factor
from lightning_swarm.coordinator.step.replay_plan import ReplayPlan, plan_replays
from lightning_swarm.model.fidelity.watched import unwatched
from lightning_swarm.protocol.messages.calls import CallKey
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.server.averaging import all_reduce
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.stage import Stage
from tests.parity.harness import LOSS_TOLERANCE, Run, SwarmRun, assert_exact, deviation, run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader

MAX_NORM = 1.0
OPTIONS: dict[str, Any] = {"max_steps": 20, "gradient_clip_val": MAX_NORM}
STEP = 5
"""The step with the bug: one microbatch of one step is enough."""


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_plain(DigitsMLP, loader(digits()), **OPTIONS)


def train() -> SwarmRun:
    return run_swarm(DigitsMLP, loader(digits()), num_stages=2, num_servers=4, **OPTIONS)


def assert_seen(swarm: SwarmRun, plain: Run) -> None:
    """Check that the comparison fails by far more than rounding."""
    with pytest.raises(AssertionError, match=r"batch \d+: loss"):
        assert_exact(swarm, plain)
    assert deviation(swarm, plain)[0] > 1e3 * LOSS_TOLERANCE


def test_without_a_bug_nothing_is_seen(plain: Run) -> None:
    swarm = train()
    assert_exact(swarm, plain)
    assert swarm.num_clipped > 0


@pytest.mark.parametrize("num_servers", [1, 4])
def test_the_trainers_own_copy_of_the_weights_is_poisoned(num_servers: int) -> None:
    """In one process the trainer's copy could serve as the weights by mistake, so it is poisoned."""
    poisoned: list[bool] = []

    class Looking(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with unwatched():
                poisoned.append(all(bool(own.isnan().all()) for own in self.parameters()))
            return super().training_step(batch, batch_idx)

    run_swarm(Looking, loader(digits()), num_servers=num_servers, max_steps=3, max_epochs=-1)
    assert poisoned == [True] * 3


# ---------------------------------------------------------------------- a microbatch twice


@pytest.fixture
def double_count(monkeypatch: pytest.MonkeyPatch) -> list[CallKey]:
    """Send a completed backward to the stage's other replica as well, as a careless retry would."""
    planted: list[CallKey] = []
    backward = MicrobatchRun.backward

    async def twice(self: MicrobatchRun, gradients: Sequence[Tensor | None], **rest: Any) -> list[Tensor | None] | None:
        result = await backward(self, gradients, **rest)
        key = self.microbatch.key
        if key.step == STEP and not planted:
            planted.append(key)
            copy = await self.context.replay_buffer.find(key)
            assert copy is not None
            last = len(copy.route) - 1
            (other,) = (peer for peer in self.context.routers[last].peers if peer != copy.route[last])
            await replay(self.context, copy, {last: other}, frozenset())
        return result

    monkeypatch.setattr(MicrobatchRun, "backward", twice)
    return planted


def test_a_double_count_is_mended(plain: Run, double_count: list[CallKey], plans: list[ReplayPlan]) -> None:
    swarm = train()
    assert len(double_count) == 1
    (plan,) = plans
    assert [len(peers) for peers in plan.discards] == [0, 1], "one of the two sums begins anew"
    assert_exact(swarm, plain)


def test_a_double_count_is_seen(plain: Run, double_count: list[CallKey], disarmed: None) -> None:
    swarm = train()
    assert len(double_count) == 1
    assert_seen(swarm, plain)


# ---------------------------------------------------------------------- a microbatch lost


@pytest.fixture
def lost_microbatch(monkeypatch: pytest.MonkeyPatch) -> list[CallKey]:
    """Acknowledge one gradient without adding it."""
    planted: list[CallKey] = []
    add = GradientSums.add

    def lose(self: GradientSums, stage: Stage, key: CallKey, *rest: Any) -> bool:
        if key.step == STEP and stage.index == 0 and not planted:
            planted.append(key)
            return True
        return add(self, stage, key, *rest)

    monkeypatch.setattr(GradientSums, "add", lose)
    return planted


def test_a_lost_microbatch_is_mended(plain: Run, lost_microbatch: list[CallKey], plans: list[ReplayPlan]) -> None:
    swarm = train()
    assert len(lost_microbatch) == 1
    (plan,) = plans
    assert [(receipt, list(holders)) for receipt, holders in plan.holes.items()] == [(lost_microbatch[0].receipt, [0])]
    assert_exact(swarm, plain)


def test_a_lost_microbatch_is_seen(plain: Run, lost_microbatch: list[CallKey], disarmed: None) -> None:
    swarm = train()
    assert len(lost_microbatch) == 1
    assert_seen(swarm, plain)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[ReplayPlan]:
    """Collect the replay plans of closings that found something to repair."""
    found: list[ReplayPlan] = []

    def plan(*arguments: Any, **settings: Any) -> ReplayPlan:
        made = plan_replays(*arguments, **settings)
        if not made.done:
            found.append(made)
        return made

    monkeypatch.setattr(reconcile, "plan_replays", plan)
    return found


@pytest.fixture
def disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the closing's repair, which would hide the bug."""
    monkeypatch.setattr(reconcile, "plan_replays", lambda *_, **__: ReplayPlan((), (), {}, ()))


# ---------------------------------------------------------------------- wrong arithmetic


def test_clipping_per_stage_is_seen(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[tuple[float, float]] = []
    apply = Stage.apply

    def clip_own_part(self: Stage, record: Record, mean_gradient: Tensor, *rest: Any, **options: Any) -> None:
        own = clip_factor(float(mean_gradient.square().sum()), MAX_NORM)
        factors.append((own, record.clip_factor))
        apply(self, msgspec.structs.replace(record, clip_factor=own), mean_gradient, *rest, **options)

    monkeypatch.setattr(Stage, "apply", clip_own_part)
    swarm = train()
    assert any(not math.isclose(own, whole) for own, whole in factors)
    assert_seen(swarm, plain)


def test_averaging_in_float16_is_seen(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[float] = []
    average = all_reduce.average

    async def coarse(vector: Tensor, total_weight: float, *rest: Any, **options: Any) -> all_reduce.AveragingResult:
        half = vector.to(torch.float16).to(vector)
        rounded.append(float((half - vector).abs().max()))
        return await average(half, total_weight, *rest, **options)

    monkeypatch.setattr(all_reduce, "average", coarse)
    swarm = train()
    assert max(rounded) > 0.0
    assert_seen(swarm, plain)
