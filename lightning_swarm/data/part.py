"""A stream of samples, of which each of the trainers that were started together takes its part."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override


class Part(IterableDataset[Any]):
    """Every n-th sample of an iterable dataset; whatever else is asked of it is the whole one's.

    Args:
        whole: Each trainer iterates over it by itself. In one order at all of them, the parts have nothing in common.
        rank: Of the trainer.
        num_trainers: n.
    """

    def __init__(self, whole: IterableDataset[Any], rank: int, num_trainers: int) -> None:
        self.whole = whole
        self._rank = rank
        self._num_trainers = num_trainers

    @override
    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.whole), self._rank, None, self._num_trainers)

    def __len__(self) -> int:
        return len(range(self._rank, len(self.whole), self._num_trainers))  # type: ignore[arg-type]  # if it has one

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # on its way to a worker's process it has nothing yet
            raise AttributeError(name)
        return getattr(self.whole, name)


def part_of(loader: DataLoader[Any], rank: int, num_trainers: int) -> DataLoader[Any]:
    """The loader, over a trainer's part of its iterable dataset."""
    assert isinstance(loader.dataset, IterableDataset)
    made = copy.copy(loader)  # made anew it would need its class's own arguments
    vars(made).update(dataset=Part(loader.dataset, rank, num_trainers), _iterator=None)
    return made
