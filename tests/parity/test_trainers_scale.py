"""`16-mixed` with several trainers: one scale for all through joins and deaths, and all skip an overflowed step."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.messages.scaling import LossScaling
from tests.parity.float16 import INITIAL_SCALE, InFloat16
from tests.parity.models import digits, make_optimizer
from tests.parity.test_lead_of_several import LIMITS, dead, rank_of, standby_of
from tests.parity.test_trainers_come import under_way
from tests.parity.test_whole import WHOLE
from tests.parity.trainers import Seen, ThreadStrategy, default_dtype, train

GROWTH_INTERVAL = 4
AFTERWARDS = 8  # steps under the second lead


def precision(initial_scale: float = INITIAL_SCALE) -> MixedPrecision:
    """Return float16 precision; without the plugin Lightning would use bfloat16 on a CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale, growth_interval=GROWTH_INTERVAL)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


class LeadDies(L.Callback):
    """Kills the lead once three trainers train, losses fit and a standby exists; the next lead stops steps later."""

    lead = 0

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        seen = seen_by(trainer)
        trained = {seen.batches[place][0] for places in seen.steps for place in places}
        fitted = [record.outcome for record in seen.records].count("apply") >= 2
        if rank_of(trainer) == 0 and len(trained) == 3 and fitted and standby_of(seen):
            seen.kill("peer-0")

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        seen = seen_by(trainer)
        if trainer.is_global_zero:
            self.lead = rank_of(trainer)
        trainer.should_stop = bool(seen.went_back) and len(seen.records) >= seen.went_back[0] + AFTERWARDS


def seen_by(trainer: L.Trainer) -> Seen:
    assert isinstance(trainer.strategy, ThreadStrategy)
    return trainer.strategy._seen


def assert_scales(seen: Seen) -> None:
    """Check that each step has the scale that torch's scaler would have after the previous steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL)
    scaler.scale(torch.ones(()))
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for record in seen.records:
        assert record.closing.gradient_scale == scaler.get_scale()
        weight.grad = torch.full((), torch.inf if record.outcome == "skip" else 1.0)
        scaler.step(optimizer)
        scaler.update()


def assert_weights(seen: Seen) -> None:
    """Check losses and weights against plain torch, with the scales from the records."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        module = InFloat16().float()
    optimizer = make_optimizer(module, module.recipe)
    for places, record in zip(seen.steps, seen.records, strict=True):
        scale, sums = record.closing.gradient_scale, [torch.zeros_like(one) for one in module.parameters()]
        batches = [seen.batches[place][1] for place in places]
        for place, ids in zip(places, batches, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = module.training_step([part[ids] for part in digits().tensors], 0)
            assert seen.losses[place] == pytest.approx(loss.item(), rel=1e-5)
            (scale * loss).backward()
            for total, parameter in zip(sums, module.parameters(), strict=True):
                total.add_(parameter.grad, alpha=len(ids) / sum(map(len, batches)) / scale)
        for total, parameter in zip(sums, module.parameters(), strict=True):
            parameter.grad = total
        fits = all(bool(total.isfinite().all()) for total in sums)
        assert record.outcome == ("apply" if fits else "skip")
        if fits:
            optimizer.step()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(seen.weights[name], tensor, rtol=0.0, atol=1e-5)


def test_one_scale_for_all_whoever_leads() -> None:
    """Trainers that join start with the run's scale, not with their own."""
    events, plugins = LeadDies(), iter([precision(), *(precision(2.0**10) for _ in range(2))])
    rank = vars(rank_zero_only)["rank"]  # a global of the process, which these trainers share as threads only
    try:
        seen = train(
            3,
            lambda seen: InFloat16().float(),
            come=dict.fromkeys((1, 2), under_way),
            callbacks=lambda rank: [events],
            each={"plugins": lambda: next(plugins)},
            precision=None,
            raises=False,
            max_steps=80,
            swarm={"limits": LIMITS, **WHOLE},
        )
    finally:
        vars(rank_zero_only)["rank"] = rank
    assert seen.killed == ["peer-0"]
    assert not seen.errors.keys() - set(dead(seen)), seen.errors
    (back,) = seen.went_back
    outcomes = [record.outcome for record in seen.records]
    assert outcomes.count("skip") > 2
    assert "apply" in outcomes[:back]
    assert "skip" in outcomes[back:] or any(
        after.closing.gradient_scale > before.closing.gradient_scale
        for before, after in zip(seen.records[back:], seen.records[back + 1 :], strict=False)
    ), "another lead's steps show how long the scale had stood"
    assert_scales(seen)
    seen.weights = seen.modules[events.lead].state_dict()
    assert_weights(seen)


@pytest.mark.parametrize("of_lead", [True, False])
def test_one_that_scales_otherwise_is_refused_by_name(of_lead: bool) -> None:
    plugins = iter([[precision()], []] if of_lead else [[], [precision()]])
    each = {"plugins": lambda: next(plugins)}
    seen = train(2, lambda seen: InFloat16().float(), each=each, precision=None, raises=False, swarm=WHOLE)
    assert isinstance(seen.errors[1], ConfigError)
    assert "Give all of them the same `precision`" in str(seen.errors[1])


@pytest.mark.parametrize(("growth", "interval"), [(2.0, 3), (1.5, 1), (256.0, 2)])
def test_it_changes_as_torch_has_it(growth: float, interval: int) -> None:
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=3.0e5, growth_factor=growth, backoff_factor=0.3, growth_interval=interval
    )
    scaler.scale(torch.ones(()))
    scaling = LossScaling(scale=3.0e5, growth_factor=growth, backoff_factor=0.3, growth_interval=interval)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(60):
        skipped = step % 7 == 5
        weight.grad = torch.full((), torch.inf if skipped else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scaling = scaling.after(skipped=skipped)
        assert scaling.scale == pytest.approx(scaler.get_scale(), rel=1e-6)
        assert scaling.num_applied == scaler._get_growth_tracker()
