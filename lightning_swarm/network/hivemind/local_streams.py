"""Streams between peers of one machine, past their daemons.

What goes through two daemons is copied, encrypted and decrypted: milliseconds of processor time for every MiB, which
peers of one machine take from each other's computing. They talk over a Unix socket instead.

Who is at the other end is still known from libp2p. Whoever finds a socket in a peer's name asks that peer over the
daemon for two secrets: one to show there, and one to be shown. So another user of the machine can feign neither, unless
he has processes in the network namespaces of both.

The sockets have names of Linux's abstract kind: they end with their process, and they are seen in one network namespace
only, so peers in containers with networks of their own talk over these. Elsewhere there are no neighbours.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.network.hivemind.streams import Stream

_log = logging.getLogger(__name__)

INTRODUCE: Final = "transport.introduce"
"""The method that tells a caller its two secrets."""

_CALLER: Final = b"caller"
_LISTENER: Final = b"listener"
_SECRET_BYTES: Final = 32  # of SHA-256
# magic, the caller's secret, lengths of the protocol's name and of the caller's id; these follow.
_GREETING: Final = struct.Struct(f"<4s{_SECRET_BYTES}sBB")
_MAGIC: Final = b"LSWN"
_MAX_GREETING: Final = 64  # connections that have not said yet whose they are

Serve = Callable[[str, PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""``(protocol, caller, reader, writer)``: answer what comes over a stream that a neighbour opened."""


class LocalPeers:
    """Opens and takes streams to and from other peers of this machine.

    Args:
        peer: This one.
        introduce: Asks a peer, over its daemon, for `INTRODUCE`.
        serve: Answers a neighbour. The protocol's name is whatever that neighbour said.
        greeting_s: Seconds within which the two know each other; then the daemon is tried.
    """

    def __init__(
        self,
        peer: PeerId,
        introduce: Callable[[PeerId], Awaitable[bytes]],
        serve: Serve,
        *,
        greeting_s: float,
    ) -> None:
        self._peer = peer
        self._introduce = introduce
        self._serve = serve
        self._greeting_s = greeting_s
        self._key = secrets.token_bytes(_SECRET_BYTES)
        self._introductions: dict[PeerId, bytes] = {}
        self._greeting: set[asyncio.Task[Any]] = set()  # with those that have not said yet whose they are
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Be found by others. Where that cannot be, they come through the daemon."""
        if sys.platform != "linux":
            return
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.setblocking(False)
            listening.bind(_name(self._peer))
            self._server = await asyncio.start_unix_server(self._greeted, sock=listening)
        except OSError as error:
            listening.close()
            _log.warning("Peers of this machine reach this one through its daemon only: %s", error)

    def close(self) -> None:
        """Be found no more. The streams are their owners'."""
        for task in self._greeting:
            task.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None

    async def answer(self, caller: PeerId, body: bytes) -> bytes:
        """`INTRODUCE`: what `caller` has to show, and what it is shown."""
        if body:
            raise ProtocolError(f"{INTRODUCE} takes no arguments, got {len(body)} bytes")
        return self._secret(_CALLER, caller) + self._secret(_LISTENER, caller)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream | None:
        """A stream to `peer`; None if it is not to be found on this machine, or does not answer."""
        if self._server is None or (connected := _connect(peer)) is None:
            return None
        reader, writer = await asyncio.open_unix_connection(sock=connected)
        try:
            async with asyncio.timeout(self._greeting_s):
                await self._greet(peer, protocol, reader, writer)
        except BaseException as error:
            writer.transport.abort()
            self._introductions.pop(peer, None)  # perhaps it began anew
            if not isinstance(error, OSError | EOFError | SwarmError):
                raise
            _log.debug("%s is not reached past its daemon: %s", peer, error)
            return None
        return Stream(reader, writer)

    async def _greet(
        self, peer: PeerId, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Show who this is, and be shown who that is."""
        if peer not in self._introductions:
            self._introductions[peer] = await self._introduce(peer)
        shown, expected = self._introductions[peer][:_SECRET_BYTES], self._introductions[peer][_SECRET_BYTES:]
        if len(expected) != _SECRET_BYTES:
            raise ProtocolError(f"{peer} answered `{INTRODUCE}` by something else than two secrets.")
        names = protocol.encode(), self._peer.encode()
        writer.write(_GREETING.pack(_MAGIC, shown, *map(len, names)) + b"".join(names))
        if not hmac.compare_digest(await reader.readexactly(_SECRET_BYTES), expected):
            raise ProtocolError(f"Somebody else than {peer} listens in its name.")

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody of this machine has connected."""
        try:
            protocol, caller = await self._know(reader)
            writer.write(self._secret(_LISTENER, caller))
        except (OSError, EOFError, ProtocolError) as error:
            writer.transport.abort()
            _log.debug("A connection past the daemon was refused: %s", error)
            return
        except asyncio.CancelledError:  # this peer's loop ends; asyncio would log it as a failure of its own
            writer.transport.abort()
            return
        await self._serve(protocol, caller, reader, writer)

    async def _know(self, reader: asyncio.StreamReader) -> tuple[str, PeerId]:
        """What a stream is for, and whose it is."""
        if len(self._greeting) >= _MAX_GREETING:
            raise ProtocolError(f"{_MAX_GREETING} connections have not said yet whose they are")
        task = asyncio.current_task()
        assert task is not None
        self._greeting.add(task)
        try:
            async with asyncio.timeout(self._greeting_s):
                magic, shown, *lengths = _GREETING.unpack(await reader.readexactly(_GREETING.size))
                protocol, name = [(await reader.readexactly(n)).decode(errors="replace") for n in lengths]
        finally:
            self._greeting.discard(task)
        caller = PeerId(name)
        if magic != _MAGIC or not hmac.compare_digest(shown, self._secret(_CALLER, caller)):
            raise ProtocolError("it does not show the secret of a caller")
        return protocol, caller

    def _secret(self, of: bytes, caller: PeerId) -> bytes:
        return hmac.digest(self._key, of + caller.encode(), "sha256")


def _name(peer: PeerId) -> str:
    return f"\0lightning_swarm/{peer}"


def _connect(peer: PeerId) -> socket.socket | None:
    """A connection to whoever listens in this peer's name. It is there at once, or there is none."""
    connecting = socket.socket(socket.AF_UNIX)
    try:
        connecting.setblocking(False)
        connecting.connect(_name(peer))
    except OSError:
        connecting.close()
        return None
    return connecting
