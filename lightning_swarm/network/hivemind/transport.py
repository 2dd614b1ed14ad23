"""`HivemindTransport`: calls and tensors over raw streams of libp2p, with our framing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from lightning_swarm.errors import DeadlineExceeded, ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.base import BaseTransport
from lightning_swarm.network.exchange import ask, serve
from lightning_swarm.network.framing import Kind
from lightning_swarm.network.hivemind._engine import P2P, StreamInfo
from lightning_swarm.network.hivemind._pending import steady
from lightning_swarm.network.hivemind._process import exited
from lightning_swarm.network.hivemind.calls import Calls, answer_calls
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
    """

    def __init__(self, p2p: P2P, *, silence_s: float) -> None:
        super().__init__(PeerId(p2p.peer_id.to_base58()), silence_s=silence_s)
        self._p2p = p2p
        self._daemon = Daemon(p2p)
        self._pool = StreamPool(partial(self._daemon.open_stream, protocol=_STREAM))
        open_stream = partial(self._daemon.open_stream, protocol=_CALL)
        self._calls = Calls(open_stream, self._spawn, self._liveness.patience_s)
        self._watch: asyncio.Task[None] | None = None

    @property
    def daemon_pid(self) -> int:
        """The process that does the talking. Without it this peer is dead to others."""
        return int(self._p2p._child.pid)

    async def open(self) -> None:
        """Begin to serve. All methods share two of libp2p's protocols, so they may be registered at any time."""
        self._watch = asyncio.create_task(self._watch_daemon(steady(self._p2p)))
        await self._p2p.add_binary_stream_handler(_CALL, self._on_calls)
        await self._p2p.add_binary_stream_handler(_STREAM, self._on_stream)

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
        self._pool.close()
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

    async def _send_call(self, peer: PeerId, method: str, request: bytes) -> bytes:
        return await self._calls.ask(peer, request)

    async def _on_calls(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = PeerId(info.peer_id.to_base58())
        await self._attend(
            reader, writer, lambda stream: answer_calls(stream, partial(self._serve_call, caller), self._spawn)
        )

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

    async def _on_stream(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = PeerId(info.peer_id.to_base58())
        find, count = partial(self._find, caller), partial(self._count_served, caller)
        await self._attend(
            reader, writer, lambda stream: serve(stream.channel, find, count, idle_timeout=_IDLE_TIMEOUT_S)
        )

    async def _attend(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[[Stream], Coroutine[Any, Any, None]],
    ) -> None:
        """Answer what comes over a stream that another peer opened."""
        stream = Stream(reader, writer)
        try:
            if not self._closed:
                with self._owning():
                    await answer(stream)
        except asyncio.CancelledError:
            # asyncio's stream server logs the cancellation of what it started as a failure of its own.
            if not self._closed:
                raise
        finally:
            stream.close()
