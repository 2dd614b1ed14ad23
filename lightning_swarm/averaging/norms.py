"""The squared norm of a gradient, or of a part of it."""

from __future__ import annotations

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
    norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in vector.split(_BLOCK)]
    return sum(norm * norm for norm in torch.stack(norms).tolist()) if norms else 0.0
