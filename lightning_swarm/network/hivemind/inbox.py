"""The read end of a stream: bytes go from the socket straight into the memory that they are for.

asyncio's `StreamReader` copies each byte three times on its way there, and wakes its reader for every piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from typing_extensions import override

_STAGING_BYTES: Final = 64 << 10
"""Room for what nobody waits for yet, and for what is small. When it is full, the socket is not read."""


class Inbox(asyncio.BufferedProtocol):
    """A `Reader` of a connected socket, and whether its other direction has room.

    Args:
        transport: The socket. It calls this as its protocol from now on.
        arrived: What had been read from it before.
        ended: Whether that was all.
    """

    def __init__(self, transport: asyncio.Transport, arrived: bytes, *, ended: bool) -> None:
        self._transport = transport
        self._staging = memoryview(bytearray(max(_STAGING_BYTES, 2 * len(arrived))))
        self._start, self._stop = 0, len(arrived)
        self._staging[: self._stop] = arrived
        self._target: memoryview | None = None  # where it goes instead: what is left to fill
        self._seen: Callable[[memoryview], None] = _ignore
        self._ended = ended
        self._problem: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._full = False
        self._room = asyncio.Event()
        self._room.set()
        transport.pause_reading()  # the kind of protocol decides how a socket is read, from when that begins
        transport.set_protocol(self)
        transport.resume_reading()
        # Then `drain` waits until nothing is buffered, and what has been written may change again.
        if not transport.is_closing():  # uvloop would raise what is no OSError
            transport.set_write_buffer_limits(high=0)

    # ------------------------------------------------------------------ for who reads

    def at_eof(self) -> bool:
        """Whether the other side has hung up, and all that it sent was read."""
        return (self._ended or self._problem is not None) and self._start == self._stop

    async def readexactly(self, n: int, /) -> bytes:
        """Exactly `n` bytes, or `asyncio.IncompleteReadError`. Cancelled, it has read nothing if `n` is small."""
        if n > len(self._staging) // 2:
            data = bytearray(n)
            await self.fill(memoryview(data), _ignore)
            return bytes(data)
        while self._stop - self._start < n:
            if self._ended:
                raise asyncio.IncompleteReadError(self._take(self._stop - self._start), n)
            if self._start + n > len(self._staging):
                self._make_room()
            await self._wait()
        self._check()
        return self._take(n)

    async def read(self, n: int, /) -> bytes:
        """At least one and at most `n` bytes; none at the end."""
        while self._stop == self._start and not self._ended:
            await self._wait()
        self._check()
        return self._take(min(n, self._stop - self._start))

    async def fill(self, view: memoryview, seen: Callable[[memoryview], None], /) -> None:
        """Fill all of `view`, and show each piece to `seen` as it comes; or `asyncio.IncompleteReadError`."""
        self._check()
        if num_here := min(len(view), self._stop - self._start):
            view[:num_here] = self._staging[self._start : self._start + num_here]
            self._skip(num_here)
            seen(view[:num_here])
        if num_here == len(view):
            return
        self._target, self._seen = view[num_here:], seen
        try:
            while self._target is not None:
                if self._ended:
                    raise asyncio.IncompleteReadError(b"", len(self._target))
                await self._wait()
        finally:
            self._target, self._seen = None, _ignore

    async def drain(self) -> None:
        """Wait until all that was written to the socket is sent."""
        self._check()
        await self._room.wait()
        if self._problem is not None or self._transport.is_closing():
            raise ConnectionResetError("it is closed") from self._problem

    # ------------------------------------------------------------------ for the socket

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._staging[self._stop :] if self._target is None else self._target

    @override
    def buffer_updated(self, nbytes: int) -> None:
        if self._target is None:
            self._stop += nbytes
            if self._stop == len(self._staging):
                self._full = True
                self._transport.pause_reading()
            self._wake()
            return
        piece, left = self._target[:nbytes], self._target[nbytes:]
        self._target = left if len(left) else None
        self._seen(piece)
        if self._target is None:
            self._wake()

    @override
    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return True  # the other direction stays open

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._problem = self._problem or exc
        self._room.set()
        self._wake()

    @override
    def pause_writing(self) -> None:
        self._room.clear()

    @override
    def resume_writing(self) -> None:
        self._room.set()

    # ------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until something comes that concerns who reads."""
        self._check()
        if self._waiting is not None:
            raise RuntimeError("a stream is read by one at a time")
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None
        self._check()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _take(self, n: int) -> bytes:
        data = bytes(self._staging[self._start : self._start + n])
        self._skip(n)
        return data

    def _skip(self, n: int) -> None:
        self._start += n
        if self._start == self._stop:
            self._start = self._stop = 0
        if self._full:
            self._make_room()

    def _make_room(self) -> None:
        """Move what is here to the front, and read on."""
        num_here = self._stop - self._start
        self._staging[:num_here] = bytes(self._staging[self._start : self._stop])
        self._start, self._stop = 0, num_here
        if self._full and self._stop < len(self._staging):
            self._full = False
            self._transport.resume_reading()


def _ignore(_: memoryview) -> None:
    """Nobody wants to see it."""
