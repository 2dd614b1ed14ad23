"""A 64-bit fingerprint of tensors that is quick to compute and equal on every device.

It finds replicas that drifted apart by accident; it is no cryptographic hash and stops no forger.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from lightning_swarm.randomness.stream import long_bits

_ROW = 1 << 15
_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """The fingerprint of the tensors' bytes, in order. Any dtypes and shapes."""
    total = 0
    for tensor in tensors:
        total = (total * _PRIME + _of_bytes(tensor) + tensor.numel() + 1) & _MASK
    return total


def _of_bytes(tensor: Tensor) -> int:
    # Not `reshape`: a single element is contiguous whatever its stride, which no byte view allows.
    raw = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    padding = -len(raw) % 4
    if padding:
        raw = torch.nn.functional.pad(raw, (0, padding))
    words = raw.view(torch.int32)
    places = _places(words.device)
    total = 0
    for start in range(0, len(words), _ROW):
        row = words[start : start + _ROW]
        # 32 bits times 64: a sign meets 33 bits of its place's multiplier. In 64 bits by 64 it would meet one, and
        # two changed signs would cancel. int64 arithmetic wraps alike everywhere.
        total = (total * _PRIME + int((row.to(torch.int64) * places[: len(row)]).sum())) & _MASK
    return total


@lru_cache(maxsize=8)
def _places(device: torch.device) -> Tensor:
    """An odd multiplier for each place in a row. Multilinear hashing: Dietzfelbinger, STACS 1996."""
    return long_bits(_PRIME, _ROW, device) | 1
