"""A small request that has no answer is sent again: a lost message costs seconds, and a handler runs once at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.network.rpc import Responder
from lightning_swarm.network.transport import PING

METHOD = "test.call"
SOON_S = 5.0


class Losing:
    """A tap that loses the first requests, or their answers.

    Args:
        num_lost: Number of messages to lose.
        answers: Lose answers in place of requests.
    """

    def __init__(self, num_lost: int, *, answers: bool) -> None:
        self.num_left = num_lost
        self._answers = answers

    is_on_wires = False

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
