"""Replaces the user's DataLoader by a loader that reads one trainer's lane of an epoch and numbers its batches."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.protocol.messages.run import BatchNumber, RandomNumbers
from lightning_swarm.strategy.framework import OWN_PACKAGES

_reading: ContextVar[bool] = ContextVar("reading", default=False)


@contextmanager
def reading_data() -> Iterator[None]:
    """Mark that user code inside makes or reads training data, for `is_reading`."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def is_reading() -> bool:
    """Return whether the calling code makes or reads training data, in this process or in a loader's worker."""
    return _reading.get() or get_worker_info() is not None


def _read(iterable: Iterable[Any]) -> Iterator[Any]:
    """Iterate over user data; the user's code runs inside `reading_data`, and the consumer's code outside of it."""
    with reading_data():
        iterator = iter(iterable)
    while True:
        try:
            with reading_data():
                sample = next(iterator)
        except StopIteration:
            return
        yield sample


class StridedDataset(IterableDataset[Any]):
    """Every n-th sample of an iterable dataset, with all other attributes of the whole dataset."""

    def __init__(self, whole: IterableDataset[Any], rank: int, num_trainers: int) -> None:
        self.whole = whole
        self._rank = rank
        self._num_trainers = num_trainers

    @override
    def __iter__(self) -> Iterator[Any]:
        # Each trainer iterates over the whole dataset; the parts are disjoint if the order is the same everywhere.
        return islice(_read(self.whole), self._rank, None, self._num_trainers)

    def __len__(self) -> int:
        return len(range(self._rank, len(self.whole), self._num_trainers))  # type: ignore[arg-type]  # raises if `whole` has no length

    def __getattr__(self, name: str) -> Any:
        # `whole` is not set yet while the dataset is unpickled in a worker. The position of the whole dataset is not
        # that of a part of it, so that a stateful loader reads the part again and skips its batches.
        if name == "whole" or (name in ("state_dict", "load_state_dict") and self._num_trainers > 1):
            raise AttributeError(name)
        return getattr(self.whole, name)


def part_of(loader: DataLoader[Any], rank: int, num_trainers: int) -> DataLoader[Any]:
    """Return a copy of a loader that reads a trainer's part of the iterable dataset."""
    assert isinstance(loader.dataset, IterableDataset)
    copied = copy.copy(loader)  # the user's class may have unknown constructor arguments
    vars(copied).update(dataset=StridedDataset(loader.dataset, rank, num_trainers), _iterator=None)
    return copied


def divides_itself(sampler: object) -> bool:
    """Return whether a sampler already divides the data among several trainers."""
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1


def own_generators(loader: Any) -> list[torch.Generator]:
    """Return the distinct generators of a DataLoader or `SharedLoader`, and of its samplers."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    values = [getattr(source, "generator", None) for source in (loader, *samplers)]
    return list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())


def take_random_numbers(own: Sequence[torch.Generator]) -> RandomNumbers:
    """Return the state of all generators that user code draws from, and of a loader's `own` generators."""
    _, python, python_gauss = random.getstate()
    numpy = np.random.get_state(legacy=True)  # noqa: NPY002 - user code draws from it
    _, keys, position, has_gauss, gauss = numpy
    return RandomNumbers(
        torch=torch.get_rng_state().numpy().tobytes(),
        python=np.array(python, dtype="<u4").tobytes(),
        python_gauss=python_gauss,
        numpy=np.asarray(keys, dtype="<u4").tobytes(),
        numpy_place=int(position),
        numpy_gauss=float(gauss) if has_gauss else None,
        own=[generator.get_state().numpy().tobytes() for generator in own],
    )


def restore_random_numbers(numbers: RandomNumbers, own: Sequence[torch.Generator]) -> None:
    """Set all generators to a state. Raises ProtocolError if the state does not fit this machine's generators."""
    try:
        torch.set_rng_state(_as_tensor(numbers.torch))
        python = np.frombuffer(numbers.python, dtype="<u4").tolist()
        random.setstate((3, tuple(python), numbers.python_gauss))
        keys = np.frombuffer(numbers.numpy, dtype="<u4").astype(np.uint32)
        gauss = numbers.numpy_gauss
        state = ("MT19937", keys, numbers.numpy_place, int(gauss is not None), gauss or 0.0)
        np.random.set_state(state)  # noqa: NPY002 - user code draws from it
        for generator, buffer in zip(own, numbers.own, strict=True):
            generator.set_state(_as_tensor(buffer))
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ProtocolError(f"the lead's random numbers cannot be restored here: {error}") from error


@contextmanager
def drawing_from(numbers: RandomNumbers, own: Sequence[torch.Generator]) -> Iterator[None]:
    """Inside, all generators have the given state; afterwards the process's generators are restored."""
    before = take_random_numbers(())
    try:
        restore_random_numbers(numbers, own)
        yield
    finally:
        restore_random_numbers(before, ())


def _as_tensor(buffer: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8)


class LaneSampler:
    """A batch sampler that yields the indices of a lane's batches, and queues the numbers of the unread batches."""

    def __init__(
        self,
        origin: Any,
        read: Callable[[], Iterator[tuple[BatchNumber, list[Any], int]]],
        num_batches: Callable[[], int],
    ) -> None:
        self.origin = origin  # the user's batch sampler
        self.unread: deque[tuple[BatchNumber, int]] = deque()  # batches that the loader has not returned yet
        self._read = read  # yields for each batch of the epoch's lane: number, indices, and how many batches follow
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[list[Any]]:
        unread = self.unread = deque()
        for number, indices, num_left in self._read():
            unread.append((number, num_left))
            yield indices

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch's lane."""
        return self._num_batches()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's batch sampler, such as `sampler`, `batch_size` or `set_epoch`."""
        if name == "origin":  # not set yet while the sampler is unpickled or copied
            raise AttributeError(name)
        return getattr(self.origin, name)


def _wrong_number_of_batches(loader: DataLoader[Any]) -> ConfigError:
    return ConfigError(
        "trainers can share a loader only if it gives one batch for each list of indices from its batch sampler, but "
        f"the `__iter__` of {type(loader).__name__} gives another number of batches. Combine samples in the dataset or "
        "in `collate_fn`, or set `Trainer(use_distributed_sampler=False)`, so that each trainer reads its own data."
    )


class SharedLoader:
    """Reads a trainer's lane with the user's DataLoader, and reports the number of each batch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        on_batch: Callable[[BatchNumber, int], None],
        replacement: Callable[[], DataLoader[Any] | None],
    ) -> None:
        assert isinstance(loader.batch_sampler, LaneSampler)
        self.loader = loader  # a copy of the user's loader with another batch sampler
        self._lane = loader.batch_sampler
        self._on_batch = on_batch  # called before a batch is returned, with its number and how many follow in the lane
        self._replacement = replacement  # returns the loader to read if this loader cannot be shared after all, or None
        if hasattr(loader, "in_order"):
            loader.in_order = True  # numbers are assigned to batches in their order

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch's lane."""
        replacement = self._replacement()
        return len(self._lane) if replacement is None else len(replacement)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the lane."""
        replacement = self._replacement()
        if replacement is not None:
            return iter(replacement)
        # Workers begin to read when an iterator is made, and Lightning may make it before the run has begun.
        return self._read(None if self.loader.num_workers else iter(self.loader))

    def _read(self, iterator: Iterator[Any] | None) -> Iterator[Any]:
        """Yield the batches of the loader's iterator, which is made now if None, and report each batch before that."""
        for batch in iter(self.loader) if iterator is None else iterator:
            if not self._lane.unread:
                raise _wrong_number_of_batches(self.loader)
            number, num_left = self._lane.unread.popleft()
            self._on_batch(number, num_left)
            yield batch

    def fetch(self, indices: Sequence[Any]) -> Any:
        """Read one batch outside of the lane, with the user's loader class."""
        # This process reads the batch, unless the user's `worker_init_fn` prepares the dataset.
        prepare = self.loader.worker_init_fn if self.loader.num_workers else None
        module_name = getattr(getattr(prepare, "func", prepare), "__module__", None)
        needs_worker = prepare is not None and not is_in_packages(OWN_PACKAGES, module_name)
        loader = copy.copy(self.loader)
        workers = {"num_workers": 1} if needs_worker else {"num_workers": 0, "prefetch_factor": None, "timeout": 0}
        # The workers' seed is drawn from a generator of its own, because the user's must not advance.
        own = {"batch_sampler": [list(indices)], "generator": torch.Generator(), "_iterator": None}
        vars(loader).update(workers, persistent_workers=False, **own)
        batches = list(iter(loader))
        if len(batches) != 1:
            raise _wrong_number_of_batches(loader)
        return batches[0]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the DataLoader."""
        # This loader has no state methods, because the run keeps the position in the data.
        if name in ("loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes of the DataLoader: Lightning sets `worker_init_fn`, and resets `_iterator`."""
        if name in ("worker_init_fn", "_iterator"):
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)
