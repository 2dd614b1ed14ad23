"""Detection of silent peers: lost pings, slow links, suspended watchers, and bytes that move."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import torch

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import DeadlineExceeded, Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.access import PING
from lightning_swarm.network.framing import Buffer
from lightning_swarm.network.memory import MemoryNetwork

T = TypeVar("T")
A, B = PeerId("a"), PeerId("b")


class Wires(MemoryNetwork):
    """Loses or delays pings."""

    def __init__(self) -> None:
        super().__init__(latency_s=0.01)
        self.lost: set[int] = set()
        self.num_pings = 0
        self.ping_s = 0.0
        self.buffer_s = 0.0

    async def carry(self, sender: PeerId, receiver: PeerId, buffer: Buffer) -> Buffer:
        if sender == A and PING.encode() in bytes(buffer):
            self.num_pings += 1
            if self.num_pings in self.lost:
                await asyncio.Event().wait()
            await asyncio.sleep(self.ping_s)
        await asyncio.sleep(self.buffer_s)
        return await super().carry(sender, receiver, buffer)


class Two:
    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.network = Wires()
        self.a, self.b = self.network.transport(A), self.network.transport(B)
        self.b.handle_call("nap", self._nap)
        self.b.handle_stream("take", self._take)

    async def _nap(self, caller: PeerId, body: bytes) -> bytes:
        await asyncio.sleep(float(body))
        return b"awake"

    async def _take(self, caller: PeerId, message: Message) -> Message:
        return Message()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def nap(self, seconds: float, timeout: float = 1e6) -> bytes:
        return await self.a.call(B, "nap", str(seconds).encode(), timeout=timeout)

    def close(self) -> None:
        self.run(self.a.close())
        self.run(self.b.close())
        self.run(asyncio.sleep(100.0))
        left = asyncio.all_tasks(self.loop)
        self.loop.close()
        assert not left


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def test_who_is_asked_for_long_is_pinged_and_nobody_else(two: Two) -> None:
    two.run(two.nap(1.0))
    two.run(asyncio.sleep(1000.0))
    assert two.network.num_pings == 0
    two.run(two.nap(100.0))
    assert 35 <= two.network.num_pings <= 40
    two.run(asyncio.sleep(1000.0))
    assert two.network.num_pings <= 40


def test_many_exchanges_share_the_pings(two: Two) -> None:
    async def go() -> None:
        await asyncio.gather(*(two.nap(100.0) for _ in range(20)))

    two.run(go())
    assert 35 <= two.network.num_pings <= 40


@pytest.mark.parametrize("after_s", [0.0, 1.0, 33.0])
def test_silence_is_found_after_ten_seconds(two: Two, after_s: float) -> None:
    async def go() -> float:
        napping = asyncio.create_task(two.nap(1e5))
        await asyncio.sleep(after_s)
        two.network.freeze(B)
        with pytest.raises(Unreachable, match=r"b gave no sign of life for 1[0-2.5]+ s during `nap`"):
            await napping
        return two.loop.time() - after_s

    assert 7.0 <= two.run(go()) <= 12.6
    two.network.thaw(B)
    assert two.run(two.nap(1.0)) == b"awake"


def test_of_many_that_come_and_go_few_are_remembered(two: Two) -> None:
    """Peers with pending calls are monitored nevertheless."""

    async def go() -> None:
        napping = asyncio.create_task(two.nap(3000.0))
        for number in range(600):
            await two.network.transport(PeerId(f"peer-{number}")).ping(A)
            await two.a.ping(PeerId(f"peer-{number}"))
            await asyncio.sleep(4.0)
        assert len(two.a._liveness._watched) <= 256
        two.network.freeze(B)
        with pytest.raises(Unreachable, match="no sign of life"):
            await napping

    two.run(go())


def test_a_deadline_that_is_nearer_is_met(two: Two) -> None:
    two.network.freeze(B)
    with pytest.raises(DeadlineExceeded):
        two.run(two.nap(1.0, timeout=5.0))


def test_lost_pings_do_no_harm(two: Two) -> None:
    two.network.lost = {3, 4, 8, 11, 12}
    assert two.run(two.nap(60.0)) == b"awake"
    assert two.network.num_pings > 12


def test_round_trips_that_take_longer_and_longer_are_waited_for(two: Two) -> None:
    async def go() -> None:
        for seconds in (2.0, 5.0, 9.0, 20.0):
            two.network.ping_s = seconds
            assert await two.nap(200.0) == b"awake"

    two.run(go())


def test_who_sends_a_large_tensor_over_a_slow_link_is_alive(two: Two) -> None:
    """The pings queue behind the tensor."""
    two.network.ping_s, two.network.buffer_s = 1e4, 1.0
    tensors = (torch.zeros(64 << 20, dtype=torch.uint8),)
    two.run(two.a.stream(B, "take", Message(b"", tensors), timeout=1e6))
    assert two.loop.time() > 30.0, "it was not slow"


def test_a_watcher_that_slept_itself_blames_nobody(two: Two) -> None:
    async def go() -> bytes:
        napping = asyncio.create_task(two.nap(60.0))
        await asyncio.sleep(11.0)
        two.loop._now_s += 1000.0  # this whole process was suspended
        return await napping

    two.network.lost = {4}
    assert two.run(go()) == b"awake"


def test_a_closed_transport_watches_nobody(two: Two) -> None:
    async def go() -> None:
        napping = asyncio.create_task(two.nap(1e5))
        await asyncio.sleep(20.0)
        await two.a.close()
        with pytest.raises(Unreachable, match="closed"):
            await napping

    two.run(go())
    num_pings = two.network.num_pings
    two.run(asyncio.sleep(1000.0))
    assert two.network.num_pings == num_pings


def test_pings_are_counted_as_traffic(two: Two) -> None:
    two.run(two.nap(60.0))
    assert two.a.traffic.sent_bytes[B, PING] == two.b.traffic.received_bytes[A, PING] > 0
