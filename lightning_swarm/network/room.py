"""New memory for what arrives, and for what is made of it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_HUGE_BYTES: Final = 4 << 20
_ALIGNMENT: Final = 64  # torch's own: some libraries round otherwise where memory lies otherwise


def new_bytes(n: int) -> Tensor:
    """``[n]`` of uint8 on the CPU, uninitialised, aligned as torch aligns.

    Large ones come from numpy, which asks Linux for huge pages: to touch 40 MB of fresh memory for the first time then
    takes a quarter of the time.
    """
    if n < _HUGE_BYTES:
        return torch.empty(n, dtype=torch.uint8)
    return torch.from_numpy(_aligned(_raw(n), n))


class Recycled:
    """Memory that is wanted again and again, in the same sizes: what nobody refers to any more is given out anew.

    Linux clears each page that it hands out. In a process whose memory has been in use for a while that takes as long
    as ten passes over it: 0.15 s for 50 MB were measured.

    Args:
        num_spare: Pieces to keep while nobody uses them, the newest.
        max_bytes: Of a piece that is kept.
    """

    def __init__(self, num_spare: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._spare = deque[npt.NDArray[np.uint8]](maxlen=num_spare)  # for any thread: what is called of it is atomic

    def new_bytes(self, n: int) -> Tensor:
        """As the function of that name."""
        if n < _HUGE_BYTES:
            return torch.empty(n, dtype=torch.uint8)
        raw = self._take(n)
        lent = _aligned(raw, n)
        # A tensor refers to the array that it is made of, and so do its views, wherever they are sent.
        weakref.finalize(lent, self._keep, raw).atexit = False
        return torch.from_numpy(lent)

    def _take(self, n: int) -> npt.NDArray[np.uint8]:
        for _ in range(len(self._spare)):
            try:
                raw = self._spare.popleft()
            except IndexError:  # another thread took it
                break
            if len(raw) == n + _ALIGNMENT:
                return raw
            self._spare.append(raw)
        return _raw(n)

    def _keep(self, raw: npt.NDArray[np.uint8]) -> None:
        if len(raw) <= self._max_bytes:
            self._spare.append(raw)


def _raw(n: int) -> npt.NDArray[np.uint8]:
    return np.empty(n + _ALIGNMENT, dtype=np.uint8)


def _aligned(raw: npt.NDArray[np.uint8], n: int) -> npt.NDArray[np.uint8]:
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + n]
