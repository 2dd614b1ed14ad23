"""The doctor names what is wrong with a machine, and what to do; it is silent about a good one."""

from __future__ import annotations

import socket
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from lightning_swarm import cli, doctor
from lightning_swarm.doctor import policy
from lightning_swarm.doctor.policy import Finding, Folder

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
GIB = 1 << 30


def folder(problem: str | None = None, free_bytes: int = 9 * GIB) -> Finding:
    return policy.check_folder(Folder(path="/data", purpose="checkpoints", problem=problem, free_bytes=free_bytes))


@pytest.mark.parametrize(
    "finding",
    [
        policy.check_python("3.11.0"),
        policy.check_python("3.15.0rc1"),
        policy.check_version("torch", "2.13.0+cpu"),
        policy.check_version("lightning", "2.6.9"),
        policy.check_version("numpy", "2.3.99"),
        policy.check_binary("/x/p2pd", executable=True),
        policy.check_port("127.0.0.1", 31337, None),
        policy.check_daemon(None, 0.3),
        policy.check_threads(2, 2),
        folder(free_bytes=policy.LEAST_FREE_BYTES),
    ],
    ids=repr,
)
def test_nothing_is_wrong_with_a_good_machine(finding: Finding) -> None:
    assert finding.ok
    assert finding.remedy is None


@pytest.mark.parametrize(
    ("finding", "found", "remedy"),
    [
        (policy.check_python("3.10.14"), "3.10.14", "Use a Python >=3.11"),
        (policy.check_version("numpy", "2.4.0"), "2.4.0, but <2.4 is needed", 'pip install "numpy<2.4"'),
        (policy.check_version("lightning", "2.7.0"), "2.7.0, but >=2.5,<2.7", 'pip install "lightning>=2.5,<2.7"'),
        (policy.check_version("torch", "2.3.1"), "2.3.1, but >=2.4", 'pip install "torch>=2.4"'),
        (policy.check_version("hivemind", None), "not installed", 'pip install "hivemind>=1.1.12,<1.2"'),
        (policy.check_binary(None, executable=False), "without its program p2pd", "--force-reinstall"),
        (policy.check_binary("/x/p2pd", executable=False), "/x/p2pd must not be run", "chmod +x /x/p2pd"),
        (policy.check_port("127.0.0.1", 31337, "in use"), "port 31337: in use", "another port"),
        (policy.check_port("203.0.113.7", 0, "no such address"), "any port: no such address", "0.0.0.0 for all"),
        (policy.check_daemon("Unreachable: no", 30.0), "does not start: Unreachable: no", "firewall"),
        (policy.check_threads(8, 2), "8 on 2 cores: they wait", "OMP_NUM_THREADS=2"),
        (folder(problem="Permission denied"), "/data: Permission denied", "may write to"),
        (folder(free_bytes=policy.LEAST_FREE_BYTES - 1), "/data, 1.0 GiB free", "at least 1 GiB"),
    ],
    ids=lambda value: value.check if isinstance(value, Finding) else "",
)
def test_a_fault_is_named_with_its_remedy(finding: Finding, found: str, remedy: str) -> None:
    assert not finding.ok
    assert found in finding.found
    assert remedy in str(finding.remedy)


def test_supported_versions_are_those_of_the_package() -> None:
    required = {one.name: one.specifier for one in map(Requirement, PYPROJECT["project"]["dependencies"])}
    assert {name: str(required[name]) for name in policy.SUPPORTED} == {
        name: str(Requirement(name + supported).specifier) for name, supported in policy.SUPPORTED.items()
    }
    assert PYPROJECT["project"]["requires-python"] == policy.SUPPORTED_PYTHON


# ---------------------------------------------------------------------- how it is found out


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_is_tried(taken: int) -> None:
    assert doctor.try_port("127.0.0.1", 0) is None
    assert "in use" in str(doctor.try_port("127.0.0.1", taken))
    assert doctor.try_port("192.0.2.1", 0) is not None  # an address of nobody
    assert doctor.try_port("127.0.0.1", 70_000) is not None


def test_a_folder_is_written_to(tmp_path: Path) -> None:
    good = doctor.look_at_folder(tmp_path, "tests")
    assert good.problem is None
    assert good.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert doctor.look_at_folder(tmp_path / "missing", "tests").problem == "No such file or directory"


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
    assert doctor.installed_version("torch") is not None
    assert doctor.installed_version("lightning-swarm-without-such-a-package") is None


# ---------------------------------------------------------------------- as a command


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where daemons were started, had they been real; and a machine with enough cores and room."""
    started: list[tuple[str, int]] = []

    def start(host: str, port: int) -> tuple[None, float]:
        started.append((host, port))
        return None, 0.25

    monkeypatch.setattr(doctor, "try_daemon", start)
    monkeypatch.setattr(doctor, "_num_threads", lambda: 1)
    monkeypatch.setattr(policy, "LEAST_FREE_BYTES", 1)
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
    assert daemons == []  # why it would not start has been said


@pytest.mark.parametrize("fault", ["missing daemon", "numpy"])
def test_other_faults_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], daemons: list[tuple[str, int]], fault: str
) -> None:
    if fault == "numpy":
        real = doctor.installed_version
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


def test_a_daemon_that_does_not_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_swarm.network import hivemind

    async def start(**_: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(hivemind, "start", start)
    problem, took_s = doctor.try_daemon("127.0.0.1", 0)
    assert problem == "OSError: no such luck"
    assert took_s >= 0.0
