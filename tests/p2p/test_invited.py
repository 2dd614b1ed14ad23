"""A run of invited peers in real processes: invited peers help or observe; other peers get an error with the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.hosts import Hosts
from lightning_swarm import cli
from lightning_swarm.network.identity import Identity, load_identity
from tests.p2p.processes import COMMAND, SCRIPT, Run
from tests.p2p.test_processes import assert_plain
from tests.p2p.warm import WarmRun

# Cold starts of peers in this file: 3, the second peers of the starter; all others are forked.

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

JOINED_AT = 5
UNCHECKED = Path(__file__).with_name("unchecked.py")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(user: str, *arguments: object, **options: Any) -> Run:
        """Start a program of a user, with a separate folder for keys."""
        own = {"XDG_CONFIG_HOME": str(tmp_path / user / "config"), "PYTHONPATH": str(SCRIPT.parents[2])}
        runs.append(WarmRun(*arguments, environment=own, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


class _Users:
    """The starter of a run, whose trainer waits for a joiner and then for an observer, and users that try to join.

    Each user has a network namespace as a machine if that is permitted; otherwise all share this machine.
    """

    def __init__(
        self, start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Hosts | None = None
    ) -> None:
        self._start, self._folder, self._monkeypatch, self._hosts = start, tmp_path, monkeypatch, hosts
        self.out = self._folder_of("starter")
        self.begin("--max-steps", 50)

    def begin(self, *options: object) -> None:
        """Start the run."""
        starting = ["--devices", 2, *self._options(0), "--joiner-at", JOINED_AT, "--clip", 0.5, "--save", *options]
        program = [sys.executable, str(SCRIPT)]
        self.run = self._start("starter", "digits", self.out, *starting, program=program, netns=self._netns(0))
        self.address = self.run.wait_for("can join this run: ").partition("lightning-swarm join ")[2].split()[0]
        assert "lightning-swarm invite --role server --uses 2 --out swarm.invite" in self.run.wait_for(
            "Only peers with an inv"
        )

    def _options(self, number: int) -> list[object]:
        reached = ["--trust", "invited"] if self._hosts is None else ["--listen", f"{self._hosts.address(number)}:0"]
        return ["--num-stages", 2, "--microbatch-size", 3, *reached]

    def _netns(self, number: int) -> str:
        return "" if self._hosts is None else self._hosts.namespace(number)

    def _folder_of(self, name: str) -> Path:
        (self._folder / name).mkdir(exist_ok=True)
        return self._folder / name

    def command(self, *arguments: object) -> int:
        """Run a command in this process, as the starter."""
        self._monkeypatch.setenv("XDG_CONFIG_HOME", str(self.out / "config"))
        self._monkeypatch.setattr(sys, "argv", ["lightning-swarm", *map(str, arguments)])
        return cli.main()

    def call(self, *arguments: object) -> Run:
        """Run a command on the starter's machine, as the starter."""
        return self._start("starter", *arguments, program=COMMAND, netns=self._netns(0))

    def invite(self, role: str, name: str = "", *options: object, days_ago: int = 0) -> Path:
        path, now_s = self._folder / f"{name or role}.invite", time.time()
        with self._monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now_s - 86400.0 * days_ago)
            assert self.command("invite", "--role", role, "--out", path, *options) == 0
        return path

    def join(self, name: str, invitation: Path | None, *options: object, program: Sequence[object] = COMMAND) -> Run:
        invited = [] if invitation is None else ["--invite", invitation]
        joining = ["join", self.address, *invited, "--identity", self._folder / f"{name}.key"]
        script = [SCRIPT, "digits", self._folder_of(name), "--devices", 1, *self._options(1), *options]
        return self._start(name, *joining, *script, program=[*map(str, program)], netns=self._netns(1))

    def present(self, name: str, invitation: Path | None, *, days_ago: int = 0) -> Run:
        """Start a joiner without checks of its own, so that the run's peers must refuse it."""
        return self.join(name, invitation, program=[sys.executable, UNCHECKED, days_ago])


def test_only_who_is_invited_trains_along(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = _Users(start, tmp_path, monkeypatch)
    run, out, address, command = users.run, users.out, users.address, users.command
    invitation, _ = users.invite("server"), users.invite("observer")
    run.wait_for("waiting for a joiner")
    anna = users.join("anna", invitation)
    run.wait_for("waiting for an onlooker")
    capsys.readouterr()
    assert command("status", address, "--run-id", "another") == 1
    refused = capsys.readouterr().err
    assert "answers only peers with a certificate of its run" in refused
    assert f"Name an invitation: `lightning-swarm status {address} --invite FILE`" in refused
    assert command("status", address) == 0  # authorized by the owner's key
    capsys.readouterr()
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


@pytest.fixture
def hosts() -> Iterator[Hosts | None]:
    """Two machines, if this one permits network namespaces."""
    if Hosts.missing():
        yield None
        return
    with ExitStack() as stack:
        try:
            found = stack.enter_context(Hosts([0.0, 0.0]))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"On one machine instead of two: {error}", file=sys.stderr)
            found = None
        yield found


def assert_refused(refused: Run, *words: str) -> None:
    assert refused.wait() in (1, 78)  # exit status of an error, or of a wrong setting
    assert any(all(word in line for word in words) for line in refused.output), "".join(refused.output)
    assert refused.survivors() == []


def test_whom_the_owner_bans_is_out_and_the_run_goes_on(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Hosts | None
) -> None:
    users = _Users(start, tmp_path, monkeypatch, hosts)
    invitation, unused = users.invite("server"), users.invite("server", "unused")
    expired = users.invite("server", "expired", days_ago=8)
    users.run.wait_for("waiting for a joiner")
    anna = users.join("anna", invitation)
    users.run.wait_for("waiting for an onlooker")
    members = users.call("members", users.address, "--json")
    assert members.wait() == 0, "".join(members.output)
    found = [json.loads(line) for line in members.output]
    assert [member["role"] for member in found].count("keeper") == 1
    banned = load_identity(tmp_path / "anna.key").peer_id
    assert [member["uses"] for member in found if member["peer_id"] == banned] == [[1, 1]]

    reason = "its gradients are noise"
    for who in (banned, unused):
        ban = users.call("ban", users.address, who, "--reason", reason)
        assert ban.wait() == 0, "".join(ban.output)
        assert "is banned: " in ban.output[-1]
    assert anna.wait() == 1
    told = f"This peer was banned from this run by its owner, who gives the reason: {reason}"
    assert any(told in line for line in anna.output), "".join(anna.output)
    copied = tmp_path / "mallory.key.certificate"
    copied.write_bytes((tmp_path / "anna.key.certificate").read_bytes())
    for_one = users.invite("server", "for_one", "--peer", Identity.generate().peer_id)
    refusals = [
        ("anna", invitation, f"{banned} was banned from this run by its owner"),
        ("bob", None, "lightning-swarm join --invite" if hosts is None else "this peer has no invitation"),
        ("carl", unused, "came by an invitation that was banned from this run"),
        ("mallory", None, "it was made for another peer"),
        ("dora", invitation, "all uses (1) of the invitation of"),
        ("erna", expired, "it expired"),
        ("fred", for_one, "it was made for another peer"),
    ]
    for refused, words in [(users.join(name, by), words) for name, by, words in refusals]:  # runs all of them at once
        assert_refused(refused, words)
    # The run also refuses each certificate that the joiner's own program refuses.
    at_the_gate = "refuses the certificate of this peer: "
    at_once = [
        (users.join("gina", None, "--trust", "open"), ["answers only peers with a certificate of its run"]),
        (users.present("mallory", None), [at_the_gate, "it was made for another peer"]),
        (users.present("hans", for_one), [at_the_gate, "it was made for another peer"]),
        (users.present("ida", expired), [at_the_gate, "its peer joined after the invitation had expired"]),
        (
            users.present("jane", expired, days_ago=8),
            ["a new peer must join before its invitation expires"],
        ),
    ]
    for refused, said in at_once:
        assert_refused(refused, *said)
    (users.out / "seen").touch()
    assert users.run.wait() == 0, "".join(users.run.output)
    assert [one.survivors() for one in (users.run, anna)] == [[], []]
    assert json.loads((users.out / "result.json").read_text())["num_refused"] > 0
    assert_plain(users.out, "digits", 0.5)

    # A run that resumes from the checkpoint keeps the ban, too.
    path = users.out / "last.ckpt"
    assert len(torch.load(path, weights_only=True)["swarm_peers"]["bans"]) == 2
    another = users.invite("server", "another")
    users.begin("--max-steps", 60, "--ckpt", path)
    users.run.wait_for("waiting for a joiner")
    assert_refused(users.join("anna", another), f"{banned} was banned from this run by its owner", reason)
    bob = users.join("bob", another)
    assert users.run.wait() == 0, "".join(users.run.output)
    assert bob.wait() == 0, "".join(bob.output)
    [(_, peers)] = json.loads((users.out / "result.json").read_text())["newcomers"]
    assert peers == [load_identity(tmp_path / "bob.key").peer_id]
