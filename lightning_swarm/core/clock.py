"""The running loop's clock, and `VirtualLoop`, whose clock jumps to the next timer instead of waiting for it.

Source: trio's `MockClock` with `autojump_threshold`, in asyncio's terms.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast

from lightning_swarm.core.errors import SwarmError

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


def now_s() -> float:
    """Read the running loop's clock."""
    return asyncio.get_running_loop().time()


class Deadlock(SwarmError):
    """All tasks wait under a virtual clock, and no timer is set that could wake one."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A single-threaded event loop with virtual time and without sockets. Its runs are exactly reproducible."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._num_futures = 0
        super().__init__(_JumpingSelector(self._jump))
        # asyncio iterates over sets of tasks, for example when it cancels a TaskGroup. Tasks and futures hash to their
        # numbers, because hashes of addresses would give such a set another order in each run.
        self.set_task_factory(cast(Any, lambda loop, coro, **kwargs: _NumberedTask(coro, loop=loop, **kwargs)))

    def time(self) -> float:
        """Return the seconds of virtual time since the loop began; they pass only when nothing is ready to run."""
        return self._now_s

    def run_until_complete(self, future: Generator[Any, None, _T] | Awaitable[_T]) -> _T:
        """Run until `future` is done. Raise `Deadlock` if it never can be, after cancelling it if it is a coroutine."""
        owned = not asyncio.isfuture(future)
        task = asyncio.ensure_future(cast(Awaitable[_T], future), loop=self)
        try:
            return super().run_until_complete(task)
        except Deadlock:
            if owned and not task.done():
                # No other code holds this task, so a later call would meet its half-run coroutine.
                task.cancel()
                super().run_until_complete(asyncio.wait([task]))
            raise

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future that hashes to its number."""
        return _NumberedFuture(loop=self)

    def run_in_executor(
        self, _executor: object, func: Callable[[Unpack[_Args]], _T], *args: *_Args
    ) -> asyncio.Future[_T]:
        """Run `func` now, in this thread: it takes no virtual time."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # as an executor does: the error is raised where the future is awaited
            future.set_exception(error)
        return future

    def next_number(self) -> int:
        """Count a task or future that is being created, and return its number."""
        self._num_futures += 1
        return self._num_futures

    def _jump(self, seconds: float | None) -> None:
        """Advance the clock; raise `Deadlock` if `seconds` is None, which means that no timer is set."""
        if seconds is None:
            tasks = sorted(asyncio.all_tasks(self), key=hash)
            waiting = "; ".join(map(_location, tasks)) or "nothing but the caller's future"
            raise Deadlock(f"Nothing is ready and no timer is set at {self._now_s:g} s. Waiting: {waiting}.")
        self._now_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits: it only polls, and advances the clock by the time that it would have waited."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump_clock = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return []  # tasks are ready to run; events from other threads wait until no task is
        events = super().select(0)
        if not events:
            self._jump_clock(timeout)
        return events


class _NumberedFuture(asyncio.Future[Any]):
    def __init__(self, *, loop: VirtualLoop) -> None:
        super().__init__(loop=loop)
        self._number = loop.next_number()

    def __hash__(self) -> int:
        return self._number


class _NumberedTask(asyncio.Task[Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: VirtualLoop, **kwargs: Any) -> None:
        # The base class puts the task into a set, so the hash must exist before.
        self._number = loop.next_number()
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self._number


def _location(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    line = f" at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
    return f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')}{line})"
