"""Environments from which the launcher can start peers."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.process import leaving_on_signals
from lightning_swarm.network.access import Role
from lightning_swarm.network.addresses import Address
from lightning_swarm.network.identity import Identity, load_identity
from lightning_swarm.peer import process
from lightning_swarm.peer.entry import entry_of
from lightning_swarm.strategy import launcher
from lightning_swarm.strategy.launcher import SwarmLauncher
from lightning_swarm.trust.invitation_text import from_text, to_text
from lightning_swarm.trust.owner import Owner

NOW_S = 1_800_000_000.0
ONE: dict[str, Any] = {"uses": 1, "expires_at_s": 4e9, "stay_s": 4e9}
FOR_ONE: dict[str, Any] = {"role": Role.SERVER, "now_s": 0.0, "expires_at_s": 4e9, "stay_s": 4e9}
ID = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"


@pytest.mark.parametrize(("num_peers", "fits"), [(1, True), (2, False)])
def test_a_notebook_has_no_script_to_run_again_for_a_second_peer(num_peers: int, fits: bool) -> None:
    assert SwarmLauncher(SwarmStrategy(), num_peers).is_interactive_compatible is fits


def test_peers_that_would_build_another_module_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(SwarmLauncher, "_first_module", None)
    monkeypatch.setattr(SwarmLauncher, "_start_peers", lambda self, _: started.append(self._num_peers))

    def launch(module: L.LightningModule, num_peers: int) -> None:
        answers = {"check": lambda *_: None, "waits_for_fit": lambda _: False}
        strategy: Any = SimpleNamespace(config=SwarmStrategy().config, peer=None, is_plain=False, **answers)
        trainer: Any = SimpleNamespace(lightning_module=module)
        SwarmLauncher(strategy, num_peers).launch(lambda: None, trainer=trainer)

    first, second = L.LightningModule(), L.LightningModule()
    launch(first, 2)
    launch(first, 2)
    launch(second, 1)
    with pytest.raises(
        ConfigError, match=r"module of the script's first `fit`; this LightningModule is another module"
    ):
        launch(second, 2)
    assert started == [2, 2, 1]


def test_an_empty_variable_names_no_invitation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_INVITE_FILE", "")
    assert not process.apply_environment(SwarmStrategy().config, 0).is_invited
    named = SwarmStrategy(invite="swarm.invite").config
    assert process.apply_environment(named, 0).invite == "swarm.invite"


def test_whom_to_join_comes_from_the_script_or_from_who_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named = SwarmStrategy(initial_peers=f"203.0.113.7:31337/{ID}").config
    assert process.apply_environment(named, 0) == named
    monkeypatch.setenv("SWARM_JOIN", f"192.0.2.1:5/{ID} /ip4/192.0.2.2/tcp/5/p2p/{ID}")
    for config in named, SwarmStrategy().config:
        told = process.apply_environment(config, 0)
        assert [str(address.host_port) for address in told.initial_peers] == ["192.0.2.1:5", "192.0.2.2:5"]
        assert told.only_serves
    monkeypatch.setenv("SWARM_JOIN", "192.0.2.1:5")
    with pytest.raises(ConfigError, match="must be host:port/id"):
        process.apply_environment(named, 0)


def test_children_serve_at_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_JOIN", f"192.0.2.1:31337/{ID}")
    monkeypatch.setenv("SWARM_RUN_ID", "the parent's")
    config = SwarmStrategy(
        role="trainer", listen="0.0.0.0:31337", announce="192.0.2.1:31337", identity_path="key"
    ).config
    child = process.apply_environment(config, 2)
    assert child.only_serves
    assert child.run_id == "the parent's"
    assert (str(child.listen), str(child.announce[0]), child.identity_path) == (
        "0.0.0.0:31339",
        "192.0.2.1:31339",
        "key.2",
    )


def test_peers_that_are_started_together_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def popen(command: Any, env: dict[str, str], **options: Any) -> None:
        told.append(env["SWARM_LAUNCH_ID"])

    monkeypatch.setattr(launcher.subprocess, "Popen", popen)
    lead = SwarmLauncher(SwarmStrategy(), 3)
    lead._start_children([], [])
    first = lead.launch_id
    lead._start_children([], [])
    assert told == [first, first, lead.launch_id, lead.launch_id]
    assert len(set(told)) == 2
    monkeypatch.setenv("SWARM_LAUNCH_ID", first)
    assert SwarmLauncher(SwarmStrategy(), 3).launch_id == first


@pytest.mark.parametrize(
    ("fn", "role", "invites"),
    [
        (TrainerFn.FITTING, "auto", True),
        (TrainerFn.VALIDATING, "auto", False),
        (TrainerFn.TESTING, "auto", False),
        (TrainerFn.PREDICTING, "auto", False),
        (TrainerFn.VALIDATING, "server", True),
    ],
)
def test_only_who_lets_others_in_invites_them(
    monkeypatch: pytest.MonkeyPatch, fn: TrainerFn, role: Any, invites: bool
) -> None:
    said: list[str] = []
    runtime = SimpleNamespace(run=lambda _: [f"/ip4/127.0.0.1/tcp/5/p2p/{ID}"])
    transport = SimpleNamespace(addresses=lambda: None)
    peer = SimpleNamespace(runtime=runtime, transport=transport, check_run_id=lambda: None)
    monkeypatch.setattr(launcher, "hivemind_peer", lambda *_: peer)
    monkeypatch.setattr(launcher, "rank_zero_info", said.append)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=fn))
    SwarmLauncher(SwarmStrategy(role=role), 1)._start_peers(trainer)
    assert len(said) == invites
    said.clear()
    SwarmLauncher(SwarmStrategy(role="server", initial_peers=f"192.0.2.9:5/{ID}"), 1)._start_peers(trainer)
    assert said[0] == "Connecting to 192.0.2.9:5."


@pytest.mark.parametrize(
    ("argv", "name", "named"),
    [
        (["/home/me/train.py", "--lr", "0.1"], None, "train.py --lr 0.1"),
        (["/home/me/my project/train.py"], None, "train.py"),
        (["/site/my_project/train.py", "x"], "my_project.train", "-m my_project.train x"),
        (["/bin/lightning-swarm", "fit", "--config", "run.yaml"], None, "--config run.yaml"),
        (["/site/lightning_swarm/__main__.py", "fit", "-c", "a b"], "lightning_swarm.__main__", "-c 'a b'"),
        (
            [
                "lightning-swarm",
                "fit",
                "-c",
                "x",
                "--trainer.strategy.role=both",
                "--trainer.strategy.num_stages",
                "2",
                "--trainer.strategy.init_args.announce",
                "192.0.2.9:5",
                "--trainer.devices",
                "4",
                "--seed_everything=1",
            ],
            None,
            "-c x --trainer.strategy.num_stages 2 --seed_everything=1",
        ),
    ],
)
def test_the_invitation_names_the_address_and_the_program(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], name: str | None, named: str
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", argv[0], raising=False)  # no notebook
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", name and SimpleNamespace(name=name))
    inner, outer = Address.parse(f"127.0.0.1:5/{ID}"), Address.parse(f"192.0.2.1:5/{ID}")
    config = SwarmStrategy().config
    line = process.how_to_join(config, [inner, outer], None)
    assert line == f"Peers can join this run: lightning-swarm join 192.0.2.1:5/{ID} {named}"
    line = process.how_to_join(config, [inner], None)
    assert line.startswith("Peers of this machine only (others: set `listen`")
    assert line.endswith(f"lightning-swarm join 127.0.0.1:5/{ID} {named}")
    start, more = process.how_to_join(SwarmStrategy(role="server").config, [outer], None).split("\n")
    if "lightning" in argv[0]:
        place = f"--trainer.strategy.role both --trainer.strategy.initial_peers 192.0.2.1:5/{ID}"
        assert start == f"This server waits for its run. A peer starts it with lightning-swarm fit {named} {place}"
    else:
        assert start.endswith(f"starts it with SwarmStrategy(role='both', initial_peers='192.0.2.1:5/{ID}')")
    assert more == f"More servers: lightning-swarm serve 192.0.2.1:5/{ID} {named}"
    line = process.how_to_join(SwarmStrategy(initial_peers=f"192.0.2.9:5/{ID}").config, [outer], None)
    assert line.startswith("This peer asks to join run 'swarm'. On Ctrl-C or SIGTERM it leaves between two steps. ")
    assert line.endswith(f"lightning-swarm join 192.0.2.1:5/{ID} {named}")


def test_a_run_of_invited_peers_says_how_others_get_an_invitation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)  # no notebook
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    here = Address.parse(f"192.0.2.1:5/{ID}")

    def lines(**options: Any) -> list[str]:
        config = SwarmStrategy(trust="invited", **options).config
        return process.how_to_join(config, [here], entry_of(config, lambda: tmp_path, now_s=NOW_S)).split("\n")

    private = "Only peers with an invitation are admitted. Make the file on this machine, and send it in private: "
    assert lines() == [
        f"Peers can join this run: lightning-swarm join 192.0.2.1:5/{ID} --invite swarm.invite train.py",
        f"{private}lightning-swarm invite --role server --out swarm.invite",
    ]
    assert lines(run_id="it's mine")[1].endswith(
        "lightning-swarm invite --role server --run-id 'it'\"'\"'s mine' --out swarm.invite"
    )
    config = SwarmStrategy(trust="invited").config
    of_four = process.how_to_join(config, [here], entry_of(config, lambda: tmp_path, now_s=NOW_S), num_peers=4)
    assert of_four.endswith("lightning-swarm invite --role server --uses 4 --out swarm.invite")
    start, more, invite = lines(role="server")
    assert start.endswith(f"SwarmStrategy(role='both', initial_peers='192.0.2.1:5/{ID}', invite='swarm.invite')")
    assert more == f"More servers: lightning-swarm serve 192.0.2.1:5/{ID} --invite swarm.invite train.py"
    assert invite == f"{private}lightning-swarm invite --role trainer --out swarm.invite"
    (tmp_path / "theirs").write_text(to_text(Owner("swarm", Identity.generate()).invite(Role.SERVER, **ONE)))
    asks = lines(initial_peers=str(here), invite=str(tmp_path / "theirs"))
    assert asks[1].startswith("Only peers with an invitation are admitted. The run's owner makes the file")


def test_children_are_invited_by_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    told: list[Any] = []

    def popen(command: Any, env: dict[str, str], pass_fds: Any, **options: Any) -> None:
        path = env["SWARM_INVITE_FILE"]
        assert path == f"/dev/fd/{pass_fds[0]}"
        assert (Path(path).stat().st_mode & 0o777, Path(path).stat().st_nlink) == (0o600, 0)
        line = Path(path).read_text()
        assert line[15:] not in str([command, env, options])
        monkeypatch.setenv("SWARM_INVITE_FILE", path)
        monkeypatch.setenv("SWARM_JOIN", f"192.0.2.1:31337/{ID}")
        config = process.apply_environment(strategy.config, len(told) + 1)
        told.append(entry_of(config, lambda: tmp_path / "none", now_s=NOW_S))
        assert from_text(line, "the launcher") == told[-1].proof
        monkeypatch.delenv("SWARM_INVITE_FILE")

    monkeypatch.setattr(launcher.subprocess, "Popen", popen)
    strategy: Any = SimpleNamespace(config=SwarmStrategy(trust="invited").config, num_trainers=1)
    lead = SwarmLauncher(strategy, 3)
    lead._entry = lead._own_entry()
    lead._start_children([], [])
    assert lead._entry is not None
    assert [(one.owner, one.role) for one in told] == [(lead._entry.owner, Role.SERVER)] * 2
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["swarm.owner"]
    assert "SWARM_INVITE_FILE" not in os.environ


def test_a_run_that_is_open_warns_of_what_can_happen(caplog: pytest.LogCaptureFixture) -> None:
    for listen, num_warnings in (("127.0.0.1:5", 0), ("0.0.0.0:5", 1)):
        strategy: Any = SimpleNamespace(config=SwarmStrategy(trust="open", listen=listen).config)
        assert SwarmLauncher(strategy, 1)._own_entry() is None
        assert caplog.text.count("anyone who reaches this peer's port can join the run") == num_warnings


def test_a_machine_whose_children_would_not_be_let_in_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher, "hivemind_peer", lambda *_: pytest.fail("a peer was started"))
    monkeypatch.setattr(process, "child_command", list)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    key, invite = tmp_path / "key", tmp_path / "one.invite"
    invite.write_text(to_text(Owner("swarm", Identity.generate()).certify(load_identity(key).peer_id, **FOR_ONE)))
    config = SwarmStrategy(initial_peers=f"192.0.2.1:5/{ID}", identity_path=str(key), invite=str(invite)).config
    strategy: Any = SimpleNamespace(config=config)
    with pytest.raises(ConfigError, match="`devices` above 1 starts 1 more peers"):
        SwarmLauncher(strategy, 2)._start_peers(SimpleNamespace())  # type: ignore[arg-type]


def test_the_first_signal_asks_to_leave_and_the_second_ends_at_once() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    told: list[str] = []
    with leaving_on_signals(told.append):
        signal.raise_signal(signal.SIGTERM)
        assert told == ["SIGTERM"]
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130
    assert told == ["SIGTERM"]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


def test_signals_are_left_alone_beside_the_main_thread() -> None:
    def serve() -> None:
        with leaving_on_signals(lambda _: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[Any] = []
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


class Child:
    """A process of this machine that ends on request."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stdin = io.BytesIO()
        self.pid = 0

    def terminate(self) -> None:
        self.asked.append("terminate")

    def kill(self) -> None:
        self.asked.append("kill")

    def wait(self, timeout: float | None = None) -> int:
        self.asked.append(f"wait {timeout is not None and timeout > 100.0}")
        return 0


def leaving(reason: Callable[[SwarmLauncher], None], role: Any = "server") -> tuple[list[str], list[str]]:
    """Let a launcher with one child leave; return its requests to its peer, and to the child."""
    left: list[str] = []
    peer = SimpleNamespace(leave=lambda: left.append("left"))
    strategy: Any = SimpleNamespace(config=SwarmStrategy(role=role).config, peer=peer)
    one, child = SwarmLauncher(strategy, 2), Child()
    one._children = [child]  # type: ignore[list-item]
    reason(one)
    one._end_children_in_order(0)
    return left, child.asked


def test_who_leaves_has_its_machine_leave_and_waits_for_it() -> None:
    for reason in (
        lambda one: one._leave("SIGTERM"),
        lambda one: one._handle_notice("AWS will stop this spot instance"),
    ):
        assert leaving(reason) == (["left"], ["terminate", "wait True"])


def test_a_trainer_takes_a_notice_for_a_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends SIGTERM only if a handler is set, as Lightning sets one; otherwise the process would end at once."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(launcher.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(launcher.signal, "getsignal", lambda _: signal.SIG_DFL)
    leaving(lambda one: one._handle_notice("GCP preempts this machine"), role="both")
    assert sent == []
    monkeypatch.setattr(launcher.signal, "getsignal", lambda _: lambda *_: None)
    assert leaving(lambda one: one._handle_notice("GCP preempts this machine"), role="both") == ([], ["wait False"])
    assert sent == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.parametrize(("code", "num_said"), [(3, 1), (0, 0)])
def test_a_guest_says_how_many_of_its_peers_are_left(
    code: int, num_said: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of three processes dies; a process that left gracefully is not reported."""
    guest = SwarmLauncher(SwarmStrategy(), 3)
    command = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen([*command, "input()"], stdin=subprocess.PIPE) as living:
        ending = subprocess.Popen([*command, f"raise SystemExit({code})"])
        guest._children = [living, ending]
        guest._report_end(2, ending)
        assert living.stdin is not None
        living.stdin.close()
        living.kill()
    assert caplog.text.count("2 of 3 peers of this machine are left: local peer 2 (process") == num_said
    assert caplog.text.count("ended with exit code 3") == num_said


@pytest.mark.parametrize(
    ("listen", "announce", "found"),
    [
        ("0.0.0.0:31337", "203.0.113.7:4000", "127.0.0.1:31337"),
        ("[::]:31337", "[2001:db8::7]:4000", "[::1]:31337"),
        ("10.0.0.5:31337", "203.0.113.7:4000", "10.0.0.5:31337"),
        ("0.0.0.0:31337", "", None),
        ("0.0.0.0", "203.0.113.7:4000", None),  # the system chooses its port
    ],
)
def test_peers_of_a_machine_meet_inside_its_router(listen: str, announce: str, found: str | None) -> None:
    config = SwarmStrategy(num_stages=2, listen=listen, announce=announce or ()).config
    own = Identity.generate().peer_id
    announced = [f"/ip4/203.0.113.7/tcp/4000/p2p/{own}"]
    addresses = process.addresses_for_children(config, announced)
    assert addresses == [*([f"{found}/{own}"] if found else []), *announced]
    assert all(Address.parse(text).peer_id == own for text in addresses)
