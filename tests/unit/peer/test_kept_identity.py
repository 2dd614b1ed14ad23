"""Keys that joined peers keep: the same key after each restart, and never a living process's."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.identity import load_identity
from lightning_swarm.peer import kept_identity, process
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.kept_identity import PeerStart, keep_identity

START = PeerStart(command="join", listen="0.0.0.0:31337", folder="/home/anna")

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
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


def end_all() -> None:
    """Release this process's locks, as its end would."""
    for descriptor in kept_identity._locks.values():
        os.close(descriptor)
    kept_identity._locks.clear()


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    end_all()


def kept(folder: Path, run_id: str = "swarm", start: PeerStart = START) -> str:
    path = keep_identity(lambda: folder, run_id, start)
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
        end_all()
        first = kept(folder, start=PeerStart("", "another", "127.0.0.1:0", "/home/eve"))
    assert first == str(folder / "swarm.peer")
    assert load_identity(Path(first)) != load_identity(Path(second))
    assert kept(folder) == first
    assert kept(folder, "another run") not in (first, second)
    assert [stat.S_IMODE(Path(path).stat().st_mode) for path in (first, second)] == [0o600] * 2


@pytest.mark.parametrize("differ", [["command"], ["listen"], ["folder"], ["invitation", "command"]], ids=" and ".join)
def test_peers_that_restart_in_another_order_get_their_own_keys_back(tmp_path: Path, differ: list[str]) -> None:
    starts = [
        structs.replace(START, **{"invitation": "one", **dict.fromkeys(differ, name)}) for name in ("a", "b", "c")
    ]
    first = list[str]()
    for start in starts:  # each stays while the next one starts
        first.append(_kept_by_another(tmp_path, start, first))
    assert len(set(first)) == 3
    taken: dict[int, str] = {}
    for index in (2, 0, 1):
        taken[index] = _kept_by_another(tmp_path, starts[index], [*taken.values()])
    assert [taken[index] for index in range(3)] == first


def _kept_by_another(folder: Path, start: PeerStart, held: list[str]) -> str:
    """Keep a key as another process would while more processes hold theirs; this process ignores its own locks."""
    with contextlib.ExitStack() as others:
        end_all()
        for path in held:
            others.enter_context(another_process_holds(Path(f"{path}.lock")))
        return kept(folder, start=start)


def test_an_invitation_of_another_peer_is_never_used_twice(tmp_path: Path) -> None:
    anna, ben = (structs.replace(START, invitation=name, command=name) for name in ("anna's", "ben's"))
    first = kept(tmp_path, start=anna)
    end_all()
    assert kept(tmp_path, start=ben) != first, "else a restart of Anna's peer would be a further use of her invitation"
    end_all()
    assert kept(tmp_path, start=anna) == first
    end_all()
    assert kept(tmp_path, start=structs.replace(anna, invitation="")) == first, "the file of it may be gone"
    end_all()
    assert kept(tmp_path, start=ben) == f"{first}2", "and the first key is Anna's still"
    end_all()
    assert kept(tmp_path, start=structs.replace(anna, invitation="a new one")) == first, "in the file of the old one"


def test_a_start_names_its_invitation_by_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joining: SwarmConfig
) -> None:
    invitation = tmp_path / "anna.invite"
    invitation.write_text("swarm-invite-1.secret")
    start = PeerStart.of(replace(joining, invite=str(invitation)))
    invitation.write_text("swarm-invite-1.secret\n")
    assert PeerStart.of(replace(joining, invite=str(invitation))) == start
    kept(tmp_path, start=start)
    assert "secret" not in (tmp_path / "swarm.peer.lock").read_text()
    invitation.write_text("swarm-invite-1.another")
    renewed = PeerStart.of(replace(joining, invite=str(invitation)))
    assert renewed != start
    assert renewed.may_be(start)
    invitation.rename(tmp_path / "ben.invite")
    assert not PeerStart.of(replace(joining, invite=str(tmp_path / "ben.invite"))).may_be(start)

    for unreadable in (str(tmp_path), str(tmp_path / "missing"), "x" * 5000, "\0"):
        assert PeerStart.of(replace(joining, invite=unreadable)).may_be(start)
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "serve", "--device", "cuda:1"])
    assert PeerStart.of(joining).command != start.command


@pytest.mark.parametrize("text", ["", "null", "[1, 2, 3, 4, 5]", "{", '["a"]', "\udcff", "[" * 4000])
def test_a_record_of_a_start_that_cannot_be_read_is_like_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "swarm.peer.lock").write_bytes(text.encode(errors="surrogateescape"))
    assert kept(tmp_path) == str(tmp_path / "swarm.peer")


def test_without_a_folder_the_peer_joins_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def homeless() -> Path:
        raise ConfigError("this user has no home.")

    (tmp_path / "file").touch()
    assert keep_identity(homeless, "swarm", START) is None
    assert keep_identity(lambda: tmp_path / "file" / "folder", "swarm", START) is None
    assert caplog.text.count("each start is another use of its invitation") == 2


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwarmConfig:
    """Settings of a script for the first machine, in a peer that `join` starts on the second."""
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
