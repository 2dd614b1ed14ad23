"""Process settings while a peer runs in the process."""

from __future__ import annotations

import gc
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lightning_swarm import SwarmStrategy
from lightning_swarm.core import process
from lightning_swarm.core.process import ProcessSettings, collect_as_usual, collecting_rarely, max_files
from lightning_swarm.peer import network, peer

BLOCK_BYTES = 48 << 20  # more than glibc ever caches, and less than a thread's arena


@pytest.fixture
def _nothing_frozen() -> Iterator[None]:
    gc.disable()  # only the tests collect
    others, gc.callbacks[:] = gc.callbacks[:], []  # callbacks of other tests' peers
    gc.unfreeze()
    yield
    gc.freeze()  # the state of the other tests
    gc.callbacks[:] = others
    gc.enable()


def test_as_many_files_may_be_open_as_the_system_permits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        settings = ProcessSettings(keeps_memory=False)
        try:
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
            assert max_files() == (sys.maxsize if hard == resource.RLIM_INFINITY else hard)
        finally:
            settings.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def _thresholds_kept() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("_nothing_frozen", "_thresholds_kept")
def test_imports_are_not_searched_for_garbage() -> None:
    usual = gc.get_threshold()
    with collecting_rarely():
        assert gc.get_threshold()[0] > 500_000
        with collecting_rarely():  # a command that runs another one
            made = [[] for _ in range(10_000)]
        assert gc.get_threshold() == usual
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects(generation=0)) < len(made), "the next collection does not go through what was made"


@pytest.mark.usefixtures("_nothing_frozen", "_thresholds_kept")
def test_a_threshold_of_the_program_itself_stays() -> None:
    with collecting_rarely():
        gc.set_threshold(5_000)
        gc.freeze()
        collect_as_usual()  # `fit` begins
        assert gc.get_threshold()[0] == 5_000
    assert gc.get_threshold()[0] == 5_000
    assert gc.get_freeze_count() > 10_000


@pytest.mark.usefixtures("_nothing_frozen")
def test_garbage_is_not_sought_in_what_was_there_before() -> None:
    settings = ProcessSettings(keeps_memory=False)
    gc.collect(1)
    assert gc.get_freeze_count() == 0, "nothing is spent on it before the first full collection"
    gc.collect()
    assert gc.get_freeze_count() > 10_000
    settings.close()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_nothing_frozen")
def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    ProcessSettings(keeps_memory=False).close()
    assert gc.get_freeze_count() > 10_000


_IN_A_PROCESS = """
import ctypes, importlib.util, mmap, resource, sys, threading

BLOCK_BYTES = int(sys.argv[2])
spec = importlib.util.spec_from_file_location("process_settings", sys.argv[1])
process_settings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process_settings)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def new_pages():
    before = faults()
    block = libc.malloc(ctypes.c_size_t(BLOCK_BYTES))
    ctypes.memset(block, 1, BLOCK_BYTES)
    libc.free(block)
    return faults() - before


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def fewest():
    new_pages()
    return min(new_pages() for _ in range(3))


def fewest_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(fewest()))
    thread.start()
    thread.join()
    return found[0]


print(fewest(), fewest_in_a_thread())
kept = process_settings.ProcessSettings(keeps_memory=True)
print(fewest(), fewest_in_a_thread())
before = resident()
kept.close()
print(before - resident(), fewest())
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have other ways to free memory")
def test_freed_memory_is_kept_for_what_comes_next_and_given_back_at_the_end() -> None:
    said = subprocess.run(  # a separate process, because the settings stay with it
        [sys.executable, "-c", _IN_A_PROCESS, process.__file__, str(BLOCK_BYTES)],
        env={name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60.0,
    )
    before, during, after = ([int(number) for number in line.split()] for line in said.stdout.splitlines())
    huge_pages = BLOCK_BYTES >> 21  # the fewest huge pages that such a block can have
    assert min(before) >= huge_pages
    assert max(during) < huge_pages
    given_back, fewest = after
    assert given_back > BLOCK_BYTES // 2
    assert fewest >= huge_pages


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_whoever_tunes_malloc_keeps_what_they_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        """A peer with its process settings."""

    def make(*, keeps_memory: bool) -> ProcessSettings:
        raise Made(keeps_memory)

    for other in [one for one in os.environ if one.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(other)
    config = SwarmStrategy().config
    monkeypatch.setattr(network, "ProcessSettings", make)
    with pytest.raises(Made, match="True"):
        peer.hivemind_peer(config, None)
    monkeypatch.setenv(name, "1")
    with pytest.raises(Made, match="False"):
        peer.hivemind_peer(config, None)
