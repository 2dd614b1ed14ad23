"""Pings peers that owe an answer, so that an exchange may take long and still end soon after its peer fell silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.rpc import Channel

PINGS_PER_SILENCE: Final = 4
"""Pings in a row that go unanswered before a peer counts as silent, so that one lost ping does no harm."""

_MAX_CHECK_INTERVAL_S: Final = 2.5  # longest time between two checks of the exchanges with a peer
_FIRST_REPEAT_S: Final = 1.25  # a request without an answer is sent again at the first check after this time

_ROUND_TRIPS: Final = 4  # a peer may be silent for this many of its round trips, even beyond the limit
_MAX_SILENCE_FACTOR: Final = 6  # longest silence of such a peer, as a multiple of the limit
_ROUND_TRIP_DECAY: Final = 0.9  # factor on the slowest round trip with each later one
_MAX_KNOWN: Final = 256  # beyond this number, peers without an exchange are forgotten, with their round trips


@dataclass(eq=False)
class Exchange:
    """One exchange with a peer, and its deadline, which is moved to now when the peer is silent."""

    limit: asyncio.Timeout
    silent_s: float | None = None  # how long the peer had been silent, if that ended the exchange
    send_again: Callable[[], None] | None = None  # sends the request once more; None: it is never repeated
    is_large: bool = False  # repeated only while no bytes move between the peers
    begun_s: float = 0.0
    num_repeats: int = 0

    def repeat_if_due(self, now_s: float, *, is_moving: bool) -> None:
        """Repeat the request if no answer has come: first after a moment, then after twice as long each time."""
        if self.send_again is None or (self.is_large and is_moving):
            return
        if now_s - self.begun_s >= _FIRST_REPEAT_S * 2**self.num_repeats:
            self.num_repeats += 1
            self.send_again()


class _WatchedPeer:
    """A peer that owes an answer to at least one exchange."""

    def __init__(self) -> None:
        self.exchanges: dict[Exchange, None] = {}  # ordered, so that a run repeats exactly
        self.channels: set[Channel] = set()
        self.pings: set[asyncio.Task[None]] = set()
        self.num_moved_bytes = 0  # moved by all channels until the newest check
        self.alive_s = 0.0  # time of the newest sign of life
        self.round_trip_s = 0.0  # slowest recent round trip; older samples fade
        self.due_s = 0.0  # time of the next check
        self.tick: asyncio.TimerHandle | None = None  # timer of the next check

    @property
    def is_in_use(self) -> bool:
        """Return whether an exchange with the peer is in progress, or ended a moment ago."""
        return bool(self.exchanges or self.channels or self.tick is not None)


# A dead peer breaks its connections. A frozen peer, or one behind a dead link, breaks nothing and is silent. A busy
# peer answers pings.
@dataclass(eq=False)
class Liveness:
    """Watches the peers of current exchanges, and ends the exchanges of a peer that falls silent."""

    silence_s: float  # seconds that a peer may be silent; more where round trips are slow
    _ping: Callable[[PeerId], Coroutine[Any, Any, None]]  # returns once the peer has answered, even by an error
    _spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]  # runs a ping in a task that has an owner
    _watched: dict[PeerId, _WatchedPeer] = field(default_factory=dict)

    def patience_s(self, peer: PeerId) -> float:
        """Return the seconds that `peer` may be silent."""
        watched = self._watched.get(peer)
        slow_s = 0.0 if watched is None else _ROUND_TRIPS * watched.round_trip_s
        return min(max(self.silence_s, slow_s), _MAX_SILENCE_FACTOR * self.silence_s)

    def _interval_s(self, peer: PeerId) -> float:
        return min(self.patience_s(peer) / PINGS_PER_SILENCE, _MAX_CHECK_INTERVAL_S)

    def watch(self, peer: PeerId, exchange: Exchange) -> None:
        """End `exchange` if `peer` falls silent before `forget`."""
        loop = asyncio.get_running_loop()
        watched = self._state_of(peer)
        if not watched.exchanges:
            watched.alive_s = loop.time()
        watched.exchanges[exchange] = None
        exchange.begun_s = loop.time()
        if watched.tick is None:
            self._schedule_check(peer, watched)

    def forget(self, peer: PeerId, exchange: Exchange) -> None:
        """Stop watching `exchange`, if it is watched."""
        watched = self._watched.get(peer)
        if watched is None or exchange not in watched.exchanges:
            return
        del watched.exchanges[exchange]
        if not watched.exchanges:
            for ping in watched.pings:
                ping.cancel()

    @contextmanager
    def moving(self, peer: PeerId, channel: Channel) -> Iterator[None]:
        """Count bytes that move over `channel` as signs of life of `peer` within this context."""
        watched = self._state_of(peer)
        watched.channels.add(channel)
        try:
            yield
        finally:
            watched.channels.discard(channel)

    def note_alive(self, peer: PeerId) -> None:
        """Record an answer of `peer` as a sign of life."""
        if (watched := self._watched.get(peer)) is not None:
            watched.alive_s = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Stop watching."""
        for watched in self._watched.values():
            if watched.tick is not None:
                watched.tick.cancel()
                watched.tick = None

    def _state_of(self, peer: PeerId) -> _WatchedPeer:
        """Return a peer's state, which is added if missing; then forget unused states if there are too many."""
        if peer not in self._watched:
            if len(self._watched) >= _MAX_KNOWN:
                self._watched = {known: watched for known, watched in self._watched.items() if watched.is_in_use}
            self._watched[peer] = _WatchedPeer()
        return self._watched[peer]

    def _schedule_check(self, peer: PeerId, watched: _WatchedPeer) -> None:
        loop = asyncio.get_running_loop()
        watched.due_s = loop.time() + self._interval_s(peer)
        watched.tick = loop.call_at(watched.due_s, self._on_tick, peer, watched)

    def _on_tick(self, peer: PeerId, watched: _WatchedPeer) -> None:
        """Check a peer: end its exchanges if it is silent, otherwise ping it or repeat requests if that is due."""
        watched.tick = None
        if not watched.exchanges:
            return  # the timer outlives exchanges, so that short exchanges need no new timer
        now_s = asyncio.get_running_loop().time()
        interval_s = self._interval_s(peer)
        if (late_s := now_s - watched.due_s) > interval_s:
            watched.alive_s += late_s  # this process was suspended or blocked, and could receive nothing
        num_moved_bytes = sum(channel.num_moved_bytes for channel in watched.channels)
        is_moving = num_moved_bytes != watched.num_moved_bytes
        if is_moving:  # a sign of life
            watched.num_moved_bytes, watched.alive_s = num_moved_bytes, now_s
        silent_s = now_s - watched.alive_s
        if silent_s >= self.patience_s(peer):
            for exchange in watched.exchanges:
                if not exchange.limit.expired():
                    exchange.silent_s = silent_s
                    exchange.limit.reschedule(now_s)
            watched.alive_s = now_s  # the next exchange waits its full time
            return  # without a timer: these exchanges end now, and the next call of `watch` sets one
        if silent_s >= interval_s / 2:
            ping = self._spawn(self._ping_once(peer, watched))
            watched.pings.add(ping)
            ping.add_done_callback(watched.pings.discard)
        if silent_s < 1.5 * interval_s:  # a silent peer would receive all repeats at once later
            for exchange in tuple(watched.exchanges):
                exchange.repeat_if_due(now_s, is_moving=is_moving)
        self._schedule_check(peer, watched)

    async def _ping_once(self, peer: PeerId, watched: _WatchedPeer) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(_MAX_SILENCE_FACTOR * self.silence_s):
                await self._ping(peer)
        except (SwarmError, TimeoutError):
            return  # the next tick decides
        now_s = loop.time()
        watched.alive_s = max(watched.alive_s, now_s)
        watched.round_trip_s = max(now_s - began_s, _ROUND_TRIP_DECAY * watched.round_trip_s)


async def alive_among(transport: Transport, peers: Iterable[PeerId], *, timeout: float | None = None) -> set[PeerId]:
    """Ping peers, and return the peers that answer within `timeout` seconds; None: as long as the transport waits."""

    async def answers(peer: PeerId) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await transport.ping(peer)
        except (SwarmError, TimeoutError):
            return False
        return True

    asked = list(peers)
    return {peer for peer, is_alive in zip(asked, await gather(map(answers, asked)), strict=True) if is_alive}
