"""A butterfly all-reduce in fixed point: the mean's bits do not depend on how microbatches are spread over peers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message
from lightning_swarm.protocol.compression import from_message, to_message
from lightning_swarm.server.averaging.all_reduce import (
    AveragingResult,
    AveragingState,
    Compute,
    Group,
    fetch,
    fetch_reduced,
    message_for_joiners,
    squared_norm,
)
from lightning_swarm.server.averaging.averager import Averager

FINE: Final = 2.0**-56  # unit of the second integer of an element
COARSE: Final = 2.0**-14  # unit of the first integer
LIMIT: Final = 2.0**28  # bound on added numbers: 2**42 coarse units, and a remainder of up to 2**41 fine units
MAX_ADDED: Final = 1 << 20  # most vectors in the sum over all peers, so that no integer overflows

_FIXED_POINT_SLICE: Final = 1 << 17  # elements added at once: intermediate values take several times their memory
_SLICE: Final = 1 << 18  # elements added before the loop may run other tasks


# Sums of integers, unlike sums of floats, do not depend on the order. Each element of a sum is two 64-bit integers, in
# coarse and in fine units. Together they represent numbers below `LIMIT` to half of `FINE`, and `MAX_ADDED` of them
# add up without overflow. The last column counts the vectors that were added, and the vectors that did not fit.
def empty_sum(length: int, device: torch.device) -> Tensor:
    """Return an empty sum, ``[2, length + 1]``."""
    return torch.zeros(2, length + 1, dtype=torch.int64, device=device)


def fits(vectors: Sequence[Tensor], weight: float) -> bool:
    """Return whether vectors can be added: all elements are finite, and below `LIMIT` when multiplied by `weight`."""
    filled = [vector for vector in vectors if vector.numel()]
    if not filled:
        return True
    highest = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(filled, float("inf"))])
    return bool((highest * weight < LIMIT).all())  # false for NaN


def add(into: Tensor, vector: Tensor, weight: float) -> None:
    """Add a float vector ``[n]`` that `fits`, times `weight`, to the columns ``[2, n]`` of a sum."""
    for begin in range(0, len(vector), _FIXED_POINT_SLICE):
        # Convert to coarse units. Only the product with the weight, and fractions of a fine unit, are rounded.
        weighted = vector[begin : begin + _FIXED_POINT_SLICE].to(torch.float64, copy=True).mul_(weight).div_(COARSE)
        coarse = weighted.round()
        fine = weighted.sub_(coarse).mul_(COARSE / FINE).round_()
        sums = into[:, begin : begin + _FIXED_POINT_SLICE]
        sums[0] += coarse.to(torch.int64)
        sums[1] += fine.to(torch.int64)


def count_vector(total: Tensor, *, was_added: bool) -> None:
    """Count, in a sum's last column, a vector that was added, or that was left out because it does not fit."""
    total[0 if was_added else 1, -1] += 1


def is_whole(counts: Tensor) -> bool:
    """Return whether a sum with this last column holds all vectors that were to be added."""
    added, unfit = map(int, counts.tolist())
    return unfit == 0 and 0 <= added <= MAX_ADDED


def quotient(sums: Tensor, divisor: float) -> Tensor:
    """Divide columns ``[2, n]`` of a sum; return ``[n]`` float64, the same bits on every device."""
    # Divide by a tensor, because a GPU would multiply by the inverse of a Python number.
    by = torch.full((), divisor, dtype=torch.float64, device=sums.device)
    return (sums[0].to(torch.float64) * COARSE).add_(sums[1].to(torch.float64) * FINE).div_(by)


@dataclass(frozen=True)
class DeterministicAverager(Averager):
    """Adds up sums as integers, and sends means as floats."""

    like: Tensor  # ``[n]``, with the dtype and device of the mean
    compute: Compute

    @override
    async def average(
        self, vector: Tensor, total_weight: float, group: Group, rank: int, carried: AveragingState
    ) -> AveragingResult:
        bounds, counts = group.bounds(len(self.like)), vector[:, -1]
        others = group.others(rank)
        for i in others:
            coarse, fine = vector[:, bounds[i]]
            group.offer(f"part{i}", to_message((coarse, fine, counts)), to=i)
        own = vector[:, bounds[rank]]
        read = partial(_read, length=own.shape[1])
        pieces = await gather(fetch(group, i, f"part{rank}", read) for i in others)
        given = await group.digests([*pieces[:rank], (own[0], own[1], counts), *pieces[rank:]], self.compute)
        mean = torch.empty(len(self.like), dtype=self.like.dtype, device=self.like.device)
        total = counts.cpu() + sum(piece_counts for *_, piece_counts in pieces)
        await _reduce(mean[bounds[rank]], [own, *(piece[:2] for piece in pieces)], total, total_weight)
        own_mean = mean[bounds[rank]]
        group.offer(f"reduced{rank}", to_message(own_mean) if others else message_for_joiners(own_mean))
        await fetch_reduced(mean, group, rank)
        # The first server of the roster computes the whole norm, because a sum of norms depends on the number of parts.
        norm = await self.compute(lambda: squared_norm(mean)) if rank == 0 else 0.0
        return AveragingResult(mean, norm, AveragingState(), given)


async def _reduce(
    into: Tensor, pieces: list[Tensor | tuple[Tensor, Tensor]], counts: Tensor, total_weight: float
) -> None:
    """Add the pieces, and divide once. The mean is NaN if a gradient did not fit into a sum; see `is_whole`."""
    if not is_whole(counts):
        into.fill_(float("nan"))
        return
    for begin in range(0, len(into), _SLICE):
        reduced = into[begin : begin + _SLICE]
        sums = empty_sum(len(reduced) - 1, into.device)
        for coarse, fine in pieces:
            sums[0] += coarse[begin : begin + _SLICE].to(into.device)
            sums[1] += fine[begin : begin + _SLICE].to(into.device)
        reduced.copy_(quotient(sums, total_weight))
        await asyncio.sleep(0)  # let the loop answer other peers meanwhile


async def _read(message: Message, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Read a part's coarse integers, its fine integers, and the counts of its sum."""
    tree = from_message(message)[0]
    parts = [part for part in tree if isinstance(part, Tensor)] if isinstance(tree, tuple) else []
    forms = [(part.dtype, tuple(part.shape)) for part in parts]
    if forms != [(torch.int64, (length,))] * 2 + [(torch.int64, (2,))]:
        raise ProtocolError(f"a part of a sum must be two vectors of {length} int64 and one of 2 counts; got {forms}")
    return parts[0], parts[1], parts[2]
