"""The time at which averaging that is not urgent uses a server's line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lightning_swarm.core.clock import VirtualLoop, now_s
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.pending_work import IdleLinkWait, PendingWork

STEP_S = 10.0
TIMEOUT_S = 60.0


class Busy:
    """A server whose calls take a given time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.under_way = PendingWork(
            TicketStore(MemoryNetwork().transport(PeerId("a")), max_bytes=1 << 20), loop.create_task
        )
        self.idle_link = IdleLinkWait(self.under_way, timeout=TIMEOUT_S)
        self._num_calls = 0

    def call(self, direction: str, begin_s: float, took_s: float) -> None:
        self._num_calls += 1
        name = f"{self._num_calls}/0/{direction}@t"
        self._loop.call_later(begin_s, lambda: self.under_way.start(name, bytes(16), lambda: asyncio.sleep(took_s)))

    def waits(self) -> float:
        """Return the seconds that the next averaging waits."""
        return self._loop.run_until_complete(self._waits())

    async def _waits(self) -> float:
        begin_s = now_s()
        await self.idle_link.wait()
        return now_s() - begin_s

    def rest(self, seconds: float) -> None:
        self._loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def busy(loop: VirtualLoop) -> Iterator[Busy]:
    """A server that has had a step."""
    one = Busy(loop)
    assert one.waits() == 0.0, "nothing is known of a step's time yet"
    one.rest(STEP_S)
    yield one
    loop.run_until_complete(one.under_way.abort_all())


def test_forwards_go_first(busy: Busy) -> None:
    busy.call("forward", 0.0, 1.5)
    busy.call("forward", 0.5, 3.0)
    busy.call("backward", 3.6, 1.0)
    assert busy.waits() == pytest.approx(3.6)


def test_forwards_that_are_yet_to_come_are_waited_for_a_little(busy: Busy) -> None:
    busy.call("forward", 0.9, 1.0)
    assert busy.waits() == pytest.approx(0.9 + 1.0 + 0.1 * STEP_S), "and after them no longer"


def test_nothing_is_waited_for_where_nothing_comes(busy: Busy) -> None:
    assert busy.waits() == pytest.approx(0.1 * STEP_S)


def test_a_backward_that_is_there_is_waited_for_no_more(busy: Busy) -> None:
    busy.call("backward", 0.0, 3.0)
    busy.rest(0.1)
    assert busy.waits() == 0.0


def test_it_waits_at_most_for_half_a_step(busy: Busy) -> None:
    busy.call("forward", 0.0, 100.0)
    assert busy.waits() == pytest.approx(0.5 * STEP_S)


def test_others_do_not_wait_too_long_for_its_part(busy: Busy) -> None:
    busy.rest(1000.0)
    busy.call("forward", 0.0, 1000.0)
    assert busy.waits() == pytest.approx(TIMEOUT_S / 4)


def test_averaging_that_takes_most_of_a_step_has_no_time(busy: Busy) -> None:
    busy.idle_link.averaging_s = 0.6 * STEP_S
    busy.call("forward", 0.0, 3.0)
    assert busy.waits() == 0.0
