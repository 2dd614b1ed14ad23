"""Streams through the libp2p daemon: opening them, and keeping a few for the next request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from typing_extensions import override

from lightning_swarm.core.errors import ProtocolError, Unreachable
from lightning_swarm.network import PeerId
from lightning_swarm.network.framing import Buffer
from lightning_swarm.network.hivemind._engine import P2P, Multiaddr, PeerID, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from lightning_swarm.network.rpc import Channel

_STAGING_BYTES: Final = 64 << 10
"""Room for what nobody waits for yet, and for what is small. When it is full, the socket is not read."""


# Bytes go from the socket straight into the memory that they are for. asyncio's `StreamReader` copies each byte three
# times on its way there, and wakes its reader for every piece.
class Inbox(asyncio.BufferedProtocol):
    """A `Reader` of a connected socket, and whether its other direction has room.

    Args:
        transport: The socket. It calls this as its protocol from now on.
        arrived: What had been read from it before.
        ended: Whether that was all.
    """

    def __init__(self, transport: asyncio.Transport, arrived: bytes, *, ended: bool) -> None:
        self._transport = transport
        self._staging = memoryview(bytearray(max(_STAGING_BYTES, 2 * len(arrived))))
        self._start, self._stop = 0, len(arrived)
        self._staging[: self._stop] = arrived
        self._target: memoryview | None = None  # where it goes instead: what is left to fill
        self._seen: Callable[[memoryview], None] = _ignore
        self._ended = ended
        self._problem: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._full = False
        self._room = asyncio.Event()
        self._room.set()
        transport.pause_reading()  # the kind of protocol decides how a socket is read, from when that begins
        transport.set_protocol(self)
        transport.resume_reading()
        # Then `drain` waits until nothing is buffered, and what has been written may change again.
        if not transport.is_closing():  # uvloop would raise what is no OSError
            transport.set_write_buffer_limits(high=0)

    # ------------------------------------------------------------------ for who reads

    def at_eof(self) -> bool:
        """Whether the other side has hung up, and all that it sent was read."""
        return (self._ended or self._problem is not None) and self._start == self._stop

    async def readexactly(self, n: int, /) -> bytes:
        """Exactly `n` bytes, or `asyncio.IncompleteReadError`. Cancelled, it has read nothing if `n` is small."""
        if n > len(self._staging) // 2:
            data = bytearray(n)
            await self.fill(memoryview(data), _ignore)
            return bytes(data)
        while self._stop - self._start < n:
            if self._ended:
                raise asyncio.IncompleteReadError(self._take(self._stop - self._start), n)
            if self._start + n > len(self._staging):
                self._make_room()
            await self._wait()
        self._check()
        return self._take(n)

    async def read(self, n: int, /) -> bytes:
        """At least one and at most `n` bytes; none at the end."""
        while self._stop == self._start and not self._ended:
            await self._wait()
        self._check()
        return self._take(min(n, self._stop - self._start))

    async def fill(self, view: memoryview, seen: Callable[[memoryview], None], /) -> None:
        """Fill all of `view`, and show each piece to `seen` as it comes; or `asyncio.IncompleteReadError`."""
        self._check()
        if num_here := min(len(view), self._stop - self._start):
            view[:num_here] = self._staging[self._start : self._start + num_here]
            self._skip(num_here)
            seen(view[:num_here])
        if num_here == len(view):
            return
        self._target, self._seen = view[num_here:], seen
        try:
            while self._target is not None:
                if self._ended:
                    raise asyncio.IncompleteReadError(b"", len(self._target))
                await self._wait()
        finally:
            self._target, self._seen = None, _ignore

    async def drain(self) -> None:
        """Wait until all that was written to the socket is sent."""
        self._check()
        await self._room.wait()
        if self._problem is not None or self._transport.is_closing():
            raise ConnectionResetError("it is closed") from self._problem

    # ------------------------------------------------------------------ for the socket

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._staging[self._stop :] if self._target is None else self._target

    @override
    def buffer_updated(self, nbytes: int) -> None:
        if self._target is None:
            self._stop += nbytes
            if self._stop == len(self._staging):
                self._full = True
                self._transport.pause_reading()
            self._wake()
            return
        piece, left = self._target[:nbytes], self._target[nbytes:]
        self._target = left if len(left) else None
        self._seen(piece)
        if self._target is None:
            self._wake()

    @override
    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return True  # the other direction stays open

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._problem = self._problem or exc
        self._room.set()
        self._wake()

    @override
    def pause_writing(self) -> None:
        self._room.clear()

    @override
    def resume_writing(self) -> None:
        self._room.set()

    # ------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until something comes that concerns who reads."""
        self._check()
        if self._waiting is not None:
            raise RuntimeError("a stream is read by one at a time")
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None
        self._check()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _take(self, n: int) -> bytes:
        data = bytes(self._staging[self._start : self._start + n])
        self._skip(n)
        return data

    def _skip(self, n: int) -> None:
        self._start += n
        if self._start == self._stop:
            self._start = self._stop = 0
        if self._full:
            self._make_room()

    def _make_room(self) -> None:
        """Move what is here to the front, and read on."""
        num_here = self._stop - self._start
        self._staging[:num_here] = bytes(self._staging[self._start : self._stop])
        self._start, self._stop = 0, num_here
        if self._full and self._stop < len(self._staging):
            self._full = False
            self._transport.resume_reading()


def _ignore(_: memoryview) -> None:
    """Nobody wants to see it."""


_MAX_OPEN: Final = 64  # streams at once, busy or idle; who wants one more waits
_MAX_IDLE: Final = 32  # to one peer: as many as a batch of 32 large microbatches uses at once, step after step
_IDLE_S: Final = 30.0  # until an idle stream is closed; less than the other side's patience


class Stream:
    """A two-way stream to a peer, as a `Channel`.

    Args:
        reader: Its read end, from which nobody else reads any more.
        writer: Its write end, which must be kept for as long.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._transport = cast(asyncio.Transport, writer.transport)
        # `asyncio.StreamReader` tells nobody what it has read, and whether that was all.
        arrived, ended = bytes(reader._buffer), reader._eof  # type: ignore[attr-defined]
        self._inbox = Inbox(self._transport, arrived, ended=ended or self._transport.is_closing())
        self.channel = Channel(self._inbox, self.write)
        self.expiry: asyncio.TimerHandle | None = None

    def gather_writes(self) -> None:
        """Send at once what is written in one turn of the loop. For buffers that do not change any more."""
        if not self._transport.is_closing():  # as below
            self._transport.set_write_buffer_limits()

    async def write(self, buffer: Buffer) -> None:
        """Send a buffer, and wait until it may change again."""
        self.write_soon(buffer)
        await self.drain()

    async def drain(self) -> None:
        """Wait until there is room for more."""
        await self._inbox.drain()

    def write_soon(self, buffer: Buffer) -> None:
        """Send a buffer that does not change."""
        if self._transport.is_closing():  # uvloop would raise what is no OSError
            raise ConnectionResetError("it is closed")
        self._transport.write(buffer)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more."""
        return self.num_unsent_bytes > self._transport.get_write_buffer_limits()[1]

    @property
    def num_unsent_bytes(self) -> int:
        """Buffered here, because the other side does not read as fast."""
        return self._transport.get_write_buffer_size()

    @property
    def ended(self) -> bool:
        """Whether the other side has hung up."""
        return self._inbox.at_eof() or self._transport.is_closing()

    def close(self) -> None:
        """Hang up. What has not been sent is dropped."""
        if self.expiry is not None:
            self.expiry.cancel()
        self._transport.abort()


class Daemon:
    """Requests to the libp2p daemon that hivemind's client leaves half-open when they fail or are cancelled."""

    def __init__(self, p2p: P2P) -> None:
        self._path: str = p2p.daemon_listen_maddr["unix"]

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """A stream to `peer`.

        Raises:
            Unreachable: The peer cannot be dialed, or does not speak `protocol`.
        """
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=_to_peer_id(peer).to_bytes(), proto=[protocol]),
        )
        return await self._request(request, f"open a stream to {peer}")

    async def connect(self, peer: PeerId, addresses: list[str]) -> None:
        """Dial `peer` at these addresses, and remember them.

        Raises:
            Unreachable: It does not answer there.
            ProtocolError: These are no addresses.
        """
        try:
            encoded = [Multiaddr(address).to_bytes() for address in addresses]
        except ValueError as error:
            raise ProtocolError(f"No address can be read in {addresses}: {error}.") from error
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=_to_peer_id(peer).to_bytes(), addrs=encoded),
        )
        (await self._request(request, f"connect to {peer}")).close()

    async def _request(self, request: Any, purpose: str) -> Stream:
        """Ask the daemon. What follows its answer on the same socket is the stream, if one was asked for."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise Unreachable(f"Cannot {purpose}: this peer's libp2p daemon is gone.") from error
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
        except (OSError, EOFError) as error:
            writer.transport.abort()
            raise Unreachable(f"Cannot {purpose}: this peer's libp2p daemon hung up.") from error
        except BaseException:
            writer.transport.abort()
            raise
        if response.type == p2pd_pb2.Response.ERROR:
            writer.transport.abort()
            raise Unreachable(f"Cannot {purpose}: {response.error.msg}.")
        return Stream(reader, writer)


def _to_peer_id(peer: PeerId) -> PeerID:
    """Form of a peer's identity that hivemind takes."""
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise Unreachable(f"{peer!r} is no peer id.") from error


class StreamPool:
    """Streams to other peers: a bounded number at once, and idle ones kept for a while.

    Args:
        open_stream: Opens a new one.
    """

    def __init__(self, open_stream: Callable[[PeerId], Awaitable[Stream]]) -> None:
        self._open_stream = open_stream
        self._room = asyncio.Semaphore(_MAX_OPEN)
        self._num_busy = 0
        # In the order in which they became idle.
        self._idle: dict[Stream, PeerId] = {}

    @asynccontextmanager
    async def lease(self, peer: PeerId) -> AsyncIterator[Stream]:
        """A stream to `peer` for one exchange. It is closed afterwards unless it was given to `keep`."""
        async with self._room:
            self._num_busy += 1
            try:
                stream = self._take_idle(peer) or await self._open(peer)
                try:
                    yield stream
                finally:
                    if stream not in self._idle:
                        stream.close()
            finally:
                self._num_busy -= 1

    def keep(self, peer: PeerId, stream: Stream) -> None:
        """Keep a leased stream, on which nothing is under way, for the next exchange."""
        if sum(other == peer for other in self._idle.values()) < _MAX_IDLE:
            self._idle[stream] = peer
            stream.expiry = asyncio.get_running_loop().call_later(_IDLE_S, self._drop, stream)

    def close(self) -> None:
        """Close the idle streams; who leased one closes it."""
        for stream in tuple(self._idle):
            self._drop(stream)

    async def _open(self, peer: PeerId) -> Stream:
        if self._num_busy + len(self._idle) > _MAX_OPEN:
            self._drop(next(iter(self._idle)))
        return await self._open_stream(peer)

    def _take_idle(self, peer: PeerId) -> Stream | None:
        # The newest first: it is the least likely to have ended.
        for stream in [stream for stream, other in self._idle.items() if other == peer][::-1]:
            del self._idle[stream]
            if stream.expiry is not None:
                stream.expiry.cancel()
            if not stream.ended:
                return stream
            stream.close()
        return None

    def _drop(self, stream: Stream) -> None:
        del self._idle[stream]
        stream.close()
