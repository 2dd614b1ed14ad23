"""Peers report their versions and their clock to any caller; on virtual time, the result is exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol import queries
from lightning_swarm.protocol.messages.reports import Greeting
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, encode
from lightning_swarm.protocol.rpc import HELLO

LATENCY_S = 0.25


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize("ahead_s", [0.0, 100.0, -7.5])
def test_the_clocks_difference_is_found_whatever_the_way_takes(loop: VirtualLoop, ahead_s: float) -> None:
    network = MemoryNetwork(latency_s=LATENCY_S)
    asking, asked = network.transport(), network.transport()
    queries.answer_greetings(asked, now=lambda: 1000.0 + loop.time() + ahead_s)
    meeting = loop.run_until_complete(
        queries.greet(asking, asked.peer_id, timeout=9.0, now=lambda: 1000.0 + loop.time())
    )
    assert meeting.round_trip_s == pytest.approx(2 * LATENCY_S)
    assert meeting.ahead_s == pytest.approx(ahead_s)
    assert meeting.greeting.protocol_version == PROTOCOL_VERSION
    assert meeting.greeting.versions.keys() == {"Python", "torch", "lightning", "hivemind", "CPU"}


def test_the_quickest_answer_counts(loop: VirtualLoop) -> None:
    """A delayed answer says little about the clocks."""
    network = MemoryNetwork(latency_s=LATENCY_S)
    asking, asked = network.transport(), network.transport()
    questions: list[float] = []

    def slow_at_first() -> float:
        questions.append(loop.time())
        if len(questions) == 1:
            loop._now_s += 5.0  # simulates a suspended machine
        return 1000.0 + loop.time()

    queries.answer_greetings(asked, now=slow_at_first)
    meeting = loop.run_until_complete(
        queries.greet(asking, asked.peer_id, timeout=9.0, now=lambda: 1000.0 + loop.time())
    )
    assert len(questions) > 1
    assert meeting.round_trip_s == pytest.approx(2 * LATENCY_S)
    assert meeting.ahead_s == pytest.approx(0.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x93\x01\x02\x03",
        encode(Greeting(protocol_version=1, versions={"x" * 101: "1"}, unix_time_s=1.0)),
        encode(Greeting(protocol_version=1, versions={str(n): "1" for n in range(17)}, unix_time_s=1.0)),
        encode(Greeting(protocol_version=1, versions={}, unix_time_s=float("nan"))),
        encode(Greeting(protocol_version=1, versions={}, unix_time_s=float("inf"))),
        encode(Greeting(protocol_version=1, versions={}, unix_time_s=-1.0)),
    ],
    ids=range(7),
)
def test_an_answer_that_is_none_is_refused(loop: VirtualLoop, answer: bytes) -> None:
    network = MemoryNetwork()
    asking, asked = network.transport(), network.transport()

    async def lie(caller: PeerId, body: bytes) -> bytes:
        return answer

    asked.handle_call(HELLO.name, lie)
    with pytest.raises(ProtocolError):
        loop.run_until_complete(queries.greet(asking, asked.peer_id, timeout=9.0))
