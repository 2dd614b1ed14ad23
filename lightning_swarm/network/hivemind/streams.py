"""Streams through the libp2p daemon: opening streams, and keeping idle ones for later requests."""

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

# Buffer for short reads, and for bytes that no reader waits for yet. While it is full, the socket is not read.
_STAGING_BYTES: Final = 64 << 10


# Bytes go from the socket straight into their final memory. asyncio's `StreamReader` would copy each byte three times,
# and wake its reader for every piece.
class Inbox(asyncio.BufferedProtocol):
    """A `Reader` of a connected socket, whose protocol it becomes; it also tracks room for writing."""

    # `arrived`: bytes that were already read from the socket; `ended`: the other side hung up after these bytes.
    def __init__(self, transport: asyncio.Transport, arrived: bytes, *, ended: bool) -> None:
        self._transport = transport
        self._staging = memoryview(bytearray(max(_STAGING_BYTES, 2 * len(arrived))))
        self._start, self._stop = 0, len(arrived)  # bounds of the unread bytes in the staging memory
        self._staging[: self._stop] = arrived
        self._target: memoryview | None = None  # the rest of the memory to fill instead of the staging memory
        self._on_piece: Callable[[memoryview], None] = _ignore
        self._ended = ended
        self._problem: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None  # done once the reader need not wait any more
        self._full = False  # the staging memory is full, so the socket is not read
        self._room = asyncio.Event()  # not set while the transport has no room for writes
        self._room.set()
        transport.pause_reading()  # asyncio chooses how to read by the protocol's class when reading starts
        transport.set_protocol(self)
        transport.resume_reading()
        # With this limit, `drain` waits until nothing is buffered, and written buffers may change again.
        if not transport.is_closing():  # uvloop would raise an error that is no OSError
            transport.set_write_buffer_limits(high=0)

    # ------------------------------------------------------------------ for the reader

    def at_eof(self) -> bool:
        """Return whether the other side has hung up, and all its bytes were read."""
        return (self._ended or self._problem is not None) and self._start == self._stop

    async def readexactly(self, n: int, /) -> bytes:
        """See `Reader`. If this is cancelled and `n` is small, nothing has been read."""
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
        self._raise_problem()
        return self._take(n)

    async def read(self, n: int, /) -> bytes:
        """See `Reader`."""
        while self._stop == self._start and not self._ended:
            await self._wait()
        self._raise_problem()
        return self._take(min(n, self._stop - self._start))

    async def fill(self, view: memoryview, on_piece: Callable[[memoryview], None], /) -> None:
        """See `Reader`."""
        self._raise_problem()
        if num_staged := min(len(view), self._stop - self._start):
            view[:num_staged] = self._staging[self._start : self._start + num_staged]
            self._skip(num_staged)
            on_piece(view[:num_staged])
        if num_staged == len(view):
            return
        self._target, self._on_piece = view[num_staged:], on_piece
        try:
            while self._target is not None:
                if self._ended:
                    raise asyncio.IncompleteReadError(b"", len(self._target))
                await self._wait()
        finally:
            self._target, self._on_piece = None, _ignore

    async def drain(self) -> None:
        """Wait until all written bytes are sent."""
        self._raise_problem()
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
        piece, rest = self._target[:nbytes], self._target[nbytes:]
        self._target = rest if len(rest) else None
        self._on_piece(piece)
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

    async def _wait(self) -> None:
        """Wait until bytes have come for the reader, or the stream has ended."""
        self._raise_problem()
        if self._waiting is not None:
            raise RuntimeError("only one task at a time may read a stream")
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None
        self._raise_problem()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _raise_problem(self) -> None:
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
        """Move the staged bytes to the front, and resume reading."""
        num_staged = self._stop - self._start
        self._staging[:num_staged] = bytes(self._staging[self._start : self._stop])
        self._start, self._stop = 0, num_staged
        if self._full and self._stop < len(self._staging):
            self._full = False
            self._transport.resume_reading()


def _ignore(_: memoryview) -> None:
    pass


_MAX_OPEN: Final = 64  # streams at once, busy or idle; a request for one more waits
_MAX_IDLE: Final = 32  # limit for one peer: a batch of 32 large microbatches uses as many at once, in each step
_IDLE_S: Final = 30.0  # time after which an idle stream is closed, before the other side closes it


class Stream:
    """A two-way stream to a peer, with a `Channel`. No other code may read from `reader` any more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer  # kept, because a writer closes its transport when it is garbage-collected
        self._transport = cast(asyncio.Transport, writer.transport)
        # `asyncio.StreamReader` has no public way to take over the bytes that it has read.
        arrived, ended = bytes(reader._buffer), reader._eof  # type: ignore[attr-defined]
        self._inbox = Inbox(self._transport, arrived, ended=ended or self._transport.is_closing())
        self.channel = Channel(self._inbox, self.write)
        self.expiry: asyncio.TimerHandle | None = None  # closes the stream if it stays idle

    def gather_writes(self) -> None:
        """Send small writes together. From now on, a buffer must not change after it was written."""
        if not self._transport.is_closing():  # see `write_soon`
            self._transport.set_write_buffer_limits()

    async def write(self, buffer: Buffer) -> None:
        """Send a buffer, and wait until it may change again."""
        self.write_soon(buffer)
        await self.drain()

    async def drain(self) -> None:
        """Wait until there is room for further writes."""
        await self._inbox.drain()

    def write_soon(self, buffer: Buffer) -> None:
        """Send a buffer without waiting. The buffer must not change any more."""
        if self._transport.is_closing():  # uvloop would raise an error that is no OSError
            raise ConnectionResetError("it is closed")
        self._transport.write(buffer)

    @property
    def is_full(self) -> bool:
        """Return whether there is no room for further writes."""
        return self.num_unsent_bytes > self._transport.get_write_buffer_limits()[1]

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that are buffered here because the other side reads more slowly."""
        return self._transport.get_write_buffer_size()

    @property
    def ended(self) -> bool:
        """Return whether the other side has hung up."""
        return self._inbox.at_eof() or self._transport.is_closing()

    def close(self) -> None:
        """Hang up, and drop unsent bytes."""
        if self.expiry is not None:
            self.expiry.cancel()
        self._transport.abort()


class Daemon:
    """Sends requests to the libp2p daemon; hivemind's client would leave failed and cancelled requests half-open."""

    def __init__(self, p2p: P2P) -> None:
        self._path: str = p2p.daemon_listen_maddr["unix"]

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to `peer`; raise `Unreachable` if it cannot be dialed, or does not support `protocol`."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=_to_peer_id(peer).to_bytes(), proto=[protocol]),
        )
        return await self._request(request, f"open a stream to {peer}")

    async def connect(self, peer: PeerId, addresses: list[str]) -> None:
        """Dial `peer` at these addresses, and remember them."""
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
        """Send a request to the daemon. If it asked for a stream, the stream follows the answer on the same socket."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise Unreachable(f"Cannot {purpose}: this peer's libp2p daemon is gone.") from error
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise Unreachable(f"Cannot {purpose}: {response.error.msg}.")
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError | EOFError):
                raise Unreachable(f"Cannot {purpose}: this peer's libp2p daemon hung up.") from error
            raise
        return Stream(reader, writer)


def _to_peer_id(peer: PeerId) -> PeerID:
    try:
        return PeerID.from_base58(peer)
    except ValueError as error:
        raise Unreachable(f"{peer!r} is no peer id.") from error


class StreamPool:
    """Keeps a bounded number of streams to other peers; idle streams expire."""

    def __init__(self, open_stream: Callable[[PeerId], Awaitable[Stream]]) -> None:
        self._open_stream = open_stream
        self._room = asyncio.Semaphore(_MAX_OPEN)
        self._num_busy = 0
        self._idle: dict[Stream, PeerId] = {}  # in the order in which they became idle

    @asynccontextmanager
    async def lease(self, peer: PeerId) -> AsyncIterator[Stream]:
        """Lend a stream to `peer` for one exchange. It is closed afterwards, unless `keep` was called with it."""
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
        """Keep a leased stream, whose exchange is complete, for the next exchange."""
        if sum(idle_peer == peer for idle_peer in self._idle.values()) < _MAX_IDLE:
            self._idle[stream] = peer
            stream.expiry = asyncio.get_running_loop().call_later(_IDLE_S, self._drop, stream)

    def hang_up(self, peer: PeerId | None = None) -> None:
        """Close the idle streams to a peer; None: to all peers. A leased stream is closed at the end of its lease."""
        for stream in [stream for stream, idle_peer in self._idle.items() if peer in (None, idle_peer)]:
            self._drop(stream)

    async def _open(self, peer: PeerId) -> Stream:
        """Open a stream, after closing the one that has been idle for longest if there are too many."""
        if self._num_busy + len(self._idle) > _MAX_OPEN:
            self._drop(next(iter(self._idle)))
        return await self._open_stream(peer)

    def _take_idle(self, peer: PeerId) -> Stream | None:
        # The newest stream first: it is the least likely to have ended.
        for stream in [stream for stream, idle_peer in self._idle.items() if idle_peer == peer][::-1]:
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
