"""A run of invited peers, in processes of its own: who is invited helps or looks, others are told what to ask for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_swarm import cli
from tests.p2p.processes import COMMAND, SCRIPT, Run
from tests.p2p.test_processes import assert_plain

# Cold starts of peers in this file: 3. The onlookers are in the tests' own process.

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


def test_only_who_is_invited_trains_along(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: object) -> int:
        """In this process, as the starter's user."""
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "starter" / "config"))
        monkeypatch.setattr(sys, "argv", ["lightning-swarm", *map(str, arguments)])
        return cli.main()

    for name in ("starter", "anna"):
        (tmp_path / name).mkdir()
    out = tmp_path / "starter"
    options = ["--num-stages", 2, "--microbatch-size", 3, "--trust", "invited"]
    run = start(
        "starter", "digits", out, "--devices", 2, *options, "--max-steps", 50, "--joiner-at", JOINED_AT, "--clip", 0.5
    )
    address = run.wait_for("can join this run: ").partition("lightning-swarm join ")[2].split()[0]
    assert "lightning-swarm invite --role server --out swarm.invite" in run.wait_for("Only peers with an invitation")
    for role in ("server", "observer"):
        assert command("invite", "--role", role, "--out", tmp_path / f"{role}.invite") == 0
    run.wait_for("waiting for a joiner")
    anna = start(
        *("anna", "join", address, "--invite", tmp_path / "server.invite", "--identity", tmp_path / "anna.key"),
        *(SCRIPT, "digits", tmp_path / "anna", "--devices", 1, *options),
        program=COMMAND,
    )
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
