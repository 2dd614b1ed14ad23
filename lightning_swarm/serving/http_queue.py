"""The places of texts at the HTTP endpoint, and the fair, bounded queue of requests that wait for them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from lightning_swarm.serving.http_fields import MAX_TEXTS, RequestError

_SHORT_TOKENS: Final = 512  # maximum new tokens of a short text


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Limits on texts and on requests that wait.

    Args:
        texts: The maximum number of texts in progress.
        waiting: The maximum number of waiting requests. 0: no request waits.
        wait_s: The longest wait, in seconds.
    """

    texts: int = 64
    waiting: int = 256
    wait_s: float = 60.0

    @property
    def max_share(self) -> int:
        """Places that all long texts together may take, and likewise the texts of one client: three quarters of all."""
        return max(1, self.texts - self.texts // 4)


DEFAULT_LIMITS: Final = QueueLimits()


class TextQueue:
    """Admits requests, each client in turn. A client's long and short requests wait in separate lines."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        # (client, is long) -> its waiting requests; the next line in turn is first
        self._lines: dict[tuple[str, bool], deque[QueuedRequest]] = {}
        self._waiting = Counter[str]()  # client -> waiting requests
        self._running = Counter[str]()  # client -> texts in progress
        self._num_long = 0  # long texts in progress
        self._numbers = itertools.count()

    def enter(self, client: str, num_texts: int, num_tokens: int) -> QueuedRequest:
        """Queue a request for the places of its texts, each of up to `num_tokens` new tokens.

        If the queue is full, it refuses the newest request of the client with most waiting requests.

        Raises:
            RequestError: This request is refused, or has too many texts.
        """
        queued = QueuedRequest(self, next(self._numbers), client, num_texts, is_long=num_tokens > _SHORT_TOKENS)
        max_texts = min(self._max_texts(client), self._limits.max_share if queued.is_long else self._limits.texts)
        if num_texts > max_texts:
            length = "long" if queued.is_long else "short"
            raise RequestError(400, f"a request must have at most {max_texts} {length} texts, got {num_texts}")
        self._lines.setdefault(queued.line, deque()).append(queued)
        self._waiting[client] += 1
        self.admit()
        if self._waiting.total() > self._limits.waiting:
            busiest = max(self._waiting, key=lambda other: (self._waiting[other], other == client))
            lines = (line for (other, _), line in self._lines.items() if other == busiest)
            newest = max((line[-1] for line in lines), key=lambda request: request.number)
            newest.refuse(f"this endpoint is busy, and {self._limits.waiting} requests are waiting already")
        if queued.admitted.done():
            queued.admitted.result()  # raises the error if this request was refused
        else:
            reason = f"no place became free within {self._limits.wait_s:g} s"
            queued.timer = asyncio.get_running_loop().call_later(self._limits.wait_s, queued.refuse, reason)
        return queued

    def admit(self) -> None:
        """Give free places to waiting requests, in turn."""
        while (queued := self._next()) is not None:
            self.remove(queued)
            if (line := self._lines.pop(queued.line, None)) is not None:
                self._lines[queued.line] = line  # as the last line in turn
            self._running[queued.client] += queued.num_texts
            self._num_long += queued.num_texts * queued.is_long
            queued.stop_timer()
            queued.admitted.set_result(None)

    def _next(self) -> QueuedRequest | None:
        """Return the next request that can be admitted now, or None."""
        is_long_blocked = False
        for (client, is_long), (queued, *_) in self._lines.items():
            if (is_long and is_long_blocked) or self._running[client] + queued.num_texts > self._max_texts(client):
                continue
            # Later requests must not overtake, because a request for many places might otherwise wait forever.
            if self._running.total() + queued.num_texts > self._limits.texts:
                return None
            if not is_long or self._num_long + queued.num_texts <= self._limits.max_share:
                return queued
            is_long_blocked = True
        return None

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request from its line."""
        self._lines[queued.line].remove(queued)
        if not self._lines[queued.line]:
            del self._lines[queued.line]
        self._waiting -= Counter([queued.client])

    def release(self, queued: QueuedRequest) -> None:
        """Free one place of an admitted request."""
        self._running -= Counter([queued.client])
        self._num_long -= queued.is_long
        self.admit()

    def _max_texts(self, client: str) -> int:
        # `client` is empty if a request's address is unknown. Then no share applies.
        return min(MAX_TEXTS, self._limits.max_share) if client else self._limits.texts


class QueuedRequest:
    """A request that waits for its places, or has them."""

    def __init__(self, queue: TextQueue, number: int, client: str, num_texts: int, *, is_long: bool) -> None:
        self._queue, self.number, self.client, self.num_texts, self.is_long = queue, number, client, num_texts, is_long
        self.line = client, is_long
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._has_left = False

    async def until_admitted(self) -> None:
        """Wait for the places; raises RequestError if the request is refused."""
        await asyncio.wait([self.admitted])  # unlike `await self.admitted`, does not cancel the future
        self.admitted.result()

    def refuse(self, reason: str) -> None:
        """Refuse a waiting request."""
        self.stop_timer()
        self._queue.remove(self)
        self.admitted.set_exception(RequestError(429, f"{reason}. Try again later"))
        self._queue.admit()

    def leave(self, *, num_begun: int) -> None:
        """Leave the queue, or free the places of texts that have not begun. May be called several times.

        The first `num_begun` texts have begun, and free their own places when they end.
        """
        if not self.admitted.done():
            self.stop_timer()
            self._queue.remove(self)
            self.admitted.cancel()
            self._queue.admit()
        elif not self.admitted.cancelled() and self.admitted.exception() is None and not self._has_left:
            for _ in range(self.num_texts - num_begun):
                self.release()
        self._has_left = True

    def release(self) -> None:
        """Free the place of one text that has ended."""
        self._queue.release(self)

    def stop_timer(self) -> None:
        """Cancel the timer that limits the wait."""
        if self.timer is not None:
            self.timer.cancel()
