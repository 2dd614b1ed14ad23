"""`HivemindTransport`: calls and tensors with our framing over raw streams of libp2p, or past it within a machine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from typing_extensions import override

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, DeadlineExceeded, ProtocolError, Unreachable
from lightning_swarm.core.tasks import ended, gather
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import (
    HEADER_BYTES,
    Fixed,
    Kind,
    encode_cancel,
    encode_error,
    exchange_id_of,
    parse_small,
)
from lightning_swarm.network.hivemind._engine import P2P, StreamInfo
from lightning_swarm.network.hivemind.daemon import exited, steady
from lightning_swarm.network.hivemind.local_streams import INTRODUCE, LocalPeers
from lightning_swarm.network.hivemind.streams import Daemon, Stream, StreamPool
from lightning_swarm.network.rpc import STALL_TIMEOUT_S, Channel, ask, serve
from lightning_swarm.network.transport import BaseTransport

MAX_CALLS: Final = 4096
"""Most calls of one stream that are answered at once. Who sends more is told that this peer is busy. A trainer may wait
for as many results as a server holds calls (`Limits.max_pending_calls`), and ask for other things beside."""

_IDLE_S: Final = 30.0  # until a stream without calls is closed; less than the other side's patience
_PATIENCE_S: Final = 60.0
_MAX_OPENING: Final = 32  # the daemon fails when very many streams are opened at once
_OPENING_S: Final = 15.0  # longer than a peer may be silent; the daemon's own minute would keep others waiting for room
_READ_BYTES: Final = 1 << 18
_MAX_UNSENT_BYTES: Final = 8 << 20  # left by calls that were given up, for a peer that does not read

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


# All calls to one peer share a stream that stays open, and are answered in any order. libp2p's own unary calls cost the
# daemon two to three times the work, and open a stream each time.
class OutgoingCalls:
    """Calls to other peers.

    Args:
        open_stream: Opens a stream to a peer.
        spawn: Runs a task for as long as the transport is open.
        patience_s: How long a peer may be silent.
    """

    def __init__(
        self,
        open_stream: Callable[[PeerId], Awaitable[Stream]],
        spawn: Spawn,
        patience_s: Callable[[PeerId], float],
    ) -> None:
        self._open_stream = open_stream
        self._spawn = spawn
        self._patience_s = patience_s
        self._room = asyncio.Semaphore(_MAX_OPENING)
        self._lines: dict[PeerId, asyncio.Task[_PeerStream]] = {}

    async def exchange(self, peer: PeerId, request: bytes) -> bytes:
        """Carry an encoded call to `peer` and its encoded answer back.

        Raises:
            Unreachable: There is no way to the peer, or it broke.
        """
        opening = self._lines.get(peer)
        if opening is None or _has_ended(opening):
            opening = self._lines[peer] = self._spawn(self._open(peer))
            opening.add_done_callback(partial(self._forget_failed, peer))
        if not opening.done():
            # Others may wait for the same stream, and it is of use to the next call, too.
            await asyncio.wait({opening})
        if opening.cancelled():
            raise Unreachable(f"The transport was closed before a stream to {peer} was open.")
        if isinstance(error := opening.exception(), Unreachable):
            raise Unreachable(str(error)) from error
        return await opening.result().exchange(request)

    async def _open(self, peer: PeerId) -> _PeerStream:
        async with self._room:
            try:
                async with asyncio.timeout(_OPENING_S):
                    stream = await self._open_stream(peer)
            except TimeoutError as error:
                raise Unreachable(f"Cannot open a stream to {peer} within {_OPENING_S:g} s.") from error
        line = _PeerStream(peer, stream, self._patience_s)
        self._spawn(line.read()).add_done_callback(lambda _: self._forget_ended(peer))
        return line

    def _forget_failed(self, peer: PeerId, opening: asyncio.Task[_PeerStream]) -> None:
        # To look at its exception is to have seen it: perhaps nobody waits any more.
        if (opening.cancelled() or opening.exception() is not None) and self._lines.get(peer) is opening:
            del self._lines[peer]

    def _forget_ended(self, peer: PeerId) -> None:
        opening = self._lines.get(peer)
        if opening is not None and _has_ended(opening):
            del self._lines[peer]


def _has_ended(opening: asyncio.Task[_PeerStream]) -> bool:
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or opening.result().ended


class _PeerStream:
    """The stream to one peer, and who waits for answers."""

    def __init__(self, peer: PeerId, stream: Stream, patience_s: Callable[[PeerId], float]) -> None:
        self._peer = peer
        self._stream = stream
        stream.gather_writes()
        self._patience_s = patience_s
        self._unheard_s: float | None = None  # since when nothing came, of what was asked
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._used_s = now_s()
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether it is of no more use: it broke, or the other side may have lost its patience."""
        return self._closed or self._stream.ended or (not self._answers and now_s() - self._used_s > _IDLE_S)

    async def exchange(self, request: bytes) -> bytes:
        exchange_id = exchange_id_of(request)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[exchange_id] = answer
        try:
            # It does not wait until the request is sent: others may keep the stream full, and the answer says it, too.
            self._stream.write_soon(request)
            self._unheard_s = now_s() if self._unheard_s is None else self._unheard_s
            return await answer
        except OSError as error:
            raise Unreachable(f"The connection to {self._peer} broke: {error}.") from error
        except asyncio.CancelledError:
            self._take_back(exchange_id)
            raise
        finally:
            del self._answers[exchange_id]
            self._used_s = now_s()

    def _take_back(self, exchange_id: int) -> None:
        with suppress(OSError):
            self._stream.write_soon(encode_cancel(exchange_id))
        silent = self._unheard_s is not None and now_s() - self._unheard_s >= self._patience_s(self._peer)
        # A peer that was cut off without a word may have come back by another connection.
        if silent or self._stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
            self._stream.close()

    async def read(self) -> None:
        """Hand out answers until the stream ends, or nobody has used it for long."""
        problem, incoming = "it hung up", _Incoming(self._stream.channel)
        try:
            while True:
                try:
                    head, data = await incoming.next(_IDLE_S)
                except TimeoutError:
                    if incoming.half_way:
                        raise
                    if self.ended:
                        return
                    continue
                self._unheard_s = None
                answer = self._answers.get(head.exchange_id)
                if answer is not None and not answer.done():  # else nobody waits for it any more
                    answer.set_result(data)
        except TimeoutError:
            problem = f"an answer stopped half way for {STALL_TIMEOUT_S:g} s"
        except (OSError, EOFError, ProtocolError) as error:
            problem = str(error) or problem
        finally:
            self._closed = True
            self._stream.close()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(Unreachable(f"The connection to {self._peer} broke: {problem}."))


class _Incoming:
    """Whole messages off a stream. What comes in one piece is taken in one: each step apart would cost a timer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._data = bytearray()
        self._head: Fixed | None = None  # of the message that `_data` begins with, once it is known

    @property
    def half_way(self) -> bool:
        """Whether a message has come in part."""
        return bool(self._data)

    async def next(self, idle_timeout: float) -> tuple[Fixed, bytes]:
        """The next message.

        Raises:
            TimeoutError: None has begun for so many seconds, or nothing more of it came.
            ProtocolError: It is none, or too long.
            EOFError: The stream has ended. Or an `OSError`.
        """
        while (message := self._split()) is None:
            async with asyncio.timeout(STALL_TIMEOUT_S if self.half_way else idle_timeout):
                data = await self._channel.read(_READ_BYTES)
            if not data:
                raise EOFError
            self._data += data
        return message

    def _split(self) -> tuple[Fixed, bytes] | None:
        """Take a message off what has come, if it is all there."""
        if self._head is None and len(self._data) >= HEADER_BYTES:
            self._head = parse_small(self._data)
        if self._head is None or len(self._data) < self._head.num_bytes:
            return None
        head, self._head = self._head, None
        message = bytes(self._data[: head.num_bytes])
        del self._data[: head.num_bytes]
        return head, message


async def answer_calls(stream: Stream, serve: Callable[[bytes], Awaitable[bytes]], spawn: Spawn) -> None:
    """Answer the calls that come over a stream, each as soon as it can be, until the stream ends or misbehaves.

    A handler whose caller gave up, or hung up, is cancelled.

    Args:
        stream: Where they come from.
        serve: Makes the encoded answer to an encoded call.
        spawn: Runs a task for as long as the transport is open.
    """
    incoming = _Incoming(stream.channel)
    answers = _Answers(stream, serve, spawn)
    stream.gather_writes()
    try:
        while True:
            try:
                head, request = await incoming.next(_PATIENCE_S)
            except TimeoutError:
                if answers.under_way and not incoming.half_way:
                    continue
                return
            await answers.accept(head, request)
    except (OSError, EOFError, ProtocolError):
        return
    finally:
        stream.close()
        await ended(list(answers.under_way.values()))


class _Answers:
    """What is answered over a stream. The tasks, by their exchanges, are those that are under way."""

    def __init__(self, stream: Stream, serve: Callable[[bytes], Awaitable[bytes]], spawn: Spawn) -> None:
        self._stream = stream
        self._serve = serve
        self._spawn = spawn
        self.under_way: dict[int, asyncio.Task[None]] = {}

    async def accept(self, head: Fixed, request: bytes) -> None:
        """A call came, or one is taken back."""
        exchange_id = head.exchange_id
        if head.kind is Kind.CANCEL:
            if exchange_id in self.under_way:
                self.under_way[exchange_id].cancel()
        elif exchange_id in self.under_way:
            raise ProtocolError(f"call {exchange_id} came twice")
        elif len(self.under_way) >= MAX_CALLS:  # to wait here would be to hear of no call that is taken back
            busy = Busy(f"{MAX_CALLS} calls of one peer are answered at once, and so many are under way")
            await self._send(b"".join(encode_error(exchange_id, busy)))
        else:
            self.under_way[exchange_id] = task = self._spawn(self._answer(request))
            task.add_done_callback(lambda _: self.under_way.pop(exchange_id))

    async def _answer(self, request: bytes) -> None:
        await self._send(await self._serve(request))

    async def _send(self, data: bytes) -> None:
        try:
            self._stream.write_soon(data)
            if self._stream.is_full:
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await self._stream.drain()
        except OSError:  # the caller hung up, or does not read its answers
            self._stream.close()


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
        self._calls = OutgoingCalls(partial(self._open_stream, protocol=_CALL), self._spawn, self._liveness.patience_s)
        self._neighbours = self._with_neighbours(silence_s) if neighbours else None
        self._watch: asyncio.Task[None] | None = None

    def _with_neighbours(self, silence_s: float) -> LocalPeers:
        # Half the time that a peer may be silent: the daemon shall have its turn.
        return LocalPeers(self._peer_id, self._introduced, self._attend, greeting_s=silence_s / 2)

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
        return await self._calls.exchange(peer, request)

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
