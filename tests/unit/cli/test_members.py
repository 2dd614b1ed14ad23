"""`lightning-swarm ban` and `unban`: the subjects that an owner may name, and the output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_swarm import cli
from lightning_swarm.cli import commands
from lightning_swarm.monitor import members
from lightning_swarm.monitor.members import Members, RunMember
from lightning_swarm.network import PeerId
from lightning_swarm.network.identity import Identity
from lightning_swarm.trust.certificates import SignedBan, decode
from lightning_swarm.trust.owner import Owner

PEER, OTHER = Identity.generate().peer_id, Identity.generate().peer_id
FIRST, SECOND = bytes(16).hex(), bytes(15).hex() + "02"


class _Run(Members):
    """A run that `PEER` joined with two invitations."""

    def __init__(self) -> None:
        self.said: list[SignedBan] = []
        self.banned: set[str] = set()  # banned by records
        self.refusing: str | None = None  # a subject for which one peer has a newer statement

    def members(self) -> list[RunMember]:
        return [RunMember(PEER, "server", number, (1, 1), (), None) for number in (FIRST, SECOND)]

    def has_seen(self, peer: PeerId) -> bool:
        return any(one.peer_id == peer for one in self.members())

    def banned_invitations_of(self, peer: PeerId) -> list[str]:
        return [number for number in self.invitations_of(peer) if number in self.banned]

    def send_ban(self, signed: bytes) -> dict[PeerId, str | None]:
        said = decode(signed, SignedBan)
        self.said.append(said)
        return {OTHER: None, PEER: "it is older" if said.subject == self.refusing else None}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Run:
    found = _Run()

    @contextmanager
    def asking(*_: Any, **__: Any) -> Iterator[_Run]:
        yield found

    monkeypatch.setattr(members, "asking", asking)
    monkeypatch.setattr(commands, "follow_environment", lambda: None)
    monkeypatch.chdir(tmp_path)
    Owner.load("swarm", Path("key"))
    return found


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    name, *rest = arguments
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", name, f"203.0.113.7:31337/{OTHER}", *rest, "--owner", "key"])
    return cli.main()


def test_with_invitation_the_peer_and_all_its_invitations_are_banned(
    run: _Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, is_lifted, done in (("ban", False, "are banned"), ("unban", True, "may take part again")):
        run.said.clear()
        assert call(monkeypatch, name, PEER, "--invitation") == 0
        assert [(one.subject, one.is_lifted) for one in run.said] == [
            (subject, is_lifted) for subject in (PEER, FIRST, SECOND)
        ]
        assert f"the invitation {FIRST[:8]} and the invitation {SECOND[:8]} {done}: 2 of 2" in capsys.readouterr().err


def test_unban_says_that_an_invitation_is_still_banned(
    run: _Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.banned = {SECOND}
    assert call(monkeypatch, "unban", PEER) == 0
    assert [one.subject for one in run.said] == [PEER]
    err = capsys.readouterr().err
    assert f"The peer's invitation {SECOND[:8]} is still banned: call `unban` with `--invitation`, too." in err


def test_a_peer_that_heeds_only_a_part_is_named(
    run: _Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.refusing = SECOND
    assert call(monkeypatch, "ban", PEER, "--invitation") == 0
    err = capsys.readouterr().err
    assert "did not accept it: it is older" in err
    assert "1 of 2 peers accepted it. The other peers receive it from there, or with the next record." in err


def test_a_peer_that_the_run_never_saw_is_banned_with_a_warning(
    run: _Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ban", "unban"):
        for peer, is_told in ((OTHER, True), (PEER, False)):
            assert call(monkeypatch, name, peer) == 0
            assert run.said[-1].subject == peer
            assert (
                f"The run has never seen {peer}. If the id is mistyped, call again" in (capsys.readouterr().err)
            ) is is_told
