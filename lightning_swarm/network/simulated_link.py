"""Simulated links of the peers of a `MemoryNetwork`: bandwidth in both directions, latency, and flow control."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.core.clock import now_s

PIECE_BYTES: Final = 1 << 16  # links carry messages in pieces, so that concurrent messages share them
FIRST_WINDOW_BYTES: Final = 1 << 18  # initial flow-control window of a stream


@dataclass
class Direction:
    """One direction of a link. It transmits all bytes in the order of sending."""

    bytes_per_s: float = math.inf
    _free_s: float = 0.0  # time when all queued bytes are transmitted

    def transmit(self, num_bytes: int, at_s: float) -> float:
        """Queue bytes at the time `at_s` behind all earlier bytes, and return the time when they are transmitted."""
        self._free_s = max(self._free_s, at_s) + num_bytes / self.bytes_per_s
        return self._free_s


@dataclass
class FlowWindow:
    """Flow control of one stream: how many bytes may be on their way until the reader allows more."""

    # Source: yamux's specification, with the doubling of go-yamux, which libp2p's daemon uses.
    round_trip_s: float  # time until the reader's answer to the first bytes of a window arrives
    _size_bytes: int = FIRST_WINDOW_BYTES
    _left_bytes: int = FIRST_WINDOW_BYTES
    _began_s: float | None = None  # time when the window's first bytes left; None: nothing was sent yet

    def send(self, num_bytes: int, at_s: float) -> float:
        """Account for the next piece, which is ready at `at_s`, and return the time when it may leave."""
        if self._began_s is None:
            self._began_s = at_s
        if self._left_bytes <= 0:
            at_s = max(at_s, self._began_s + self.round_trip_s)
            self._size_bytes *= 2
            self._left_bytes, self._began_s = self._size_bytes, at_s
        self._left_bytes -= num_bytes
        return at_s


@dataclass(frozen=True)
class SimulatedLink:
    """A peer's link to the point where all links meet."""

    up: Direction = field(default_factory=Direction)  # peer -> meeting point
    down: Direction = field(default_factory=Direction)  # meeting point -> peer
    latency_s: float = 0.0  # one way, between the peer and the meeting point


async def cross(sender: SimulatedLink | None, receiver: SimulatedLink | None, num_bytes: int) -> None:
    """Wait until bytes have passed both links, except for their latency. None is a link without limits."""
    # `MemoryNetwork.wait_latency` adds the latency. Here, latency only delays a sender whose window is full.
    # Each message starts with the window of a new stream, although real streams may have grown a larger one.
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
