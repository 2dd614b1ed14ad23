"""Portable operations on lists of similar tensors, each by one kernel for the whole list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

_DTYPES: Final = (torch.float32, torch.float64)


def are_tensors(values: Any) -> bool:
    """Return whether a value is a list of tensors that is not empty."""
    return isinstance(values, (list, tuple)) and bool(values) and isinstance(values[0], Tensor)


def are_alike(operands: Sequence[Any]) -> bool:
    """Return whether all tensors have the same supported dtype and device, and lists' tensors pairwise equal shapes."""
    if not are_tensors(operands[0]):
        return False
    tensors = operands[0]
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in _DTYPES:
        return False
    for values in operands:
        if isinstance(values, Tensor) and (values.dtype != dtype or values.device != device):
            return False
        if are_tensors(values) and not all(
            tensor.dtype == dtype and tensor.device == device and tensor.shape == first.shape
            for tensor, first in zip(values, tensors, strict=True)
        ):
            return False
    return True


def compute_lists(name: str, first: list[Tensor], others: Sequence[Any], out: list[Tensor] | None) -> list[Tensor]:
    """Compute an operation of IEEE 754 on lists, and write the results into the tensors of `out`, unless it is None."""
    if out is first:
        getattr(torch, f"_foreach_{name}_")(first, *others)
        return first
    results: list[Tensor] = getattr(torch, f"_foreach_{name}")(first, *others)
    if out is not None:
        torch._foreach_copy_(out, results)
    return results if out is None else out
