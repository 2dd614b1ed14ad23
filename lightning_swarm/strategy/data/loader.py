"""What takes the place of the user's DataLoader: it reads a lane of an epoch ahead, and says which batch is which."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from typing_extensions import override

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.protocol.messages.run import BatchNumber, RandomNumbers


class StridedDataset(IterableDataset[Any]):
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
    vars(made).update(dataset=StridedDataset(loader.dataset, rank, num_trainers), _iterator=None)
    return made


def own_generators(loader: Any) -> list[torch.Generator]:
    """Of a DataLoader, or what takes its place, and its samplers: each once."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [getattr(one, "generator", None) for one in (loader, *samplers)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def take(own: Sequence[torch.Generator]) -> RandomNumbers:
    """Where all generators are."""
    _, python, python_gauss = random.getstate()
    numpy = np.random.get_state(legacy=True)  # noqa: NPY002 - what users draw from
    _, keys, place, has_gauss, gauss = numpy
    return RandomNumbers(
        torch=torch.get_rng_state().numpy().tobytes(),
        python=np.array(python, dtype="<u4").tobytes(),
        python_gauss=python_gauss,
        numpy=np.asarray(keys, dtype="<u4").tobytes(),
        numpy_place=int(place),
        numpy_gauss=float(gauss) if has_gauss else None,
        own=[one.get_state().numpy().tobytes() for one in own],
    )


def restore(numbers: RandomNumbers, own: Sequence[torch.Generator]) -> None:
    """Have them go on from there.

    Raises:
        ProtocolError: It is not where generators of this machine can be.
    """
    try:
        torch.set_rng_state(_as_tensor(numbers.torch))
        python = np.frombuffer(numbers.python, dtype="<u4").tolist()
        random.setstate((3, tuple(python), numbers.python_gauss))
        keys = np.frombuffer(numbers.numpy, dtype="<u4").astype(np.uint32)
        gauss = numbers.numpy_gauss
        state = ("MT19937", keys, numbers.numpy_place, int(gauss is not None), gauss or 0.0)
        np.random.set_state(state)  # noqa: NPY002 - what users draw from
        for one, buffer in zip(own, numbers.own, strict=True):
            one.set_state(_as_tensor(buffer))
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ProtocolError(f"the lead's random numbers cannot be gone on with here: {error}") from error


@contextmanager
def drawing_from(numbers: RandomNumbers, own: Sequence[torch.Generator]) -> Iterator[None]:
    """Have generators go on from there; those of the process are afterwards where they were before."""
    before = take(())
    try:
        restore(numbers, own)
        yield
    finally:
        restore(before, ())


def _as_tensor(buffer: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8)


_HIDDEN: Final = ("state_dict", "load_state_dict")
"""The place in the data is the run's, not a loader's."""


class LaneSampler:
    """The batch sampler of a loader that reads a lane.

    Args:
        origin: The user's batch sampler.
        read: Numbers and indices of the batches of the lane of the epoch under way, and how many follow each.
        num_batches: Of a whole epoch's lane.
    """

    def __init__(
        self,
        origin: Any,
        read: Callable[[], Iterator[tuple[BatchNumber, list[Any], int]]],
        num_batches: Callable[[], int],
    ) -> None:
        self.origin = origin
        self.handed: deque[tuple[BatchNumber, int]] = deque()  # that the loader has not given yet
        self._read = read
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[list[Any]]:
        handed = self.handed = deque()
        for number, indices, num_left in self._read():
            handed.append((number, num_left))
            yield indices

    def __len__(self) -> int:
        """Of a whole epoch's lane."""
        return self._num_batches()

    def __getattr__(self, name: str) -> Any:
        """As the user's: its sampler, its sizes, its `set_epoch`."""
        if name == "origin":
            raise AttributeError(name)
        return getattr(self.origin, name)


class SharedLoader:
    """A DataLoader whose batches have numbers.

    Args:
        loader: Made anew from the user's, with a `LaneSampler`.
        on_batch: Called with each batch's number before it is given, and how many follow it in the lane.
        instead: What to read where this one cannot be shared after all; None: it can.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        on_batch: Callable[[BatchNumber, int], None],
        instead: Callable[[], DataLoader[Any] | None],
    ) -> None:
        self.loader = loader
        self._on_batch = on_batch
        self._instead = instead
        if hasattr(loader, "in_order"):
            loader.in_order = True  # by which a batch is known again

    @property
    def lane(self) -> LaneSampler:
        """What it reads by."""
        lane = self.loader.batch_sampler
        assert isinstance(lane, LaneSampler)
        return lane

    def __len__(self) -> int:
        """Of a whole epoch's lane."""
        instead = self._instead()
        return len(self.lane) if instead is None else len(instead)

    def __iter__(self) -> Iterator[Any]:
        """Read the lane."""
        instead = self._instead()
        if instead is not None:
            return iter(instead)
        # Workers begin to read when an iterator is made, and Lightning may make one before there is a run.
        return self._given(None if self.loader.num_workers else iter(self.loader))

    def _given(self, made: Iterator[Any] | None) -> Iterator[Any]:
        for batch in iter(self.loader) if made is None else made:
            number, num_left = self.lane.handed.popleft()
            self._on_batch(number, num_left)
            yield batch

    def fetch(self, indices: Sequence[Any]) -> Any:
        """One more batch, read here and now."""
        loader = self.loader
        return _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, loader.drop_last).fetch(indices)

    def __getattr__(self, name: str) -> Any:
        """As the DataLoader has it."""
        if name == "loader" or name in _HIDDEN:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Likewise: Lightning sets how workers begin, and takes their iterator away."""
        if name in ("worker_init_fn", "_iterator"):
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)
