"""The benchmarks' delayed lines between network namespaces of this machine. They start daemons, but no peers."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import uvloop

from benchmarks.hosts import SEND_SIZES, Hosts
from benchmarks.latency import ask, measure
from lightning_swarm.network import Transport, hivemind
from lightning_swarm.network.addresses import HostPort


def _why_not() -> str:
    """Return the reason why this machine cannot have such lines, or an empty text."""
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


@pytest.mark.thorough
@pytest.mark.usefixtures("_permitted")
def test_all_that_goes_over_a_line_is_late_and_as_much_goes_over_it_as_without() -> None:
    near, far = measure(50.0, 0.0, seconds=1.0), measure(50.0, 0.06, seconds=2.0)
    assert near.round_trip_s < 0.12 <= far.round_trip_s
    assert far.connect_s >= 0.12  # includes a handshake
    # The machine may be busy. With a window of 64 KiB the far line would reach only 4.
    assert 15.0 < far.mbit < 50.0
    assert 15.0 < near.mbit < 50.0


@pytest.mark.usefixtures("_permitted")
def test_lines_change_while_hosts_use_them() -> None:
    with Hosts([50.0] * 2, [0.05] * 2) as hosts:
        hosts.change([10.0] * 2, [0.01] * 2)
        found = ask(hosts, seconds=1.0, num_trips=5)
    assert 0.04 <= found.round_trip_s < 0.2  # before the change it took 0.2 s
    assert 2.0 < found.mbit < 10.0


@pytest.mark.usefixtures("_permitted")
def test_hosts_may_have_more_under_way_than_the_machine_they_are_on() -> None:
    largest = 1 << 25
    with Hosts([0.0], send_bytes=largest) as hosts:
        said = subprocess.run([*hosts.on(0), "cat", SEND_SIZES], capture_output=True, text=True, check=True).stdout
    assert int(said.split()[2]) == largest != int(Path(SEND_SIZES).read_text().split()[2])


@pytest.mark.usefixtures("_permitted")
def test_nothing_is_left_behind() -> None:
    with Hosts([0.0, 10.0], [0.01, 0.0]) as hosts:
        names = {hosts.on(number)[3] for number in range(2)}
        assert names < _namespaces()
    assert not names & _namespaces()


def _namespaces() -> set[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in said.splitlines()}


@pytest.mark.usefixtures("_permitted")
def test_peers_far_apart_that_dial_each_other_at_once_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All servers do so when a run begins. Only the daemons are on hosts of their own."""
    monkeypatch.setattr(hivemind, "_check_free", AsyncMock())  # the address belongs to another host
    with Hosts([100.0] * 2, [0.05] * 2) as hosts, closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(_meet(hosts))


async def _meet(hosts: Hosts) -> None:
    async with AsyncExitStack() as stack:
        transports = [await _started(hosts, number, stack) for number in range(2)]
        addresses = [await one.addresses() for one in transports]
        await asyncio.gather(*(one.connect(other) for one, other in zip(transports, addresses[::-1], strict=True)))
        for one, other in (transports, transports[::-1]):
            assert await one.ping(other.peer_id) > 0.2


async def _started(hosts: Hosts, number: int, stack: AsyncExitStack) -> Transport:
    loop: Any = asyncio.get_running_loop()
    start = loop.subprocess_exec
    loop.subprocess_exec = lambda protocol, *command, **options: start(protocol, *hosts.on(number), *command, **options)
    try:
        transport, directory = await hivemind.start(listen=HostPort(hosts.address(number), 0), neighbours=False)
    finally:
        loop.subprocess_exec = start
    stack.push_async_callback(transport.close)
    stack.push_async_callback(directory.close)
    return transport
