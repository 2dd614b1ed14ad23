"""Averaging by a malicious server, which sends false parts of its sum, or a false mean or norm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.server.averaging import all_reduce, deterministic
from lightning_swarm.server.averaging.all_reduce import AveragingResult, AveragingState, Group, squared_norm
from lightning_swarm.server.averaging.averager import Averager
from lightning_swarm.server.stage import Stage
from lightning_swarm.testing.wrapping import wrap
from tests.adversaries.adversary import Adversary


class LyingAverager(Averager):
    """Averages false parts of the frozen sum, or reports a false part of the mean or a false norm."""

    def __init__(self, honest: Averager, adversary: Adversary, stage: Stage) -> None:
        self._honest, self._adversary, self._step = honest, adversary, stage.version
        self._generator = adversary.generator(stage.version, stage.index, 2)

    @override
    async def average(
        self, vector: Tensor, total_weight: float, group: Group, place: int, carried: AveragingState
    ) -> AveragingResult:
        token = _reducing.set(self._lie_about_mean)
        try:
            said = self._with_other_parts(vector, group, place)
            result = await self._honest.average(said, total_weight, group, place, carried)
        finally:
            _reducing.reset(token)
        norm = self._adversary.attack.squared_norm(result.squared_norm)
        true, told = (torch.tensor(one, dtype=torch.float64) for one in (result.squared_norm, norm))
        return result._replace(squared_norm=norm) if self._adversary.tell(self._step, [true], [told]) else result

    @override
    async def collect(self, like: Tensor, group: Group) -> tuple[Tensor, AveragingState]:
        return await self._honest.collect(like, group)

    def _with_other_parts(self, vector: Tensor, group: Group, place: int) -> Tensor:
        """Return the vector with lies in all parts that other servers reduce."""
        true = floats_of(vector)
        parts = [true[bounds] for bounds in group.bounds(len(true))]
        said = [one if i == place else self._adversary.attack.part(one, self._generator) for i, one in enumerate(parts)]
        return with_floats(vector, torch.cat(said)) if self._adversary.tell(self._step, parts, said) else vector

    def _lie_about_mean(self, reduced: Tensor) -> None:
        said = self._adversary.attack.reduced(reduced, self._generator)
        if self._adversary.tell(self._step, [reduced], [said]):
            reduced.copy_(said)


# Replaces the part of the mean that the running task reduces. Both averagers reduce by a function of their module, and
# all servers of the process share that function.
_reducing: ContextVar[Callable[[Tensor], None] | None] = ContextVar("_reducing", default=None)


async def _reduce(honest: Callable[..., Awaitable[float | None]], into: Tensor, *arguments: Any) -> float | None:
    norm, lie = await honest(into, *arguments), _reducing.get()
    if lie is None:
        return norm
    lie(into)
    return None if norm is None else squared_norm(into)


def open_reductions() -> None:
    """Wrap the reducing functions, so that they apply the running task's lie, if there is one."""
    for module in (all_reduce, deterministic):
        if not isinstance(module._reduce, partial):
            wrap(module, "_reduce", _reduce)


def floats_of(values: Tensor) -> Tensor:
    """Return the vector ``[n]`` of a sum as floats; the sum is in floats or in fixed point."""
    return values if values.is_floating_point() else deterministic.quotient(values[:, :-1], 1.0)


def with_floats(values: Tensor, floats: Tensor) -> Tensor:
    """Return a sum in the format of `values`, floats or fixed point, with the vector ``[n]`` of `floats`."""
    if values.is_floating_point():
        return floats.to(values)
    difference, said = floats - floats_of(values), values.clone()
    fits = deterministic.fits([difference], 1.0)
    if fits:
        deterministic.add(said[:, :-1], difference, 1.0)
    else:  # no mean, as after a gradient that does not fit
        deterministic.count_vector(said, was_added=False)
    return said
