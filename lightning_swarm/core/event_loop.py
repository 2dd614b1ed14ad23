"""How the main thread uses the swarm's loop: from a thread beside it, or in the same one.

On a real peer the loop has a thread of its own and answers others at any time. Under a virtual clock it runs only
while the main thread waits for it, so a run is one thread and repeats exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from typing_extensions import override

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import PeerError, StageLost, SwarmError, WentBack
from lightning_swarm.core.process import ProcessSettings
from lightning_swarm.core.tasks import ended

_T = TypeVar("_T")

_MOMENT_S: Final = 1.0


class Runtime(ABC):
    """Runs coroutines on the swarm's loop, for callers that are not on it."""

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run to the end and return the result. Interrupted (Ctrl-C), it cancels the work first."""

    @abstractmethod
    def post(self, callback: Callable[[], None]) -> None:
        """Have the loop call something soon, and return at once; from any thread, and from a signal's handler."""

    @abstractmethod
    def close(self) -> None:
        """End the loop. Twice is fine."""


class ThreadRuntime(Runtime):
    """A uvloop (where there is one) in a daemon thread.

    Args:
        name: Of the thread.
        housekeeping: Of the process, which ends with the loop.
    """

    def __init__(self, name: str = "swarm", housekeeping: ProcessSettings | None = None) -> None:
        self._housekeeping = housekeeping
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the swarm's loop is closed: this peer has left")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @override
    def post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed: there is nobody to tell any more
            self._loop.call_soon_threadsafe(callback)

    @override
    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self._end()
        finally:
            housekeeping, self._housekeeping = self._housekeeping, None
            if housekeeping is not None:
                housekeeping.close()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # hivemind leaves tasks behind: the timer of its bootstrap, say. Nobody else can end them.
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()


class InlineRuntime(Runtime):
    """A loop with virtual time that runs while somebody waits for it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    @override
    def post(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    @override
    def close(self) -> None:
        """The loop belongs to whoever made it: other peers may live on it."""


class _InterruptibleRuntime(Runtime):
    """On another runtime's loop, with something else to look at meanwhile.

    Args:
        runtime: Whose loop it is.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runtime.run(self._first(work))

    @abstractmethod
    async def _first(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`, unless something else comes first."""

    @override
    def post(self, callback: Callable[[], None]) -> None:
        self._runtime.post(callback)

    @override
    def close(self) -> None:
        self._runtime.close()


class UntilRunEnds(_InterruptibleRuntime):
    """Of a trainer that the run may leave behind: waiting for anything ends when the run does.

    Args:
        runtime: Whose loop it is.
        over: Set when the run has ended.
        end: What to raise then.
        deaf: Whether nothing can be told here any more.
        back: Set when it is void, and goes on from an earlier step.
        grace_s: Other peers that leave may be noticed before the end is told: seconds to wait for it then.
    """

    def __init__(
        self,
        runtime: Runtime,
        over: asyncio.Event,
        back: asyncio.Event,
        *,
        end: Callable[[], SwarmError],
        deaf: Callable[[], bool],
        grace_s: float,
    ) -> None:
        super().__init__(runtime)
        self._over = over
        self._end = end
        self._deaf = deaf
        self._back = back
        self._grace_s = grace_s

    @override
    async def _first(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.ensure_future(work)
        over = asyncio.ensure_future(self._over.wait())
        back = asyncio.ensure_future(self._back.wait())
        try:
            await asyncio.wait({task, over, back}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), PeerError) and not self._deaf():
                await asyncio.wait({over, back}, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                raise self._end()
            if back.done():
                raise WentBack("the run goes back to a snapshot, and this trainer's loop with it")
            return task.result()
        finally:
            await ended([task, over, back])


class UntilStageLost(_InterruptibleRuntime):
    """Of the lead: waiting for anything ends when the run has lost what it cannot go on without, and can go back.

    Args:
        runtime: Whose loop it is.
        lost: Returns, in words, when that is so; called when something takes longer than a moment.
    """

    def __init__(self, runtime: Runtime, lost: Callable[[], Coroutine[Any, Any, str]]) -> None:
        super().__init__(runtime)
        self._lost = lost

    @override
    async def _first(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.ensure_future(work)
        lost: asyncio.Task[str] | None = None
        try:
            await asyncio.wait({task}, timeout=_MOMENT_S)
            if not task.done():
                lost = asyncio.ensure_future(self._lost())
                await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost is None or task.done():
                return task.result()
            raise StageLost(f"the run cannot go on as it is: {lost.result()}")
        finally:
            await ended([task] if lost is None else [task, lost])


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
