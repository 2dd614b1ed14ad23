"""Data."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import Subset
from typing_extensions import override

from tests.features.both import STEPS, Evaluated, Trained, approx, fit_both
from tests.features.mark import WORKS, feature
from tests.parity.models import DigitsMLP, digits, loader


@feature("DataLoader workers, shuffling", WORKS)
def test_workers() -> None:
    def shuffled() -> Any:
        return loader(digits(), num_workers=1, shuffle=True, generator=torch.Generator().manual_seed(1))

    fit_both(data=shuffled, max_epochs=1)


@feature("`LightningDataModule`", WORKS)
def test_data_modules() -> None:
    class Digits(L.LightningDataModule):
        @override
        def setup(self, stage: str) -> None:
            self.data = digits()

        @override
        def train_dataloader(self) -> Any:
            return loader(self.data)

        @override
        def val_dataloader(self) -> Any:
            return loader(self.data)

    assert "val_loss" in fit_both(Evaluated, data=Digits, max_epochs=1).logged()


class OnBoth(DigitsMLP):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [F.cross_entropy(self.net(part[0]), part[1]) for part in batch.values() if part is not None]
        return torch.stack(losses).sum()


@pytest.mark.first_cells(1)
@feature(
    "several training datasets: a dict of loaders, `CombinedLoader`",
    WORKS,
    "each part goes through the pipeline in a separate call",
)
@pytest.mark.parametrize(("mode", "batches"), [("min_size", 7), ("max_size_cycle", 11), ("max_size", 11)])
def test_combined_loaders(mode: Any, batches: int) -> None:
    def combined() -> CombinedLoader:
        return CombinedLoader({"a": loader(digits(), 8), "b": loader(digits(), 5)}, mode)

    both = fit_both(OnBoth, data=combined, max_epochs=1)
    assert len(both.plain.losses) == batches
    fit_both(OnBoth, data=lambda: {"a": loader(digits(), 8), "b": loader(digits(), 5)}, max_steps=3)


@feature("several validation loaders", WORKS)
def test_several_validation_loaders() -> None:
    class ByLoader(DigitsMLP):
        @override
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    halves = Subset(digits(), range(30)), Subset(digits(), range(30, 52))
    logged = fit_both(ByLoader, *map(loader, halves), max_epochs=1).logged()
    assert logged["val_loss/dataloader_idx_0"] != approx(logged["val_loss/dataloader_idx_1"])


@feature("`on_before_batch_transfer`, `transfer_batch_to_device`, `on_after_batch_transfer`", WORKS)
def test_batch_transfer_hooks() -> None:
    class Halves(Trained):
        @override
        def on_before_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
            return [batch[0] / 2, batch[1]]

        @override
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return {"images": batch[0].to(device), "labels": batch[1].to(device)}

        @override
        def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> list[Tensor]:
            return [batch["images"], batch["labels"]]

    halved, whole = fit_both(Halves, max_steps=STEPS), fit_both(max_steps=STEPS)
    assert halved.plain.losses != whole.plain.losses
