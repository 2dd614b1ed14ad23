"""The module `my_project` of the documentation: a model and its data."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class MyModel(L.LightningModule):
    """Has all its layers in one `Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.blocks(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class MyData(L.LightningDataModule):
    """Has 32 rows."""

    def train_dataloader(self) -> DataLoader[Any]:
        return my_data()


def my_data() -> DataLoader[Any]:
    """Return a loader of four batches."""
    return DataLoader(TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1))), batch_size=8)
