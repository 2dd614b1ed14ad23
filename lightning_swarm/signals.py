"""SIGTERM and Ctrl-C for a process that serves: the first asks it to leave, the second ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def leaving_on_signals(leave: Callable[[str], None]) -> Iterator[None]:
    """Have the first signal call `leave` with its name, and each further one raise `SystemExit`, as a shell has it.

    Signals are the main thread's business: on another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            raise SystemExit(128 + number)
        told = True
        leave(signal.Signals(number).name)

    before = {one: signal.signal(one, handle) for one in _SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
