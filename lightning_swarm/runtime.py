"""How the main thread uses the swarm's loop: from a thread beside it, or in the same one.

On a real peer the loop has a thread of its own and answers others at any time. Under a virtual clock it runs only
while the main thread waits for it, so a run is one thread and repeats exactly.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from typing_extensions import override

from lightning_swarm.clock import VirtualLoop

_T = TypeVar("_T")


class Runtime(ABC):
    """Runs coroutines on the swarm's loop, for callers that are not on it."""

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run to the end and return the result. Interrupted (Ctrl-C), it cancels the work first."""

    @abstractmethod
    def close(self) -> None:
        """End the loop. Twice is fine."""


class ThreadRuntime(Runtime):
    """A uvloop (where there is one) in a daemon thread."""

    def __init__(self, name: str = "swarm") -> None:
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
    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class InlineRuntime(Runtime):
    """A loop with virtual time that runs while somebody waits for it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @override
    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    @override
    def close(self) -> None:
        """The loop belongs to whoever made it: other peers may live on it."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
