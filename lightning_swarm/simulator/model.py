"""A model that weighs and sends as much as it is told to, and computes next to nothing."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

_FLOAT_BYTES = 4


class Block(nn.Module):
    """One stage. Each sample is a row; its elements are all equal.

    Args:
        gives: Elements of a row that it returns.
        num_parameters: Its own.
    """

    def __init__(self, gives: int, num_parameters: int) -> None:
        super().__init__()
        self._gives = gives
        self.weight = nn.Parameter(torch.full((num_parameters,), 0.5))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """``[samples, any]`` to ``[samples, gives]``."""
        return (hidden[:, :1] * self.weight[0]).expand(-1, self._gives).contiguous()


class Simulated(L.LightningModule):
    """As many blocks as stages. What goes in and what comes out is small, as tokens and losses are.

    Args:
        num_stages: Of the pipeline.
        boundary_bytes: Of a sample, from a stage to the next.
        stage_bytes: Of a stage's weights.
        wrap: Makes the stage of each block, by its index.
    """

    def __init__(
        self,
        num_stages: int,
        boundary_bytes: int,
        stage_bytes: int,
        wrap: Callable[[int, Block], nn.Module] = lambda _, block: block,
    ) -> None:
        super().__init__()
        width, size = (max(1, num_bytes // _FLOAT_BYTES) for num_bytes in (boundary_bytes, stage_bytes))
        widths = [width] * (num_stages - 1) + [1]
        self.blocks = nn.Sequential(*(wrap(index, Block(gives, size)) for index, gives in enumerate(widths)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.blocks(batch)
        return out.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Ones(Dataset[Tensor]):
    """Samples ``[1]``."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    @override
    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


def batches(batch_size: int) -> DataLoader[Tensor]:
    """What `Simulated` trains on: epochs of 64 batches."""
    return DataLoader(Ones(64 * batch_size), batch_size=batch_size)
