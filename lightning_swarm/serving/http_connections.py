"""The connections of the HTTP endpoint: each must make progress, and no address can hold all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_REQUEST_S: Final = 10.0  # seconds within which a request's headers must arrive
_READ_S, _READ_BYTES = 30.0, 16 << 10  # a client must read so many bytes of its answer within so many seconds


class Connection(H11Protocol):
    """uvicorn's protocol, which also closes a connection whose client sends no request, or does not read its answer.

    It is h11's in every environment, because the other one has no limit on the bytes of a request's headers.
    """

    _since_s = 0.0  # when the client's turn began
    _waiting: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def _make_room(self) -> None:
        """Close a connection that waits for its client: the oldest one of the address with most of them."""
        others = [one for one in self.connections if one is not self and isinstance(one, Connection)]
        waiting = [one for one in others if one.waits_for_client and not one.transport.is_closing()]
        number = Counter(one.address for one in waiting)
        if waiting:
            max(waiting, key=lambda one: (number[one.address], -one._since_s)).transport.abort()

    @property
    def address(self) -> str:
        """The client's address."""
        return self.client[0] if self.client is not None else ""

    @property
    def waits_for_client(self) -> bool:
        """Whether the rest of a request is missing, or the client does not read its answer."""
        return self._is_idle or self.cycle.more_body or self.flow.write_paused

    @property
    def _is_idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._waiting, self._reading):
            if timer is not None:
                timer.cancel()

    def _wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._since_s = self.loop.time()
        self._waiting = self.loop.call_later(_REQUEST_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._is_idle:
            return
        if self.transport.get_write_buffer_size():
            self._watch_reading()  # the client may still read its answer
        else:
            self.transport.abort()

    def _watch_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(_READ_S, self._close_unless_read, self.transport.get_write_buffer_size())

    def _close_unless_read(self, unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if not left:
            self._wait()
        elif left > unread - _READ_BYTES:
            self.transport.abort()  # `close` would wait for the client
        else:
            self._watch_reading()
