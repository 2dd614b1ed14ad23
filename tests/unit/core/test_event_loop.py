"""Use of the swarm's loop by the main thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lightning_swarm.core import event_loop
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import StepError
from lightning_swarm.core.event_loop import InlineRuntime, Runtime, ThreadRuntime
from lightning_swarm.core.process import ProcessSettings


@pytest.fixture(params=["thread", "inline"])
def runtime(request: pytest.FixtureRequest, loop: VirtualLoop) -> Iterator[Runtime]:
    runtime: Runtime = ThreadRuntime() if request.param == "thread" else InlineRuntime(loop)
    yield runtime
    runtime.close()


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def raises(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("kind", [StepError, TimeoutError])
def test_a_result_and_an_error_come_back(runtime: Runtime, kind: type[Exception]) -> None:
    assert runtime.run(answer()) == 42
    with pytest.raises(kind, match="on the loop"):
        runtime.run(raises(kind("on the loop")))
    assert runtime.run(answer()) == 42


def test_all_work_runs_on_one_loop(runtime: Runtime) -> None:
    async def where() -> tuple[int, int]:
        return id(asyncio.get_running_loop()), threading.get_ident()

    first, second = runtime.run(where()), runtime.run(where())
    assert first == second
    assert (first[1] == threading.get_ident()) == isinstance(runtime, InlineRuntime)


def test_closing_twice_is_fine(runtime: Runtime) -> None:
    runtime.close()
    runtime.close()


def test_the_process_settings_end_with_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[ProcessSettings] = []
    monkeypatch.setattr(ProcessSettings, "close", lambda self: ended.append(self))
    settings = ProcessSettings(keeps_memory=False)
    runtime = ThreadRuntime(settings=settings)
    assert runtime.run(answer()) == 42
    assert not ended
    runtime.close()
    runtime.close()
    assert ended == [settings]


def test_an_inline_runtime_leaves_the_loop_to_others(loop: VirtualLoop) -> None:
    InlineRuntime(loop).close()
    assert InlineRuntime(loop).run(answer()) == 42


def test_a_thread_answers_others_while_nobody_waits() -> None:
    runtime = ThreadRuntime()
    answered = threading.Event()

    async def start() -> asyncio.Task[None]:
        async def later() -> None:
            answered.set()

        return asyncio.create_task(later())

    runtime.run(start())
    assert answered.wait(60.0)
    runtime.close()
    assert not runtime._thread.is_alive()


def test_a_signal_that_another_thread_receives_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped may receive its signals so; the main thread is not woken."""
    monkeypatch.setattr(event_loop, "_SIGNAL_DELAY_S", 0.05)
    runtime, is_handled = ThreadRuntime(), asyncio.Event()
    former_handler = signal.signal(signal.SIGUSR1, lambda *_: runtime.post(is_handled.set))
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # of this thread alone

    async def wait() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        await is_handled.wait()

    try:
        runtime.run(wait())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        signal.signal(signal.SIGUSR1, former_handler)
        runtime.close()


def test_an_interrupted_wait_cancels_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ThreadRuntime()
    begun, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    submit = asyncio.run_coroutine_threadsafe

    def interrupted(*args: object) -> object:
        future: concurrent.futures.Future[object] = submit(*args)  # type: ignore[arg-type]

        def result(*_: float) -> None:
            assert begun.wait(60.0)
            raise KeyboardInterrupt

        monkeypatch.setattr(future, "result", result)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.run(work())
    assert cancelled.wait(60.0)
    runtime.close()


def test_tasks_that_nobody_else_ends_end_with_the_loop() -> None:
    runtime = ThreadRuntime()
    left: list[asyncio.Task[None]] = []

    async def leave_one() -> None:
        left.append(asyncio.create_task(asyncio.sleep(3600.0)))

    runtime.run(leave_one())
    runtime.close()
    assert left[0].cancelled()


def test_a_loop_that_does_not_end_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "_CLEANUP_TIMEOUT_S", 0.1)
    runtime, released = ThreadRuntime(), threading.Event()

    async def never_ends() -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def leave_one() -> asyncio.Task[None]:
        return asyncio.create_task(never_ends())

    left = runtime.run(leave_one())
    runtime.close()
    assert "did not end within 0.1 s" in caplog.text
    with pytest.raises(RuntimeError, match="closed"):
        runtime.run(answer())
    released.set()
    runtime._thread.join(60.0)
    assert left.done()
    assert not runtime._thread.is_alive()


def test_a_closed_runtime_runs_nothing_and_says_so() -> None:
    runtime = ThreadRuntime()
    runtime.close()
    with pytest.raises(RuntimeError, match="closed"):
        runtime.run(answer())
