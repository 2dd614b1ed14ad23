"""What a process does differently while a peer is at home in it: with garbage, and with freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from lightning_swarm.core.errors import ConfigError

LOG: Final = "SWARM_LOG"
"""From which level on this package's log goes to stderr, whatever the script says; its children inherit it."""

_LEVELS: Final = ("debug", "info", "warning", "error")


def follow_environment() -> None:
    """Show the log as the environment says; nothing is changed if it says nothing.

    Raises:
        ConfigError: It names no level.
    """
    level = os.environ.get(LOG)
    if not level:
        return
    if level not in _LEVELS:
        raise ConfigError(f"the variable {LOG} must be one of {', '.join(_LEVELS)}, got {level!r}. Set one, or none.")
    logger = logging.getLogger("lightning_swarm")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():  # else the script has said where logs go
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


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


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>
_ARENA_BYTES: Final = 64 << 20  # glibc's HEAP_MAX_SIZE: threads beside the main one have pieces of that size
_OLD_MAX_BYTES: Final = 32 << 20
"""The largest threshold for mmap that glibc before 2.35 takes, and the largest that any comes to by itself."""
_KEPT_BYTES: Final = 1 << 30


class ProcessSettings:
    """From here until `close` this process goes another way.

    - The collector of garbage leaves alone what the process has by now. To look through all that torch and the others
      brought stops every thread for a third of a second, and whoever waits for this peer.
    - glibc keeps freed memory for what comes next, where it would give it back to the kernel, which clears each page
      before it gives it out again: a step needs the same memory as the one before.

    Args:
        keeps_memory: Whether it does the latter.
    """

    def __init__(self, *, keeps_memory: bool) -> None:
        self._froze = gc.get_freeze_count() == 0  # else somebody sees to it
        if self._froze:
            gc.collect()  # what is garbage by now is not to stay
            gc.freeze()
        self._libc = ctypes.CDLL(None) if keeps_memory and platform.libc_ver()[0] == "glibc" else None
        if not self._keep(_ARENA_BYTES, _KEPT_BYTES, _ARENA_BYTES):
            self._keep(_OLD_MAX_BYTES, _KEPT_BYTES, _ARENA_BYTES)

    def close(self) -> None:
        """End that, and give back what is free."""
        if self._froze:
            gc.unfreeze()
        # What glibc comes to by itself where something large is freed, and its own pad.
        if self._libc is not None and self._keep(_OLD_MAX_BYTES, 2 * _OLD_MAX_BYTES, 128 << 10):
            self._libc.malloc_trim(0)

    def _keep(self, own: int, at_top: int, pad: int) -> bool:
        """Say what glibc keeps; whether it takes that.

        Args:
            own: Blocks from so many bytes on have memory of their own, which is given back when they are freed.
            at_top: So many bytes may be free at the end of the main heap.
            pad: So many are asked for beyond what is needed; a thread's piece stays while less than that would be left.
        """
        # This one first: it is the one that may be refused, and any of them ends what glibc would find by itself.
        if self._libc is None or not self._libc.mallopt(_MMAP_THRESHOLD, own):
            return False
        self._libc.mallopt(_TRIM_THRESHOLD, at_top)
        self._libc.mallopt(_TOP_PAD, pad)
        return True
