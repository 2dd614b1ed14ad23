"""`HivemindTransport`: calls and tensors with our framing over raw streams of libp2p, or past it within a machine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from typing_extensions import override

from lightning_swarm.errors import DeadlineExceeded, ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.base import BaseTransport
from lightning_swarm.network.exchange import ask, serve
from lightning_swarm.network.framing import Kind
from lightning_swarm.network.hivemind._engine import P2P, StreamInfo
from lightning_swarm.network.hivemind._pending import steady
from lightning_swarm.network.hivemind._process import exited
from lightning_swarm.network.hivemind.calls import Calls, answer_calls
from lightning_swarm.network.hivemind.neighbours import INTRODUCE, Neighbours
from lightning_swarm.network.hivemind.streams import Daemon, Stream, StreamPool
from lightning_swarm.tasks import ended, gather

_CALL: Final = "lightning_swarm.call"
_STREAM: Final = "lightning_swarm.stream"
_CONNECT_TIMEOUT_S: Final = 30.0
_SHUTDOWN_TIMEOUT_S: Final = 5.0
# The pool of the other side closes its idle streams earlier, so requests do not meet a closing stream.
_IDLE_TIMEOUT_S: Final = 60.0


class HivemindTransport(BaseTransport):
    """A peer on libp2p. `lightning_swarm.network.hivemind.start` makes it.

    Args:
        p2p: The daemon's client; this transport owns it.
        silence_s: How long another peer may be silent.
        neighbours: Whether peers of this machine are talked to past the daemons.
    """

    def __init__(self, p2p: P2P, *, silence_s: float, neighbours: bool) -> None:
        super().__init__(PeerId(p2p.peer_id.to_base58()), silence_s=silence_s)
        self._p2p = p2p
        self._daemon = Daemon(p2p)
        self._pool = StreamPool(partial(self._open_stream, protocol=_STREAM))
        self._calls = Calls(partial(self._open_stream, protocol=_CALL), self._spawn, self._liveness.patience_s)
        self._neighbours = self._with_neighbours(silence_s) if neighbours else None
        self._watch: asyncio.Task[None] | None = None

    def _with_neighbours(self, silence_s: float) -> Neighbours:
        # Half the time that a peer may be silent: the daemon shall have its turn.
        return Neighbours(self._peer_id, self._introduced, self._attend, greeting_s=silence_s / 2)

    @property
    def daemon_pid(self) -> int:
        """The process that does the talking. Without it this peer is dead to others."""
        return int(self._p2p._child.pid)

    async def open(self) -> None:
        """Begin to serve. All methods share two of libp2p's protocols, so they may be registered at any time."""
        self._watch = asyncio.create_task(self._watch_daemon(steady(self._p2p)))
        for protocol in (_CALL, _STREAM):
            await self._p2p.add_binary_stream_handler(protocol, partial(self._on_stream, protocol))
        if self._neighbours is not None:
            self.handle_call(INTRODUCE, self._neighbours.answer)
            await self._neighbours.listen()

    async def connect(self, addresses: Sequence[str]) -> None:
        """See `Transport`."""
        by_peer: defaultdict[PeerId, list[str]] = defaultdict(list)
        for address in addresses:
            where, found, peer = address.rpartition("/p2p/")
            if not found:
                raise ProtocolError(f"A full address ends in /p2p/<peer id>, got {address!r}.")
            by_peer[PeerId(peer)].append(where)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await gather(self._daemon.connect(peer, where_all) for peer, where_all in by_peer.items())
        except TimeoutError as error:
            raise DeadlineExceeded(f"{', '.join(by_peer)} did not answer within {_CONNECT_TIMEOUT_S:g} s.") from error

    async def addresses(self) -> tuple[str, ...]:
        """See `Transport`."""
        return tuple(map(str, await self._p2p.get_visible_maddrs()))

    async def close(self) -> None:
        """See `Transport`."""
        self._break_off()
        await self._wait_until_served()
        if self._watch is not None:
            await ended([self._watch])
        await self._stop_daemon()

    async def _stop_daemon(self) -> None:
        pid = self.daemon_pid
        self._p2p._terminate()
        try:
            async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
                await exited(pid)
        except TimeoutError:
            # It was asked politely; a stopped process does not hear that.
            with suppress(ProcessLookupError):
                self._p2p._child.kill()
            await exited(pid)

    async def _watch_daemon(self, reading: asyncio.Task[None]) -> None:
        # Without its daemon, or with nobody who reads from it, hivemind's client would wait for answers for ever.
        gone = asyncio.create_task(exited(self.daemon_pid))
        try:
            await asyncio.wait({gone, reading}, return_when=asyncio.FIRST_COMPLETED)
            self._break_off()
        finally:
            await ended([gone])

    @override
    def _break_off(self) -> None:
        super()._break_off()
        self._pool.close()
        if self._neighbours is not None:
            self._neighbours.close()

    async def _open_stream(self, peer: PeerId, protocol: str) -> Stream:
        if self._neighbours is not None and (stream := await self._neighbours.open_stream(peer, protocol)):
            return stream
        return await self._daemon.open_stream(peer, protocol)

    async def _introduced(self, peer: PeerId) -> bytes:
        """Ask a neighbour who it is, over its daemon."""
        stream = await self._daemon.open_stream(peer, _STREAM)
        try:
            answer, _ = await ask(stream.channel, Kind.CALL, next(self._exchange_ids), INTRODUCE, Message(), 0)
        finally:
            self._count(peer, INTRODUCE, stream.channel)
            stream.close()
        return answer.body

    async def _send_call(self, peer: PeerId, method: str, request: bytes) -> bytes:
        return await self._calls.ask(peer, request)

    async def _send_stream(self, peer: PeerId, method: str, message: Message, max_bytes: int) -> Message:
        async with self._pool.lease(peer) as stream:
            try:
                with self._liveness.moving(peer, stream.channel):
                    answer, fit = await ask(
                        stream.channel, Kind.STREAM, next(self._exchange_ids), method, message, max_bytes
                    )
            finally:
                self._count(peer, method, stream.channel)
            if fit and not self._closed:
                self._pool.keep(peer, stream)
            return answer

    async def _on_stream(
        self, protocol: str, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._attend(protocol, PeerId(info.peer_id.to_base58()), reader, writer)

    async def _attend(
        self, protocol: str, caller: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer what comes over a stream that another peer opened."""
        stream = Stream(reader, writer)
        try:
            if not self._closed:
                with self._owning():
                    await self._answer(protocol, caller, stream)
        except asyncio.CancelledError:
            # asyncio's stream server logs the cancellation of what it started as a failure of its own.
            if not self._closed:
                raise
        finally:
            stream.close()

    async def _answer(self, protocol: str, caller: PeerId, stream: Stream) -> None:
        if protocol == _CALL:
            await answer_calls(stream, partial(self._serve_call, caller), self._spawn)
        elif protocol == _STREAM:
            find, count = partial(self._find, caller), partial(self._count_served, caller)
            await serve(stream.channel, find, count, idle_timeout=_IDLE_TIMEOUT_S)
