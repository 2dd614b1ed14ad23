"""Streams through the libp2p daemon: opening them, and keeping a few for the next request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from lightning_swarm.errors import ProtocolError, Unreachable
from lightning_swarm.network import PeerId
from lightning_swarm.network.exchange import Channel
from lightning_swarm.network.framing import Buffer
from lightning_swarm.network.hivemind._engine import P2P, Multiaddr, PeerID, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from lightning_swarm.network.hivemind.inbox import Inbox

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
