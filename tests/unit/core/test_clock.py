"""The virtual loop: time jumps, endless waits raise, and every run is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lightning_swarm.core.clock import Deadlock, VirtualLoop
from lightning_swarm.core.errors import SwarmError


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_a_sleep_takes_exactly_its_virtual_time(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(3600.0))
    assert loop.time() == 3600.0


def test_timers_fire_in_order_and_concurrently(loop: VirtualLoop) -> None:
    fired: list[tuple[str, float]] = []

    async def ring(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        fired.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name, after_s in (("late", 5.0), ("early", 0.25), ("day", 200_000.0)):
                group.create_task(ring(name, after_s))

    loop.run_until_complete(main())
    assert fired == [("early", 0.25), ("late", 5.0), ("day", 200_000.0)]


def test_timeouts_run_on_virtual_time(loop: VirtualLoop) -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert loop.run_until_complete(main()) == 30.0


def test_a_deadlock_is_an_error_that_names_who_waits(loop: VirtualLoop) -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="wait_for_godot"):
        loop.run_until_complete(wait_for_godot())
    assert issubclass(Deadlock, SwarmError)
    assert not asyncio.all_tasks(loop), "the coroutine that could not finish was left behind"


def test_a_deadlocked_coroutine_may_still_clean_up(loop: VirtualLoop) -> None:
    async def stubborn(cleaned: list[float]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            cleaned.append(asyncio.get_running_loop().time())

    cleaned: list[float] = []
    with pytest.raises(Deadlock):
        loop.run_until_complete(stubborn(cleaned))
    assert cleaned == [1.0]


def test_tasks_go_on_only_while_the_loop_is_driven(loop: VirtualLoop) -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1.0)

    ticking = loop.create_task(tick())
    loop.run_until_complete(asyncio.sleep(1.5))
    assert ticks == [0.0, 1.0]
    loop.run_until_complete(asyncio.sleep(1.0))
    assert ticks == [0.0, 1.0, 2.0]
    ticking.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(ticking)


def test_the_loop_goes_on_after_a_deadlock(loop: VirtualLoop) -> None:
    event = asyncio.Event()
    waiter = loop.create_task(event.wait())
    with pytest.raises(Deadlock):
        loop.run_until_complete(waiter)
    assert not waiter.done(), "a task that belongs to someone else was cancelled"
    event.set()
    assert loop.run_until_complete(waiter) is True


def test_threads_are_replaced_by_the_caller(loop: VirtualLoop) -> None:
    assert loop.run_until_complete(asyncio.to_thread(sum, [1, 2])) == 3

    with pytest.raises(ZeroDivisionError):
        loop.run_until_complete(asyncio.to_thread(divmod, 1, 0))


def test_sets_of_tasks_iterate_in_order_of_creation(loop: VirtualLoop) -> None:
    ended: list[int] = []

    async def member(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(member(number))
            await asyncio.sleep(1.0)
            raise RuntimeError("end")

    with pytest.raises(ExceptionGroup):
        loop.run_until_complete(main())
    assert ended == sorted(ended)
