"""Sums in fixed point: they do not depend on the order of what is added, nor on who adds up which part of it.

Whole numbers may be added in any order, floats may not. Each element of a sum has two of 64 bits, one of coarse units
and one of fine ones: together they hold what is below `LIMIT` to half of `FINE`, and `MAX_ADDED` of that without
overflowing. A last column counts what was added, and what could not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

FINE: Final = 2.0**-56
COARSE: Final = 2.0**-14

LIMIT: Final = 2.0**28
"""Of what is added, once. It is 2**42 coarse units, and what is left below one of them 2**41 fine ones."""

MAX_ADDED: Final = 1 << 20

_SLICE: Final = 1 << 17
"""Elements that are added at once: what they are made into takes memory several times."""


def nothing(length: int, device: torch.device) -> Tensor:
    """``[2, length + 1]``, the sum of no vector."""
    return torch.zeros(2, length + 1, dtype=torch.int64, device=device)


def fit(vectors: Sequence[Tensor], weight: float) -> bool:
    """Whether all elements are numbers, and times `weight` below `LIMIT`."""
    filled = [vector for vector in vectors if vector.numel()]
    if not filled:
        return True
    highest = torch.stack([one.to(torch.float64) for one in torch._foreach_norm(filled, float("inf"))])
    return bool((highest * weight < LIMIT).all())  # not so of NaN


def add(into: Tensor, vector: Tensor, weight: float) -> None:
    """Add a vector that fits, times `weight`.

    Args:
        into: ``[2, n]``, columns of a sum.
        vector: ``[n]``, floats.
        weight: Of it.
    """
    for begin in range(0, len(vector), _SLICE):
        # In units. But for the weight, and the fine ones that are no whole number, nothing of this rounds.
        weighted = vector[begin : begin + _SLICE].to(torch.float64, copy=True).mul_(weight).div_(COARSE)
        coarse = weighted.round()
        fine = weighted.sub_(coarse).mul_(COARSE / FINE).round_()
        sums = into[:, begin : begin + _SLICE]
        sums[0] += coarse.to(torch.int64)
        sums[1] += fine.to(torch.int64)


def note(total: Tensor, *, fits: bool) -> None:
    """Count a vector that was added to a sum; or one that was not, because it does not fit."""
    total[0 if fits else 1, -1] += 1


def is_whole(counts: Tensor) -> bool:
    """Whether a sum, of which this is the last column, is what was to be added up."""
    added, unfit = map(int, counts.tolist())
    return unfit == 0 and 0 <= added <= MAX_ADDED


def quotient(sums: Tensor, divisor: float) -> Tensor:
    """``[n]`` float64: columns of a sum, divided."""
    return (sums[0].to(torch.float64) * COARSE).add_(sums[1].to(torch.float64) * FINE).div_(divisor)
