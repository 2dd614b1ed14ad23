"""Simulated links of the peers of a `MemoryNetwork`: bandwidth in both directions, latency, and flow control."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.core.clock import now_s

PIECE_BYTES: Final = 1 << 16  # a link carries messages in such pieces, between which pieces of others come
FIRST_WINDOW_BYTES: Final = 1 << 18  # of a stream


@dataclass
class Direction:
    """One direction of a link. What is sent later waits for what was sent before."""

    bytes_per_s: float = math.inf
    _free_s: float = 0.0

    def transmit(self, num_bytes: int, now_s: float) -> float:
        """Send some bytes after all that are queued already, and return the time when they are through."""
        self._free_s = max(self._free_s, now_s) + num_bytes / self.bytes_per_s
        return self._free_s


@dataclass
class FlowWindow:
    """Flow control of one stream: how many bytes may be on their way until the reader allows more."""

    # Source: yamux's specification, and the doubling each time of go-yamux, which libp2p's daemon has.
    round_trip_s: float  # until the reader's answer to the first bytes of a window arrives
    _size_bytes: int = FIRST_WINDOW_BYTES
    _left_bytes: int = FIRST_WINDOW_BYTES
    _began_s: float | None = None

    def send(self, num_bytes: int, now_s: float) -> float:
        """Send a piece after the one before, and return the time when it may leave."""
        if self._began_s is None:
            self._began_s = now_s
        if self._left_bytes <= 0:
            now_s = max(now_s, self._began_s + self.round_trip_s)
            self._size_bytes *= 2
            self._left_bytes, self._began_s = self._size_bytes, now_s
        self._left_bytes -= num_bytes
        return now_s


@dataclass(frozen=True)
class SimulatedLink:
    """A peer's link to the point where all links meet."""

    up: Direction = field(default_factory=Direction)  # from the peer
    down: Direction = field(default_factory=Direction)  # to the peer
    latency_s: float = 0.0  # from the peer to the meeting point, or back


async def cross(sender: SimulatedLink | None, receiver: SimulatedLink | None, num_bytes: int) -> None:
    """Return when some bytes have passed both links, piece by piece. None is a link without limits."""
    # Each message goes as over a new stream, though in reality some streams have grown a larger window before.
    window = FlowWindow(2 * sum(link.latency_s for link in (sender, receiver) if link is not None))
    for offset in range(0, num_bytes, PIECE_BYTES):
        piece, at_s = min(PIECE_BYTES, num_bytes - offset), now_s()
        if (leaves_s := window.send(piece, at_s)) > at_s:
            await asyncio.sleep(leaves_s - at_s)
            at_s = leaves_s
        until_s = max(
            at_s if sender is None else sender.up.transmit(piece, at_s),
            at_s if receiver is None else receiver.down.transmit(piece, at_s),
        )
        await asyncio.sleep(until_s - at_s)
