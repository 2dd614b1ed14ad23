"""A peer's line to the others, in the network's in-memory twin: how many bytes it carries, and how long they take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

PIECE_BYTES: Final = 1 << 16
"""Goes over a line at once."""


@dataclass
class Direction:
    """One of a line's two. Who comes later waits.

    Args:
        bytes_per_s: What it carries.
    """

    bytes_per_s: float = math.inf
    _free_s: float = 0.0

    def take(self, num_bytes: int, now_s: float) -> float:
        """Send some bytes after all that are there already. Returns when they are through."""
        self._free_s = max(self._free_s, now_s) + num_bytes / self.bytes_per_s
        return self._free_s


@dataclass(frozen=True)
class Line:
    """Both directions.

    Args:
        up: What the peer sends.
        down: What it gets.
        latency_s: From the peer to where all lines meet, or back.
    """

    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    latency_s: float = 0.0
