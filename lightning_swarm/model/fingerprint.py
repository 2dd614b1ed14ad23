"""A 64-bit fingerprint of tensors that is quick to compute and equal on every device.

It finds replicas that drifted apart by accident; it is no cryptographic hash and stops no forger.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from lightning_swarm.model.random.philox import long_bits

_ROW: Final = 1 << 15
_MASK: Final = (1 << 64) - 1
_PRIME: Final = 0x9E3779B97F4A7C15
_PIECE: Final = 1 << 21
"""Words that are taken at once: some milliseconds' work."""


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """The fingerprint of the tensors' bytes, in order. Any dtypes and shapes."""
    return Fingerprint(tensors).finish()


class Fingerprint:
    """A fingerprint that is taken piece by piece.

    Args:
        tensors: Whose bytes. They must not change until it is finished.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._pieces = _pieces(tensors)
        self._value: int | None = None

    def advance(self) -> bool:
        """Take a piece; whether there is more to take."""
        if self._value is None:
            try:
                next(self._pieces)
            except StopIteration as end:
                self._value = end.value
        return self._value is None

    def finish(self) -> int:
        """Take the rest."""
        while self.advance():
            pass
        assert self._value is not None
        return self._value


def _pieces(tensors: Iterable[Tensor]) -> Generator[None, None, int]:
    total = 0
    for tensor in tensors:
        of_tensor = yield from _of_bytes(tensor)
        total = (total * _PRIME + of_tensor + tensor.numel() + 1) & _MASK
        yield
    return total


def _of_bytes(tensor: Tensor) -> Generator[None, None, int]:
    # Not `reshape`: a single element is contiguous whatever its stride, which no byte view allows.
    raw = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    padding = -len(raw) % 4
    if padding:
        raw = torch.nn.functional.pad(raw, (0, padding))
    words = raw.view(torch.int32)
    places = _places(words.device)
    products = places.new_empty(min(_ROW, len(words)))
    total = 0
    for start in range(0, len(words), _ROW):
        if start and start % _PIECE == 0:
            yield
        row = words[start : start + _ROW]
        # 32 bits times 64: a sign meets 33 bits of its place's multiplier. In 64 bits by 64 it would meet one, and
        # two changed signs would cancel. int64 arithmetic wraps alike everywhere.
        of_row = products[: len(row)].copy_(row).mul_(places[: len(row)]).sum()
        total = (total * _PRIME + int(of_row)) & _MASK
    return total


@lru_cache(maxsize=8)
def _places(device: torch.device) -> Tensor:
    """An odd multiplier for each place in a row. Multilinear hashing: Dietzfelbinger, STACS 1996."""
    return long_bits(_PRIME, _ROW, device) | 1
