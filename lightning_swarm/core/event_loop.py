"""The main thread's access to the swarm's event loop, which runs in another thread or in the same one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from typing_extensions import override

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import PeerError, StageLost, SwarmError, Unreachable, WentBack
from lightning_swarm.core.process import ProcessSettings
from lightning_swarm.core.tasks import cancel_and_wait, first_of

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_UNWATCHED_S: Final = 1.0  # the lead does not watch a shorter wait for lost stages
_CLEANUP_TIMEOUT_S: Final = 10.0  # longest wait for cleanup, or for the end of the loop's thread
_SIGNAL_DELAY_S: Final = 1.0  # longest wait after which the main thread handles signals


class Runtime(ABC):
    """Runs coroutines on the swarm's event loop, for code outside of it."""

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run the coroutine to its end and return its result. Ctrl-C cancels the coroutine, and is then raised."""

    @abstractmethod
    def post(self, callback: Callable[[], None]) -> None:
        """Schedule a callback on the loop and return at once. Safe from any thread and any signal handler."""

    @abstractmethod
    def close(self) -> None:
        """End the loop. A second call does nothing."""


class ThreadRuntime(Runtime):
    """Runs a uvloop (where available) in a daemon thread. Closing the runtime also undoes its process `settings`."""

    def __init__(self, name: str = "swarm", settings: ProcessSettings | None = None) -> None:
        self._settings = settings
        self._loop = _new_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._closed:
            work.close()
            raise RuntimeError("the swarm's loop is closed: this peer has left")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            # Python handles signals in the main thread. If one arrives while the process is stopped, the kernel may
            # deliver it to another thread, which does not end a wait of the main thread.
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    return future.result(_SIGNAL_DELAY_S)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @override
    def post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for the call
            self._loop.call_soon_threadsafe(callback)

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLEANUP_TIMEOUT_S)
            if self._thread.is_alive():  # the program can still end: this is a daemon thread
                _log.warning("The swarm's event loop did not end within %g s, and is abandoned.", _CLEANUP_TIMEOUT_S)
        finally:
            settings, self._settings = self._settings, None
            if settings is not None:
                settings.close()

    def _serve(self) -> None:
        self._loop.run_forever()
        # hivemind leaves tasks behind, such as its bootstrap timer. Nothing else can end them.
        running = asyncio.all_tasks(self._loop)
        for task in running:
            task.cancel()
        if running:
            self._loop.run_until_complete(asyncio.wait(running))
        self._loop.close()  # uvloop waits here for open connections, perhaps forever


class InlineRuntime(Runtime):
    """Runs a virtual-time loop only while a caller waits in `run`: a single thread, so runs repeat exactly."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    @override
    def post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for the call
            self._loop.call_soon(callback)

    @override
    def close(self) -> None:
        """Leave the loop open: it belongs to its creator, and other peers may use it."""


class _WrappedRuntime(Runtime):
    """Base of runtimes that wrap another runtime's loop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @override
    def post(self, callback: Callable[[], None]) -> None:
        self._runtime.post(callback)

    @override
    def close(self) -> None:
        self._runtime.close()


class TimedRuntime(_WrappedRuntime):
    """Wraps another runtime, and measures the seconds that callers have waited for it."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.waited_s = 0.0

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        began_s = time.monotonic()
        try:
            return self._runtime.run(work)
        finally:
            self.waited_s += time.monotonic() - began_s


class _InterruptibleRuntime(_WrappedRuntime):
    """Wraps another runtime; an event can interrupt the wait for a coroutine."""

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runtime.run(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.ensure_future(work)
        try:
            await self._wait(task)
            return task.result()
        finally:
            await cancel_and_wait([task])

    @abstractmethod
    async def _wait(self, task: asyncio.Future[Any]) -> None:
        """Wait for the task's end; raise an error if the event comes first."""


class UntilCutOff(_InterruptibleRuntime):
    """The runtime of a peer: every wait ends once no other peer can reach this one."""

    def __init__(self, runtime: Runtime, cut_off: asyncio.Event, why: Callable[[], str]) -> None:
        super().__init__(runtime)
        self._cut_off, self._why = cut_off, why

    @override
    async def _wait(self, task: asyncio.Future[Any]) -> None:
        if self._cut_off.is_set():  # only cleanup runs now, and it needs no other peer
            await asyncio.wait({task}, timeout=_CLEANUP_TIMEOUT_S)
        else:
            await first_of(asyncio.wait({task}), self._cut_off.wait())
        error = task.exception() if task.done() and not task.cancelled() else None
        if self._cut_off.is_set() and (not task.done() or isinstance(error, PeerError)):
            raise Unreachable(self._why()) from error


class UntilRunEnds(_InterruptibleRuntime):
    """The runtime of a trainer: every wait ends when the run ends without this trainer, or rolls back."""

    def __init__(
        self,
        runtime: Runtime,
        run_ended: asyncio.Event,
        rolled_back: asyncio.Event,
        *,
        ending_error: Callable[[], SwarmError],  # makes the error to raise when the run has ended
        is_cut_off: Callable[[], bool],  # returns whether messages can no longer reach this peer
        grace_s: float,  # seconds after a failed call in which the announcement of the run's end may still arrive
    ) -> None:
        super().__init__(runtime)
        self._run_ended, self._rolled_back = run_ended, rolled_back
        self._ending_error, self._is_cut_off, self._grace_s = ending_error, is_cut_off, grace_s

    @override
    async def _wait(self, task: asyncio.Future[Any]) -> None:
        end = asyncio.ensure_future(self._run_ended.wait())
        rollback = asyncio.ensure_future(self._rolled_back.wait())
        try:
            await asyncio.wait({task, end, rollback}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), PeerError) and not self._is_cut_off():
                await asyncio.wait({end, rollback}, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise self._ending_error()
            if rollback.done():
                raise WentBack("the run rolls back to a snapshot, and this trainer's loop with it")
        finally:
            await cancel_and_wait([end, rollback])


class UntilStageLost(_InterruptibleRuntime):
    """The runtime of the lead: every wait ends when the run has lost a stage and can roll back."""

    def __init__(self, runtime: Runtime, wait_for_loss: Callable[[], Coroutine[Any, Any, str]]) -> None:
        super().__init__(runtime)
        self._wait_for_loss = wait_for_loss  # returns a description once a stage is lost

    @override
    async def _wait(self, task: asyncio.Future[Any]) -> None:
        await asyncio.wait({task}, timeout=_UNWATCHED_S)
        if task.done():
            return
        lost = asyncio.ensure_future(self._wait_for_loss())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StageLost(f"the run cannot continue: {lost.result()}")
        finally:
            await cancel_and_wait([lost])


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # uvloop does not support Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
