"""Both executors: one job at a time, the most urgent next."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.server.executor import Executor, InlineExecutor, ThreadExecutor


class Bench:
    """An executor, and a first job that occupies it until `release`, so that later jobs queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Callable[[], Executor]) -> None:
        self.loop = loop
        self.executor = make()
        self.released = threading.Event()
        self.begun = threading.Event()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def occupy(self) -> None:
        """Occupy the executor's thread. The inline executor runs no job before the loop turns, so it needs none."""
        if isinstance(self.executor, ThreadExecutor):

            def hold() -> None:
                self.begun.set()
                assert self.released.wait(60.0)

            self.executor.submit((-9,), hold)
            assert self.begun.wait(60.0)


@pytest.fixture(params=[InlineExecutor, ThreadExecutor])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    threaded = request.param is ThreadExecutor
    loop: asyncio.AbstractEventLoop = asyncio.new_event_loop() if threaded else VirtualLoop()
    bench = Bench(loop, request.param)
    yield bench
    bench.released.set()

    async def close() -> None:
        bench.executor.close()

    bench.run(close())
    if isinstance(bench.executor, ThreadExecutor):
        bench.executor._thread.join(60.0)
        assert not bench.executor._thread.is_alive(), "a closed executor left its thread behind"
    loop.close()


BACKWARD, FORWARD, STEP = 0, 1, -1


def test_steps_then_backward_then_forward_and_older_ones_first(bench: Bench) -> None:
    done: list[tuple[int, ...]] = []

    async def go() -> None:
        bench.occupy()
        priorities = [(FORWARD, 1), (FORWARD, 0, 1), (BACKWARD, 7), (FORWARD, 0, 0), (STEP,), (BACKWARD, 3)]
        futures = [bench.executor.submit(p, lambda p=p: done.append(p)) for p in priorities]  # type: ignore[misc]
        assert bench.executor.queued == len(priorities)
        bench.released.set()
        await asyncio.gather(*futures)
        assert bench.executor.queued == 0

    bench.run(go())
    assert done == [(STEP,), (BACKWARD, 3), (BACKWARD, 7), (FORWARD, 0, 0), (FORWARD, 0, 1), (FORWARD, 1)]


def test_equals_run_in_the_order_they_came(bench: Bench) -> None:
    done: list[int] = []

    async def go() -> None:
        bench.occupy()
        futures = [bench.executor.submit((1,), lambda i=i: done.append(i)) for i in range(50)]  # type: ignore[misc]
        bench.released.set()
        await asyncio.gather(*futures)

    bench.run(go())
    assert done == list(range(50))


def test_a_job_gives_its_result_and_its_time(bench: Bench) -> None:
    async def go() -> tuple[str, float]:
        return await bench.executor.submit((0,), lambda: "result")

    result, busy_s = bench.run(go())
    assert result == "result"
    assert busy_s >= 0.0


@pytest.mark.parametrize("error", [ValueError("wrong"), StopIteration("empty")])
def test_what_a_job_raises_reaches_who_waits_and_the_next_job_runs(bench: Bench, error: Exception) -> None:
    def fail() -> None:
        raise error

    async def go() -> int:
        with pytest.raises((ValueError, RuntimeError), match=str(error)):
            await asyncio.wait_for(bench.executor.submit((0,), fail), 60.0)
        return (await bench.executor.submit((0,), lambda: 3))[0]

    assert bench.run(go()) == 3


def test_a_cancelled_job_does_not_run(bench: Bench) -> None:
    done: list[str] = []

    async def go() -> None:
        bench.occupy()
        unwanted = bench.executor.submit((0,), lambda: done.append("unwanted"))
        wanted = bench.executor.submit((1,), lambda: done.append("wanted"))
        unwanted.cancel()
        bench.released.set()
        await wanted

    bench.run(go())
    assert done == ["wanted"]


def test_nothing_runs_after_close(bench: Bench) -> None:
    done: list[str] = []

    async def go() -> None:
        bench.occupy()
        waiting = bench.executor.submit((0,), lambda: done.append("waited"))
        bench.executor.close()
        bench.released.set()
        late = bench.executor.submit((0,), lambda: done.append("late"))
        for future in (waiting, late):
            with pytest.raises(asyncio.CancelledError):
                await future
        bench.executor.close()

    bench.run(go())
    assert not done


def test_work_for_idle_times_waits_for_jobs_and_ends_when_it_says_so() -> None:
    """Its pieces run between jobs only, and are requested anew after each job."""
    done: list[str] = []
    idle, go_on = threading.Event(), threading.Event()

    def piece() -> bool:
        done.append("piece")
        idle.set()
        return len(done) < 3

    async def go() -> None:
        executor = ThreadExecutor()
        executor.while_idle(piece)
        try:
            held = executor.submit((0,), lambda: go_on.wait(60.0))
            jobs = [executor.submit((1,), lambda i=i: done.append(f"job {i}")) for i in range(2)]  # type: ignore[misc]
            go_on.set()
            await asyncio.gather(held, *jobs)
            assert await asyncio.to_thread(idle.wait, 60.0)
            await executor.submit((0,), lambda: done.append("last"))
        finally:
            executor.close()
        executor._thread.join(60.0)

    asyncio.run(go())
    assert done[:2] == ["job 0", "job 1"]
    assert done.index("piece") == 2
    assert "last" in done


def test_jobs_are_timed_by_a_clock_of_their_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may replace the clock in `time`, as tests do."""
    monkeypatch.setattr(time, "perf_counter", Mock(side_effect=StopIteration))

    async def ask() -> tuple[int, float]:
        return await asyncio.wait_for(bench.executor.submit((STEP,), lambda: 7), 60.0)

    assert bench.run(ask())[0] == 7
