"""Lists an epoch's batches in the order in which they are drawn. Trainers compare their lists by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np
from torch.utils.data import Subset

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.messages.run import MAX_SIZE_CHANGES, EpochPlan


class EpochListing:
    """The first `num_batches` lists of indices from a batch sampler in an epoch, and a digest of them."""

    def __init__(
        self, batches: Iterable[Sequence[Any]], num_batches: int, *, draws_end: bool = False, subset: bytes = b""
    ) -> None:
        drawn = iter(batches)
        listed = [list(batch) for batch in islice(drawn, num_batches)]
        if draws_end:  # a loader with workers draws on to the sampler's end, which may take more random numbers
            next(drawn, None)
        lengths = [len(batch) for batch in listed]
        if not all(lengths):
            raise ConfigError(
                f"a batch must have at least one sample, but batch {lengths.index(0)} has none. Let the batch sampler "
                "leave empty batches out."
            )
        self.sizes = [(size, len(list(group))) for size, group in groupby(lengths)]
        if len(self.sizes) > MAX_SIZE_CHANGES:
            raise ConfigError(
                f"the sizes of an epoch's batches may change at most {MAX_SIZE_CHANGES} times, but change "
                f"{len(self.sizes)} times. Sort batches by size, or divide the data yourself with "
                "`use_distributed_sampler=False`."
            )
        flat = [index for batch in listed for index in batch]
        are_integers = all(type(index) is int for index in flat)
        # Samplers may yield other objects than integers, which are kept, and compared by their `repr`.
        numbers = np.array(flat, dtype="<i8") if are_integers else None
        self._flat: Any = flat if numbers is None else numbers
        self._starts = np.cumsum([0, *lengths])
        content = repr(flat).encode() if numbers is None else numbers.tobytes()
        content = repr(self.sizes).encode() + b"\0" + content
        self.digest = hashlib.sha256(content + subset).digest()
        self._former_digest = hashlib.sha256(content).digest()  # older releases saved this digest, without the subset

    def matches(self, plan: EpochPlan) -> bool:
        """Return whether a plan is for these batches."""
        return self.sizes == plan.sizes and plan.digest in (self.digest, self._former_digest)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> list[Any]:
        """Return the indices of a batch."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = self._flat[self._starts[index] : self._starts[index + 1]]
        return part.tolist() if isinstance(part, np.ndarray) else list(part)


def subset_digest(dataset: object) -> bytes:
    """Digest the indices of a `Subset`, such as `random_split` makes, and of subsets in it; else empty."""
    digests = b""
    while isinstance(dataset, Subset):
        digests += hashlib.sha256(np.asarray(dataset.indices).tobytes()).digest()
        dataset = dataset.dataset
    return digests
