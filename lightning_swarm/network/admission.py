"""Bounds on the incoming bytes and streams that this peer holds, for each other peer and for all together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy
from lightning_swarm.network import SMALL_BYTES, PeerId
from lightning_swarm.network.rpc import STALL_TIMEOUT_S, Hold, reserve_nothing


@dataclass(eq=False)
class ByteBudget:
    """Bytes of requests that this peer may hold for other peers, reserved before they are read."""

    max_bytes: int  # limit for all peers together
    max_peer_bytes: int  # limit for each peer; a larger message counts as this many, to leave room for other peers
    _by_peer: Counter[PeerId] = field(default_factory=Counter)
    _num_bytes: int = 0
    _freed: asyncio.Event = field(default_factory=asyncio.Event)  # set at each release, and then replaced

    def take(self, peer: PeerId, num_bytes: int) -> bool:
        """Reserve bytes for a peer; False without room. A peer's only message may be larger than the peer's limit."""
        num_bytes, used = min(num_bytes, self.max_peer_bytes), self._by_peer[peer]
        if (used and used + num_bytes > self.max_peer_bytes) or (
            self._num_bytes and self._num_bytes + num_bytes > self.max_bytes
        ):
            return False
        self._by_peer[peer] += num_bytes
        self._num_bytes += num_bytes
        return True

    def release(self, peer: PeerId, num_bytes: int) -> None:
        """Release bytes that `take` has reserved."""
        num_bytes = min(num_bytes, self.max_peer_bytes)
        self._num_bytes -= num_bytes
        self._by_peer[peer] -= num_bytes
        if not self._by_peer[peer]:
            del self._by_peer[peer]
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def hold_of(self, peer: PeerId) -> Hold:
        """Return the `Hold` of a peer's requests, which reserves bytes of this budget; short requests are free."""

        def hold(num_bytes: int) -> AbstractAsyncContextManager[None]:
            if num_bytes <= SMALL_BYTES:
                return reserve_nothing(num_bytes)
            return self.holding(peer, num_bytes, timeout=STALL_TIMEOUT_S)

        return hold

    @asynccontextmanager
    async def holding(self, peer: PeerId, num_bytes: int, *, timeout: float) -> AsyncIterator[None]:
        """Reserve bytes within this context, waiting up to `timeout` seconds for room; else raise `Busy`."""
        try:
            async with asyncio.timeout(timeout):
                while not self.take(peer, num_bytes):
                    await self._freed.wait()
        except TimeoutError:
            raise Busy(
                f"no room for {num_bytes} bytes of {peer} within {timeout:g} s: this peer holds {self._by_peer[peer]} "
                f"of at most {self.max_peer_bytes} bytes for that peer, and {self._num_bytes} of at most "
                f"{self.max_bytes} for all. Send less at once, or raise `Limits.receive_bytes` at the receiving peer."
            ) from None
        try:
            yield
        finally:
            self.release(peer, num_bytes)


@dataclass(eq=False)
class StreamSlot:
    """The slot of a stream that another peer has opened."""

    owner: Hashable  # identifies the peer and the kind of its stream; limits hold for each owner
    hang_up: Callable[[], None]
    since_s: float  # when it was last busy, or opened
    num_busy: int = 0  # requests that are being answered

    def begin(self) -> None:
        """Count a request that begins."""
        self.num_busy += 1

    def end(self) -> None:
        """Count a request as answered."""
        self.num_busy -= 1
        self.since_s = now_s()


@dataclass(eq=False)
class StreamSlots:
    """Limits the streams that other peers have open here: each costs this process a file descriptor."""

    max_in_all: int
    _by_owner: dict[Hashable, dict[StreamSlot, None]] = field(default_factory=dict)
    _num_open: int = 0

    def open(self, owner: Hashable, hang_up: Callable[[], None], *, at_most: int) -> StreamSlot | None:
        """Assign a slot to a new stream, after closing another stream if necessary. None: the new stream must close."""
        slot = StreamSlot(owner, hang_up, now_s())
        return slot if self.enter(slot, at_most=at_most) else None

    def enter(self, slot: StreamSlot, *, at_most: int) -> bool:
        """Add a slot that `open` or another `StreamSlots` has made, as `open` does. False: its stream must close."""
        owned = self._by_owner.get(slot.owner, {})
        if not at_most:
            return False
        if len(owned) >= at_most:
            self._evict(owned)  # the newest streams stay; the owner may have lost track of older ones
        elif self._num_open >= self.max_in_all and not self._evict_idle(self._all()):
            # All are busy. The owner of the most streams loses one, unless the new stream's owner would then have more.
            largest = max(self._by_owner.values(), key=len)
            if len(largest) <= len(owned) + 1:
                return False
            self._evict(largest)
        self._by_owner.setdefault(slot.owner, {})[slot] = None
        self._num_open += 1
        return True

    def of(self, owner: Hashable) -> list[StreamSlot]:
        """Return the slots of an owner's streams."""
        return list(self._by_owner.get(owner, ()))

    def close(self, slot: StreamSlot) -> None:
        """Free a slot. A second call does nothing."""
        slots = self._by_owner.get(slot.owner, {})
        if slot in slots:
            del slots[slot]
            self._num_open -= 1
            if not slots:
                del self._by_owner[slot.owner]

    def _all(self) -> Iterator[StreamSlot]:
        return (slot for slots in self._by_owner.values() for slot in slots)

    def _evict_idle(self, slots: Iterable[StreamSlot]) -> bool:
        """Hang up the stream that has been idle for longest; False if all are busy."""
        idle = min((slot for slot in slots if not slot.num_busy), key=lambda slot: slot.since_s, default=None)
        if idle is not None:
            self._hang_up(idle)
        return idle is not None

    def _evict(self, slots: Collection[StreamSlot]) -> None:
        """Hang up the stream that has been idle for longest, or the oldest if all are busy."""
        if not self._evict_idle(slots):
            self._hang_up(next(iter(slots)))

    def _hang_up(self, slot: StreamSlot) -> None:
        self.close(slot)
        slot.hang_up()
