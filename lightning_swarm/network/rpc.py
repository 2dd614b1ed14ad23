"""Request and answer over a two-way channel of bytes: both sides, for every transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from lightning_swarm.core.errors import ProtocolError, SwarmError, Unreachable
from lightning_swarm.core.tasks import cancel_and_wait
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.exchanges import OpenAnswers
from lightning_swarm.network.framing import (
    Buffer,
    Head,
    Kind,
    Reader,
    encode,
    encode_error,
    read_control,
    read_fixed_header,
    read_head,
    read_tensors,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

STALL_TIMEOUT_S: Final = 60.0
"""Seconds that a server waits for the next chunk of a request, or for room to write the next chunk of an answer."""

_LINGER_S: Final = 10.0  # longest wait until a refused caller hangs up


class Feed(asyncio.StreamReader):
    """A `Reader` of the bytes that `feed_data` receives."""

    async def fill(self, view: memoryview, on_piece: Callable[[memoryview], None], /) -> None:
        """See `Reader`."""
        while view:
            if not (data := await self.read(len(view))):
                raise asyncio.IncompleteReadError(b"", len(view))
            piece, view = view[: len(data)], view[len(data) :]
            piece[:] = data
            on_piece(piece)


class Channel:
    """A two-way channel of bytes between two peers, which counts them. It breaks with an `OSError` or an `EOFError`."""

    def __init__(self, reader: Reader, write: Callable[[Buffer], Awaitable[None]]) -> None:
        self._reader = reader
        self._write = write  # sends one buffer, and waits for room; then the buffer may change
        self._sent_bytes = 0
        self._received_bytes = 0

    async def readexactly(self, n: int, /) -> bytes:
        """See `Reader`."""
        data = await self._reader.readexactly(n)
        self._received_bytes += n
        return data

    async def read(self, n: int, /) -> bytes:
        """See `Reader`."""
        data = await self._reader.read(n)
        self._received_bytes += len(data)
        return data

    async def fill(self, view: memoryview, on_piece: Callable[[memoryview], None], /) -> None:
        """See `Reader`."""

        def count(piece: memoryview) -> None:
            self._received_bytes += len(piece)
            on_piece(piece)

        await self._reader.fill(view, count)

    async def send(self, buffers: Iterable[Buffer], *, stall_timeout: float | None = None) -> None:
        """Write all buffers, and wait at most `stall_timeout` seconds for each."""
        for buffer in buffers:
            self._sent_bytes += len(buffer)
            async with asyncio.timeout(stall_timeout):
                await self._write(buffer)

    @property
    def num_moved_bytes(self) -> int:
        """Bytes sent and received since `take_counts`."""
        return self._sent_bytes + self._received_bytes

    def take_counts(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        counts = self._sent_bytes, self._received_bytes
        self._sent_bytes = self._received_bytes = 0
        return counts


Responder = Callable[[Message], Awaitable[Message]]
Hold = Callable[[int], AbstractAsyncContextManager[None]]
"""Makes a context that reserves this many bytes for a request: it waits for room, or raises `Busy`."""


def reserve_nothing(_num_bytes: int, /) -> AbstractAsyncContextManager[None]:
    """Return a context that reserves nothing, for requests of any size: there is room for all of them."""
    return nullcontext()


class ServedMethod(NamedTuple):
    """A method that this peer answers."""

    max_bytes: int  # most tensor bytes of a request
    respond: Responder
    hold: Hold = reserve_nothing  # reserves room for the request's tensors until it is answered
    caller: PeerId = PeerId("")
    guard: OpenAnswers | None = None  # ends the handler if the caller loses its permit; None: it needs no permit


class Tap(Protocol):
    """Sees and changes a peer's exchanges, even with itself. Tests use it to inject faults into chosen messages."""

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder, /) -> Responder:
        """Return the function that `peer` runs in place of `respond` to answer a request of `caller`."""
        ...

    def arrived(self, caller: PeerId, peer: PeerId, method: str, request: bytes, answer: bytes, /) -> Awaitable[None]:
        """React to the answer of a call that has come back to `caller`."""
        ...


async def ask(
    channel: Channel, kind: Kind, exchange_id: int, method: str, message: Message, max_bytes: int
) -> tuple[Message, bool]:
    """Send a request; return the answer, and whether the channel may be used again. After an exception it may not."""
    request = encode(kind, exchange_id, method, message)
    # A server may refuse a request that it has not read to its end, so listen while sending.
    async with _in_background(channel.send(request)) as sending:
        try:
            head = await read_head(channel)
            check_answer(head, exchange_id, method)
            head.check_size(max_bytes)
            answer = Message(head.body, await read_tensors(channel, head))
        except (OSError, EOFError) as error:
            problem = str(error) or type(error).__name__
            raise Unreachable(f"The connection broke during `{method}`: {problem}.") from error
        # A server that answers before it has read everything refuses the request: then the channel is unusable.
        return answer, sending.done() and not sending.cancelled() and sending.exception() is None


def check_answer(head: Head, exchange_id: int, method: str) -> None:
    """Raise the error that an answer carries; refuse a message that is no answer to this request."""
    if head.kind is Kind.ERROR and head.exchange_id in (exchange_id, 0):
        raise head.error()
    if head.kind is not Kind.ANSWER or head.exchange_id != exchange_id:
        raise ProtocolError(f"The message received for `{method}` is no answer, or answers another request.")


async def serve(
    channel: Channel,
    find: Callable[[Head], ServedMethod],  # may raise a `SwarmError`, before the tensors are read
    count: Callable[[str, Channel], None],  # is called after each request
    *,
    idle_timeout: float,
    hold: Hold = reserve_nothing,  # reserves room for a request without its tensors
) -> None:
    """Answer the requests that come over a channel, one by one, until it ends or a request is refused unread."""
    while True:
        exchange_id, method = 0, ""
        try:
            async with asyncio.timeout(idle_timeout):
                fixed = await read_fixed_header(channel)
            exchange_id = fixed.exchange_id
            async with hold(fixed.control_bytes):
                async with asyncio.timeout(idle_timeout):
                    head = await read_control(channel, fixed)
                method = head.method
                await _serve_request(channel, head, find)
        except SwarmError as error:
            await _refuse(channel, exchange_id, error)
            return
        except (OSError, EOFError):
            return
        finally:
            count(method, channel)


async def _serve_request(channel: Channel, head: Head, find: Callable[[Head], ServedMethod]) -> None:
    """Read a request's tensors, run its handler, and send the answer."""
    served = find(head)
    head.check_size(served.max_bytes)
    async with served.hold(head.payload_bytes):
        message = Message(head.body, await read_tensors(channel, head, stall_timeout=STALL_TIMEOUT_S))
        work = answer_to(head, served, message)
        async with _in_background(work) as working, _in_background(channel.read(1)) as hangup:
            await asyncio.wait({working, hangup}, return_when=asyncio.FIRST_COMPLETED)
            # A waiting caller sends nothing. If bytes or the end come, it has stopped waiting: cancel the handler.
            if hangup.done():
                raise EOFError("the caller hung up, or no longer waits for its answer")
            answer = working.result()
    await channel.send(answer, stall_timeout=STALL_TIMEOUT_S)


async def answer_to(
    head: Head, served: ServedMethod, message: Message, *, max_bytes: int | None = None
) -> Iterable[Buffer]:
    """Run a handler in this task, and encode its answer, or its error. Answers over `max_bytes` become errors, too."""
    guard = served.guard
    try:
        if guard is None:
            answer = await served.respond(message)
        else:  # written inline, because a coroutine around each request would cost more than the guard
            task = guard.enter(served.caller, head.method)
            try:
                answer = await served.respond(message)
            except asyncio.CancelledError:
                guard.check_cancelled(task, served.caller, head.method)
                raise
            finally:
                guard.leave(task)
            guard.check_before_answer(served.caller, head.method)
        if max_bytes is not None and answer.num_tensor_bytes > max_bytes:
            raise ProtocolError(
                f"The answer to `{head.method}` may have at most {max_bytes} bytes of tensors on the stream of the "
                f"calls, got {answer.num_tensor_bytes}."
            )
        return encode(Kind.ANSWER, head.exchange_id, head.method, answer)
    except SwarmError as error:
        return encode_error(head.exchange_id, error)
    except Exception as error:  # noqa: BLE001
        # A bug in a handler must not take the server down, nor leave the caller waiting.
        _log.exception("The handler of `%s` failed.", head.method)
        return encode_error(head.exchange_id, error)


async def _refuse(channel: Channel, exchange_id: int, error: SwarmError) -> None:
    """Answer a request that has not been read to its end, and wait for the caller to hang up."""
    try:
        async with asyncio.timeout(_LINGER_S):
            await channel.send(encode_error(exchange_id, error))
            # Closing at once, with unread bytes, could destroy the answer on its way.
            while await channel.read(1 << 16):
                pass
    except (OSError, EOFError):
        return


@asynccontextmanager
async def _in_background(coroutine: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Run a coroutine during the block. At the block's end it is cancelled, if necessary, and awaited."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        await cancel_and_wait([task])
