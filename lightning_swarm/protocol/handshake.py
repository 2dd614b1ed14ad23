"""The greeting of two peers, by which they compare versions and clocks."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.messages.reports import Greeting
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode

HELLO: Final = "peer.hello"

_PACKAGES: Final = ("torch", "lightning", "hivemind")
_NUM_TRIES: Final = 5


@dataclass(frozen=True, kw_only=True)
class HandshakeResult:
    """A peer's greeting, and how it compares."""

    greeting: Greeting
    round_trip_s: float
    ahead_s: float  # seconds by which that peer's clock is ahead of this one's, exact to half a round trip


def own_greeting(now_s: float) -> Greeting:
    """Make this process's greeting; `now_s` is Unix time."""
    return Greeting(protocol_version=PROTOCOL_VERSION, versions=_versions(), unix_time_s=now_s)


def answer(transport: Transport, *, now: Callable[[], float] = time.time) -> None:
    """Answer greetings of other peers."""

    async def handle(caller: PeerId, body: bytes) -> bytes:
        if body:
            raise ProtocolError(f"{HELLO} takes no arguments, got {len(body)} bytes")
        return encode(own_greeting(now()))

    transport.handle_call(HELLO, handle)


async def meet(
    transport: Transport, peer: PeerId, *, timeout: float, now: Callable[[], float] = time.time
) -> HandshakeResult:
    """Greet a peer a few times, and keep the quickest answer, which compares the clocks best.

    Raises:
        PeerError: There is no answer within `timeout` seconds.
        ProtocolError: The answer is none of a peer of this package.
    """
    loop = asyncio.get_running_loop()
    meetings = []
    for _ in range(_NUM_TRIES):
        sent_s, begin_s = now(), loop.time()
        greeting = decode(await transport.call(peer, HELLO, b"", timeout=timeout), Greeting)
        round_trip_s = loop.time() - begin_s
        ahead_s = greeting.unix_time_s - (sent_s + round_trip_s / 2)
        meetings.append(HandshakeResult(greeting=greeting, round_trip_s=round_trip_s, ahead_s=ahead_s))
    return min(meetings, key=lambda meeting: meeting.round_trip_s)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _versions() -> dict[str, str]:
    installed = {name: installed_version(name) for name in _PACKAGES}
    return {"Python": platform.python_version(), **{name: version for name, version in installed.items() if version}}
