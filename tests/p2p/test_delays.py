"""The benchmarks' lines with latency, between network namespaces of this machine. No peers are started."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.hosts import Hosts
from benchmarks.latency import measure


def _why_not() -> str:
    """What keeps this machine from having such lines."""
    if missing := Hosts.missing(delayed=True):
        return f"it needs Linux, root, iproute2 and TAP devices; not found: {missing}"
    try:
        with Hosts([0.0], [0.001]):
            return ""
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"network namespaces or TAP devices are not permitted here: {error}"


@pytest.fixture(scope="module")
def _permitted() -> None:
    if why := _why_not():
        pytest.skip(why)


@pytest.mark.usefixtures("_permitted")
def test_all_that_goes_over_a_line_is_late_and_as_much_goes_over_it_as_without() -> None:
    near, far = measure(50.0, 0.0, seconds=1.0), measure(50.0, 0.06, seconds=2.0)
    assert near.round_trip_s < 0.03
    assert 0.12 <= far.round_trip_s < 0.12 + 0.03
    assert far.connect_s >= 0.12  # a handshake, too
    assert 35.0 < far.mbit < 50.0
    assert 35.0 < near.mbit < 50.0


@pytest.mark.usefixtures("_permitted")
def test_nothing_is_left_behind() -> None:
    with Hosts([0.0, 10.0], [0.01, 0.0]) as hosts:
        names = {hosts.on(number)[3] for number in range(2)}
        assert names < _namespaces()
    assert not names & _namespaces()


def _namespaces() -> set[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in said.splitlines()}
