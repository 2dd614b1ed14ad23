"""All batches of an epoch, by the indices of their samples: listed at once, and kept small."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np

from lightning_swarm.errors import ConfigError
from lightning_swarm.types.data import MAX_RUNS


class Listing:
    """What a batch sampler gives in an epoch.

    Args:
        batches: Of the sampler.
        num_batches: How many of them.
        ends: Whether the sampler is asked for one more, as by loaders with workers.

    Raises:
        ConfigError: They are nothing that an epoch can be shared by.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], num_batches: int, *, ends: bool = False) -> None:
        drawn = iter(batches)
        listed = [list(batch) for batch in islice(drawn, num_batches)]
        if ends:
            next(drawn, None)
        lengths = [len(batch) for batch in listed]
        if not all(lengths):
            raise ConfigError(f"a batch must have at least one sample, and number {lengths.index(0)} has none.")
        self.sizes = [(size, len(list(group))) for size, group in groupby(lengths)]
        if len(self.sizes) > MAX_RUNS:
            raise ConfigError(
                f"the sizes of an epoch's batches may change {MAX_RUNS} times, they do {len(self.sizes)} times. Sort "
                "batches by size, or share the data yourself with `use_distributed_sampler=False`."
            )
        flat = [index for batch in listed for index in batch]
        plain = all(type(index) is int for index in flat)
        # Whatever else samplers give is kept, and compared, as it is written.
        numbers = np.array(flat, dtype="<i8") if plain else None
        self._flat: Any = flat if numbers is None else numbers
        self._starts = np.cumsum([0, *lengths])
        content = repr(flat).encode() if numbers is None else numbers.tobytes()
        self.digest = hashlib.sha256(repr(self.sizes).encode() + b"\0" + content).digest()

    def __len__(self) -> int:
        """Of batches."""
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> list[Any]:
        """The indices of a batch."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = self._flat[self._starts[index] : self._starts[index + 1]]
        return part.tolist() if isinstance(part, np.ndarray) else list(part)
