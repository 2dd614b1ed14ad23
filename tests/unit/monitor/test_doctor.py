"""The doctor reports a machine's problems with their remedies, and reports none for a sound machine."""

from __future__ import annotations

import socket
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from lightning_swarm import cli
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.monitor import checks, doctor
from lightning_swarm.monitor.checks import DialResult, Finding, Obstacle
from lightning_swarm.monitor.doctor import Visitor
from lightning_swarm.network import PeerId, hivemind
from lightning_swarm.network.addresses import Address, listen_error
from lightning_swarm.network.identity import Identity
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.protocol import queries
from lightning_swarm.protocol.rpc import RPCS
from lightning_swarm.trust.certificates import encode
from lightning_swarm.trust.credentials import RunCredentials
from lightning_swarm.trust.owner import Owner
from tests.access import credentials_of

PYPROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
GIB = 1 << 30
PEER = "203.0.113.7:31337"
HERE = {"torch": "2.13.0", "lightning": "2.6.6"}


def folder(problem: str | None = None, free_bytes: int = 9 * GIB) -> Finding:
    return checks.check_folder("/data", "checkpoints", problem, free_bytes)


@pytest.mark.parametrize(
    "finding",
    [
        checks.check_python("3.11.0"),
        checks.check_python("3.15.0rc1"),
        checks.check_version("torch", "2.13.0+cpu"),
        checks.check_version("lightning", "2.6.9"),
        checks.check_version("numpy", "2.3.99"),
        checks.check_binary("/x/p2pd", executable=True),
        checks.check_port("127.0.0.1", 31337, None),
        checks.check_daemon(None, 0.3),
        checks.check_threads(2, 2),
        folder(free_bytes=checks.MIN_FREE_BYTES),
        checks.check_reach(DialResult(address=PEER), 0.02),
        checks.check_reach(DialResult(address=PEER)),
        checks.check_clock(PEER, checks.MAX_SKEW_S, 0.0),
        checks.check_clock(PEER, -checks.MAX_SKEW_S, 0.0),
        checks.check_clock(PEER, 3.9, 2.0),  # an answer this slow leaves open whether 3.9 is 2.9
        checks.check_protocol(PEER, 1, 1),
        checks.compare_versions(PEER, HERE, HERE),
        checks.compare_versions(PEER, HERE, {}),
    ],
    ids=repr,
)
def test_nothing_is_wrong_with_a_good_machine(finding: Finding) -> None:
    assert finding.ok
    assert finding.remedy is None


@pytest.mark.parametrize(
    ("finding", "found", "remedy"),
    [
        (checks.check_python("3.10.14"), "3.10.14", "Use a Python >=3.11"),
        (checks.check_version("numpy", "2.4.0"), "2.4.0, but <2.4 is needed", 'pip install "numpy<2.4"'),
        (checks.check_version("lightning", "2.7.0"), "2.7.0, but >=2.5", 'pip install "lightning>=2.5,!=2.6.2,!=2.6.3'),
        (checks.check_version("lightning", "2.6.3"), "2.6.3, which steals credentials", "change all passwords"),
        (checks.check_version("torch", "2.3.1"), "2.3.1, but >=2.4", 'pip install "torch>=2.4"'),
        (checks.check_version("hivemind", None), "not installed", 'pip install "hivemind>=1.1.12,<1.2"'),
        (checks.check_binary(None, executable=False), "without its program p2pd", "--force-reinstall"),
        (checks.check_binary("/x/p2pd", executable=False), "/x/p2pd is not executable", "chmod +x /x/p2pd"),
        (checks.check_port("127.0.0.1", 31337, "in use"), "port 31337: in use", "another port"),
        (checks.check_port("203.0.113.7", 0, "no such address"), "any port: no such address", "0.0.0.0 for all"),
        (checks.check_port("127.0.0.1", 99999, "out of range"), "port 99999: out of range", "a port from 1 to 65535"),
        (checks.check_daemon("Unreachable: no", 30.0), "does not start: Unreachable: no", "firewall"),
        (checks.check_threads(8, 2), "8 on 2 cores: they wait", "OMP_NUM_THREADS=2"),
        (checks.check_clock(PEER, 3.01, 0.0), f"{PEER} is 3.01 s ahead of this machine, at most 3 s", "set-ntp true"),
        (checks.check_clock(PEER, -3600.0, 0.1), "is 3600.00 s behind this machine, at most 3 s", "set-ntp true"),
        (checks.check_protocol(PEER, 1, 2), f"version 1 here, 2 at {PEER}", "same version of lightning_swarm"),
        (folder(problem="Permission denied"), "/data: Permission denied", "may write to"),
        (folder(free_bytes=checks.MIN_FREE_BYTES - 1), "/data, 1.0 GiB free", "at least 1 GiB"),
    ],
    ids=lambda value: value.check if isinstance(value, Finding) else "",
)
def test_a_fault_is_named_with_its_remedy(finding: Finding, found: str, remedy: str) -> None:
    assert not finding.ok
    assert found in finding.found
    assert remedy in str(finding.remedy)


@pytest.mark.parametrize("obstacle", Obstacle)
def test_each_obstacle_on_the_way_to_a_peer_has_its_remedy(obstacle: Obstacle) -> None:
    finding = checks.check_reach(DialResult(address=PEER, obstacle=obstacle, detail="so\n  it said"), None)
    assert finding.check == f"peer {PEER}"
    assert finding.found == f"{obstacle.text} (so it said)"
    assert finding.remedy == obstacle.remedy
    assert len({one.text for one in Obstacle}) == len({one.remedy for one in Obstacle}) == len(Obstacle)


def test_versions_that_differ_are_named() -> None:
    found = checks.compare_versions(PEER, HERE, {"torch": "2.13.0", "lightning": "2.6.7", "x": "1"})
    assert found.found == "differ, which works: lightning 2.6.6 here, 2.6.7 there; x none here, 1 there"
    assert str(found).startswith("ok     versions at ")


@pytest.mark.parametrize("name", ["torch", "CPU"])
def test_what_may_round_in_another_way_is_a_warning(name: str) -> None:
    here = {**HERE, "CPU": "x86_64, AVX2 or newer"}
    finding = checks.compare_versions(PEER, here, {**here, name: "another"})
    assert finding.ok
    assert f"{name} {here[name]} here, another there" in finding.found
    assert str(finding).startswith("WARN   versions at ")
    assert "-> This works. Where both machines hold one stage, portable arithmetic gives" in str(finding)
    assert "docs/join.md" in str(finding)
    assert checks.compare_versions(PEER, here, HERE).consequence is None  # a peer that does not report its CPU


def test_no_other_peer_forges_a_line() -> None:
    assert len(str(checks.compare_versions(PEER, HERE, {"torch": "2\nok     all"})).splitlines()) == 2


def test_a_clock_that_is_off_is_not_blamed_on_the_invitation(loop: VirtualLoop) -> None:
    """This peer's certificate has the time of its own clock, ahead of the other peer's."""
    network = MemoryNetwork()
    peer, own = (network.transport(Identity.generate().peer_id) for _ in range(2))
    owner, now_s = Owner("run", Identity.generate()), time.time()
    for transport, made_s in ((peer, now_s), (own, now_s + 300.0)):
        made = owner.certify_own(transport.peer_id, now_s=made_s)
        transport.set_credentials(RunCredentials("run", owner.key.peer_id, encode(made)), RPCS)
    queries.answer_greetings(peer)
    address = Address.parse(loop.run_until_complete(peer.addresses())[0])
    dialed, meeting = loop.run_until_complete(doctor._greet(own, address))
    assert (dialed.obstacle, meeting) == (Obstacle.CLOCK, None)
    assert "in the future" in dialed.detail
    assert checks.check_reach(dialed).remedy == checks.SET_CLOCK


def test_supported_versions_are_those_of_the_package() -> None:
    required = {one.name: one.specifier for one in map(Requirement, PYPROJECT["project"]["dependencies"])}
    assert {name: str(required[name]) for name in checks.SUPPORTED} == {
        name: str(Requirement(name + supported).specifier) for name, supported in checks.SUPPORTED.items()
    }
    assert PYPROJECT["project"]["requires-python"] == checks.SUPPORTED_PYTHON


# ---------------------------------------------------------------------- how it is found out


@pytest.fixture
def taken() -> Iterator[int]:
    """A port with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_is_tried(taken: int) -> None:
    assert listen_error("127.0.0.1", 0) is None
    assert "in use" in str(listen_error("127.0.0.1", taken))
    assert listen_error("192.0.2.1", 0) is not None  # an address without a host
    assert listen_error("127.0.0.1", 70_000) is not None


def test_a_folder_is_written_to(tmp_path: Path) -> None:
    problem, free_bytes = doctor.probe_folder(tmp_path)
    assert problem is None
    assert free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert doctor.probe_folder(tmp_path / "missing") == ("No such file or directory", 0)


def test_the_daemon_comes_with_hivemind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = doctor.find_daemon()
    assert found is not None
    assert found.name == "p2pd"
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    assert doctor.find_daemon() is None
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.find_daemon() is None


def test_a_package_is_found_by_its_version() -> None:
    assert queries.installed_version("torch") is not None
    assert queries.installed_version("lightning-swarm-without-such-a-package") is None


def knock(port: int, host: str = "127.0.0.1", timeout: float = 60.0) -> Obstacle | None:
    return doctor.probe_port(Address(host, port, PeerId("x")), timeout=timeout).obstacle


def test_a_port_where_nobody_or_somebody_else_listens(taken: int) -> None:
    assert knock(taken, timeout=0.2) is Obstacle.PROTOCOL  # it accepts the connection and never answers
    with socket.create_server(("127.0.0.1", 0)) as server:
        freed = server.getsockname()[1]
    assert knock(freed) is Obstacle.REFUSED


@pytest.mark.parametrize(
    ("says", "obstacle"),
    [
        (b"\x13/multistream/1.0.0\n", None),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Obstacle.PROTOCOL),
        (b"", Obstacle.PROTOCOL),
    ],
    ids=["libp2p", "http", "hangs up"],
)
def test_what_listens_is_told_by_its_first_words(says: bytes, obstacle: Obstacle | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(says)

        speaker = threading.Thread(target=speak)
        speaker.start()
        assert knock(server.getsockname()[1]) is obstacle
        speaker.join()


@pytest.mark.parametrize(
    ("error", "obstacle"),
    [
        (TimeoutError(), Obstacle.SILENCE),
        (OSError("no route to host"), Obstacle.ROUTE),
        (ConnectionRefusedError(), Obstacle.REFUSED),
    ],
)
def test_no_way_to_a_machine(monkeypatch: pytest.MonkeyPatch, error: OSError, obstacle: Obstacle) -> None:
    def connect(*_: object) -> None:
        raise error

    monkeypatch.setattr(doctor.socket, "create_connection", connect)
    assert knock(1) is obstacle


def test_a_name_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(doctor.socket, "getaddrinfo", resolve)
    assert knock(1, "nobody.example") is Obstacle.NAME


# ---------------------------------------------------------------------- as a command


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Addresses of the daemons that would have started, on a machine with enough cores and room."""
    started: list[tuple[str, int]] = []

    def start(host: str, port: int) -> tuple[None, float]:
        started.append((host, port))
        return None, 0.25

    monkeypatch.setattr(doctor, "try_daemon", start)
    monkeypatch.setattr(doctor, "_num_threads", lambda: 1)
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 1)
    return started


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "doctor", *arguments])
    return cli.main()


def test_a_good_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], daemons: list[tuple[str, int]]
) -> None:
    assert run(monkeypatch) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "This machine can be a peer."
    assert all(line.startswith("ok     ") for line in lines)
    assert "ok     daemon: starts in 0.2 s" in lines
    assert daemons == [("127.0.0.1", 0)]


def test_a_blocked_port_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], daemons: list[tuple[str, int]], taken: int
) -> None:
    assert run(monkeypatch, "--port", str(taken)) == 1
    lines = capsys.readouterr().out.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("WRONG")]
    assert f"port: 127.0.0.1, port {taken}: " in lines[at]
    assert lines[at + 1].strip().startswith("-> End the program that listens there")
    assert lines[-1] == "1 to mend."
    assert daemons == []  # the reason why it cannot start was reported


@pytest.mark.parametrize("fault", ["missing daemon", "numpy"])
def test_other_faults_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], daemons: list[tuple[str, int]], fault: str
) -> None:
    if fault == "numpy":
        real = queries.installed_version
        monkeypatch.setattr(doctor, "installed_version", lambda name: "2.4.1" if name == "numpy" else real(name))
    else:
        monkeypatch.setattr(doctor, "find_daemon", lambda: None)
    assert run(monkeypatch) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert wrong == [
        "WRONG  numpy: 2.4.1, but <2.4 is needed"
        if fault == "numpy"
        else "WRONG  daemon's file: hivemind was installed without its program p2pd"
    ]
    assert daemons == []


def test_one_peer_that_answers_is_enough_while_another_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer behind a network that drops packets is silent until the timeout, and may be named first."""
    silent, answering = Address("203.0.113.8", 1, PeerId("a")), Address("203.0.113.7", 1, PeerId("b"))
    over = threading.Event()

    def knock(address: Address) -> DialResult:
        if address is silent:
            assert over.wait(60.0)
        return DialResult(address=str(address.host_port))

    monkeypatch.setattr(doctor, "probe_port", knock)
    doctor.check_answering([silent, answering])
    assert not over.is_set()
    over.set()


def test_without_a_daemon_a_peer_is_knocked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], daemons: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(doctor, "find_daemon", lambda: None)
    monkeypatch.setattr(doctor, "probe_port", lambda address: DialResult(address=address.host_port))
    assert run(monkeypatch, "--peer", f"{PEER}/12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR") == 1
    said = capsys.readouterr().out
    assert f"ok     peer {PEER}: libp2p answers there; only a daemon here could identify the peer" in said
    assert said.endswith("1 to mend.\n")


def test_a_peer_that_is_no_address(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--peer", PEER) == 2
    assert (
        f"must be host:port/id (or /ip4/…/tcp/…/p2p/<id>), as the peer itself prints it, got '{PEER}'"
        in capsys.readouterr().err
    )


def test_a_daemon_that_does_not_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:

    async def start(**_: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(hivemind, "start", start)
    problem, took_s = doctor.try_daemon("127.0.0.1", 0)
    assert problem == "OSError: no such luck"
    assert took_s >= 0.0


def test_a_run_by_invitation_is_reachable_all_the_same(loop: VirtualLoop) -> None:
    network = MemoryNetwork()
    peer, own = network.transport("12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"), network.transport()
    peer.set_credentials(credentials_of(peer.peer_id), RPCS)
    queries.answer_greetings(peer)
    address = Address.parse(loop.run_until_complete(peer.addresses())[0])
    dialed, meeting = loop.run_until_complete(doctor._greet(own, address))
    assert meeting is None
    finding = checks.check_reach(dialed)
    assert finding.ok
    assert finding.found.startswith("reachable; it answers invited peers only")
    assert "`--invite FILE`" in finding.found


@pytest.mark.parametrize(
    ("run", "is_guess", "ok", "words"),
    [
        (b"run", False, True, "round trip"),
        (b"run", True, True, "round trip"),
        (b"another", True, True, "reachable; it answers invited peers only"),
        (b"another", False, False, "it rejects the invitation (b refuses the certificate"),
    ],
)
def test_an_invitation_that_was_named_has_to_be_the_right_one(
    loop: VirtualLoop, run: bytes, is_guess: bool, ok: bool, words: str
) -> None:
    network = MemoryNetwork()
    peer, own = network.transport("b"), network.transport("a")
    peer.set_credentials(credentials_of(peer.peer_id), RPCS)
    own.set_credentials(credentials_of(own.peer_id, run=run), RPCS)
    finding = met(loop, peer, own, Visitor(is_guess=is_guess))
    assert finding.ok is ok
    assert words in finding.found


@pytest.mark.parametrize(
    ("is_guess", "words"), [(True, "round trip"), (False, "accepts any peer and has no certificate")]
)
def test_a_run_that_takes_any_peer_is_looked_at_without_the_key_of_another_run(
    loop: VirtualLoop, is_guess: bool, words: str
) -> None:
    network = MemoryNetwork()
    peer, own = network.transport("b"), network.transport("a")
    own.set_credentials(credentials_of(own.peer_id), RPCS)
    finding = met(loop, peer, own, Visitor(is_guess=is_guess))
    assert finding.ok is is_guess
    assert words in finding.found


def met(loop: VirtualLoop, peer: MemoryTransport, own: MemoryTransport, visitor: Visitor) -> Finding:
    queries.answer_greetings(peer)
    address = Address("127.0.0.1", 1, peer.peer_id)
    dialed, meeting = loop.run_until_complete(doctor._greet(own, address, visitor))
    return checks.check_reach(dialed, meeting.round_trip_s if meeting else None)
