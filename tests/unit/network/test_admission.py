"""Limits on a process's pending bytes and streams, for each peer and in total."""

from __future__ import annotations

import asyncio

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import Busy
from lightning_swarm.network import PeerId, admission
from lightning_swarm.network.admission import ByteBudget, StreamSlot, StreamSlots

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_each_peer_has_its_share_and_all_together_have_theirs() -> None:
    budget = ByteBudget(100, 60)
    assert budget.take(A, 50)
    assert not budget.take(A, 11), "its share"
    assert budget.take(B, 45)
    assert not budget.take(C, 6), "the share of all"
    assert budget.take(C, 5)
    budget.release(A, 50)
    assert budget.take(C, 50)
    for peer, num_bytes in ((B, 45), (C, 5), (C, 50)):
        budget.release(peer, num_bytes)
    assert (dict(budget._by_peer), budget._num_bytes) == ({}, 0)


def test_what_is_larger_than_a_share_takes_a_share() -> None:
    """One peer leaves room for the other peers, however large its announcement."""
    budget = ByteBudget(100, 50)
    assert budget.take(A, 1000)
    assert not budget.take(A, 1)
    assert budget.take(B, 50)
    assert not budget.take(C, 1)
    budget.release(A, 1000)
    assert budget.take(C, 1)
    assert not budget.take(A, 1000)
    budget.release(C, 1)
    assert budget.take(A, 1000)


def test_who_finds_no_room_waits_for_it_and_not_for_ever(loop: VirtualLoop) -> None:
    budget = ByteBudget(100, 100)
    held: list[PeerId] = []

    async def hold(peer: PeerId, num_bytes: int, begin_s: float, took_s: float) -> None:
        await asyncio.sleep(begin_s)
        async with budget.holding(peer, num_bytes, timeout=60.0):
            held.append(peer)
            await asyncio.sleep(took_s)

    async def go() -> None:
        late = asyncio.create_task(hold(C, 90, 2.0, 100.0))
        await asyncio.gather(hold(A, 80, 0.0, 30.0), hold(B, 80, 1.0, 50.0), hold(A, 20, 2.0, 80.0))
        with pytest.raises(
            Busy,
            match="no room for 90 bytes of c within 60 s: this peer holds 0 of at most 100 bytes for that peer, and",
        ):
            await late

    loop.run_until_complete(go())
    assert held == [A, A, B]
    assert (loop.time(), budget._num_bytes) == (82.0, 0)


@pytest.fixture(autouse=True)
def at_noon(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "loop" not in request.fixturenames:
        monkeypatch.setattr(admission, "now_s", lambda: 0.0)


class Streams:
    """Streams that peers open, and the names of the closed streams."""

    def __init__(self, max_in_all: int) -> None:
        self.slots = StreamSlots(max_in_all)
        self.hung_up: list[str] = []

    def open(self, peer: str, name: str, *, busy: bool = False, since_s: float = 0.0) -> StreamSlot | None:
        slot = self.slots.open(peer, lambda: self.hung_up.append(name), at_most=3)
        if slot is not None:
            slot.since_s = since_s
            if busy:
                slot.begin()
        return slot


def test_of_a_peer_with_too_many_streams_the_one_goes_that_was_idle_for_longest() -> None:
    streams = Streams(100)
    for name, since_s in (("a1", 5.0), ("a2", 3.0), ("a3", 4.0)):
        assert streams.open("a", name, since_s=since_s)
    assert streams.open("b", "b1")
    assert streams.open("a", "a4", since_s=6.0)
    assert streams.open("a", "a5", since_s=7.0)
    assert streams.hung_up == ["a2", "a3"]
    assert streams.slots._num_open == 4


def test_where_no_stream_is_allowed_none_is_opened() -> None:
    slots = StreamSlots(max_in_all=4)
    assert slots.open(A, lambda: None, at_most=0) is None
    assert slots.of(A) == []


def test_of_a_peer_whose_streams_are_all_busy_the_oldest_goes() -> None:
    streams = Streams(100)
    slots = [streams.open("a", f"a{i}", busy=True) for i in range(3)]
    assert streams.open("a", "a3", busy=True)
    assert streams.hung_up == ["a0"]
    assert slots[0] is not None
    streams.slots.close(slots[0])
    assert streams.slots._num_open == 3


def test_idle_streams_of_others_make_room_and_busy_ones_only_of_who_has_more() -> None:
    streams = Streams(4)
    for name in ("a1", "a2", "a3"):
        assert streams.open("a", name, busy=True)
    assert streams.open("b", "b1", since_s=1.0)
    assert streams.open("c", "c1", busy=True)
    assert streams.hung_up == ["b1"]
    assert streams.open("d", "d1", busy=True)
    assert streams.hung_up == ["b1", "a1"], "of who has most"
    assert streams.open("d", "d2", busy=True) is None, "nobody has more than the newcomer would"
    assert streams.slots._num_open == 4
