"""Estimates the steps of a whole fit for the Trainer, if a step is `target_batch_size` samples."""

from __future__ import annotations

import math
from collections.abc import Sized
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override


# A property belongs to its class, so it cannot be replaced on one Trainer.
class EstimatedSteps(property):
    """`Trainer.estimated_stepping_batches`, which a strategy may correct."""

    @override
    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        estimate = partial(super().__get__, trainer, owner)
        correct = getattr(trainer.strategy, "correct_estimated_steps", None)
        return estimate() if correct is None else correct(trainer, estimate)


def expected_steps(trainer: Trainer, loader: object, num_batches: float, target_batch_size: int) -> int | None:
    """Count the steps of all epochs of a loader's first `num_batches`; None if the batches' sizes are unknown."""
    sizes = _sizes(loader)
    if sizes is None or not math.isfinite(num_batches):
        return None
    size, last, length = sizes
    steps = count_steps(
        int(num_batches),
        size,
        last if num_batches == length else size,
        num_epochs=max(trainer.max_epochs or 1, 1),
        target_batch_size=target_batch_size,
    )
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def count_steps(num_batches: int, size: float, last: float, *, num_epochs: int, target_batch_size: int) -> int:
    """Count the steps of a fit. A step ends with the batch that brings it to `target_batch_size` samples.

    A step may span the end of an epoch. All batches of an epoch have `size` samples, except the last: `last`.
    """
    steps, pending_samples, batches_per_step = 0, 0.0, math.ceil(target_batch_size / size)
    for _ in range(num_epochs if num_batches else 0):
        batches_left = num_batches - 1  # before the epoch's last batch, which may be smaller
        batches_missing = batches_per_step
        if pending_samples:
            batches_missing = math.ceil((target_batch_size - pending_samples) / size)
        if batches_left >= batches_missing:
            whole_steps, batches_left = divmod(batches_left - batches_missing, batches_per_step)
            steps, pending_samples = steps + 1 + whole_steps, 0.0
        pending_samples += batches_left * size + last
        if pending_samples >= target_batch_size:
            steps, pending_samples = steps + 1, 0.0
    return steps + (pending_samples > 0.0)


def _sizes(loader: object) -> tuple[float, float, int] | None:
    """Return the samples of a loader's batches, the samples of its last batch, and the number of batches."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.batch_sampler, Sized):
        return None
    sampler, length = loader.batch_sampler, len(loader)
    if isinstance(sampler, BatchSampler) and isinstance(sampler.sampler, Sized) and length:
        size, rest = sampler.batch_size, len(sampler.sampler) % sampler.batch_size
        return size, size if sampler.drop_last or not rest else rest, length
    if isinstance(loader.dataset, Sized) and length:  # use the mean, because a custom sampler's batches may differ
        return (mean := len(loader.dataset) / length), mean, length
    return None
