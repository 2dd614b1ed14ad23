"""`lightning-swarm doctor` on machines with a planted fault."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.errors import ConfigError, InitialPeersSilent
from lightning_swarm.core.event_loop import ThreadRuntime
from lightning_swarm.monitor.checks import MAX_SKEW_S
from lightning_swarm.network import hivemind
from lightning_swarm.network.addresses import Address
from lightning_swarm.peer.network import start_network
from lightning_swarm.protocol import queries
from tests.p2p.processes import COMMAND, Run
from tests.p2p.warm import WarmRun

# Cold starts of peers in this file: none. The doctor is no peer, and its targets live in this process.

AHEAD_S = 100.0
NOBODY = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"


@pytest.fixture
def skewed_peer() -> Iterator[Address]:
    """A running peer with a wrong clock."""
    with contextlib.closing(ThreadRuntime("peer")) as runtime:
        transport, directory = runtime.run(hivemind.start())

        async def serve() -> str:
            queries.answer_greetings(transport, now=lambda: time.time() + AHEAD_S)
            return (await transport.addresses())[0]

        try:
            yield Address.parse(runtime.run(serve()))
        finally:
            runtime.run(directory.close())
            runtime.run(transport.close())


def doctor(*arguments: object, kind: type[Run] = WarmRun) -> list[str]:
    """Return the output's lines; the command reports a problem in each of these tests."""
    run = kind("doctor", *arguments, program=COMMAND)
    try:
        assert run.wait(60.0) == 1, "".join(run.output)
        assert run.survivors() == []
    finally:
        run.end()
    return [line.rstrip("\n") for line in run.output]


@pytest.mark.thorough
def test_a_blocked_port_a_skewed_clock_and_peers_that_are_not_there(skewed_peer: Address) -> None:
    with socket.create_server(("127.0.0.1", 0)) as blocking, socket.create_server(("127.0.0.1", 0)) as freed:
        taken, free = (server.getsockname()[1] for server in (blocking, freed))
        freed.close()
        addresses = [skewed_peer, f"127.0.0.1:{free}/{NOBODY}", f"{skewed_peer.host_port}/{NOBODY}"]
        lines = doctor("--port", taken, *(part for address in addresses for part in ("--peer", address)))
    wrong = {line: lines[number + 1] for number, line in enumerate(lines) if line.startswith("WRONG")}
    port, refused, clock, other = wrong
    assert f"port: 127.0.0.1, port {taken}: [Errno 98] Address already in use" in port
    assert "-> End the program that listens there" in wrong[port]
    assert f"peer 127.0.0.1:{free}: its machine refuses the connection" in refused
    assert f"ok     peer {skewed_peer.host_port}: reachable, round trip " in "\n".join(lines)
    [ahead_s] = re.findall(rf"clock: {skewed_peer.host_port} is (\S+) s ahead of this machine, at most 3 s", clock)
    assert float(ahead_s) == pytest.approx(AHEAD_S, abs=MAX_SKEW_S)
    assert "-> Set the clock that is wrong" in wrong[clock]
    assert f"peer {skewed_peer.host_port}: another peer listens at that address" in other
    assert f"it answers as {skewed_peer.peer_id}" in other
    assert lines[-1] == "4 to mend."


@pytest.mark.thorough
def test_a_joiner_tells_wrong_ports_hosts_and_ids_apart(skewed_peer: Address, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is in plain words, not libp2p's."""
    with socket.create_server(("127.0.0.1", 0)) as blocking, socket.create_server(("127.0.0.1", 0)) as freed:
        taken, free = (server.getsockname()[1] for server in (blocking, freed))
        freed.close()
        own = skewed_peer.peer_id
        wrong = {
            f"127.0.0.1:{free}/{own}": "its machine refuses the connection ([Errno 111] Connection refused). Check",
            f"127.0.0.1:{taken}/{own}": "the program that listens there is not a peer. Check the port: another",
            f"nobody.invalid:31337/{own}": "its name does not resolve",
            f"{skewed_peer.host_port}/{NOBODY}": f"listens at that address (it answers as {own}). Copy the address",
        }
        for address, said in wrong.items():
            config = SwarmStrategy(num_stages=2, initial_peers=address).config
            with pytest.raises(InitialPeersSilent) as refusal:
                start_network(config, None)
            text = str(refusal.value)
            assert text.startswith(f"a peer to join must answer at the address that names it, {address}: ")
            assert said in text
            assert "aemon" not in text
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "swarm" in record.name]


def test_an_announced_address_of_another_peer_is_refused(skewed_peer: Address) -> None:
    """This happens if a script that names the first machine's address runs on another machine."""
    place = str(skewed_peer.host_port)
    config = SwarmStrategy(num_stages=2, initial_peers=str(skewed_peer), announce=place, trust="open").config
    with pytest.raises(
        ConfigError, match=rf"{place} answers as {skewed_peer.peer_id}, this peer is 12D3KooW"
    ) as refusal:
        start_network(config, None)
    assert "`--announce HOST:PORT` of `join` and `serve`" in str(refusal.value)


@pytest.mark.thorough
def test_a_missing_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hivemind that was installed without its program shadows the real one."""
    (tmp_path / "hivemind").mkdir()
    (tmp_path / "hivemind" / "__init__.py").write_text("raise RuntimeError('it is not to be imported')\n")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    lines = doctor(kind=Run)  # its process imports hivemind itself
    [wrong] = [number for number, line in enumerate(lines) if line.startswith("WRONG")]
    assert lines[wrong] == "WRONG  daemon's file: hivemind was installed without its program p2pd"
    assert "--force-reinstall" in lines[wrong + 1]
    assert lines[-1] == "1 to mend."
