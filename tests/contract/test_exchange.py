"""Peers that violate the protocol on intact wires: both sides of `network/rpc.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError, Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.admission import ByteBudget
from lightning_swarm.network.framing import Buffer, Head, Kind, encode, read_head, read_tensors
from lightning_swarm.network.rpc import STALL_TIMEOUT_S, Channel, Feed, Hold, ServedMethod, ask, reserve_nothing, serve

IDLE_TIMEOUT_S = 60.0


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def pair() -> tuple[Channel, Channel, Feed, Feed]:
    """Return two ends of a wire, and the feed that each reads from."""
    readers = Feed(), Feed()

    def end(reader: Feed, other: Feed) -> Channel:
        async def write(buffer: Buffer) -> None:
            other.feed_data(buffer)

        return Channel(reader, write)

    return end(readers[0], readers[1]), end(readers[1], readers[0]), *readers


async def read(channel: Channel) -> tuple[Head, Message]:
    head = await read_head(channel)
    return head, Message(head.body, await read_tensors(channel, head))


def test_a_second_answer_is_never_taken_for_the_answer_to_the_next_request(loop: VirtualLoop) -> None:
    async def go() -> None:
        mine, theirs, *_ = pair()

        async def answer_twice() -> None:
            head, message = await read(theirs)
            for _ in range(2):
                await theirs.send(encode(Kind.ANSWER, head.exchange_id, "m", message))

        async with asyncio.TaskGroup() as group:
            group.create_task(answer_twice())
            answer, fit = await ask(mine, Kind.STREAM, 1, "m", Message(b"first", (torch.ones(3),)), 100)
        assert answer.body == b"first"
        assert fit
        with pytest.raises(ProtocolError, match="another request"):
            await ask(mine, Kind.STREAM, 2, "m", Message(b"second"), 100)

    loop.run_until_complete(go())


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.STREAM])
def test_a_request_is_no_answer(loop: VirtualLoop, kind: Kind) -> None:
    async def go() -> None:
        mine, theirs, *_ = pair()
        await theirs.send(encode(kind, 1, "m", Message()))
        with pytest.raises(ProtocolError, match="no answer"):
            await ask(mine, Kind.STREAM, 1, "m", Message(), 100)

    loop.run_until_complete(go())


def test_an_answer_without_its_end_is_a_broken_connection(loop: VirtualLoop) -> None:
    async def go(length: int, answer: bytes) -> None:
        mine, theirs, reader, _ = pair()
        await theirs.send([answer[:length]])
        reader.feed_eof()
        with pytest.raises(Unreachable):
            await ask(mine, Kind.STREAM, 1, "m", Message(), 100)

    answer = b"".join(encode(Kind.ANSWER, 1, "m", Message(b"body", (torch.ones(2),))))
    for length in range(len(answer)):
        loop.run_until_complete(go(length, answer))


class Server:
    """Serves one channel with a handler that echoes, and records its requests."""

    def __init__(self, hold: Hold = reserve_nothing) -> None:
        self.hold = hold
        self.handled: list[bytes] = []
        self.counted: list[str] = []

    def find(self, head: Head) -> ServedMethod:
        if head.method != "echo":
            raise ProtocolError("no such method")
        return ServedMethod(1 << 20, self.echo, self.hold)

    async def echo(self, message: Message) -> Message:
        self.handled.append(message.body)
        if message.body == b"wait":
            await asyncio.Event().wait()
        return message

    def count(self, method: str, channel: Channel) -> None:
        self.counted.append(method)

    async def serve(self, channel: Channel) -> None:
        await serve(channel, self.find, self.count, idle_timeout=IDLE_TIMEOUT_S)


def test_one_channel_serves_many_requests_and_its_end_is_no_error(loop: VirtualLoop) -> None:
    async def go() -> None:
        server = Server()
        mine, theirs, _, their_reader = pair()
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(theirs))
            for number in range(1, 4):
                answer, fit = await ask(mine, Kind.STREAM, number, "echo", Message(b"%d" % number), 100)
                assert (answer.body, fit) == (b"%d" % number, True)
            their_reader.feed_eof()
        assert server.handled == [b"1", b"2", b"3"]

    loop.run_until_complete(go())


def test_an_idle_channel_is_given_up(loop: VirtualLoop) -> None:
    async def go() -> None:
        _, theirs, *_ = pair()
        await Server().serve(theirs)

    loop.run_until_complete(go())
    assert loop.time() == IDLE_TIMEOUT_S


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_request_that_stalls_is_given_up_and_handled_by_nobody(loop: VirtualLoop, kept: int) -> None:
    async def go() -> None:
        server = Server()
        mine, theirs, *_ = pair()
        await mine.send([b"".join(encode(Kind.STREAM, 1, "echo", Message(b"", (torch.ones(2),))))[:kept]])
        await server.serve(theirs)
        assert server.handled == []

    loop.run_until_complete(go())
    assert loop.time() > 0


def test_who_announces_tensors_and_stalls_holds_its_own_share_and_not_for_ever(loop: VirtualLoop) -> None:
    budget = ByteBudget(max_bytes=200, max_peer_bytes=100)
    liar, friend = PeerId("liar"), PeerId("friend")
    servers: list[Server] = []

    async def send(peer: PeerId, kept: int | None) -> None:
        servers.append(server := Server(partial(budget.holding, peer, timeout=3 * STALL_TIMEOUT_S)))
        mine, theirs, *_ = pair()
        await mine.send([b"".join(encode(Kind.STREAM, 1, "echo", Message(b"", (torch.ones(20),))))[:kept]])
        await server.serve(theirs)

    async def go() -> None:
        begun_s = loop.time()
        stalled = [asyncio.create_task(send(liar, -1)) for _ in range(3)]
        await asyncio.sleep(1.0)
        assert budget._by_peer == {liar: 80}, "the others wait for its share"
        heard = asyncio.create_task(send(friend, None))
        await asyncio.sleep(1.0)
        assert [server.handled for server in servers] == [[], [], [], [b""]]
        await asyncio.gather(*stalled)
        assert loop.time() - begun_s == pytest.approx(3 * STALL_TIMEOUT_S, rel=0.1)
        assert not budget._by_peer
        await heard

    loop.run_until_complete(go())


def test_a_request_that_drips_is_given_up(loop: VirtualLoop) -> None:
    """A request that arrives byte by byte is given up; a slow link is not."""
    size, rate = 1 << 20, 32 << 10

    async def go(num_bytes: int, pause_s: float) -> Server:
        server = Server()
        mine, theirs, _, their_reader = pair()
        data = b"".join(encode(Kind.STREAM, 1, "echo", Message(b"", (torch.zeros(size, dtype=torch.uint8),))))
        serving = asyncio.create_task(server.serve(theirs))
        for begin in range(0, len(data), num_bytes):
            if serving.done():
                break
            await mine.send([data[begin : begin + num_bytes]])
            await asyncio.sleep(pause_s)
        their_reader.feed_eof()
        await serving
        return server

    assert loop.run_until_complete(go(rate, 1.0)).handled == [b""]
    begun_s = loop.time()
    assert loop.run_until_complete(go(1000, STALL_TIMEOUT_S - 1.0)).handled == []
    assert loop.time() - begun_s < 3 * STALL_TIMEOUT_S


def test_noise_is_answered_with_an_error_and_handled_by_nobody(loop: VirtualLoop) -> None:
    async def go() -> None:
        server = Server()
        mine, theirs, _, their_reader = pair()
        await mine.send([b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"])
        their_reader.feed_eof()
        await server.serve(theirs)
        head, _ = await read(mine)
        assert head.kind is Kind.ERROR
        assert isinstance(head.error(), ProtocolError)
        assert server.handled == []

    loop.run_until_complete(go())


@pytest.mark.parametrize("then", ["hangs up", "sends more"])
def test_who_does_not_wait_for_the_answer_gets_none(loop: VirtualLoop, then: str) -> None:
    async def go() -> None:
        server = Server()
        mine, theirs, _, their_reader = pair()
        await mine.send(encode(Kind.STREAM, 1, "echo", Message(b"wait")))
        serving = asyncio.create_task(server.serve(theirs))
        await asyncio.sleep(1.0)
        assert server.handled == [b"wait"]
        if then == "hangs up":
            their_reader.feed_eof()
        else:
            await mine.send(encode(Kind.STREAM, 2, "echo", Message()))
        await serving
        assert server.handled == [b"wait"]

    loop.run_until_complete(go())
    assert loop.time() == 1.0
