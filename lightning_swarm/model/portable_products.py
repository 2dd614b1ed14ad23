"""Sums and matrix products with the same bits on every machine, whatever the order in which its kernels add."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_SIGNIFICANT: Final = 53  # bits of a float64's significand
_MAX_EXPONENT: Final = 1023  # of float64
# dtype -> number of pieces, of about 20 bits each, into which `exact_product` cuts a number
_NUM_PIECES: Final = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


def tree_sum(values: Tensor) -> Tensor:
    """Sum ``[n, ...]`` to ``[...]`` by adding one half to the other until one element is left."""
    if not len(values):
        return values.new_zeros(values.shape[1:])
    while len(values) > 1:
        half = (len(values) + 1) // 2
        rest = values[half:]
        values = torch.cat([values[: len(rest)] + rest, values[len(rest) : half]])
    return values[0]


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply ``[..., m, k]`` by ``[..., k, n]``; return ``[..., m, n]`` in float64.

    Numbers are cut into integers so small that float64 holds each sum of their products exactly. The result is at least
    as precise as the operands' dtype. A row of `left` or a column of `right` with infinity or NaN gives NaN.

    Source: Ozaki et al., Error-free transformations of matrix multiplication, Numerical Algorithms 59, 2012.
    """
    dtype = torch.promote_types(left.dtype, right.dtype)
    bits = (_SIGNIFICANT - math.ceil(math.log2(max(left.shape[-1], 2)))) // 2
    count = _NUM_PIECES[dtype]
    lefts, left_exponent = _pieces(left, bits, count, dim=-1)
    rights, right_exponent = _pieces(right, bits, count, dim=-2)
    total = torch.zeros((), dtype=torch.float64, device=left.device)
    for order in reversed(range(count)):  # smallest terms first; higher orders are below the dtype's rounding
        for i in range(order + 1):
            total = total + lefts[i] @ rights[order - i] * 2.0 ** (-bits * (order + 2))
    product = total * _power_of_two(left_exponent) * _power_of_two(right_exponent)
    # Pieces replace infinity and NaN by zero.
    finite = left.isfinite().all(dim=-1, keepdim=True) & right.isfinite().all(dim=-2, keepdim=True)
    return torch.where(finite, product, math.nan)


def _pieces(values: Tensor, bits: int, count: int, *, dim: int) -> tuple[list[Tensor], Tensor]:
    """Cut numbers into integers of `bits` bits; return the integers, and the common exponent of each row or column."""
    rest = values.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
    exponent = torch.frexp(rest.abs().amax(dim=dim, keepdim=True)).exponent.to(torch.int64)
    exponent = exponent.clamp(-_MAX_EXPONENT + 1, _MAX_EXPONENT - 1)
    rest = rest * _power_of_two(-exponent)
    pieces = []
    for _ in range(count):
        rest = rest * 2.0**bits
        pieces.append(rest.round())
        rest = rest - pieces[-1]
    return pieces, exponent


def _power_of_two(exponent: Tensor) -> Tensor:
    # Built from its bits, because devices approximate 2**x.
    return ((exponent + _MAX_EXPONENT) << (_SIGNIFICANT - 1)).view(torch.float64)
