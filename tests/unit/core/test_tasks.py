"""Tasks with owners: no task outlives its owner, and no failure is lost."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import StepError
from lightning_swarm.core.tasks import TaskOwner, first_result, gather, gather_bounded


async def after(seconds: float, result: int) -> int:
    await asyncio.sleep(seconds)
    return result


async def fail(seconds: float, error: Exception) -> int:
    await asyncio.sleep(seconds)
    raise error


def test_results_come_in_the_order_of_the_works(loop: VirtualLoop) -> None:
    assert loop.run_until_complete(gather(after(10.0 - i, i) for i in range(5))) == [0, 1, 2, 3, 4]
    assert loop.time() == 10.0
    assert loop.run_until_complete(gather(iter(()))) == []


def test_the_first_failure_is_raised_itself_and_ends_the_rest(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def long() -> int:
        try:
            return await after(1000.0, 0)
        finally:
            ended.append("long")

    with pytest.raises(StepError, match="first"):
        loop.run_until_complete(gather([fail(2.0, ValueError("second")), long(), fail(1.0, StepError("first"))]))
    assert ended == ["long"]
    assert loop.time() == 1.0


def test_the_first_result_that_there_is(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def silent() -> int:
        try:
            return await after(1000.0, 0)
        finally:
            ended.append("silent")

    async def nothing() -> None:
        await asyncio.sleep(1.0)

    async def find(*works: Coroutine[Any, Any, int | None]) -> int | None:
        return await first_result(works)

    assert loop.run_until_complete(find(silent(), after(3.0, 3), nothing(), after(2.0, 2))) == 2
    assert (loop.time(), ended) == (2.0, ["silent"])
    assert loop.run_until_complete(find(after(1.0, 5), after(1.0, 6))) == 5
    assert loop.run_until_complete(find(nothing(), nothing())) is None
    assert loop.run_until_complete(find()) is None
    with pytest.raises(StepError):
        loop.run_until_complete(find(silent(), fail(1.0, StepError("first"))))


def test_a_failure_inside_nested_gathers_is_raised_itself(loop: VirtualLoop) -> None:
    async def inner() -> int:
        return sum(await gather([after(5.0, 1), fail(1.0, StepError("inner"))]))

    with pytest.raises(StepError, match="inner"):
        loop.run_until_complete(gather([inner(), after(9.0, 1)]))


def test_a_cancelled_gather_ends_its_works(loop: VirtualLoop) -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            ended.append(number)

    gathering = loop.create_task(gather(work(i) for i in range(3)))
    loop.run_until_complete(asyncio.sleep(1.0))
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(gathering)
    assert ended == [0, 1, 2]


async def slow_to_end() -> None:
    """Takes a second to end when it is cancelled."""
    try:
        await asyncio.sleep(1000.0)
    finally:
        await asyncio.sleep(1.0)


def test_a_cancellation_wins_over_a_failure(loop: VirtualLoop) -> None:
    async def go_on() -> None:
        try:
            await gather([slow_to_end(), fail(1.0, StepError("it would be tried again"))])
        except StepError:
            await asyncio.sleep(1000.0)

    going = loop.create_task(go_on())
    loop.run_until_complete(asyncio.sleep(1.5))  # after the failure, before the cancelled task has ended
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(going)
    assert loop.time() == 2.0


def test_a_failure_leaves_deadlines_around_it_as_they_were(loop: VirtualLoop) -> None:
    async def late() -> None:
        async with asyncio.timeout(5.0):
            with pytest.raises(StepError):
                await gather([slow_to_end(), fail(1.0, StepError("at once"))])
            await asyncio.sleep(1000.0)

    with pytest.raises(TimeoutError):
        loop.run_until_complete(late())


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_no_more_than_the_limit_are_under_way(loop: VirtualLoop, limit: int) -> None:
    under_way = most = 0

    async def work(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(1.0)
        under_way -= 1
        return number

    assert loop.run_until_complete(gather_bounded([work(i) for i in range(10)], limit)) == list(range(10))
    assert most == min(limit, 10)


def test_the_first_has_gone_a_few_turns_of_the_loop_before_the_last_begins(loop: VirtualLoop) -> None:
    seen: list[tuple[int, int]] = []

    async def work(number: int) -> None:
        for turn in range(4):
            seen.append((number, turn))
            await asyncio.sleep(0)

    loop.run_until_complete(gather_bounded([work(i) for i in range(8)], 8, turns_apart=2))
    assert seen.index((0, 3)) < seen.index((2, 0))
    assert seen.index((1, 1)) < seen.index((2, 0))
    assert sorted(seen) == [(number, turn) for number in range(8) for turn in range(4)]


def test_what_a_failure_kept_from_beginning_is_closed(loop: VirtualLoop) -> None:
    """Collecting a coroutine that was never awaited warns, and a warning fails a test."""
    works = [fail(1.0, StepError("stop")), *(after(1.0, i) for i in range(5))]
    with pytest.raises(StepError, match="stop"):
        loop.run_until_complete(gather_bounded(works, 2))
    assert {inspect.getcoroutinestate(work) for work in works} == {inspect.CORO_CLOSED}


# ---------------------------------------------------------------------- TaskOwner


def test_closing_cancels_and_awaits_what_runs(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.sleep(5.0)
            ended.append("stubborn")

    async def go() -> None:
        owner = TaskOwner()
        await owner.start()
        owner.spawn(stubborn())
        await asyncio.sleep(1.0)
        await owner.close()
        await owner.close()

    loop.run_until_complete(go())
    assert ended == ["stubborn"]
    assert loop.time() == 6.0


def test_a_bug_in_a_task_ends_the_others_and_comes_out_at_close(loop: VirtualLoop) -> None:
    async def bug() -> None:
        await asyncio.sleep(1.0)
        raise ZeroDivisionError("a bug")

    async def go() -> bool:
        owner = TaskOwner()
        await owner.start()
        owner.spawn(bug())
        other = owner.spawn(asyncio.sleep(1000.0))
        await asyncio.sleep(2.0)
        with pytest.raises(ExceptionGroup) as caught:
            await owner.close()
        assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
        return other.cancelled()

    assert loop.run_until_complete(go())
    assert loop.time() == 2.0


def test_nothing_is_spawned_without_a_running_owner(loop: VirtualLoop) -> None:
    async def go() -> None:
        owner = TaskOwner()
        with pytest.raises(RuntimeError, match="not running"):
            owner.spawn(asyncio.sleep(1.0))
        await owner.start()
        await owner.close()
        with pytest.raises(RuntimeError, match="not running"):
            owner.spawn(asyncio.sleep(1.0))

    loop.run_until_complete(go())
