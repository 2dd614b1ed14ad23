"""Values that several trainers' code reads and sets: the run's counters and metrics, and each trainer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.parity.models import DigitsMLP, digits
from tests.parity.test_shared_data import assert_each_once, assert_same, run
from tests.parity.test_trainers import Watching
from tests.parity.trainers import numbered, train


class Counting(DigitsMLP):
    """Its loss depends on a counter, or on a value that the lead's validation logged."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        trainer = self.trainer
        factors = {
            "batch_idx": lambda: float(batch_idx % 4),
            "num_training_batches": lambda: trainer.num_training_batches / 10,
            "is_last_batch": lambda: float(trainer.is_last_batch),
            "callback_metrics": lambda: float(trainer.callback_metrics.get("val_loss", 0.0)),
        }
        return loss * (1.0 + factors[self.what]())

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))


@pytest.mark.parametrize("what", ["batch_idx", "callback_metrics", "num_training_batches", "is_last_batch"])
@pytest.mark.parametrize("num_trainers", [2, 4])
@pytest.mark.first_cells(2)
def test_a_step_reads_the_counters_of_the_run(what: str, num_trainers: int) -> None:
    validation = lambda: DataLoader(digits(), 26)  # noqa: E731 - for both
    one = run(1, lambda seen: Counting(what), validation=validation)
    several = run(num_trainers, lambda seen: Counting(what), validation=validation)
    assert_each_once(several, 3)
    assert_same(several, one)
    assert {rank for rank, _ in several.batches.values()} == set(range(num_trainers)), "one trainer had all batches"


class StopsInOther(L.Callback):
    """Sets `should_stop` in a trainer that is not the lead, after its second batch."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.fit_loop.batch_idx == 1


def test_another_trainer_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    seen = train(2, Watching, callbacks=lambda rank: [StopsInOther()] * rank, max_steps=20)
    assert 0 < len(seen.records) < 20
    assert "`trainer.should_stop` was set in peer-1" in caplog.text
    assert seen.trainers[0].should_stop


# ---------------------------------------------------------------------- what only the lead's validation sets


class Noise:
    amount = 0.0

    def __call__(self, rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
        images, labels, numbers = map(torch.stack, zip(*rows, strict=True))
        return [images + self.amount, labels, numbers]


class OnValidation(L.Callback):
    """A user's callback that acts at the end of validation."""

    def __init__(self, act: Callable[[L.Trainer, Any], None]) -> None:
        self.act = act
        self.weight = 1.0

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.act(trainer, pl_module)


def raise_noise(trainer: L.Trainer, module: Any) -> None:
    trainer.train_dataloader.collate_fn.amount += 0.5  # type: ignore[union-attr]


def relabel(trainer: L.Trainer, module: Any) -> None:
    trainer.train_dataloader.dataset.tensors[1][:4] = 0  # type: ignore[union-attr]


def lower_weight(trainer: L.Trainer, module: Any) -> None:
    (own,) = (callback for callback in trainer.callbacks if isinstance(callback, OnValidation))  # type: ignore[attr-defined]
    own.weight *= 0.5


def nothing(trainer: L.Trainer, module: Any) -> None:
    """Do nothing, for a run in which validation changes no weight."""


class Validated(Watching):
    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", DigitsMLP.training_step(self, batch, batch_idx))


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (raise_noise, "collate_fn.amount"),
        (relabel, "TensorDataset.tensors"),
        (lower_weight, "OnValidation.weight"),
        (nothing, ""),
    ],
)
def test_what_validation_changes_at_the_lead_is_named(act: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def data() -> DataLoader[Any]:
        dataset: TensorDataset = numbered(digits())
        copied = TensorDataset(*(tensor.clone() for tensor in dataset.tensors))
        return DataLoader(copied, batch_size=4, collate_fn=Noise())

    train(
        2,
        Validated,
        data=data,
        validation=lambda: DataLoader(digits(), batch_size=26),
        callbacks=lambda rank: [OnValidation(act)],
        max_steps=-1,
        max_epochs=2,
    )
    said = [text for text in caplog.messages if text.startswith("Validation runs only on the lead")]
    assert len(said) == bool(name)
    assert all(f"'{name}'" in text for text in said)
