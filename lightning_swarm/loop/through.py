"""A trainer's batches that are through, until a record that counts them was counted here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_swarm.errors import StepError
from lightning_swarm.types.data import BatchNumber


@dataclass(frozen=True)
class Batch:
    """One that Lightning's loop, or another trainer's absence, has brought."""

    idx: int
    kwargs: OrderedDict[str, Any]
    num_samples: int
    number: BatchNumber | None = None  # where trainers share the data


class Through:
    """Of one trainer.

    Attributes:
        lost: By their leases: they were through, count nowhere all the same, and are to run again.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, list[int]] = {}  # by step
        self._batches: dict[int, tuple[int, Batch, int]] = {}  # by lease: the step, the batch, its epoch
        self.lost: dict[int, Batch] = {}

    def add(self, lease: int, batch: Batch, *, step: int, epoch: int) -> None:
        """One more is through."""
        self._batches[lease] = step, batch, epoch
        self._sizes.setdefault(step, []).append(batch.num_samples)

    def num_samples(self, step: int) -> int:
        """Of those in a step."""
        return sum(self._sizes.get(step, ()))

    def num_batches(self, epoch: int) -> int:
        """Of an epoch."""
        return sum(of == epoch for _, _, of in self._batches.values())

    def lose(self, lease: int) -> None:
        """It counts nowhere, as its step's record or who coordinates says.

        Raises:
            StepError: It is not kept any more.
        """
        step, batch, _ = self._batches.pop(lease, (0, None, 0))
        if batch is None:
            raise StepError(
                "a batch before the one in hand was struck from the open step, for what servers had added of it was "
                "lost and could not be computed again. Start again from a checkpoint."
            )
        self.lost[lease] = batch
        if step in self._sizes:
            self._sizes[step].remove(batch.num_samples)

    def keep_no_batches(self) -> None:
        """None of those that are through will run again."""
        self._batches.clear()

    def count(self, step: int) -> None:
        """The record of a step was counted."""
        self._sizes = {of: sizes for of, sizes in self._sizes.items() if of > step}
        self._batches = {lease: one for lease, one in self._batches.items() if one[0] > step}

    def recall(self, lost: Mapping[int, Any]) -> None:
        """Have these run again, as the loop of another run would have had."""
        self.lost = dict(lost)
