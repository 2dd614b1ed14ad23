"""Which setting to choose for a swarm. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lightning_swarm.config import Limits
from lightning_swarm.planner.alone import fastest_alone
from lightning_swarm.planner.prediction import Predictor
from lightning_swarm.planner.records import Machine, Model, Plan, Prediction, Setting

LARGEST_BATCH: Final = 4096
"""Samples of a step, unless another number is given."""

_ENOUGH: Final = 0.9
"""Of the best rate that any batch gives: a larger batch than needed for that is not worth its fewer steps."""

_SAME: Final = 0.98
"""Of a rate: what is no reason for more stages, or larger microbatches."""

_MOST_STAGES: Final = 64
_LARGEST_MICROBATCH: Final = 256
_LARGEST_BATCH: Final = 1024
_MOST_COUNTS: Final = 8


def make_plan(
    model: Model,
    machines: Sequence[Machine],
    *,
    target_batch_size: int | None = None,
    largest_batch_size: int = LARGEST_BATCH,
    limits: Limits | None = None,
) -> Plan:
    """The best setting, and the best machine alone.

    Args:
        model: What is trained.
        machines: Each of them, the starter first.
        target_batch_size: Samples of a step; None: the smallest number that is nearly as fast as any.
        largest_batch_size: The largest one to look at.
        limits: Of the servers.
    """
    sizes = [target_batch_size] if target_batch_size else list(_powers(largest_batch_size))
    found = list(_predictions(model, machines, sizes, limits or Limits()))
    best = _chosen(found)
    size = best.setting.target_batch_size if best else sizes[-1]
    compared = [one for one in found if one.setting.target_batch_size == size]
    return Plan(
        best=best,
        alone=fastest_alone(model, machines, size),
        by_stages=tuple((one.setting.num_stages, one.samples_per_s) for one in compared),
    )


def predict(model: Model, machines: Sequence[Machine], setting: Setting, limits: Limits | None = None) -> float | None:
    """Samples/s with a given setting, or None if no machines can do it.

    Args:
        model: What is trained.
        machines: Each of them, the starter first.
        setting: At most as many stages as there are blocks.
        limits: Of the servers.
    """
    predictor = Predictor(model, machines, setting.num_stages, limits or Limits())
    return predictor.predict(setting).samples_per_s if predictor.possible else None


def _powers(largest: int) -> Iterable[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2


def _predictions(
    model: Model, machines: Sequence[Machine], batch_sizes: Sequence[int], limits: Limits
) -> Iterable[Prediction]:
    """Of each number of stages and samples of a step, with the machines, batches and microbatches that do best."""
    for num_stages in range(1, min(len(model.blocks), len(machines), _MOST_STAGES) + 1):
        all_of_them = Predictor(model, machines, num_stages, limits)
        if not all_of_them.possible:
            continue
        fewer = [Predictor(model, machines, num_stages, limits, count) for count in all_of_them.counts[1:_MOST_COUNTS]]
        for target in batch_sizes:
            best = all_of_them.predict(_best_sizes(all_of_them, num_stages, target))
            for predictor in fewer:
                found = predictor.predict(_best_sizes(predictor, num_stages, target))
                best = found if found.samples_per_s * _SAME > best.samples_per_s else best
            yield best


def _best_sizes(predictor: Predictor, num_stages: int, target: int) -> Setting:
    """The smallest batches, and of these the smallest microbatches, that are nearly as fast as any."""
    sizes = [
        Setting(num_stages=num_stages, microbatch_size=size, batch_size=batch_size, target_batch_size=target)
        for batch_size in (*_powers(min(target - 1, _LARGEST_BATCH)), target)
        if target % batch_size == 0
        for size in _powers(min(batch_size, _LARGEST_MICROBATCH, predictor.most))
    ]
    taken_s = [predictor.times(setting).step_s for setting in sizes]
    least_s = min(taken_s)
    return next(setting for setting, step_s in zip(sizes, taken_s, strict=True) if step_s * _SAME <= least_s)


def _chosen(found: Sequence[Prediction]) -> Prediction | None:
    if not found:
        return None
    enough = _ENOUGH * max(one.samples_per_s for one in found)
    size = min(one.setting.target_batch_size for one in found if one.samples_per_s >= enough)
    these = [one for one in found if one.setting.target_batch_size == size]
    enough = _SAME * max(one.samples_per_s for one in these)
    return min((one for one in these if one.samples_per_s >= enough), key=lambda one: one.setting.num_stages)
