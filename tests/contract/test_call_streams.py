"""Calls that share a stream, if the stream breaks, is idle, or is misused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lightning_swarm.core.errors import Busy, Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import TRAILER_BYTES, Kind, encode, encode_cancel, read_head
from lightning_swarm.network.liveness import alive_among
from tests.contract.world import HivemindWorld

pytest.importorskip("lightning_swarm.network.hivemind")
from lightning_swarm.network.hivemind import calls
from lightning_swarm.network.hivemind.streams import Stream
from lightning_swarm.network.hivemind.transport import _CALL

LONG_S = 60.0


@pytest.fixture(scope="module")
def world() -> Iterator[HivemindWorld]:
    world = HivemindWorld()
    world.open()
    world.b.transport.handle_call("echo", echo)
    world.b.transport.handle_call("never", never)
    yield world
    world.close()


async def echo(caller: PeerId, body: bytes) -> bytes:
    return body


async def never(caller: PeerId, body: bytes) -> bytes:
    await asyncio.Event().wait()
    return body


async def ask(world: HivemindWorld, method: str = "echo", body: bytes = b"") -> bytes:
    return await world.a.transport.call(world.b.id, method, body, timeout=LONG_S)


async def line(world: HivemindWorld) -> calls._PeerStream:
    """Return the stream of calls from `a` to `b`."""
    return await world.a.transport._calls._streams[world.b.id]  # type: ignore[attr-defined]


async def open_stream(world: HivemindWorld) -> Stream:
    """Open another stream, for misuse."""
    stream: Stream = await world.a.transport._daemon.open_stream(world.b.id, _CALL)  # type: ignore[attr-defined]
    return stream


def request(exchange_id: int, method: str = "never") -> bytes:
    return b"".join(encode(Kind.CALL, exchange_id, method, Message()))


async def hung_up(stream: Stream) -> None:
    async with asyncio.timeout(LONG_S):
        while await stream.channel.read(1 << 16):
            pass


def test_calls_to_one_peer_share_one_stream(world: HivemindWorld) -> None:
    async def go() -> None:
        await ask(world)
        before = await line(world)
        waiting = asyncio.create_task(ask(world, "never"))
        bodies = [bytes([i]) * 1000 for i in range(100)]
        assert await asyncio.gather(*(ask(world, body=body) for body in bodies)) == bodies
        assert not waiting.done(), "a call that takes long holds up no other"
        assert await line(world) is before
        waiting.cancel()
        await asyncio.wait({waiting})

    world.run(go())


def test_a_stream_that_breaks_ends_its_calls_and_the_next_one_opens_another(world: HivemindWorld) -> None:
    async def go() -> None:
        await ask(world)
        before = await line(world)
        waiting = asyncio.create_task(ask(world, "never"))
        await ask(world)  # the waiting request has been sent
        before._stream.close()
        with pytest.raises(Unreachable, match="broke"):
            await waiting
        assert await ask(world, body=b"again") == b"again"
        assert await line(world) is not before

    world.run(go())


def test_a_stream_that_nobody_uses_is_closed(world: HivemindWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_IDLE_S", 0.05)

    async def go() -> None:
        async with asyncio.timeout(LONG_S):
            await ask(world)
            before = await line(world)
            while not before._closed:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            assert await ask(world, body=b"again") == b"again"
            assert await line(world) is not before

    world.run(go())


def test_a_server_closes_a_stream_over_which_nothing_comes(
    world: HivemindWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_PATIENCE_S", 0.05)

    async def go() -> None:
        stream = await open_stream(world)
        await stream.write(request(1, "echo"))
        await hung_up(stream)
        stream.close()

    world.run(go())


@pytest.mark.parametrize(
    "misuse",
    [
        b"\0" * 100,
        request(7) + request(7),
        b"".join(encode(Kind.STREAM, 7, "never", Message())) + request(8)[:20] + b"\xff" * 200,
        b"\xff" + request(7)[1:],
    ],
    ids=["zeros", "the same call twice", "in the middle", "not ours"],
)
def test_who_misuses_a_stream_is_hung_up_on_and_nobody_else(world: HivemindWorld, misuse: bytes) -> None:
    async def go() -> None:
        waiting = asyncio.create_task(ask(world, "never"))
        stream = await open_stream(world)
        await stream.write(misuse)
        await hung_up(stream)
        stream.close()
        assert await ask(world, body=b"well") == b"well"
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})

    world.run(go())


def test_who_calls_very_often_at_once_is_told_so_and_may_take_calls_back(
    world: HivemindWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 3)

    async def go() -> None:
        async with asyncio.timeout(LONG_S):
            stream = await open_stream(world)
            for number in range(1, 5):
                await stream.write(request(number))
            busy = await read_head(stream.channel)
            assert (busy.kind, busy.exchange_id) == (Kind.ERROR, 4)
            assert isinstance(busy.error(), Busy)
            await stream.channel.readexactly(TRAILER_BYTES)
            await stream.write(encode_cancel(2))
            await ask(world)
            await stream.write(request(5, "echo"))
            answer = await read_head(stream.channel)
            assert (answer.kind, answer.exchange_id) == (Kind.ANSWER, 5)
            stream.close()

    world.run(go())


def test_who_is_too_busy_to_answer_is_alive(world: HivemindWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 0)

    async def go() -> None:
        with pytest.raises(Busy):
            await ask(world)
        assert await alive_among(world.a.transport, [world.b.id]) == {world.b.id}

    world.run(go())


def test_a_call_that_is_taken_back_makes_room(world: HivemindWorld) -> None:
    ended: list[bytes] = []

    async def until_cancelled(caller: PeerId, body: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(body)
        return body

    world.b.transport.handle_call("until_cancelled", until_cancelled)

    async def go() -> None:
        async with asyncio.timeout(LONG_S):
            stream = await open_stream(world)
            await stream.write(request(1, "until_cancelled"))
            await stream.write(encode_cancel(99))  # an unknown number
            await ask(world)
            await stream.write(encode_cancel(1))
            while not ended:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            await stream.write(request(1, "echo"))  # its number is free again
            assert await stream.channel.read(1)
            stream.close()

    world.run(go())


def test_a_stream_of_a_socket_that_is_closed_by_then_has_ended(world: HivemindWorld) -> None:
    """This must not look like a bug of this process, as uvloop's own error would."""

    async def go() -> bool:
        stream = await open_stream(world)
        stream._transport.abort()
        while stream._inbox._problem is None and not stream._inbox._ended:  # noqa: ASYNC110 - closed, not about to be
            await asyncio.sleep(0)
        broken = Stream(asyncio.StreamReader(), stream._writer)
        broken.gather_writes()
        return broken.ended

    assert world.run(go())
