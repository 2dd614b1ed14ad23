"""The squared norm of a gradient, or of a part of it."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 1 << 14
"""Elements whose squares torch adds up at once.

So few that it does so in one thread, so in one order; and that its copy of them in float64 is no memory that Linux has
to clear first.
"""


def squared_norm(vector: Tensor) -> float:
    """In float64, and the same on machines that have another number of threads."""
    # A GPU adds up in one order by itself, and a launch for each block would take longer than the sum.
    blocks = vector.split(_BLOCK) if vector.device.type == "cpu" else [vector]
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
    try:
        return math.fsum(norm * norm for norm in norms.tolist())
    except OverflowError:  # where floats would become infinite
        return math.inf
