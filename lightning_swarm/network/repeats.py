"""Repeats of requests that get no answer: the caller's side and the answering side, for every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeAlias, TypeVar

from lightning_swarm.core.errors import SwarmError, Unreachable
from lightning_swarm.core.tasks import cancel_and_wait, running_task
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import Head
from lightning_swarm.network.liveness import Exchange
from lightning_swarm.network.rpc import Responder

_T = TypeVar("_T")
_Request: TypeAlias = tuple[PeerId, int, str, bytes]  # caller, exchange id of the first request, method, body
_REPEAT_BITS: Final = 48  # bits of the first request's id; the number of the repeat stands above them


def repeated_id(exchange_id: int, num_repeats: int) -> int:
    """Return the exchange id of a repeat, which contains the id of the first request."""
    return exchange_id | num_repeats << _REPEAT_BITS


def first_id_of(exchange_id: int) -> int:
    """Return the exchange id of the request that a repeat repeats, or of the request itself."""
    return exchange_id & ((1 << _REPEAT_BITS) - 1)


# A peer that answers pings but not a request may compute for long, or may have missed the request. The caller cannot
# tell the two apart, so it sends the request again, and still waits for the answer to the first. The answering peer
# runs the handler once for both. If only the answer was lost, the handler runs again, so it must be safe to repeat.
class RepeatedSend(Generic[_T]):
    """Sends one request, repeats it whenever its `Exchange` calls `send_again`, and returns the first answer."""

    def __init__(
        self,
        exchange: Exchange,
        send: Callable[[int], Coroutine[Any, Any, _T]],  # takes the number of the repeat, 0 for the first request
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._exchange, self._send, self._spawn = exchange, send, spawn
        self._waiting: asyncio.Task[Any] | None = None  # waits for the answer to the first request
        self._has_ended_wait = False  # whether `_waiting` was cancelled, because a repeat was answered
        self._repeats: list[asyncio.Task[None]] = []
        self._answers: list[_T | SwarmError] = []  # answers to repeats

    async def first_answer(self) -> _T:
        """Return the answer that comes first, or raise the error that it carries."""
        self._exchange.send_again = self._send_again
        # Catches its own cancellation, as `asyncio.timeout` does. A timeout object for each request would cost more
        # than the rest of this method, although hardly any request is repeated.
        self._waiting = task = running_task()
        num_cancels = task.cancelling()
        try:
            return await self._send(0)
        except BaseException as error:
            if not self._has_ended_wait:
                raise
            # Other code may have cancelled the task, too.
            if task.uncancel() > num_cancels or not isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(answer := self._answers[0], SwarmError):
                raise answer from None
            return answer
        finally:
            self._exchange.send_again = self._waiting = None
            if self._repeats:
                await cancel_and_wait(self._repeats)

    def _send_again(self) -> None:
        if self._answers:  # a repeat was answered by an error, and the first request still has no answer
            self._end_wait()
        else:
            self._repeats.append(self._spawn(self._repeat(len(self._repeats) + 1)))

    async def _repeat(self, number: int) -> None:
        try:
            self._answers.append(await self._send(number))
        except SwarmError as error:
            self._answers.append(error)
            # The first request may still be answered. For example, tensors that can be fetched only once are in its
            # answer, and the repeat gets an error.
            if self._exchange.is_large or isinstance(error, Unreachable):
                return
        self._end_wait()

    def _end_wait(self) -> None:
        """End the wait for the answer to the first request, unless that answer has come."""
        asyncio.get_running_loop().call_soon(self._cancel_wait)

    def _cancel_wait(self) -> None:
        if self._waiting is not None and not self._has_ended_wait:
            self._has_ended_wait = True
            self._waiting.cancel()


class RunningAnswers:
    """Requests that are being answered. A repeat joins the request that it repeats."""

    def __init__(self) -> None:
        # request -> the future answer for its repeats; None while no repeat has come. The future's result is None if
        # the request is cancelled; then a repeat runs the handler itself.
        self._running: dict[_Request, asyncio.Future[Message | None] | None] = {}

    def joining(self, caller: PeerId, head: Head, respond: Responder) -> Responder:
        """Return a function that answers like `respond`, but runs it once for a request and its repeats."""
        request = caller, first_id_of(head.exchange_id), head.method, head.body

        async def answer_once(message: Message) -> Message:
            while request in self._running:
                shared = self._running[request]
                if shared is None:
                    shared = self._running[request] = asyncio.get_running_loop().create_future()
                shared_answer = await asyncio.shield(shared)
                if shared_answer is not None:
                    return shared_answer
            self._running[request] = None
            answer: Message | None = None
            try:
                answer = await respond(message)
                return answer
            except SwarmError as error:
                if (shared := self._running[request]) is not None:
                    shared.set_exception(error)
                    shared.exception()  # marks the error as retrieved, because the repeat may be gone
                raise
            finally:
                shared = self._running.pop(request)
                if shared is not None and not shared.done():
                    shared.set_result(answer)

        return answer_once
