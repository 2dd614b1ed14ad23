"""Scaled gradients: all stages have the plain Trainer's scales and skipped steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from typing_extensions import override

from lightning_swarm.core.errors import StepError
from lightning_swarm.protocol import compression as wire_compression
from lightning_swarm.protocol.settings import CodecName
from lightning_swarm.strategy.loop_counters import LossScale
from tests.parity.float16 import HALF, InFloat16, InHalves, Scaled, train
from tests.parity.harness import assert_same_curve, deviation, run_plain, run_swarm
from tests.parity.models import make_optimizer

STEPS = 30


def assert_same(swarm: Scaled, plain: Scaled, *, loss: float, weight: float, norm: float) -> None:
    assert swarm.scales == plain.scales
    assert plain.num_skipped > 2, "no step was skipped"
    assert plain.num_skipped == [record.outcome for record in swarm.run.records].count("skip")
    assert any(after > before for before, after in zip(plain.scales, plain.scales[1:], strict=False)), "it never grew"
    finite = [pair for pair in zip(swarm.run.norms, plain.run.norms, strict=True) if all(map(math.isfinite, pair))]
    assert len(finite) > 5
    assert max(abs(ours - theirs) / theirs for ours, theirs in finite) <= norm
    assert_same_curve(swarm.run, plain.run, loss=loss, weight=weight)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
    ],
)
def test_scales_and_weights_are_the_plain_trainers(options: dict[str, Any]) -> None:
    plain = train(run_plain, max_steps=STEPS, **options)
    swarm = train(run_swarm, max_steps=STEPS, microbatch_size=HALF, **options)
    assert_same(swarm, plain, loss=1e-6, weight=1e-6, norm=1e-6)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("codec", ["8bit", "4bit"])
def test_what_overflows_is_skipped_with_a_codec_too(codec: CodecName, monkeypatch: pytest.MonkeyPatch) -> None:
    """No codec represents an infinity, so a tensor that has one travels unencoded."""
    monkeypatch.setattr(wire_compression, "MIN_ELEMENTS", 1)
    swarm = train(run_swarm, max_steps=STEPS, microbatch_size=HALF, compression=codec)
    outcomes = [record.outcome for record in swarm.run.records]
    assert outcomes.count("skip") == swarm.num_skipped > 2
    assert outcomes.count("apply") > 5


def test_the_norm_that_clips_is_of_the_unscaled_gradient() -> None:
    plain = train(run_plain, max_steps=STEPS, gradient_clip_val=0.5)
    swarm = train(run_swarm, max_steps=STEPS, gradient_clip_val=0.5, microbatch_size=HALF)
    # A large factor amplifies the codec's error, so the tolerance is wider.
    assert_same(swarm, plain, loss=1e-2, weight=1e-2, norm=2e-2)
    assert swarm.run.num_clipped > 10


def test_microbatches_of_another_size() -> None:
    """A sum over a batch may overflow where its microbatches do not, so the scale is kept far below that."""
    plain = train(run_plain, InFloat16, factor=256.0, max_steps=STEPS)
    swarm = train(run_swarm, InFloat16, factor=256.0, max_steps=STEPS, num_stages=3, num_servers=4)
    assert_same(swarm, plain, loss=3e-2, weight=3e-2, norm=1e-1)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("wrong", [lambda scale: 1.0, lambda scale: scale * scale], ids=["never", "twice"])
def test_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """Means are not divided by the scale, or divided twice."""
    plain = train(run_plain, max_steps=STEPS)
    current = LossScale.current
    monkeypatch.setattr(LossScale, "current", lambda self: wrong(current(self)))
    swarm = train(run_swarm, max_steps=STEPS, microbatch_size=HALF)
    assert max(deviation(swarm.run, plain.run)) > 0.1
    with pytest.raises(AssertionError):
        assert_same(swarm, plain, loss=1e-2, weight=1e-2, norm=2e-2)


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: Tensor, spoils: bool) -> Tensor:
        ctx.spoils = spoils
        return hidden * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full((), math.inf if ctx.spoils else 0.0), None


class Spoil(nn.Module):
    """Has a weight whose gradient is sometimes not finite; the gradient for earlier stages always is."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.spoils = False

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = _Spoil.apply(hidden, self.factor, self.spoils)
        return out


class Spoiled(InHalves):
    """One stage's gradient is infinite in the fifth batch of each epoch."""

    place: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.spoil = Spoil()
        self.net.insert(self.place, self.spoil)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.spoil.spoils = batch_idx == 4
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("place", [0, -1])
def test_one_stage_alone_skips_the_step_in_all(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(Spoiled, "place", place, raising=False)
    plain = train(run_plain, Spoiled, factor=256.0, max_steps=14)
    swarm = train(run_swarm, Spoiled, factor=256.0, max_steps=14, microbatch_size=HALF)
    assert [swarm.run.records[step].outcome for step in (3, 4, 11)] == ["apply", "skip", "skip"]
    assert_same(swarm, plain, loss=1e-6, weight=1e-6, norm=1e-6)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_and_global_step_count_skipped_steps() -> None:
    class Scheduled(InHalves):
        @override
        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self, self.recipe)
            schedule = StepLR(optimizer, 1, gamma=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    plain = train(run_plain, Scheduled, max_steps=STEPS)
    swarm = train(run_swarm, Scheduled, max_steps=STEPS, microbatch_size=HALF)
    assert_same(swarm, plain, loss=1e-6, weight=1e-6, norm=1e-6)
    assert swarm.run.learning_rates == plain.run.learning_rates
    assert len(set(plain.run.learning_rates)) == STEPS


@pytest.mark.parametrize(("first", "second"), [("plain", "swarm"), ("swarm", "plain")])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_keeps_the_scale(tmp_path: Path, first: str, second: str) -> None:
    runs: dict[str, dict[str, Any]] = {
        "plain": {"run": run_plain},
        "swarm": {"run": run_swarm, "microbatch_size": HALF},
    }
    whole = train(run_plain, max_epochs=3)

    def save() -> dict[str, Any]:
        callbacks: list[L.Callback] = [ModelCheckpoint(tmp_path, "file", enable_version_counter=False)]
        return {"callbacks": callbacks, "enable_checkpointing": True}

    before = train(**runs[first], **save(), max_epochs=2)
    file = tmp_path / "file.ckpt"
    assert torch.load(file, weights_only=True)["MixedPrecision"]["scale"] == before.scales[-1]
    after = train(**runs[second], **save(), max_epochs=3, ckpt_path=file)
    assert before.scales + after.scales == whole.scales
    assert before.run.losses + after.run.losses == pytest.approx(whole.run.losses, rel=1e-6)


def test_a_scale_that_came_down_to_nothing_is_an_error() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1e-40, backoff_factor=1e-30)
    scale = LossScale(scaler)
    assert scale.adapts
    scaler.scale(torch.ones(()))
    scale.update(skipped=True)
    with pytest.raises(StepError, match=r"must be positive and finite, but has become 0.*detect_anomaly"):
        _ = scale.current()


def test_without_a_scaler_there_is_no_scale() -> None:
    for scale in LossScale(None), LossScale(torch.amp.GradScaler("cpu", enabled=False)):
        scale.update(skipped=True)
        assert (scale.current(), scale.adapts) == (1.0, False)
