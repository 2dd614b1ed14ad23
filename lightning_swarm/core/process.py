"""Settings of a process that runs a peer: its log, its signals, its garbage collector and its freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Final

from lightning_swarm.core.errors import ConfigError

LOG: Final = "SWARM_LOG"  # environment variable: lowest level that this package logs to stderr; children inherit it
_LEVELS: Final = ("debug", "info", "warning", "error")


def follow_environment() -> None:
    """Log to stderr from the level in the environment variable `LOG`; if it is unset, change nothing."""
    level = os.environ.get(LOG)
    if not level:
        return
    if level not in _LEVELS:
        levels = ", ".join(_LEVELS)
        raise ConfigError(f"the variable {LOG} must be one of {levels}, got {level!r}. Set one of them, or unset it.")
    logger = logging.getLogger("lightning_swarm")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():  # unless the script has configured logging
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def leaving_on_signals(leave: Callable[[str], None]) -> Iterator[None]:
    """Call `leave` with the name of the first signal; each further signal raises `SystemExit`, as a shell expects."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    is_leaving = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_leaving
        if is_leaving:
            raise SystemExit(128 + number)
        is_leaving = True
        leave(signal.Signals(number).name)

    former_handlers = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)


_NEW_OBJECTS: Final = 1_000_000  # between two collections; torch, Lightning and hivemind create 500,000
_usual_thresholds: list[tuple[int, int, int]] = []  # the collector's thresholds before `collecting_rarely`


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect garbage rarely during imports: until the context ends, or until `collect_as_usual`."""
    # Modules are not garbage, and the collector's passes over them took a seventh of the imports' CPU time.
    if not _usual_thresholds:
        _usual_thresholds.append(gc.get_threshold())
        gc.set_threshold(_NEW_OBJECTS)
    try:
        yield
    finally:
        collect_as_usual()


def collect_as_usual() -> None:
    """Restore the thresholds before `collecting_rarely`, unless the program has set its own."""
    while _usual_thresholds:
        thresholds = _usual_thresholds.pop()
        if gc.get_threshold()[0] == _NEW_OBJECTS:
            gc.set_threshold(*thresholds)
        if gc.get_freeze_count() == 0:
            # This promotes all objects to the oldest generation, which the next collections skip.
            gc.freeze()
            gc.unfreeze()


_OLDEST: Final = 2  # generation of the garbage collector
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt, from <malloc.h>
_ARENA_BYTES: Final = 64 << 20  # glibc's HEAP_MAX_SIZE: threads besides the main one get memory in such pieces
# The largest mmap threshold that glibc before 2.35 accepts. No version sets a larger one by itself.
_OLD_MAX_BYTES: Final = 32 << 20
_KEPT_BYTES: Final = 1 << 30  # free memory that the main heap may keep


def max_files() -> int:
    """Return how many files this process may have open at once."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def release_free_memory() -> None:
    """Return freed memory to the kernel, also pieces between used memory, which glibc would keep."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class ProcessSettings:
    """Changes this process's garbage collection, its limit of open files and, with `keeps_memory`, glibc's limits."""

    def __init__(self, *, keeps_memory: bool) -> None:
        self._froze = False
        with contextlib.suppress(OSError, ValueError):  # some hard limits cannot be set as soft limits
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        gc.callbacks.append(self._freeze)
        # Each step needs as much memory as the step before. The kernel would have to clear returned pages again.
        self._libc = ctypes.CDLL(None) if keeps_memory and platform.libc_ver()[0] == "glibc" else None
        if not self._set_thresholds(_ARENA_BYTES, _KEPT_BYTES, _ARENA_BYTES):
            self._set_thresholds(_OLD_MAX_BYTES, _KEPT_BYTES, _ARENA_BYTES)

    def close(self) -> None:
        """Undo the changes, and return free memory to the kernel."""
        # The limit of open files stays, because other code may have opened more by then.
        gc.callbacks.remove(self._freeze)
        if self._froze:
            gc.unfreeze()
        # These are the thresholds that glibc sets by itself once a large block is freed, and its default pad.
        if self._libc is not None and self._set_thresholds(_OLD_MAX_BYTES, 2 * _OLD_MAX_BYTES, 128 << 10):
            self._libc.malloc_trim(0)

    # A full collection over all objects of torch and other libraries stops every thread for a third of a second, and
    # delays each peer that waits for this one. So objects that survive the first full collection are excluded from
    # later ones.
    def _freeze(self, phase: str, info: Mapping[str, int]) -> None:
        # Counting takes tens of milliseconds once there are frozen objects, so it must not follow each collection.
        if self._froze or phase != "stop" or info["generation"] != _OLDEST:
            return
        if gc.get_freeze_count() == 0:  # unless other code freezes objects
            self._froze = True
            gc.freeze()

    def _set_thresholds(self, mmap_bytes: int, trim_bytes: int, pad_bytes: int) -> bool:
        """Set glibc's thresholds, and return whether it accepts them."""
        # A block of `mmap_bytes` or more gets its own mapping, which returns to the kernel when the block is freed.
        # `trim_bytes` may be free at the end of the main heap. Each request to the kernel asks for `pad_bytes` more
        # than needed, and an empty piece of a thread's memory is kept if without it less than that would be free.
        # The mmap threshold comes first: only it may be refused, and setting any of them ends glibc's own adjustment.
        if self._libc is None or not self._libc.mallopt(_MMAP_THRESHOLD, mmap_bytes):
            return False
        self._libc.mallopt(_TRIM_THRESHOLD, trim_bytes)
        self._libc.mallopt(_TOP_PAD, pad_bytes)
        return True
