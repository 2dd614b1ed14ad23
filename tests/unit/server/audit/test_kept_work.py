"""A server keeps its work for audits in memory, then on disk."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest
import torch

from lightning_swarm.model.random import key_seed
from lightning_swarm.server.audit.kept_work import KeptWork, KeptWorks
from lightning_swarm.server.compute import ForwardCall
from tests.unit.conftest import needs_full_disk, on_a_full_disk
from tests.unit.swarm import MODE, rows

NUM_BYTES = 3 * rows(0).nbytes


def work(seed: int) -> KeptWork:
    call = ForwardCall((rows(seed),), {"mask": rows(seed + 10), "flag": True}, [True], MODE, key_seed(seed))
    return KeptWork(call, [rows(seed + 20), None], bytes([seed]) * 128)


def assert_same(found: KeptWork, seed: int) -> None:
    expected = work(seed)
    assert torch.equal(found.call.inputs[0], expected.call.inputs[0])
    assert torch.equal(found.call.extras["mask"], expected.call.extras["mask"])
    assert (found.call.extras["flag"], found.call.seed) == (True, expected.call.seed)
    assert torch.equal(found.gradients[0], expected.gradients[0])
    assert found.gradients[1] is None
    assert found.claim == expected.claim


@pytest.mark.parametrize("max_bytes", [0, 2 * NUM_BYTES, 1 << 20])
def test_work_comes_back_as_it_was(max_bytes: int) -> None:
    works = KeptWorks(max_bytes)
    receipts = [(0, index, 0) for index in range(5)]
    for seed, receipt in enumerate(receipts):
        works.keep(receipt, work(seed))
    assert works.used_bytes == min(max_bytes // NUM_BYTES, 5) * NUM_BYTES
    for seed, receipt in enumerate(receipts):
        assert receipt in works
        assert works.claim(receipt) == work(seed).claim
        assert_same(works.get(receipt), seed)
    assert (9, 9, 9) not in works


@needs_full_disk
def test_without_room_it_stays_in_memory(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", on_a_full_disk)
    works = KeptWorks(0)
    for seed in range(3):
        works.keep((0, seed, 0), work(seed))
    assert works.used_bytes == 3 * NUM_BYTES
    assert len(caplog.records) == 1
    assert_same(works.get((0, 2, 0)), 2)


def test_what_is_on_disk_is_read_when_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    works, write = KeptWorks(0), os.pwrite
    works.keep((0, 0, 0), work(0))
    left = [NUM_BYTES // 2]  # bytes left, so that the second write is partial

    def filling(number: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "no room")
        num_written = write(number, data[: left[0]], offset)
        left[0] -= num_written
        return num_written

    monkeypatch.setattr(os, "pwrite", filling)
    for seed in (1, 2):
        works.keep((0, seed, 0), work(seed))
    assert works.used_bytes == 2 * NUM_BYTES
    for seed in range(3):
        assert_same(works.get((0, seed, 0)), seed)
