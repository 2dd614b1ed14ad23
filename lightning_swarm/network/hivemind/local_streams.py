"""Streams between peers of one machine that bypass their daemons, which cost milliseconds of CPU time per MiB."""

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
from lightning_swarm.core.tasks import running_task
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import INTRODUCE
from lightning_swarm.network.hivemind.streams import Stream

_log = logging.getLogger(__name__)

_CALLER: Final = b"caller"  # marks the secret that the caller sends
_LISTENER: Final = b"listener"  # marks the secret that the caller receives
_SECRET_BYTES: Final = 32  # length of a SHA-256 digest
# magic, the caller's secret, lengths of the protocol's name and of the caller's id; followed by the name and the id
_GREETING: Final = struct.Struct(f"<4s{_SECRET_BYTES}sBB")
_MAGIC: Final = b"LSWN"
_MAX_GREETING: Final = 64  # connections whose peers are not known yet

Serve = Callable[[str, PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""``(protocol, caller, reader, writer)``: answer the requests that come over a local peer's stream.

The protocol's name is unchecked text from that peer."""


# The two ends prove their identities through libp2p. The caller asks the listener over the daemon for two secrets,
# sends the first over the socket, and must receive the second. Another user of the machine could pass for a peer only
# with processes in both peers' network namespaces.
class LocalPeers:
    """Opens streams to other peers of this machine, and accepts theirs."""

    def __init__(
        self, peer: PeerId, introduce: Callable[[PeerId], Awaitable[bytes]], serve: Serve, *, greeting_s: float
    ) -> None:
        self._peer = peer  # this peer
        self._introduce = introduce  # asks a peer for the secrets of `INTRODUCE`, over its daemon
        self._serve_stream = serve
        self._greeting_s = greeting_s  # seconds to wait for a greeting before using the daemon
        self._key = secrets.token_bytes(_SECRET_BYTES)
        self._introductions: dict[PeerId, bytes] = {}  # peer -> both secrets, from its answer to `INTRODUCE`
        self._greeting: set[asyncio.Task[Any]] = set()  # tasks of connections whose peers are not known yet
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Accept connections of local peers. If this is impossible, they use the daemon."""
        if sys.platform != "linux":
            return
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.setblocking(False)
            listening.bind(_socket_name(self._peer))
            self._server = await asyncio.start_unix_server(self._accept, sock=listening)
        except OSError as error:
            listening.close()
            _log.warning("Peers of this machine reach this one through its daemon only: %s", error)

    def close(self) -> None:
        """Accept no more connections. Open streams belong to their owners."""
        for task in self._greeting:
            task.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None

    async def answer(self, caller: PeerId, body: bytes) -> bytes:
        """Answer `INTRODUCE`: return the secret that `caller` must send, then the secret that it will receive."""
        if body:
            raise ProtocolError(f"{INTRODUCE} takes no arguments, got {len(body)} bytes")
        return self._secret(_CALLER, caller) + self._secret(_LISTENER, caller)

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream | None:
        """Open a stream to `peer`; return None if it is not on this machine, or does not answer."""
        if self._server is None or (connected := _connect(peer)) is None:
            return None
        reader, writer = await asyncio.open_unix_connection(sock=connected)
        try:
            async with asyncio.timeout(self._greeting_s):
                await self._greet(peer, protocol, reader, writer)
        except BaseException as error:
            writer.transport.abort()
            self._introductions.pop(peer, None)  # the peer may have restarted, with another key
            if not isinstance(error, OSError | EOFError | SwarmError):
                raise
            _log.debug("%s is reached only through its daemon: %s", peer, error)
            return None
        return Stream(reader, writer)

    async def _greet(
        self, peer: PeerId, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Prove this peer's identity, and check the other peer's."""
        if peer not in self._introductions:
            self._introductions[peer] = await self._introduce(peer)
        own_secret, expected = self._introductions[peer][:_SECRET_BYTES], self._introductions[peer][_SECRET_BYTES:]
        if len(expected) != _SECRET_BYTES:
            raise ProtocolError(f"{peer} answered `{INTRODUCE}` with something other than two secrets.")
        names = protocol.encode(), self._peer.encode()
        writer.write(_GREETING.pack(_MAGIC, own_secret, *map(len, names)) + b"".join(names))
        if not hmac.compare_digest(await reader.readexactly(_SECRET_BYTES), expected):
            raise ProtocolError(f"Another process than {peer} listens on that peer's socket.")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check the identity of a local peer that has connected, and serve it."""
        try:
            protocol, caller = await self._identify(reader)
            writer.write(self._secret(_LISTENER, caller))
        except (OSError, EOFError, ProtocolError) as error:
            writer.transport.abort()
            _log.debug("A connection past the daemon was refused: %s", error)
            return
        except asyncio.CancelledError:  # this peer's loop ends; asyncio would log the cancellation as a failure
            writer.transport.abort()
            return
        await self._serve_stream(protocol, caller, reader, writer)

    async def _identify(self, reader: asyncio.StreamReader) -> tuple[str, PeerId]:
        """Read the protocol and the caller of a new stream, and check the caller's secret."""
        if len(self._greeting) >= _MAX_GREETING:
            raise ProtocolError(f"{_MAX_GREETING} connections have not identified themselves yet")
        task = running_task()
        self._greeting.add(task)
        try:
            async with asyncio.timeout(self._greeting_s):
                magic, secret, *lengths = _GREETING.unpack(await reader.readexactly(_GREETING.size))
                protocol, name = [(await reader.readexactly(n)).decode(errors="replace") for n in lengths]
        finally:
            self._greeting.discard(task)
        caller = PeerId(name)
        if magic != _MAGIC or not hmac.compare_digest(secret, self._secret(_CALLER, caller)):
            raise ProtocolError("it does not begin with the secret of its caller")
        return protocol, caller

    def _secret(self, end: bytes, caller: PeerId) -> bytes:
        return hmac.digest(self._key, end + caller.encode(), "sha256")


def _socket_name(peer: PeerId) -> str:
    # Linux's abstract socket names vanish with their process, and are visible only in one network namespace. Peers in
    # containers with their own networks use the daemons.
    return f"\0lightning_swarm/{peer}"


def _connect(peer: PeerId) -> socket.socket | None:
    """Connect to the socket with this peer's name, which succeeds at once or never."""
    connecting = socket.socket(socket.AF_UNIX)
    try:
        connecting.setblocking(False)
        connecting.connect(_socket_name(peer))
    except OSError:
        connecting.close()
        return None
    return connecting
