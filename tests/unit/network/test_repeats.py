"""A small request without an answer is repeated: a lost message costs seconds, and a handler runs once at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest
import torch
from typing_extensions import override

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError, TicketGone
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.access import PING
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.network.rpc import Responder

METHOD = "test.call"
SOON_S = 5.0
LARGE_BYTES = 1 << 20


class Losing:
    """A tap that loses the first requests, or their answers.

    Args:
        num_lost: Number of messages to lose.
        answers: Lose answers in place of requests.
    """

    def __init__(self, num_lost: int, *, answers: bool) -> None:
        self.num_left = num_lost
        self._answers = answers

    may_damage = False

    def damages(self, *_: object, **__: object) -> bool:
        return False

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder) -> Responder:
        async def tapped(message: Message) -> Message:
            lost = head.method == METHOD and self.num_left > 0
            self.num_left -= lost
            if lost and not self._answers:
                await asyncio.Event().wait()
            answer = await respond(message)
            if lost:
                await asyncio.Event().wait()
            return answer

        return tapped

    async def arrived(self, *_: object) -> None:
        pass


class Late(Losing):
    """A tap that delays the first answer.

    Args:
        by_s: Seconds.
    """

    def __init__(self, by_s: float) -> None:
        super().__init__(1, answers=True)
        self._by_s = by_s

    @override
    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder) -> Responder:
        async def tapped(message: Message) -> Message:
            is_late = head.method == METHOD and self.num_left > 0
            self.num_left -= is_late
            answer = await respond(message)
            if is_late:
                await asyncio.sleep(min(self._by_s, 1e6))
            return answer

        return tapped


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


def pair(loop: VirtualLoop) -> tuple[MemoryNetwork, MemoryTransport, MemoryTransport]:
    network = MemoryNetwork(latency_s=0.01)
    return network, network.transport("a"), network.transport("b")


def end(loop: VirtualLoop, *transports: MemoryTransport) -> None:
    for one in transports:
        loop.run_until_complete(one.close())


@pytest.mark.parametrize("answers", [False, True], ids=["request", "answer"])
@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_lost_message_costs_seconds(loop: VirtualLoop, num_lost: int, answers: bool) -> None:
    network, a, b = pair(loop)

    async def handle(caller: PeerId, body: bytes) -> bytes:
        return body * 2

    b.handle_call(METHOD, handle)
    network.attach_tap(tap := Losing(num_lost, answers=answers))
    assert loop.run_until_complete(a.call(b.peer_id, METHOD, b"x", timeout=300.0)) == b"xx"
    assert not tap.num_left
    assert loop.time() < SOON_S * num_lost
    end(loop, a, b)


def test_a_handler_that_takes_long_runs_once(loop: VirtualLoop) -> None:
    _, a, b = pair(loop)
    runs: list[bytes] = []

    async def handle(caller: PeerId, body: bytes) -> bytes:
        runs.append(body)
        await asyncio.sleep(100.0)
        return body

    b.handle_call(METHOD, handle)
    assert loop.run_until_complete(a.call(b.peer_id, METHOD, b"x", timeout=300.0)) == b"x"
    assert runs == [b"x"]
    assert a.traffic.sent_bytes[b.peer_id, METHOD] > 0
    end(loop, a, b)


def test_two_requests_with_the_same_body_are_two(loop: VirtualLoop) -> None:
    _, a, b = pair(loop)
    runs: list[bytes] = []

    async def handle(caller: PeerId, body: bytes) -> bytes:
        runs.append(body)
        await asyncio.sleep(1.0)
        return body

    b.handle_call(METHOD, handle)

    async def both() -> None:
        await asyncio.gather(*(a.call(b.peer_id, METHOD, b"x", timeout=300.0) for _ in range(2)))

    loop.run_until_complete(both())
    assert runs == [b"x", b"x"]
    end(loop, a, b)


def test_an_error_after_a_while_is_the_answer_of_all_repeats(loop: VirtualLoop) -> None:
    _, a, b = pair(loop)
    runs: list[bytes] = []

    async def handle(caller: PeerId, body: bytes) -> bytes:
        runs.append(body)
        await asyncio.sleep(21.0)
        raise ProtocolError("no")

    b.handle_call(METHOD, handle)
    with pytest.raises(ProtocolError, match="no"):
        loop.run_until_complete(a.call(b.peer_id, METHOD, b"x", timeout=300.0))
    assert len(runs) == 1
    end(loop, a, b)


def test_a_frozen_peer_is_pinged_and_not_asked_again(loop: VirtualLoop) -> None:
    network, a, b = pair(loop)
    runs: list[bytes] = []

    async def handle(caller: PeerId, body: bytes) -> bytes:
        runs.append(body)
        return body

    b.handle_call(METHOD, handle)

    async def freeze() -> bytes:
        await a.call(b.peer_id, PING, b"", timeout=1.0)
        network.freeze(b.peer_id)
        asyncio.get_running_loop().call_later(9.0, network.thaw, b.peer_id)
        return await a.call(b.peer_id, METHOD, b"x", timeout=300.0)

    assert loop.run_until_complete(freeze()) == b"x"
    assert len(runs) <= 2
    end(loop, a, b)


def test_a_large_answer_that_takes_long_is_computed_once(loop: VirtualLoop) -> None:
    _, a, b = pair(loop)
    runs: list[bytes] = []

    async def handle(caller: PeerId, message: Message) -> Message:
        runs.append(message.body)
        await asyncio.sleep(100.0)
        return Message(message.body, (torch.ones(LARGE_BYTES, dtype=torch.uint8),))

    b.handle_stream(METHOD, handle)
    answer = loop.run_until_complete(a.stream(b.peer_id, METHOD, Message(b"x"), timeout=300.0))
    assert answer.num_tensor_bytes == LARGE_BYTES
    assert runs == [b"x"]
    end(loop, a, b)


@pytest.mark.parametrize("late_s", [6.0, math.inf], ids=["late", "lost"])
def test_a_repeat_does_not_end_a_transfer_that_is_late(loop: VirtualLoop, late_s: float) -> None:
    """A one-time answer is gone for the repeat, which may be refused before the answer arrives."""
    network, a, b = pair(loop)
    asked_s: list[float] = []

    async def handle(caller: PeerId, message: Message) -> Message:
        asked_s.append(loop.time())
        if len(asked_s) > 1:
            raise TicketGone("it was taken")
        return Message(b"", (torch.ones(LARGE_BYTES, dtype=torch.uint8),))

    b.handle_stream(METHOD, handle)
    network.attach_tap(Late(late_s))
    ask = a.stream(b.peer_id, METHOD, Message(b"x"), timeout=300.0)
    if math.isinf(late_s):
        with pytest.raises(TicketGone):
            loop.run_until_complete(ask)
        assert loop.time() < 2 * SOON_S
    else:
        assert loop.run_until_complete(ask).num_tensor_bytes == LARGE_BYTES
    assert len(asked_s) == 2
    end(loop, a, b)
