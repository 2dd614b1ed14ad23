"""Connections of the HTTP endpoint: each must make progress, and no address can occupy all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_REQUEST_S: Final = 10.0  # seconds within which a request's headers must arrive
_READ_S, _READ_BYTES = 30.0, 16 << 10  # a client must read `_READ_BYTES` of its answer within `_READ_S`


class Connection(H11Protocol):
    """uvicorn's protocol, which also closes a connection whose client sends no request, or does not read its answer.

    It extends the h11 protocol, because uvicorn's other protocol does not limit the bytes of a request's headers.
    """

    _since_s = 0.0  # time since which the client must send a request
    _request_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def _make_room(self) -> None:
        """Close a connection that waits for its client: of the address with most such connections, the oldest."""
        others = [other for other in self.connections if other is not self and isinstance(other, Connection)]
        waiting = [other for other in others if other.waits_for_client and not other.transport.is_closing()]
        num_waiting = Counter(other.address for other in waiting)
        if waiting:
            max(waiting, key=lambda other: (num_waiting[other.address], -other._since_s)).transport.abort()

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
        self._expect_request()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_timer is not None:
            self._reading_timer.cancel()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._request_timer, self._reading_timer):
            if timer is not None:
                timer.cancel()

    def _expect_request(self) -> None:
        """Start the time within which the client must send its next request."""
        if self._request_timer is not None:
            self._request_timer.cancel()
        self._since_s = self.loop.time()
        self._request_timer = self.loop.call_later(_REQUEST_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._is_idle:
            return
        if self.transport.get_write_buffer_size():
            self._watch_reading()  # its last answer was not read yet
        else:
            self.transport.abort()

    def _watch_reading(self) -> None:
        """Start the time within which the client must read a part of its answer."""
        if self._reading_timer is not None:
            self._reading_timer.cancel()
        unread = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(_READ_S, self._close_unless_read, unread)

    def _close_unless_read(self, unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if not left:
            self._expect_request()
        elif left > unread - _READ_BYTES:
            self.transport.abort()  # unlike `close`, which would wait for the client
        else:
            self._watch_reading()
