"""Keys that joined peers keep: the same one after each restart, and never that of a living process."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.identity import load_identity
from lightning_swarm.peer import process
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.kept_identity import keep_identity

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_holds(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-I", "-S", "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def kept(folder: Path, run_id: str = "swarm") -> str:
    path = keep_identity(lambda: folder, run_id)
    assert path is not None
    return path


def test_a_restarted_process_has_the_key_and_a_living_one_does_not_share_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    with another_process_holds(folder / "swarm.peer.lock") as holder:
        second = kept(folder)
        assert second == str(folder / "swarm.peer2")
        holder.kill()
        holder.wait(10.0)
        first = kept(folder)
    assert first == str(folder / "swarm.peer")
    assert load_identity(Path(first)) != load_identity(Path(second))
    assert kept(folder) == first
    assert kept(folder, "another run") not in (first, second)
    assert [stat.S_IMODE(Path(path).stat().st_mode) for path in (first, second)] == [0o600] * 2


def test_without_a_folder_the_peer_joins_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def homeless() -> Path:
        raise ConfigError("this user has no home.")

    (tmp_path / "file").touch()
    assert keep_identity(homeless, "swarm") is None
    assert keep_identity(lambda: tmp_path / "file" / "folder", "swarm") is None
    assert caplog.text.count("each start is another use of its invitation") == 2


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwarmConfig:
    """The settings of a script that was written for the first machine, at a peer that `join` starts on the second."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name, value in {
        process.ANNOUNCE: "",
        process.IDENTITY: "",
        process.JOIN: f"203.0.113.7:31337/{'1' * 46}",
    }.items():
        monkeypatch.setenv(name, value)
    return SwarmStrategy(
        num_stages=2, listen="0.0.0.0:31337", announce="203.0.113.7:31337", identity_path=str(tmp_path / "first.key")
    ).config


def test_join_drops_the_address_and_the_key_of_the_first_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joining: SwarmConfig
) -> None:
    first = process.apply_environment(joining, 0)
    assert first.announce == ()
    assert first.identity_path == str(tmp_path / "lightning-swarm" / "swarm.peer")
    assert not (tmp_path / "first.key").exists()

    for name, value in process.child_environment(
        1, [str(first.initial_peers[0])], first, launch="", trains=False
    ).items():
        monkeypatch.setenv(name, value)
    child = process.apply_environment(joining, 1)
    assert child.announce == ()
    assert child.identity_path == f"{first.identity_path}.1"

    monkeypatch.setenv(process.ANNOUNCE, "203.0.113.8:31337 [2001:db8::8]:31337")
    assert [str(place) for place in process.apply_environment(joining, 0).announce] == [
        "203.0.113.8:31337",
        "[2001:db8::8]:31337",
    ]


def test_where_anyone_may_come_no_key_is_kept(tmp_path: Path, joining: SwarmConfig) -> None:
    found = process.apply_environment(replace(joining, trust="open"), 0)
    assert found.identity_path is None
    assert not (tmp_path / "lightning-swarm").exists()
