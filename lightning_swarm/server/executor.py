"""Runs a server's computations one at a time from a priority queue, on a thread or (under a virtual clock) inline."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter  # imported by name, so that replacing `time.perf_counter` has no effect
from typing import Any, Final, TypeVar

from typing_extensions import override

from lightning_swarm.protocol.messages.calls import CallKey, Direction

_T = TypeVar("_T")

Priority = tuple[int, ...]  # smaller runs first
FIRST: Final[Priority] = (-1,)  # of jobs for a whole stage or step, before any microbatch

TOKENS: Final[Priority] = (0, 1 << 62)
"""Priority of a forward in text generation: after all backwards (0, ...), and before the forwards of microbatches."""

# Seconds that are reported for each job under a virtual clock. Routes depend on them, and a run must be repeatable.
NOMINAL_BUSY_S = 1e-3


@dataclass(order=True)
class _Job:
    priority: Priority
    order: int  # first come, first served among equals
    run: Callable[[], Any] = field(compare=False)
    future: asyncio.Future[tuple[Any, float]] = field(compare=False)


def priority_of(key: CallKey, direction: Direction) -> Priority:
    """Return the priority of a microbatch's call: backward before forward, and older before newer microbatches."""
    return (0 if direction == "backward" else 1, key.step, key.first, key.call, key.index)


class Executor(ABC):
    """Runs jobs one after another, the smallest priority first."""

    @abstractmethod
    def submit(self, priority: Priority, run: Callable[[], _T]) -> asyncio.Future[tuple[_T, float]]:
        """Queue a job. The future holds its result and its seconds, or its exception."""

    @property
    @abstractmethod
    def queued(self) -> int:
        """The number of jobs that wait."""

    @abstractmethod
    def has_waiting(self, priority: Priority) -> bool:
        """Return whether a job of this priority or an earlier one waits; a running job may call this on its thread."""

    def while_idle(self, work: Callable[[], bool]) -> None:  # noqa: B027 - executors under a virtual clock do nothing
        """Call `work` repeatedly while no job waits, until it returns False; call it again after the next job.

        `work` must take a few milliseconds at most, and must not raise.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel waiting jobs, and run nothing more."""


class InlineExecutor(Executor):
    """Computes on the event loop itself, for swarms in one thread under a virtual clock."""

    def __init__(self) -> None:
        self._heap: list[_Job] = []
        self._counter = itertools.count()
        self._closed = False

    @override
    def submit(self, priority: Priority, run: Callable[[], _T]) -> asyncio.Future[tuple[_T, float]]:
        loop = asyncio.get_running_loop()
        job = _Job(priority, next(self._counter), run, loop.create_future())
        if self._closed:
            job.future.cancel()
        else:
            heapq.heappush(self._heap, job)
            loop.call_soon(self._run_next)
        return job.future

    @property
    @override
    def queued(self) -> int:
        return len(self._heap)

    @override
    def has_waiting(self, priority: Priority) -> bool:
        return bool(self._heap) and self._heap[0].priority <= priority

    @override
    def close(self) -> None:
        self._closed = True
        for job in self._heap:
            job.future.cancel()
        self._heap.clear()

    def _run_next(self) -> None:
        if self._heap:  # unless `close` has emptied it
            self._do(heapq.heappop(self._heap), NOMINAL_BUSY_S)

    def _do(self, job: _Job, took_s: float) -> None:
        if not job.future.cancelled():
            result, error, _ = _run(job.run)
            _finish(job.future, result, error, took_s)


# First number of a job's priority (0: backward, or a forward in text generation; 1: other forward) -> share of a
# microbatch's time. Other jobs compute both.
_SHARES: Final = {0: 2 / 3, 1: 1 / 3}


class PacedExecutor(InlineExecutor):
    """An `InlineExecutor` whose microbatches take time on the loop's clock, to simulate a machine's speed."""

    def __init__(self, microbatch_s: Callable[[], float]) -> None:
        super().__init__()
        self._microbatch_s = microbatch_s  # seconds for forward and backward together
        self._busy = False

    @override
    def _run_next(self) -> None:
        while not self._busy and self._heap:
            job = heapq.heappop(self._heap)
            if job.future.cancelled():
                continue
            took_s = 0.0 if job.priority == FIRST else self._microbatch_s() * _SHARES.get(job.priority[0], 1.0)
            if took_s:
                self._busy = True  # until `_end`; other jobs wait
                asyncio.get_running_loop().call_later(took_s, self._end, job, took_s)
            else:
                self._do(job, took_s)

    def _end(self, job: _Job, took_s: float) -> None:
        self._busy = False
        self._do(job, took_s)
        self._run_next()


class ThreadExecutor(Executor):
    """Computes on its own thread, so that the event loop keeps answering calls."""

    def __init__(self, name: str = "compute") -> None:
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._counter = itertools.count()
        self._closed = False
        self._idle_work: Callable[[], bool] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @override
    def submit(self, priority: Priority, run: Callable[[], _T]) -> asyncio.Future[tuple[_T, float]]:
        future = asyncio.get_running_loop().create_future()
        if self._closed:
            future.cancel()
        else:
            self._queue.put(_Job(priority, next(self._counter), run, future))
        return future

    @property
    @override
    def queued(self) -> int:
        return self._queue.qsize()

    @override
    def has_waiting(self, priority: Priority) -> bool:
        with self._queue.mutex:
            return bool(self._queue.queue) and self._queue.queue[0].priority <= priority

    @override
    def while_idle(self, work: Callable[[], bool]) -> None:
        self._idle_work = work

    @override
    def close(self) -> None:
        """Cancel waiting jobs, on the loop that submitted them. The running job is not interrupted."""
        self._closed = True
        while True:
            try:
                self._queue.get_nowait().future.cancel()
            except queue.Empty:
                break
        stop: asyncio.Future[tuple[Any, float]] = asyncio.get_running_loop().create_future()
        # Wakes the thread, which then ends.
        self._queue.put(_Job((-1_000_000,), next(self._counter), lambda: None, stop))

    def _work(self) -> None:
        while True:
            while self._idle_work is not None and self._queue.empty() and not self._closed and self._idle_work():
                pass
            job = self._queue.get()
            if self._closed:
                return
            if job.future.cancelled():
                continue
            result, error, busy_s = _run(job.run)
            loop = job.future.get_loop()
            try:
                loop.call_soon_threadsafe(_finish, job.future, result, error, busy_s)
            except RuntimeError:  # the loop was closed, so the result is not needed
                return
            del job, result, error, loop  # frees their objects before the next job


def _run(run: Callable[[], Any]) -> tuple[Any, BaseException | None, float]:
    start_s = perf_counter()
    try:
        return run(), None, perf_counter() - start_s
    except BaseException as error:  # noqa: BLE001 - the caller that waits for the job receives it
        return None, error, perf_counter() - start_s


def _finish(future: asyncio.Future[tuple[Any, float]], result: Any, error: BaseException | None, busy_s: float) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result((result, busy_s))
    elif isinstance(error, StopIteration):  # a future accepts any exception but this
        wrapped = RuntimeError(f"StopIteration: {error}")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
