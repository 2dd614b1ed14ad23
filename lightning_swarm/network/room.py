"""New memory for what arrives, and for what is made of it."""

from __future__ import annotations

from typing import Final

import numpy as np
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
    raw = np.empty(n + _ALIGNMENT, dtype=np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[begin : begin + n])
