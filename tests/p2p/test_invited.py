"""A run of invited peers, in processes of its own: who is invited helps or looks, others are told what to ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.p2p.processes import COMMAND, SCRIPT, Run
from tests.p2p.test_processes import assert_plain

# Cold starts of peers in this file: 5.

pytestmark = pytest.mark.thorough

Start = Callable[..., Run]
JOINED_AT = 5


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(user: str, *arguments: object, **options: Any) -> Run:
        """A program of a user, whose keys are where no other user has theirs."""
        own = {"XDG_CONFIG_HOME": str(tmp_path / user / "config"), "PYTHONPATH": str(SCRIPT.parents[2])}
        runs.append(Run(*arguments, environment=own, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def test_only_who_is_invited_trains_along(start: Start, tmp_path: Path) -> None:
    for name in ("starter", "anna", "bob", "eve"):
        (tmp_path / name).mkdir()
    out = tmp_path / "starter"
    options = ["--num-stages", 2, "--microbatch-size", 3, "--trust", "invited"]
    run = start(
        "starter", "digits", out, "--devices", 2, *options, "--max-steps", 50, "--joiner-at", JOINED_AT, "--clip", 0.5
    )
    address = run.wait_for("can join this run: ").partition("lightning-swarm join ")[2].split()[0]
    assert "lightning-swarm invite --role server --out swarm.invite" in run.wait_for("Only peers with an invitation")
    for role in ("server", "observer"):
        invited = start("starter", "invite", "--role", role, "--out", tmp_path / f"{role}.invite", program=COMMAND)
        assert invited.wait() == 0, "".join(invited.output)

    def join(user: str, *given: object, trust: str = "invited") -> Run:
        arguments = ["digits", tmp_path / user, "--devices", 1, "--num-stages", 2, "--trust", trust]
        return start(user, "join", address, *given, SCRIPT, *arguments, program=COMMAND)

    anna = join("anna", "--invite", tmp_path / "server.invite", "--identity", tmp_path / "anna.key")
    bob, eve = join("bob"), join("eve", trust="open")
    assert_refused(bob, "run 'swarm' is for invited peers", "`lightning-swarm invite --role server")
    assert_refused(eve, "answers only peers with a certificate", "Join with an invitation")
    run.wait_for("waiting for an onlooker")
    look = start("carl", "status", address, "--invite", tmp_path / "observer.invite", "--json", program=COMMAND)
    seen = json.loads(look.wait_for('{"run_id"'))
    assert look.wait() == 0, "".join(look.output)
    (out / "seen").touch()
    assert anna.wait() == 0, "".join(anna.output)
    assert run.wait() == 0, "".join(run.output)
    assert [one.survivors() for one in (run, anna)] == [[], []]

    newcomer = json.loads((tmp_path / "anna" / "traffic-0.json").read_text())
    [(step, peers)] = json.loads((out / "result.json").read_text())["newcomers"]
    assert peers == [newcomer["peer_id"]]
    assert any(peers[0] in stage for stage in seen["stages"])
    assert [peer["problem"] for peer in seen["peers"]] == [None] * 3
    assert step >= JOINED_AT
    assert sum(sent for _, _, sent in newcomer["sent"]) > 0
    assert (tmp_path / "anna.key.certificate").exists()
    assert_plain(out, "digits", 0.5)


def assert_refused(run: Run, *words: str) -> None:
    status, said = run.wait(), "".join(run.output)
    assert status not in (0, 130), said
    for word in words:
        assert word in said
    assert run.survivors() == []
