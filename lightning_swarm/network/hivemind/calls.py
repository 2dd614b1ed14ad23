"""Calls between peers. All calls to one peer share a persistent stream, and are answered in any order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, ProtocolError, SwarmError, Unreachable
from lightning_swarm.core.tasks import cancel_and_wait
from lightning_swarm.network import PeerId, framing
from lightning_swarm.network.admission import StreamSlot
from lightning_swarm.network.framing import FixedHeader, Kind
from lightning_swarm.network.hivemind.streams import Stream
from lightning_swarm.network.repeats import first_id_of
from lightning_swarm.network.rpc import STALL_TIMEOUT_S, Channel

MAX_CALLS: Final = 4096
"""Most calls of one stream that are answered at once; further calls get `Busy`. A trainer may wait for as many results
as a server holds calls (`Limits.max_pending_calls`), and send other requests meanwhile."""

_IDLE_S: Final = 30.0  # idle time after which the caller closes a stream; less than `_PATIENCE_S` of the other side
_PATIENCE_S: Final = 60.0  # idle time after which the answering peer closes a stream
_CALLS_PER_TURN: Final = 32  # calls read before other tasks of the loop run
_MAX_OPENING: Final = 32  # the daemon fails when very many streams are opened at once
# Time limit for opening a stream. It exceeds the time that a peer may be silent, but not the daemon's own timeout of a
# minute, during which dead peers would keep this peer from opening streams to others.
_OPENING_S: Final = 15.0
_READ_BYTES: Final = 1 << 18
_MAX_UNSENT_BYTES: Final = 16 << 20  # most unsent bytes for a peer; with more, its stream is closed

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


# libp2p's own unary calls cost the daemon two to three times the work, and open a stream for each call.
@dataclass(eq=False)
class OutgoingCalls:
    """Sends calls to other peers, over one stream to each."""

    _open_stream: Callable[[PeerId], Awaitable[Stream]]
    _spawn: Spawn  # runs a task while the transport is open
    _patience_s: Callable[[PeerId], float]  # seconds that a peer may be silent while calls wait
    _openings: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_OPENING))
    # peer -> the task that opens the stream, or has opened it
    _streams: dict[PeerId, asyncio.Task[_PeerStream]] = field(default_factory=dict)

    async def exchange(self, peer: PeerId, request: bytes) -> tuple[FixedHeader, bytes]:
        """Carry an encoded call to `peer`, and its encoded answer with its header back, or raise `Unreachable`."""
        opening = self._streams.get(peer)
        if opening is None or _has_ended(opening):
            opening = self._streams[peer] = self._spawn(self._open(peer))
            opening.add_done_callback(lambda _: self._forget_ended(peer))
        if not opening.done():
            # Awaiting the task itself would cancel it with this call, but other calls may need the same stream.
            await asyncio.wait({opening})
        if opening.cancelled():
            raise Unreachable(f"The transport was closed before a stream to {peer} was open.")
        if isinstance(error := opening.exception(), Unreachable):
            raise Unreachable(str(error)) from error
        return await opening.result().exchange(request)

    def hang_up(self, peer: PeerId) -> None:
        """Close the stream to a peer, if there is one."""
        opening = self._streams.get(peer)
        # `opening.cancel()` returns False if the stream is already open.
        if opening is not None and not opening.cancel() and not _has_ended(opening):
            opening.result().close()

    async def _open(self, peer: PeerId) -> _PeerStream:
        async with self._openings:
            try:
                async with asyncio.timeout(_OPENING_S):
                    stream = await self._open_stream(peer)
            except TimeoutError as error:
                raise Unreachable(f"Cannot open a stream to {peer} within {_OPENING_S:g} s.") from error
        opened = _PeerStream(peer, stream, self._patience_s)
        self._spawn(opened.read()).add_done_callback(lambda _: self._forget_ended(peer))
        return opened

    def _forget_ended(self, peer: PeerId) -> None:
        opening = self._streams.get(peer)
        if opening is not None and _has_ended(opening):
            del self._streams[peer]


def _has_ended(opening: asyncio.Task[_PeerStream]) -> bool:
    if not opening.done():
        return False
    # `exception()` also marks a failure as retrieved, because no call may be waiting for it any more.
    return opening.cancelled() or opening.exception() is not None or opening.result().ended


class _PeerStream:
    """The stream to one peer, and the calls that wait for answers on it."""

    def __init__(self, peer: PeerId, stream: Stream, patience_s: Callable[[PeerId], float]) -> None:
        self._peer = peer
        self._stream = stream
        stream.gather_writes()
        self._patience_s = patience_s
        self._silent_since_s: float | None = None  # time of the first call since the last answer; None: no call waits
        self._answers: dict[int, asyncio.Future[tuple[FixedHeader, bytes]]] = {}
        self._used_s = now_s()  # time when the newest call ended
        self._closed = False

    @property
    def ended(self) -> bool:
        """Return whether the stream broke, or was idle for so long that the other side may close it."""
        return self._closed or self._stream.ended or (not self._answers and now_s() - self._used_s > _IDLE_S)

    def close(self) -> None:
        self._stream.close()

    async def exchange(self, request: bytes) -> tuple[FixedHeader, bytes]:
        exchange_id = framing.exchange_id_of(request)
        answer: asyncio.Future[tuple[FixedHeader, bytes]] = asyncio.get_running_loop().create_future()
        self._answers[exchange_id] = answer
        try:
            # Sending is not awaited: other calls may keep the stream full, and the answer proves that it was sent.
            self._stream.write_soon(request)
            self._silent_since_s = now_s() if self._silent_since_s is None else self._silent_since_s
            return await answer
        except OSError as error:
            raise Unreachable(f"The connection to {self._peer} broke: {error}.") from error
        except asyncio.CancelledError:
            self._cancel(exchange_id)
            raise
        finally:
            del self._answers[exchange_id]
            self._used_s = now_s()

    def _cancel(self, exchange_id: int) -> None:
        """Notify the peer that a call is cancelled. Close the stream if the peer is silent, or does not read."""
        with suppress(OSError):
            self._stream.write_soon(framing.encode_cancel(exchange_id))
        since_s = self._silent_since_s
        is_silent = since_s is not None and now_s() - since_s >= self._patience_s(self._peer)
        # The connection may be dead without an error, and the peer may be reachable by a new connection.
        if is_silent or self._stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
            self._stream.close()

    async def read(self) -> None:
        """Deliver answers to their calls until the stream ends, or has been idle for too long."""
        problem, incoming = "it hung up", _IncomingMessages(self._stream.channel)
        try:
            while True:
                try:
                    head, data = await incoming.next(_IDLE_S)
                except TimeoutError:
                    if incoming.is_partial:
                        raise
                    if self.ended:
                        return
                    continue
                self._silent_since_s = None
                answer = self._answers.get(head.exchange_id)
                if answer is not None and not answer.done():  # else the call was cancelled
                    answer.set_result((head, data))
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


class _IncomingMessages:
    """Splits a stream into whole messages. Reads as much as possible at once, because each read costs a timer."""

    def __init__(self, channel: Channel, refuse: Callable[[FixedHeader], bool] = lambda _: False) -> None:
        self._channel = channel
        self._refuse = refuse  # returns whether to drop a message unread
        self._num_dropping = 0  # bytes of a refused message that are still to come
        self._data = bytearray()
        self._head: FixedHeader | None = None  # header of the message at the start of `_data`, once it has come

    @property
    def is_partial(self) -> bool:
        """Return whether a part of a message has come."""
        return bool(self._data or self._num_dropping)

    async def next(self, idle_timeout: float) -> tuple[FixedHeader, bytes]:
        """Read the next message; `TimeoutError` if none begins for `idle_timeout` seconds, or one stops half way."""
        # A refused message is returned as its header alone, before the rest has come.
        while (message := self._split()) is None:
            async with asyncio.timeout(STALL_TIMEOUT_S if self.is_partial else idle_timeout):
                data = await self._channel.read(_READ_BYTES)
            if not data:
                raise EOFError
            self._data += data
        return message

    def _split(self) -> tuple[FixedHeader, bytes] | None:
        """Split the first message off the received bytes, if it is complete."""
        if self._num_dropping:
            num_dropped = min(self._num_dropping, len(self._data))
            del self._data[:num_dropped]
            self._num_dropping -= num_dropped
        if self._head is None and len(self._data) >= framing.HEADER_BYTES:
            self._head = framing.parse_small(self._data)
            if self._refuse(self._head):
                head, self._head = self._head, None
                self._num_dropping = head.num_bytes
                return head, b""
        if self._head is None or len(self._data) < self._head.num_bytes:
            return None
        head, self._head = self._head, None
        message = bytes(self._data[: head.num_bytes])
        del self._data[: head.num_bytes]
        return head, message


@dataclass(eq=False)
class IncomingCalls:
    """Answers the calls of one stream, each in a task of its own."""

    _stream: Stream
    _serve: Callable[[bytes, FixedHeader], Awaitable[bytes]]  # returns the encoded answer to an encoded call
    _spawn: Spawn
    _slot: StreamSlot  # counts the requests under way
    _check: Callable[[int], None] | None = None  # raises if a call of this many bytes must be refused unread
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)  # exchange id -> its task

    async def answer(self) -> None:
        """Answer calls, all at once, until the stream ends or breaks the protocol."""
        incoming = _IncomingMessages(self._stream.channel, self._refuse)
        self._stream.gather_writes()
        try:
            for number in itertools.count(1):
                if number % _CALLS_PER_TURN == 0:  # thousands of calls at once must not block other tasks
                    await asyncio.sleep(0)
                try:
                    head, request = await incoming.next(_PATIENCE_S)
                except TimeoutError:
                    if self._tasks and not incoming.is_partial:  # the caller waits for answers
                        continue
                    return
                if request:  # empty: the call was refused unread, and is answered already
                    await self._accept(head, request)
        except (OSError, EOFError, ProtocolError):
            return
        finally:
            self._stream.close()
            await cancel_and_wait(list(self._tasks.values()))  # cancels the handlers, because the caller hung up

    def _refuse(self, head: FixedHeader) -> bool:
        """Return whether `_check` refuses a call unread; then the error is sent as its answer."""
        if self._check is None:
            return False
        try:
            self._check(head.num_bytes)
        except SwarmError as error:
            self._stream.write_soon(b"".join(framing.encode_error(head.exchange_id, error)))
            if self._stream.is_full:  # the caller does not read its answers
                self._stream.close()
            return True
        return False

    async def _accept(self, head: FixedHeader, request: bytes) -> None:
        """Start answering a call, or cancel a call in progress."""
        exchange_id = head.exchange_id
        if head.kind is Kind.CANCEL:
            if exchange_id in self._tasks:
                self._tasks[exchange_id].cancel()
        elif exchange_id != first_id_of(exchange_id) and first_id_of(exchange_id) in self._tasks:
            return  # a repeat of a call in progress on this stream, whose answer suffices
        elif exchange_id in self._tasks:
            raise ProtocolError(f"call {exchange_id} came twice")
        elif len(self._tasks) >= MAX_CALLS:  # waiting here would delay cancellations
            busy = Busy(f"at most {MAX_CALLS} calls of one peer are answered at once, and all of these are in use")
            await self._send(b"".join(framing.encode_error(exchange_id, busy)))
        else:
            self._tasks[exchange_id] = task = self._spawn(self._answer(head, request))
            self._slot.begin()
            task.add_done_callback(lambda _: self._end(exchange_id))

    def _end(self, exchange_id: int) -> None:
        del self._tasks[exchange_id]
        self._slot.end()

    async def _answer(self, head: FixedHeader, request: bytes) -> None:
        await self._send(await self._serve(request, head))

    async def _send(self, data: bytes) -> None:
        try:
            self._stream.write_soon(data)
            if self._stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
                raise ConnectionResetError("the caller does not read its answers")
            if self._stream.is_full:
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await self._stream.drain()
        except OSError:  # the caller hung up, or does not read its answers
            self._stream.close()
