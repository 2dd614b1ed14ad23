"""The read end of a stream, on a real socket and both kinds of loop."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

inbox = pytest.importorskip("lightning_swarm.network.hivemind.streams")
streams = pytest.importorskip("lightning_swarm.network.hivemind.streams")

LOOPS = ["asyncio", "uvloop"]
SMALL = inbox._STAGING_BYTES // 2
"""Most bytes that are read without separate memory."""


def run(kind: str, go: Callable[[], Coroutine[Any, Any, None]]) -> None:
    factory = asyncio.new_event_loop if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def main() -> None:
        async with asyncio.timeout(60.0):
            await go()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Any, socket.socket]]:
    """A stream, and the bare socket at its other end."""
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)
    stream = streams.Stream(*await asyncio.open_connection(sock=mine))
    try:
        yield stream, theirs
    finally:
        stream.close()
        theirs.close()


async def sent(theirs: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(theirs, data)


async def fill(channel: Any, n: int) -> None:
    await channel.fill(memoryview(bytearray(n)), lambda _: None)


def seen_by(pieces: list[bytes]) -> Callable[[memoryview], None]:
    return lambda piece: pieces.append(bytes(piece))


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_come_in_order_however_they_are_read(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(3_000_000)

    async def read(stream: Any, left: int) -> bytes:
        n = min(left, rng.choice([1, 36, 1000, SMALL, SMALL + 1, 300_000]))
        how = rng.choice(["read", "readexactly", "fill"])
        if how == "read":
            return bytes(await stream.channel.read(n))
        if how == "readexactly":
            return bytes(await stream.channel.readexactly(n))
        buffer, pieces = bytearray(n), list[bytes]()
        await stream.channel.fill(memoryview(buffer), seen_by(pieces))
        assert b"".join(pieces) == buffer
        return bytes(buffer)

    async def go() -> None:
        async with connected() as (stream, theirs), asyncio.TaskGroup() as group:
            group.create_task(sent(theirs, data))
            got = b""
            while len(got) < len(data):
                got += await read(stream, len(data) - len(got))
                if rng.random() < 0.1:
                    await asyncio.sleep(0)  # the loop reads from the socket without a waiting reader
            assert got == data
            assert stream.channel.take_counts() == (0, len(data))

    run(kind, go)


@pytest.mark.parametrize("kind", LOOPS)
def test_what_is_awaited_goes_straight_into_its_memory(kind: str) -> None:
    async def go() -> None:
        async with connected() as (stream, theirs):
            target = bytearray(10)
            filling = asyncio.create_task(stream.channel.fill(memoryview(target), lambda _: None))
            await asyncio.sleep(0)
            assert stream._inbox.get_buffer(-1).obj is target
            await sent(theirs, b"0123456789rest")
            await filling
            assert target == b"0123456789"
            assert await stream.channel.readexactly(4) == b"rest"

    run(kind, go)


@pytest.mark.parametrize("kind", LOOPS)
def test_what_nobody_reads_does_not_fill_the_memory(kind: str) -> None:
    data = bytes(range(256)) * 20_000

    async def go() -> None:
        async with connected() as (stream, theirs), asyncio.TaskGroup() as group:
            sending = group.create_task(sent(theirs, data))
            while not stream._inbox._full:  # noqa: ASYNC110 - the socket sets no event
                await asyncio.sleep(0)
            assert not sending.done()
            assert await stream.channel.readexactly(len(data)) == data

    run(kind, go)


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("wanted", [10, SMALL + 1], ids=["small", "large"])
@pytest.mark.parametrize("how", ["readexactly", "fill"])
def test_an_end_that_comes_too_early_is_one(kind: str, wanted: int, how: str) -> None:
    async def go() -> None:
        async with connected() as (stream, theirs):
            await sent(theirs, b"short")
            theirs.close()
            channel = stream.channel
            reading = channel.readexactly(wanted) if how == "readexactly" else fill(channel, wanted)
            with pytest.raises(asyncio.IncompleteReadError):
                await reading
            assert await stream.channel.read(1) == b""
            assert stream.ended

    run(kind, go)


@pytest.mark.parametrize("kind", LOOPS)
def test_what_came_before_the_end_can_be_read(kind: str) -> None:
    async def go() -> None:
        async with connected() as (stream, theirs):
            await sent(theirs, b"all")
            theirs.close()
            assert await stream.channel.readexactly(3) == b"all"
            with pytest.raises(asyncio.IncompleteReadError) as caught:
                await stream.channel.readexactly(1)
            assert caught.value.partial == b"", "it ended between two messages"

    run(kind, go)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_cancelled_read_of_a_few_bytes_has_read_nothing(kind: str) -> None:
    async def go() -> None:
        async with connected() as (stream, theirs):
            await sent(theirs, b"abc")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.0):
                    await stream.channel.readexactly(6)
            await sent(theirs, b"def")
            assert await stream.channel.readexactly(6) == b"abcdef"

    run(kind, go)


@pytest.mark.parametrize("kind", LOOPS)
def test_what_had_arrived_before_is_not_lost(kind: str) -> None:
    """The daemon's answer and the first bytes of the stream may arrive at once."""

    async def go() -> None:
        mine, theirs = socket.socketpair()
        theirs.sendall(b"answer" + b"stream" * 20_000)
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=mine)
        assert await reader.readexactly(6) == b"answer"
        stream = streams.Stream(reader, writer)
        assert await stream.channel.readexactly(120_000) == b"stream" * 20_000
        assert await stream.channel.read(1) == b""
        stream.close()

    run(kind, go)
