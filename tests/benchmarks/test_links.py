"""Benchmarks between network namespaces of this machine, each in a small run of its real code."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts
from tests.benchmarks.small import Small, run

# The end of a benchmark's process closes its children's pipes; here the process goes on.
pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.timeout(580),  # processes start slowly on a busy machine
    pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

LINKS = {
    "generation_links": Small("--stages 1 --round-trip 20 --width 64"),
    "latency": Small("--seconds 1", {"ROWS": ((100.0, 0.01),)}),
    "links": Small("--seconds 2 --widths 64 --mbits 100"),
    "simulated": Small("--seconds 10 --only 'a link binds'"),
    "trainers_links": Small("--sizes 1M --steps 1"),
    "wan.overlap": Small("--steps 1", {"MBITS": (500.0,), "ROUND_TRIPS_S": (0.01,), "NUM_PEERS": 2}),
    "wan.throughput": Small(
        "--steps 1", {"MBITS": (500.0,), "ROUND_TRIPS_S": (0.01,), "SPEEDS": {"equal": (1.0, 1.0)}}
    ),
    "wan.utilisation": Small("--seconds 1 --steps 1 --only base", {"ROUND_TRIPS_S": (0.01, 0.05)}),
    "wire": Small("--seconds 2 --width 64", {"CODECS": ("8bit",)}),
}
"""Each starts one to five hosts."""


@cache
def why_not() -> str:
    """Return the reason why this machine cannot have such hosts, or an empty text."""
    if missing := Hosts.missing(delayed=True):
        return f"it needs Linux, root, iproute2 and TAP devices; not found: {missing}"
    try:
        with Hosts([0.0], [0.001]):
            return ""
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"network namespaces or TAP devices are not permitted here: {error}"


@pytest.mark.parametrize("name", LINKS)
def test_it_measures(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := why_not():
        pytest.skip(why)
    run(name, LINKS[name], folder, monkeypatch)
