"""A butterfly of sums in fixed point: the mean has the same bits whoever added up what, and however many did."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.averaging import butterfly, fixed_point
from lightning_swarm.averaging.averager import Averaged, Averager, Carried
from lightning_swarm.averaging.butterfly import Group, fetched, taken
from lightning_swarm.averaging.norms import squared_norm
from lightning_swarm.averaging.parts import Compute
from lightning_swarm.compression import from_message, to_message
from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import Message
from lightning_swarm.tasks import gather

_SLICE: Final = 1 << 18
"""Elements that are added before anything else may happen on the loop."""


@dataclass(frozen=True)
class Exact(Averager):
    """All numbers travel as they are: sums as whole numbers, means as floats.

    Its squared norm is that of all parts with the first of a roster, and 0 with all others: norms of parts, added up,
    depend on how many there are.

    Args:
        like: ``[n]``, of the dtype and on the device of the mean.
        compute: Runs what takes long elsewhere than on the loop.
    """

    like: Tensor
    compute: Compute

    @override
    async def _alone(self, vector: Tensor, total_weight: float, group: Group, carried: Carried) -> Averaged:
        return await self._average(vector, total_weight, group, 0, carried)

    @override
    async def _average(
        self, vector: Tensor, total_weight: float, group: Group, place: int, carried: Carried
    ) -> Averaged:
        bounds, counts = group.bounds(len(self.like)), vector[:, -1]
        others = [i for i in range(len(group.roster)) if i != place]
        for i in others:
            coarse, fine = vector[:, bounds[i]]
            group.tickets.offer(f"{group.prefix}/part{i}", to_message((coarse, fine, counts)))
        own = vector[:, bounds[place]]

        async def read(message: Message) -> tuple[Tensor, Tensor, Tensor]:
            return _read(message, own.shape[1])

        found = await gather(fetched(group, i, f"part{place}", read) for i in others)
        mean = torch.empty(len(self.like), dtype=self.like.dtype, device=self.like.device)
        total = counts.cpu() + sum(one[2] for one in found)
        await _reduce(mean[bounds[place]], [own, *(one[:2] for one in found)], total, total_weight)
        group.tickets.offer(f"{group.prefix}/reduced{place}", to_message(mean[bounds[place]]))
        reduced = await gather(
            taken(group, i, f"reduced{i}", like=mean, length=bounds[i].stop - bounds[i].start) for i in others
        )
        for i, part in zip(others, reduced, strict=True):
            mean[bounds[i]] = part
        norm: float = await self.compute(lambda: squared_norm(mean)) if place == 0 else 0.0
        return Averaged(mean, norm, Carried())

    @override
    async def _collect(self, like: Tensor, group: Group) -> tuple[Tensor, Carried]:
        return await butterfly.collect(like, group), Carried()


async def _reduce(
    into: Tensor, pieces: list[Tensor | tuple[Tensor, Tensor]], counts: Tensor, total_weight: float
) -> None:
    """Add the pieces, and divide once; if something is not in them, there is no mean, and none is a number."""
    if not fixed_point.is_whole(counts):
        into.fill_(float("nan"))
        return
    for begin in range(0, len(into), _SLICE):
        reduced = into[begin : begin + _SLICE]
        sums = fixed_point.nothing(len(reduced) - 1, into.device)
        for coarse, fine in pieces:
            sums[0] += coarse[begin : begin + _SLICE].to(into.device)
            sums[1] += fine[begin : begin + _SLICE].to(into.device)
        reduced.copy_(fixed_point.quotient(sums, total_weight))
        await asyncio.sleep(0)  # others want to be heard meanwhile


def _read(message: Message, length: int) -> tuple[Tensor, Tensor, Tensor]:
    tree = from_message(message)[0]
    parts = [one for one in tree if isinstance(one, Tensor)] if isinstance(tree, tuple) else []
    found = [(one.dtype, tuple(one.shape)) for one in parts]
    if found != [(torch.int64, (length,))] * 2 + [(torch.int64, (2,))]:
        raise ProtocolError(f"a part of a sum must be {length} whole numbers twice, and two that count; got {found}")
    return parts[0], parts[1], parts[2]
