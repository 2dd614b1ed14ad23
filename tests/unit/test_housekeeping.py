"""What a process does differently while a peer is at home in it."""

from __future__ import annotations

import ctypes
import gc
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_swarm.environment import tunes_malloc
from lightning_swarm.housekeeping import Housekeeping

BLOCK_BYTES = 48 << 20  # above all that glibc keeps by itself


@pytest.fixture
def _nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as all tests have it


@pytest.mark.usefixtures("_nothing_frozen")
def test_garbage_is_not_sought_in_what_was_there_before() -> None:
    housekeeping = Housekeeping(keeps_memory=False)
    assert gc.get_freeze_count() > 10_000
    housekeeping.close()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_nothing_frozen")
def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    Housekeeping(keeps_memory=False).close()
    assert gc.get_freeze_count() > 10_000


def _new_pages() -> int:
    """Get a block of memory, write to it and free it; the pages that the kernel had to bring."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t(BLOCK_BYTES))
    ctypes.memset(block, 1, BLOCK_BYTES)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have other ways to free memory")
def test_freed_memory_is_kept_for_what_comes_next_and_given_back_at_the_end() -> None:
    huge_pages = BLOCK_BYTES >> 21  # the fewest that such a block can have
    assert min(_new_pages() for _ in range(3)) >= huge_pages
    housekeeping = Housekeeping(keeps_memory=True)
    try:
        _new_pages()
        assert min(_new_pages() for _ in range(3)) < huge_pages
        before = _resident_bytes()
    finally:
        housekeeping.close()
    assert before - _resident_bytes() > BLOCK_BYTES // 2


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_whoever_tunes_malloc_keeps_what_they_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tunes_malloc()
    monkeypatch.setenv(name, "1")
    assert tunes_malloc()
