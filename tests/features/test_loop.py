"""Epochs, limits and validation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.testing import InMemoryStrategy
from tests.features.both import STEPS, Evaluated, Trained, approx, evaluate_both, fit_both, trainers
from tests.features.mark import WORKS, feature
from tests.parity.harness import WEIGHT_TOLERANCE, quiet_warnings
from tests.parity.models import DigitsMLP, digits, loader


class WhenValidated(L.Callback):
    """Records the steps and losses of validations, and the number of their batches."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []
        self.num_batches = 0
        self.num_sanity_batches = 0

    @override
    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.sanity_checking:
            self.num_sanity_batches += 1
        else:
            self.num_batches += 1

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.found.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def validated(**options: Any) -> WhenValidated:
    """Return the plain Trainer's validations; check that the swarm's are equal."""
    seen = {"plain": WhenValidated(), "swarm": WhenValidated()}
    fit_both(Evaluated, loader(digits(), 20), made={"callbacks": lambda name: [seen[name]]}, **options)
    plain, swarm = seen.values()
    assert [step for step, _ in swarm.found] == [step for step, _ in plain.found]
    assert [loss for _, loss in swarm.found] == approx([loss for _, loss in plain.found])
    assert (swarm.num_batches, swarm.num_sanity_batches) == (plain.num_batches, plain.num_sanity_batches)
    return plain


@feature("`Trainer(max_steps=...)`, `max_epochs`", WORKS, "`global_step` counts the swarm's steps")
@pytest.mark.parametrize(("options", "steps"), [({"max_steps": STEPS}, STEPS), ({"max_epochs": 2}, 14)], ids=str)
def test_lengths(options: dict[str, Any], steps: int) -> None:
    both = fit_both(**options)
    assert [trainer.global_step for trainer in both.trainers] == [steps, steps]


@feature("`Trainer(min_epochs=...)`, `min_steps`", WORKS)
@pytest.mark.parametrize(("options", "steps"), [({}, 7), ({"min_epochs": 2}, 14), ({"min_steps": 10}, 10)], ids=str)
def test_least_lengths(options: dict[str, Any], steps: int) -> None:
    class Stops(L.Callback):
        @override
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.should_stop = True

    both = fit_both(**options, max_epochs=4, made={"callbacks": lambda _: [Stops()]})
    assert [trainer.global_step for trainer in both.trainers] == [steps, steps]


@feature("`Trainer(max_time=...)`, `Timer`", WORKS)
def test_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class ASecondForABatch(L.Callback):
        """Simulates a clock by one second per batch."""

        now = 0.0

        def monotonic(self) -> float:
            return self.now

        @override
        def on_train_batch_start(self, *_: Any) -> None:
            self.now += 1.0

    def clock(_: str) -> list[L.Callback]:
        one = ASecondForABatch()
        monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", one)
        return [one]

    both = fit_both(max_time=timedelta(seconds=4), max_epochs=3, made={"callbacks": clock})
    assert [trainer.global_step for trainer in both.trainers] == [4, 4]


@pytest.mark.first_cells(1)
@feature(
    "`Trainer(val_check_interval=...)`", WORKS, "validates the weights of the last step, which do not change meanwhile"
)
@pytest.mark.parametrize("interval", [3, 0.5])
def test_validating_within_an_epoch(interval: float) -> None:
    assert [step for step, _ in validated(val_check_interval=interval, max_epochs=2).found] == [3, 6, 10, 13]


@feature("`Trainer(check_val_every_n_epoch=...)`", WORKS)
def test_validating_every_other_epoch() -> None:
    assert [step for step, _ in validated(check_val_every_n_epoch=2, max_epochs=4).found] == [14, 28]


@feature("`Trainer(num_sanity_val_steps=...)`", WORKS)
def test_sanity_checking() -> None:
    assert validated(num_sanity_val_steps=2, max_epochs=1).num_sanity_batches == 2


@feature("`Trainer(limit_train_batches=...)`", WORKS)
def test_limiting_training() -> None:
    assert len(fit_both(limit_train_batches=3, max_epochs=2).plain.losses) == 6


@feature("`Trainer(limit_val_batches=...)`", WORKS)
def test_limiting_validation() -> None:
    assert validated(limit_val_batches=2, max_epochs=2).num_batches == 4


@feature("`Trainer.validate`, `Trainer.test`; `limit_val_batches`, `limit_test_batches`", WORKS)
@pytest.mark.parametrize(("fn", "logged"), [("validate", "val_loss"), ("test", "test_loss")])
def test_evaluating(fn: str, logged: str) -> None:
    whole, swarm = evaluate_both(fn)
    assert swarm[0] == approx(whole[0])
    limited, swarm = evaluate_both(fn, **{f"limit_{logged.removesuffix('_loss')}_batches": 2})
    assert swarm[0] == approx(limited[0])
    assert limited[0][logged] != approx(whole[0][logged])


@feature("`Trainer.predict`, `limit_predict_batches`", WORKS)
def test_predicting() -> None:
    plain, swarm = evaluate_both("predict", limit_predict_batches=3)
    assert [len(batch) for batch in plain] == [8, 8, 8]
    torch.testing.assert_close(swarm, plain, rtol=0.0, atol=1e-12)


@feature("`Trainer(overfit_batches=...)`", WORKS)
def test_overfitting() -> None:
    both = fit_both(overfit_batches=2, max_epochs=4)
    assert len(both.plain.losses) == 8
    assert both.plain.losses[6] < both.plain.losses[0]


@feature("`Trainer(fast_dev_run=...)`", WORKS)
def test_fast_dev_run() -> None:
    both = fit_both(Evaluated, loader(digits()), fast_dev_run=3)
    assert [trainer.global_step for trainer in both.trainers] == [3, 3]


@feature("`Trainer(reload_dataloaders_every_n_epochs=...)`", WORKS)
def test_reloading() -> None:
    asked: list[int] = []

    class BringsData(Trained):
        @override
        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            asked.append(self.trainer.current_epoch)
            return loader(digits(), 8 + self.trainer.current_epoch)

    fit_both(BringsData, data=lambda: None, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    assert asked == [0, 1, 2, 0, 1, 2]


@feature("`Trainer(barebones=True)`", WORKS)
def test_barebones() -> None:
    weights = []
    plain: dict[str, Any] = {"devices": 1}
    swarm: dict[str, Any] = {"devices": 2, "strategy": InMemoryStrategy(num_stages=2)}
    for options in (plain, swarm):
        torch.manual_seed(0)
        module = DigitsMLP()
        with quiet_warnings():
            trainer = L.Trainer(barebones=True, accelerator="cpu", max_steps=STEPS, precision="64-true", **options)
            trainer.fit(module, loader(digits()))
        assert trainer.global_step == STEPS
        weights.append(module.state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=0.0, atol=WEIGHT_TOLERANCE)


class NotesMode(Evaluated):
    """Records whether validation ran in inference mode."""

    seen: list[bool]

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(torch.is_inference_mode_enabled())


@feature("`Trainer(inference_mode=...)`", WORKS)
@pytest.mark.parametrize("inference_mode", [True, False])
def test_inference_mode(inference_mode: bool) -> None:
    found = []
    for trainer in trainers(inference_mode=inference_mode):
        torch.manual_seed(0)
        NotesMode.seen = []
        found.append(trainer.validate(NotesMode(), loader(digits())))
        assert NotesMode.seen == 7 * [inference_mode]
    assert found[1][0] == approx(found[0][0])


@feature("`on_train_batch_start` returning -1, `Trainer.should_stop`", WORKS)
def test_stopping_from_hooks() -> None:
    class Stops(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 8

    class EndsItsEpochs(Trained):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    both = fit_both(EndsItsEpochs, made={"callbacks": lambda _: [Stops()]}, max_epochs=5)
    assert [trainer.global_step for trainer in both.trainers] == [8, 8]
