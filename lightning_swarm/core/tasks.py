"""Tasks with an owner: no task outlives its owner, and no failure goes unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


class TaskOwner:
    """A TaskGroup that lives between `start` and `close`, for objects that live longer than one call."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._root: asyncio.Task[None] | None = None  # the task of `_hold`
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Begin to accept tasks. A second call does nothing."""
        if self._root is not None:
            return
        started = asyncio.Event()
        self._root = asyncio.create_task(self._hold(started))
        await started.wait()

    @property
    def is_running(self) -> bool:
        """True while the owner accepts tasks."""
        return self._group is not None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until it is done or the owner closes."""
        if self._group is None:
            work.close()
            raise RuntimeError("the owner of this task is not running")
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel and await all tasks. Raises the error of a task that failed: a bug, which has cancelled all others."""
        self._stop.set()
        if self._root is not None:
            root, self._root = self._root, None
            await root

    async def _hold(self, started: asyncio.Event) -> None:
        """Keep the group open until `close`; in its own task, because one task must enter and leave a TaskGroup."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                started.set()
                await self._stop.wait()
                self._group = None  # accepts no more tasks
                for task in self._tasks:
                    task.cancel()
        finally:
            self._group = None


def running_task() -> asyncio.Task[Any]:
    """Return the task that runs this code."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def nothing() -> None:
    """Do nothing: the default for an optional coroutine."""


async def gather(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run all coroutines at once and return the results in order. The first failure cancels the rest and is raised."""
    # Not a TaskGroup: if the caller is cancelled while a failure is already cancelling the other tasks, a TaskGroup
    # raises the failure and swallows the cancellation. A caller that tries again after failures might then never end.
    tasks = [asyncio.create_task(work) for work in coroutines]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]
    finally:
        await cancel_and_wait(tasks)
    return [task.result() for task in failures or tasks]  # raises the error of the first failure


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel all tasks, and wait until they have ended. Their errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    interrupted: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:  # still wait for the tasks
            interrupted = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs no warning
    if interrupted is not None:
        raise interrupted


async def first_of(*waits: Coroutine[Any, Any, Any], timeout: float | None = None) -> None:
    """Wait until one of several coroutines ends, at most `timeout` seconds, and cancel the rest. Raise its error."""
    tasks = {asyncio.ensure_future(wait) for wait in waits}
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_and_wait(tasks)


async def first_result(coroutines: Iterable[Coroutine[Any, Any, _T | None]]) -> _T | None:
    """Run all coroutines at once, return the first result that is not None, and cancel the rest.

    If several end at once, the first in order counts.
    """
    tasks = [asyncio.ensure_future(work) for work in coroutines]
    try:
        running = tasks
        while running:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                if task.done() and (result := task.result()) is not None:
                    return result
            running = [task for task in running if not task.done()]
    finally:
        await cancel_and_wait(tasks)
    return None


async def gather_bounded(
    coroutines: Sequence[Coroutine[Any, Any, _T]], limit: int, *, turns_apart: int = 0
) -> list[_T]:
    """Like `gather`, but at most `limit` coroutines run at once. They start in order.

    Between two starts the event loop runs `turns_apart` times, so that the messages of the first coroutine leave before
    later ones add theirs.
    """
    slots = asyncio.Semaphore(limit)
    turns = [asyncio.Event() for _ in coroutines]

    async def start_all() -> None:
        for turn in turns:
            turn.set()
            for _ in range(turns_apart):
                await asyncio.sleep(0)

    async def run_one(turn: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T:
        await turn.wait()
        async with slots:
            return await work

    starting = asyncio.ensure_future(start_all())
    try:
        return await gather(map(run_one, turns, coroutines))
    finally:
        for work in coroutines:
            work.close()  # after a failure, some may not have started
        await cancel_and_wait([starting])
