"""A run of invited peers, in processes of its own: who is invited helps or looks, others are told what to ask for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_swarm import cli
from lightning_swarm.network.identity import load_identity
from tests.p2p.processes import COMMAND, SCRIPT, Run
from tests.p2p.test_processes import assert_plain

# Cold starts of peers in this file: 7. The onlookers are in the tests' own process.

pytestmark = pytest.mark.thorough

JOINED_AT = 5


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(user: str, *arguments: object, **options: Any) -> Run:
        """A program of a user, whose keys are where no other user has theirs."""
        own = {"XDG_CONFIG_HOME": str(tmp_path / user / "config"), "PYTHONPATH": str(SCRIPT.parents[2])}
        runs.append(Run(*arguments, environment=own, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


class _Users:
    """The starter of a run, whose trainer waits for a joiner and then for an onlooker, and Anna, who joins."""

    def __init__(
        self, start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, num_steps: int = 50
    ) -> None:
        self._start, self._folder, self._monkeypatch = start, tmp_path, monkeypatch
        for name in ("starter", "anna"):
            (tmp_path / name).mkdir()
        self.out = tmp_path / "starter"
        self._options = ["--num-stages", 2, "--microbatch-size", 3, "--trust", "invited"]
        starting = ["--devices", 2, *self._options, "--max-steps", num_steps, "--joiner-at", JOINED_AT, "--clip", 0.5]
        self.run = start("starter", "digits", self.out, *starting)
        self.address = self.run.wait_for("can join this run: ").partition("lightning-swarm join ")[2].split()[0]
        assert "lightning-swarm invite --role server --out swarm.invite" in self.run.wait_for("Only peers with an inv")

    def command(self, *arguments: object) -> int:
        """In this process, as the starter."""
        self._monkeypatch.setenv("XDG_CONFIG_HOME", str(self.out / "config"))
        self._monkeypatch.setattr(sys, "argv", ["lightning-swarm", *map(str, arguments)])
        return cli.main()

    def invite(self, role: str) -> Path:
        path = self._folder / f"{role}.invite"
        assert self.command("invite", "--role", role, "--out", path) == 0
        return path

    def anna(self, invitation: Path) -> Run:
        joining = ["join", self.address, "--invite", invitation, "--identity", self._folder / "anna.key"]
        script = [SCRIPT, "digits", self._folder / "anna", "--devices", 1, *self._options]
        return self._start("anna", *joining, *script, program=COMMAND)


def test_only_who_is_invited_trains_along(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = _Users(start, tmp_path, monkeypatch)
    run, out, address, command = users.run, users.out, users.address, users.command
    invitation, _ = users.invite("server"), users.invite("observer")
    run.wait_for("waiting for a joiner")
    anna = users.anna(invitation)
    run.wait_for("waiting for an onlooker")
    capsys.readouterr()
    assert command("status", address) == 1
    refused = capsys.readouterr().err
    assert "answers only peers with a certificate of its run" in refused
    assert "Join with an invitation of the run's owner: `lightning-swarm join --invite FILE`" in refused
    assert command("status", address, "--invite", tmp_path / "observer.invite", "--json") == 0
    seen = json.loads(capsys.readouterr().out)
    (out / "seen").touch()
    assert anna.wait() == 0, "".join(anna.output)
    assert run.wait() == 0, "".join(run.output)
    assert [one.survivors() for one in (run, anna)] == [[], []]

    newcomer = json.loads((tmp_path / "anna" / "traffic-0.json").read_text())["peer_id"]
    [(step, peers)] = json.loads((out / "result.json").read_text())["newcomers"]
    assert peers == [newcomer]
    assert step >= JOINED_AT
    assert any(newcomer in stage for stage in seen["stages"])
    assert [peer["problem"] for peer in seen["peers"]] == [None] * 3
    assert (tmp_path / "anna.key.certificate").exists()
    assert_plain(out, "digits", 0.5)


def test_whom_the_owner_bans_is_out_and_the_run_goes_on(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = _Users(start, tmp_path, monkeypatch)
    invitation = users.invite("server")
    users.run.wait_for("waiting for a joiner")
    anna = users.anna(invitation)
    users.run.wait_for("waiting for an onlooker")
    capsys.readouterr()
    assert users.command("members", users.address, "--json") == 0
    members = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [member["role"] for member in members].count("keeper") == 1
    banned = load_identity(tmp_path / "anna.key").peer_id
    assert [member["uses"] for member in members if member["peer_id"] == banned] == [[1, 1]]
    reason = "its gradients are noise"
    assert users.command("ban", users.address, banned, "--reason", reason) == 0
    assert "is banned: 3 of 3 peers heard it." in capsys.readouterr().err
    assert anna.wait() == 1
    assert any(
        f"This peer was banned from this run by its owner, who gives the reason: {reason}" in line
        for line in anna.output
    )
    again = users.anna(invitation)
    assert again.wait() != 0
    assert any("was banned from this run by its owner" in line for line in again.output), "".join(again.output)
    (users.out / "seen").touch()
    assert users.run.wait() == 0, "".join(users.run.output)
    assert [one.survivors() for one in (users.run, anna, again)] == [[], [], []]
    assert_plain(users.out, "digits", 0.5)
