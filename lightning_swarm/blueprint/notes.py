"""What is written down of what was done to tensors on meta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import init

INITIALISERS: Final = {
    one.__code__: one for one in (init._no_grad_trunc_normal_, init.orthogonal_, init.dirac_, init.sparse_)
}
"""Torch's own initialisers that look at numbers. On meta they do nothing, without a word."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is in its storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor that has values."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class Done:
    """Something that was done.

    Args:
        function: Torch's own operator.
        leaves: Of its arguments, in which tensors are `Place`s or `Known`.
        spec: Of the arguments' tree.
        made: Where each of the tensors that it returns is, unless that was there before.
        reads: Storages.
        writes: Storages.
        fills: Of these, those of which nothing stays.
        dtype: The default one.
        drawn: The generators that it may have drawn from, and their states before; first the one that it was given.
    """

    function: Any
    leaves: Sequence[Any]
    spec: Any
    made: Sequence[Place | None]
    reads: frozenset[int]
    writes: frozenset[int]
    fills: frozenset[int]
    dtype: torch.dtype
    drawn: Sequence[tuple[torch.Generator, Tensor]]
