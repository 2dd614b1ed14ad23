"""`lightning-swarm invite`: written files and refused requests; and observers of a run of invited peers."""

from __future__ import annotations

import os
import pwd
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_swarm import cli
from lightning_swarm.cli import commands
from lightning_swarm.core import private_file
from lightning_swarm.core.errors import AccessDenied, Uncertified, Unreachable
from lightning_swarm.monitor import doctor, members, survey, swarm_report
from lightning_swarm.network.access import Role
from lightning_swarm.network.identity import Identity, load_identity
from lightning_swarm.trust.certificates import Certificate, SecretInvitation
from lightning_swarm.trust.credentials import RunCredentials
from lightning_swarm.trust.invitation_text import from_text, to_text
from lightning_swarm.trust.owner import Owner

ID = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"
HERE = f"203.0.113.7:31337/{ID}"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use a temporary folder, with the user's keys in `config`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(commands, "follow_environment", lambda: None)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", *arguments])
    return cli.main()


def test_an_invitation_is_one_line_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert command(monkeypatch, "invite", "--role", "trainer", "--uses", "4", "--expires", "12h", "--for", "4w") == 0
    out, err = capsys.readouterr()
    made = from_text(out, "standard output")
    key = folder / "config" / "lightning-swarm" / "swarm.owner"
    assert isinstance(made, SecretInvitation)
    assert (made.invitation.run_id, made.invitation.role, made.invitation.uses) == ("swarm", Role.TRAINER, 4)
    assert made.invitation.stay_s == 28 * 86400
    assert made.invitation.owner == load_identity(key).peer_id
    assert out.count("\n") == 1
    assert f"Made the owner's key of run 'swarm': {key}. The run must be started with this key." in err
    assert re.search(r"Invited 4 peers to run 'swarm' as trainer: to join until \d{4}-\d\d-\d\d \d\d:\d\d UTC,", err)
    assert "and to stay for 28 days. Each holder" in err
    assert out[15:60] not in err
    assert command(monkeypatch, "invite", "--run-id", "another") == 0
    assert command(monkeypatch, "invite") == 0
    out, err = capsys.readouterr()
    another, same = (from_text(line, "standard output").invitation for line in out.splitlines())
    assert (another.run_id, same.owner) == ("another", made.invitation.owner)
    assert err.count("Made the owner's key") == 1


def test_a_file_of_an_invitation_is_for_this_user_and_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    former = os.umask(0)
    try:
        assert command(monkeypatch, "invite", "--out", "anna.invite") == 0
    finally:
        os.umask(former)
    out = folder / "anna.invite"
    text = out.read_text()
    from_text(text, "the file")
    assert out.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out == ""
    assert command(monkeypatch, "invite", "--out", "anna.invite") == 2
    assert "`--out` must be a new file, got 'anna.invite', which exists" in capsys.readouterr().err
    assert out.read_text() == text
    assert command(monkeypatch, "invite", "--out", "none/anna.invite") == 2
    assert "`--out` must be a new file in a writable folder" in capsys.readouterr().err


def test_a_file_of_an_invitation_is_whole_or_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert command(monkeypatch, "invite") == 0  # the owner's key exists by now
    tried = []

    def full(descriptor: int) -> None:
        tried.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_file.os, "fsync", full)
    assert command(monkeypatch, "invite", "--out", "anna.invite") == 2
    assert tried
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["config"]


def test_an_invitation_of_one_peer_holds_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert command(monkeypatch, "invite", "--peer", ID, "--owner", "my.key", "--for", "90m") == 0
    out, err = capsys.readouterr()
    made = from_text(out, "standard output")
    assert isinstance(made, Certificate)
    assert (made.peer, made.invitation.owner) == (ID, load_identity(folder / "my.key").peer_id)
    assert re.search(rf"Invited {ID} to run 'swarm' as server: to join until [-\d]+ [:\d]+ UTC, and to stay for", err)
    assert "for 90 minutes from now." in err
    assert "no secret" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--uses", "0"], "`--uses` must be 1..4096, got 0"),
        (["--uses", "4097"], "`--uses` must be 1..4096, got 4097"),
        (["--peer", "Anna"], "`--peer` must be a peer's id, like 12D3KooW..., got 'Anna'"),
        (["--peer", ID, "--uses", "2"], "`--uses` must be 1 with `--peer`"),
        (["--run-id", ""], "`--run-id` must be 1..100 printable characters"),
        *(
            (
                ["--expires", text],
                f"`--expires` must be a time of up to 3650 days, like 30m, 12h, 7d or 4w, got {text!r}",
            )
            for text in ("7", "d", "0d", " -1d", "1.5d", "3651d", "7 d", "9" * 30 + "d", "٣d")
        ),
    ],
)
def test_what_cannot_be_is_refused_and_makes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    arguments: list[str],
    words: str,
) -> None:
    assert command(monkeypatch, "invite", *arguments) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "module", "name"),
    [
        (["status", HERE], survey, "watch_reports"),
        (["doctor", "--peer", HERE], doctor, "examine"),
    ],
)
def test_who_looks_at_a_run_shows_an_invitation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    arguments: list[str],
    module: Any,
    name: str,
) -> None:
    told: list[Any] = []

    def look(*_: object, visitor: Any, **__: object) -> Any:
        told.append(visitor)
        yield from ()

    monkeypatch.setattr(module, name, look)
    owner = Owner("theirs", Identity.generate())
    line = to_text(owner.invite(Role.OBSERVER, uses=1, expires_at_s=4e9, stay_s=4e9))
    (folder / "look.invite").write_text(line)
    assert command(monkeypatch, *arguments) == 0
    assert command(monkeypatch, *arguments, "--invite", "look.invite") == 0
    monkeypatch.setenv("SWARM_INVITE_FILE", "look.invite")
    assert command(monkeypatch, *arguments) == 0
    assert command(monkeypatch, *arguments, "--invite", line) == 0
    without, *invited = told
    assert without.certify is None
    for visitor in invited:
        assert role_of(visitor) is Role.OBSERVER
        assert not visitor.is_guess, "a run that takes any peer is not what the user means"
    late = to_text(owner.invite(Role.OBSERVER, uses=1, expires_at_s=1.0, stay_s=4e9))
    assert command(monkeypatch, *arguments, "--invite", late) == 2
    err = capsys.readouterr().err
    assert "got its text: it expired" in err
    assert late[20:60] not in err


def role_of(visitor: Any) -> Role:
    """Return the role in the certificate that a visitor presents to peers of its own run."""
    credentials = visitor.certify(ID)
    assert isinstance(credentials, RunCredentials)
    role: Role = credentials.verify(ID, credentials.certificate, now_s=time.time()).role  # type: ignore[arg-type]
    return role


LOOKS: list[Any] = [
    (["status", HERE], survey, "watch_reports"),
    (["plan", "--swarm", HERE], survey, "watch_sightings"),
    (["members", HERE], members, "asking"),
    (["doctor", "--peer", HERE], doctor, "examine"),
]


@pytest.mark.parametrize(("arguments", "module", "name"), LOOKS)
def test_who_started_a_run_looks_at_it_as_its_owner(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    arguments: list[str],
    module: Any,
    name: str,
) -> None:
    told: list[Any] = []

    def look(*_: object, visitor: Any, **__: object) -> Any:
        told.append(visitor)
        raise Unreachable("nobody is there")

    monkeypatch.setattr(module, name, look)
    owner = Owner.load("theirs", folder / "config" / "lightning-swarm" / "theirs.owner")
    for more in ([], ["--run-id", "theirs"], ["--owner", "config/lightning-swarm/theirs.owner"], ["--owner", "none"]):
        command(monkeypatch, *arguments, *more)
    another, of_run, named = told
    assert another.certify is None
    assert of_run.certify(ID).owner == named.certify(ID).owner == owner.key.peer_id
    assert (role_of(of_run), of_run.is_guess, named.is_guess) == (Role.KEEPER, True, False)
    assert "`--owner` must be the file of an owner's key, got 'none', which does not exist" in capsys.readouterr().err
    assert not (folder / "config" / "lightning-swarm" / "swarm.owner").exists(), "who looks makes no key"


def test_a_user_without_a_home_looks_at_a_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    told: list[Any] = []
    monkeypatch.setattr(survey, "watch_reports", lambda *_, visitor, **__: (told.append(visitor) for _ in range(1)))
    monkeypatch.setattr(swarm_report, "table", str)
    assert command(monkeypatch, "status", HERE) == 0
    assert [visitor.certify for visitor in told] == [None]


@pytest.mark.parametrize(("arguments", "module", "name"), LOOKS[:3])
def test_who_is_refused_is_told_the_option_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    arguments: list[str],
    module: Any,
    name: str,
) -> None:
    def refuse(*_: object, visitor: Any, **__: object) -> Any:
        raise Uncertified("Join.") if visitor.certify is None else AccessDenied("b refuses the certificate of a.")

    monkeypatch.setattr(module, name, refuse)
    remedy = f"Name an invitation: `lightning-swarm {' '.join(arguments)} --invite FILE`, or by SWARM_INVITE_FILE."
    assert command(monkeypatch, *arguments) == 1
    err = capsys.readouterr().err
    assert f"{HERE} answers only peers with a certificate of its run, and this command has no certificate." in err
    assert remedy in err
    assert "Join" not in err
    Owner.load("swarm", folder / "config" / "lightning-swarm" / "swarm.owner")
    assert command(monkeypatch, *arguments) == 1
    err = capsys.readouterr().err
    assert "this command used the owner's key of run 'swarm', but b refuses the certificate of a. Name an" in err
    assert remedy in err
    assert "if `--run-id` is the run's id; it is 'swarm' here" in err
