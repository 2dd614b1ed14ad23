"""What a process does differently while a peer is at home in it: with garbage, and with freed memory."""

from __future__ import annotations

import ctypes
import gc
import platform
from typing import Final

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>
_KEPT_BYTES: Final = 1 << 30
_ARENA_BYTES: Final = 64 << 20  # glibc's HEAP_MAX_SIZE: threads beside the main one have pieces of that size
_OWN_BYTES: Final = _ARENA_BYTES
"""What is as large as this has memory of its own, which is given back when it is freed."""


class Housekeeping:
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
        self._keep(_KEPT_BYTES, _ARENA_BYTES)

    def close(self) -> None:
        """End that, and give back what is free."""
        if self._froze:
            gc.unfreeze()
        self._keep(_ARENA_BYTES, 0)  # as it comes to be by itself where something large is freed
        if self._libc is not None:
            self._libc.malloc_trim(0)

    def _keep(self, at_top: int, pad: int) -> None:
        """Give back what is free at the end of the heap beyond `at_top` bytes, and get `pad` more than is asked for."""
        if self._libc is not None:
            self._libc.mallopt(_TRIM_THRESHOLD, at_top)
            self._libc.mallopt(_TOP_PAD, pad)
            self._libc.mallopt(_MMAP_THRESHOLD, _OWN_BYTES)
