"""Whether a peer that owes an answer is alive: pings beside the exchange, one series for each peer.

A dead peer breaks its connections. A frozen one, or one behind a dead link, breaks nothing: it is silent. A busy one
answers pings. So an exchange may wait for long and still end soon after its peer fell silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.rpc import Channel

PINGS_PER_SILENCE: Final = 4
"""A peer is silent when so many pings in a row were not answered; a lost one does no harm."""

_ROUND_TRIPS: Final = 4
_LONGEST: Final = 6
_FADING: Final = 0.9
_MAX_KNOWN: Final = 256
"""Beyond so many peers, those with whom nothing is under way are forgotten, and how slow they were."""


class Exchange:
    """One exchange under way, as far as liveness goes.

    Args:
        limit: Its deadline, which is moved to now when the peer is silent.
    """

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.limit = limit
        self.silent_s: float | None = None  # for how long the peer had been, when that ended the exchange


class _Watched:
    """A peer that owes somebody an answer."""

    def __init__(self) -> None:
        self.exchanges: dict[Exchange, None] = {}  # ordered, so that a run repeats exactly
        self.channels: set[Channel] = set()
        self.pings: set[asyncio.Task[None]] = set()
        self.num_moved_bytes = 0
        self.heard_s = 0.0
        self.round_trip_s = 0.0  # of late; the slowest ones fade
        self.due_s = 0.0
        self.tick: asyncio.TimerHandle | None = None

    @property
    def in_use(self) -> bool:
        """Whether something is under way, or was a moment ago."""
        return bool(self.exchanges or self.channels or self.tick is not None)

    def look_at_channels(self, now_s: float) -> None:
        """Bytes that move are a sign of life, too."""
        num_moved_bytes = sum(channel.num_moved_bytes for channel in self.channels)
        if num_moved_bytes != self.num_moved_bytes:
            self.num_moved_bytes, self.heard_s = num_moved_bytes, now_s


class Liveness:
    """Watches the peers with which exchanges are under way.

    Args:
        silence_s: A peer that gave no sign of life for so long is silent; raised where round trips are slow.
        ping: Returns when the peer has answered anything at all, and raises otherwise.
        spawn: Runs a ping in a task that has an owner.
    """

    def __init__(
        self,
        silence_s: float,
        ping: Callable[[PeerId], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.silence_s = silence_s
        self._ping = ping
        self._spawn = spawn
        self._watched: dict[PeerId, _Watched] = {}

    def patience_s(self, peer: PeerId) -> float:
        """How long `peer` may be silent."""
        watched = self._watched.get(peer)
        slow_s = 0.0 if watched is None else _ROUND_TRIPS * watched.round_trip_s
        return min(max(self.silence_s, slow_s), _LONGEST * self.silence_s)

    @contextmanager
    def watching(self, peer: PeerId, exchange: Exchange) -> Iterator[None]:
        """Meanwhile, end `exchange` if `peer` falls silent."""
        loop = asyncio.get_running_loop()
        watched = self._known(peer)
        if not watched.exchanges:
            watched.heard_s = loop.time()
        watched.exchanges[exchange] = None
        if watched.tick is None:
            self._arm(peer, watched)
        try:
            yield
        finally:
            watched.exchanges.pop(exchange, None)
            if not watched.exchanges:
                for ping in watched.pings:
                    ping.cancel()

    @contextmanager
    def moving(self, peer: PeerId, channel: Channel) -> Iterator[None]:
        """Meanwhile, what moves over `channel` is a sign of life of `peer`."""
        watched = self._known(peer)
        watched.channels.add(channel)
        try:
            yield
        finally:
            watched.channels.discard(channel)

    def heard(self, peer: PeerId) -> None:
        """`peer` answered something."""
        if (watched := self._watched.get(peer)) is not None:
            watched.heard_s = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Watch nobody any more."""
        for watched in self._watched.values():
            if watched.tick is not None:
                watched.tick.cancel()
                watched.tick = None

    def _known(self, peer: PeerId) -> _Watched:
        if peer not in self._watched:
            if len(self._watched) >= _MAX_KNOWN:
                self._watched = {one: watched for one, watched in self._watched.items() if watched.in_use}
            self._watched[peer] = _Watched()
        return self._watched[peer]

    def _arm(self, peer: PeerId, watched: _Watched) -> None:
        loop = asyncio.get_running_loop()
        watched.due_s = loop.time() + self.patience_s(peer) / PINGS_PER_SILENCE
        watched.tick = loop.call_at(watched.due_s, self._on_tick, peer, watched)

    def _on_tick(self, peer: PeerId, watched: _Watched) -> None:
        watched.tick = None
        if not watched.exchanges:
            return  # the timer outlives exchanges, so that short ones cost none
        now_s = asyncio.get_running_loop().time()
        interval_s = self.patience_s(peer) / PINGS_PER_SILENCE
        if (late_s := now_s - watched.due_s) > interval_s:
            watched.heard_s += late_s  # this process slept, and did not listen
        watched.look_at_channels(now_s)
        silent_s = now_s - watched.heard_s
        if silent_s >= self.patience_s(peer):
            for exchange in watched.exchanges:
                if not exchange.limit.expired():
                    exchange.silent_s = silent_s
                    exchange.limit.reschedule(now_s)
            watched.heard_s = now_s  # whoever tries again is as patient
            return
        if silent_s >= interval_s / 2:
            ping = self._spawn(self._ping_once(peer, watched))
            watched.pings.add(ping)
            ping.add_done_callback(watched.pings.discard)
        self._arm(peer, watched)

    async def _ping_once(self, peer: PeerId, watched: _Watched) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(_LONGEST * self.silence_s):
                await self._ping(peer)
        except (SwarmError, TimeoutError):
            return  # what comes of it is for the next tick to say
        now_s = loop.time()
        watched.heard_s = max(watched.heard_s, now_s)
        watched.round_trip_s = max(now_s - began_s, _FADING * watched.round_trip_s)


async def alive_among(transport: Transport, peers: Iterable[PeerId], *, timeout: float | None = None) -> set[PeerId]:
    """Those that answer, within `timeout` seconds or what the transport gives them."""

    async def answers(peer: PeerId) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await transport.ping(peer)
        except (SwarmError, TimeoutError):
            return False
        return True

    asked = list(peers)
    return {peer for peer, there in zip(asked, await gather(map(answers, asked)), strict=True) if there}
