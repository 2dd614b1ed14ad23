"""What takes the place of the user's DataLoader: it reads a lane of an epoch ahead, and says which batch is which."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_swarm.types.data import BatchNumber

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
