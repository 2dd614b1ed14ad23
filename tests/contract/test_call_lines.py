"""The caller's end of a stream for calls, and the server's, if the other end misbehaves: on a pair of sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lightning_swarm.core.errors import Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import HEADER_BYTES, Kind, encode, encode_cancel, exchange_id_of
from lightning_swarm.network.repeats import repeated_id

pytest.importorskip("lightning_swarm.network.hivemind")
from lightning_swarm.network.admission import StreamSlot
from lightning_swarm.network.hivemind import calls
from lightning_swarm.network.hivemind.calls import IncomingCalls, OutgoingCalls
from lightning_swarm.network.hivemind.streams import Stream

LONG_S = 30.0
SHORT_S = 0.05
PEER = PeerId("peer")


class Tasks:
    """Owns tasks, as a transport does."""

    def __init__(self) -> None:
        self.all: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.all.append(asyncio.create_task(work))
        return self.all[-1]

    async def end(self) -> None:
        for task in self.all:
            task.cancel()
        await asyncio.wait(self.all)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Stream, Stream]]:
    streams = [Stream(*await asyncio.open_connection(sock=one)) for one in socket.socketpair()]
    try:
        yield streams[0], streams[1]
    finally:
        for stream in streams:
            stream.close()


def run(go: Callable[[Tasks], Coroutine[Any, Any, None]], *, fast: bool = False) -> None:
    """Run on a separate loop, and check that no error went to its exception handler."""
    complaints: list[dict[str, Any]] = []
    factory = pytest.importorskip("uvloop").new_event_loop if fast else asyncio.new_event_loop

    async def main() -> None:
        tasks = Tasks()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(LONG_S):
            await go(tasks)
            await tasks.end()
        tasks.all.clear()
        gc.collect()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert complaints == []


def patient(peer: PeerId) -> float:
    return LONG_S


def request(exchange_id: int, num_bytes: int = 0) -> bytes:
    return b"".join(encode(Kind.CALL, exchange_id, "method", Message(bytes(num_bytes))))


def test_a_transport_that_closes_cancels_nobody_who_waits_for_a_stream() -> None:
    async def never(peer: PeerId) -> Stream:
        await asyncio.Event().wait()
        raise AssertionError

    async def go(tasks: Tasks) -> None:
        asking = asyncio.create_task(OutgoingCalls(never, tasks.spawn, patient).exchange(PEER, request(1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await tasks.end()
        with pytest.raises(Unreachable, match="closed"):
            await asking

    run(go)


def test_an_opening_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_OPENING_S", SHORT_S)
    num_opened = 0

    async def never(peer: PeerId) -> Stream:
        nonlocal num_opened
        num_opened += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def go(tasks: Tasks) -> None:
        caller = OutgoingCalls(never, tasks.spawn, patient)
        for number in (1, 2):
            with pytest.raises(Unreachable, match="within"):
                await caller.exchange(PEER, request(number))
            assert num_opened == number, "the next call tries anew"
        assert not caller._streams

    run(go)


@pytest.mark.parametrize("fast", [False, True], ids=["asyncio", "uvloop"])
def test_a_call_given_up_as_its_stream_closes_is_only_cancelled(fast: bool) -> None:
    async def go(tasks: Tasks) -> None:
        async with connected() as (ours, _):

            async def open_stream(peer: PeerId) -> Stream:
                return ours

            asking = asyncio.create_task(OutgoingCalls(open_stream, tasks.spawn, patient).exchange(PEER, request(1)))
            await asyncio.sleep(SHORT_S)
            ours.close()
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled() or isinstance(asking.exception(), Unreachable)

    run(go, fast=fast)


@pytest.mark.parametrize("fast", [False, True], ids=["asyncio", "uvloop"])
def test_calls_to_a_peer_that_does_not_read_break_its_stream_and_do_not_fill_the_memory(fast: bool) -> None:
    async def go(tasks: Tasks) -> None:
        async with connected() as (ours, _):

            async def open_stream(peer: PeerId) -> Stream:
                return ours

            caller = OutgoingCalls(open_stream, tasks.spawn, patient)
            largest = 0
            for number in range(1, 1000):
                asking = asyncio.create_task(caller.exchange(PEER, request(number, 1 << 20)))
                while not asking.done() and ours.num_unsent_bytes <= largest:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait({asking})
                if ours.ended:
                    break
                largest = ours.num_unsent_bytes
            assert ours.ended
            assert 0 < largest <= calls._MAX_UNSENT_BYTES

    run(go, fast=fast)


def test_an_answer_that_comes_while_much_is_to_be_sent_is_not_waited_for() -> None:
    async def go(tasks: Tasks) -> None:
        async with connected() as (ours, theirs):

            async def open_stream(peer: PeerId) -> Stream:
                return ours

            caller = OutgoingCalls(open_stream, tasks.spawn, patient)
            first = asyncio.create_task(caller.exchange(PEER, request(1)))
            await theirs.channel.readexactly(HEADER_BYTES)
            others = [asyncio.create_task(caller.exchange(PEER, request(number, 1 << 20))) for number in (2, 3, 4, 5)]
            second = asyncio.create_task(caller.exchange(PEER, request(6)))
            await asyncio.sleep(SHORT_S)
            assert ours.num_unsent_bytes
            answers = [b"".join(encode(Kind.ANSWER, number, "method", Message())) for number in (1, 6)]
            await theirs.write(b"".join(answers))
            assert [(await first)[1], (await second)[1]] == answers
            for other in others:
                other.cancel()
            await asyncio.wait(others)

    run(go)


def test_calls_to_a_peer_that_is_silent_for_too_long_go_over_another_stream() -> None:
    async def go(tasks: Tasks) -> None:
        async with connected() as first, connected() as second:
            left, patience_s = [first[0], second[0]], LONG_S

            async def open_stream(peer: PeerId) -> Stream:
                return left.pop(0)

            caller = OutgoingCalls(open_stream, tasks.spawn, lambda _: patience_s)
            for _ in range(3):  # an early end says nothing about the stream
                asking = asyncio.create_task(caller.exchange(PEER, request(1)))
                await first[1].channel.readexactly(len(request(1)))
                asking.cancel()
                await asyncio.wait({asking})
                await first[1].channel.readexactly(len(encode_cancel(1)))
                await first[1].write(b"".join(encode(Kind.ANSWER, 1, "method", Message())))
                await asyncio.sleep(SHORT_S)
            assert not first[0].ended
            patience_s = 2 * SHORT_S
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3 * SHORT_S):
                    await caller.exchange(PEER, request(2))
            assert first[0].ended
            again = asyncio.create_task(caller.exchange(PEER, request(3)))
            answer = b"".join(encode(Kind.ANSWER, 3, "method", Message()))
            await second[1].channel.readexactly(len(request(3)))
            await second[1].write(answer)
            assert (await again)[1] == answer

    run(go)


def test_an_answer_that_stops_half_way_breaks_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "STALL_TIMEOUT_S", SHORT_S)

    async def go(tasks: Tasks) -> None:
        async with connected() as (ours, theirs):

            async def open_stream(peer: PeerId) -> Stream:
                return ours

            caller = OutgoingCalls(open_stream, tasks.spawn, patient)
            asking = asyncio.create_task(caller.exchange(PEER, request(1)))
            await theirs.write(b"".join(encode(Kind.ANSWER, 1, "method", Message()))[:-1])
            with pytest.raises(Unreachable, match="half way"):
                await asking
            await asyncio.sleep(SHORT_S)
            assert not caller._streams

    run(go)


@pytest.mark.parametrize("fast", [False, True], ids=["asyncio", "uvloop"])
def test_who_reads_no_answers_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(calls, "STALL_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(calls, "_PATIENCE_S", SHORT_S)

    async def large(request: bytes, _: object) -> bytes:
        return bytes(8 << 20)

    async def go(tasks: Tasks) -> None:
        async with connected() as (ours, theirs):
            serving = asyncio.create_task(
                IncomingCalls(ours, large, tasks.spawn, StreamSlot("theirs", ours.close, 0.0)).answer()
            )
            await theirs.write(request(1))
            await serving
            assert ours.ended

    run(go, fast=fast)


def test_a_repeat_of_a_call_that_came_by_the_same_stream_takes_no_room() -> None:
    begun: list[int] = []

    async def endless(request: bytes, _: object) -> bytes:
        begun.append(exchange_id_of(request))
        await asyncio.Event().wait()
        return b""

    async def go(tasks: Tasks) -> None:
        async with connected() as (ours, theirs):
            serving = IncomingCalls(ours, endless, tasks.spawn, StreamSlot("theirs", ours.close, 0.0)).answer()
            tasks.spawn(serving)
            for number in (1, repeated_id(1, 1), repeated_id(1, 2), repeated_id(2, 1), 3):
                await theirs.write(request(number))
            while 3 not in begun:  # noqa: ASYNC110
                await asyncio.sleep(0.0)
            assert begun == [1, repeated_id(2, 1), 3], "the second call's first request was lost"

    run(go)
