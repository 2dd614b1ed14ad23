"""A peer's line to the others, in the network's in-memory twin: how many bytes it carries, and how long they take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

PIECE_BYTES: Final = 1 << 16
"""Goes over a line at once."""

FIRST_WINDOW_BYTES: Final = 1 << 18
"""Of a stream."""


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


@dataclass
class Window:
    """What a stream lets be under way before the reader gives way for more; then twice as much, and so on.

    Args:
        round_trip_s: Until the reader's word on what was sent first is there.

    Source: yamux's specification, and the doubling of go-yamux, which libp2p's daemon has.
    """

    round_trip_s: float
    _size_bytes: int = FIRST_WINDOW_BYTES
    _left_bytes: int = FIRST_WINDOW_BYTES
    _began_s: float | None = None

    def take(self, num_bytes: int, now_s: float) -> float:
        """Send a piece after the one before. Returns when it may leave."""
        if self._began_s is None:
            self._began_s = now_s
        if self._left_bytes <= 0:
            now_s = max(now_s, self._began_s + self.round_trip_s)
            self._size_bytes *= 2
            self._left_bytes, self._began_s = self._size_bytes, now_s
        self._left_bytes -= num_bytes
        return now_s


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
