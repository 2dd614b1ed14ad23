"""A server's reports of its memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from lightning_swarm.server.server import describe_peak, peak_bytes
from tests.unit.conftest import MakeSwarm

CPU = torch.device("cpu")
BIG = 64 << 20

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process has held")


def _held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    found = peak_bytes(CPU)
    assert found is not None
    return found


@linux
def test_the_peak_is_what_was_held_at_once() -> None:
    before = _peak_bytes()
    held = []
    # Exceed the earlier peak, because other tests' threads may free memory meanwhile.
    while (after := _peak_bytes()) < before + BIG / 2:
        held.append(torch.ones(BIG, dtype=torch.uint8))
    assert after - before < BIG * 2
    assert abs(after - _held_bytes()) < BIG / 2
    held.clear()
    assert abs(_peak_bytes() - after) < BIG / 2, "it was given back, and still was held"
    assert re.fullmatch(r" It took at most \d+\.\d\d GB of memory here\.", describe_peak(CPU))


def test_a_gpus_memory_is_what_torch_took_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {device: 2_340_000_000}.__getitem__)
    assert peak_bytes(device) == 2_340_000_000
    assert describe_peak(device) == " It took at most 2.34 GB of memory here."


def test_of_other_devices_nothing_is_said() -> None:
    assert peak_bytes(torch.device("meta")) is None
    assert describe_peak(torch.device("meta")) == ""


@linux
def test_a_server_reports_it(make_swarm: MakeSwarm) -> None:
    [server] = make_swarm("a").servers.values()
    report = server.report()
    assert report is not None
    assert report.peak_bytes is not None
    assert 10 << 20 < report.peak_bytes <= (peak_bytes(CPU) or 0)
