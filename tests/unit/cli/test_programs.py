"""`lightning-swarm join` and `serve`: the programs that they run, and the settings that they pass."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_swarm import cli
from lightning_swarm.cli import programs
from lightning_swarm.core.errors import Unreachable
from lightning_swarm.network.access import Role
from lightning_swarm.network.identity import Identity
from lightning_swarm.peer import process
from lightning_swarm.strategy.launcher import SwarmLauncher
from lightning_swarm.trust.invitation_text import to_text
from lightning_swarm.trust.owner import Owner

ID = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"
HERE = f"203.0.113.7:31337/{ID}"
NAMES = (
    *(process.JOIN, process.LISTEN, process.ANNOUNCE, process.IDENTITY),
    *(process.ROLE, process.PREEMPTION, process.INVITE),
)

Ran = list[tuple[list[str], dict[str, str]]]


@pytest.fixture(autouse=True)
def _process_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore the parts of the process that a command changes."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(SwarmLauncher, "launched", False)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('trained by myself')")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Collect the programs that would have run, with their environment variables."""
    started: Ran = []

    def run(program: list[str]) -> None:
        started.append((program, {name: os.environ[name] for name in NAMES if name in os.environ}))
        SwarmLauncher.launched = True

    monkeypatch.setattr(programs._bootstrap, "run", run)
    monkeypatch.setattr(programs, "run_trainer", lambda: run(["lightning-swarm", *sys.argv[1:]]))
    return started


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", *arguments])
    return cli.main()


@pytest.mark.parametrize(
    ("arguments", "program", "told"),
    [
        (["join", HERE, "train.py"], ["train.py"], {"SWARM_JOIN": HERE}),
        (["join", f"/ip4/203.0.113.7/tcp/31337/p2p/{ID}", "train.py"], ["train.py"], {"SWARM_JOIN": HERE}),
        (["join", HERE, "train.py", "--listen", "x", "y"], ["train.py", "--listen", "x", "y"], {"SWARM_JOIN": HERE}),
        (["join", HERE, "-m", "their.train", "-x"], ["-m", "their.train", "-x"], {"SWARM_JOIN": HERE}),
        (
            ["join", "--listen=0.0.0.0", HERE, "--identity", "key", "train.py"],
            ["train.py"],
            {"SWARM_JOIN": HERE, "SWARM_LISTEN": "0.0.0.0:0", "SWARM_IDENTITY": "key"},
        ),
        (["join", HERE, "--config", "a.yaml"], ["lightning-swarm", "fit", "--config", "a.yaml"], {"SWARM_JOIN": HERE}),
        (
            ["serve", HERE, "--listen", "192.0.2.1:5", "--model", "their.Net"],
            ["lightning-swarm", "fit", "--model", "their.Net"],
            {"SWARM_JOIN": HERE, "SWARM_LISTEN": "192.0.2.1:5", "SWARM_ROLE": "server"},
        ),
        (
            ["join", HERE, "--invite", "a.invite", "train.py", "--invite", "x"],
            ["train.py", "--invite", "x"],
            {"SWARM_JOIN": HERE, "SWARM_INVITE_FILE": "a.invite"},
        ),
        (["serve", "train.py", HERE], ["train.py", HERE], {"SWARM_ROLE": "server"}),
        (
            ["join", HERE, "--announce", "203.0.113.8:31337", "--announce=[2001:db8::8]:31337", "train.py"],
            ["train.py"],
            {"SWARM_JOIN": HERE, "SWARM_ANNOUNCE": "203.0.113.8:31337 [2001:db8::8]:31337"},
        ),
        (
            ["join", "--preemption", "auto", HERE, "train.py", "--preemption", "x"],
            ["train.py", "--preemption", "x"],
            {"SWARM_JOIN": HERE, "SWARM_PREEMPTION": "auto"},
        ),
    ],
)
def test_a_program_is_told_whom_to_join(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ran: Ran,
    arguments: list[str],
    program: list[str],
    told: dict[str, str],
) -> None:
    assert command(monkeypatch, *arguments) == 0
    # Empty values override the program's own, which are meant for its author's machine.
    assert ran == [(program, {"SWARM_ANNOUNCE": "", "SWARM_IDENTITY": "", **told})]
    what = "the model" if program[0] == "lightning-swarm" else program[program[0] == "-m"]
    assert capsys.readouterr().err == f"Importing torch, Lightning and {what}.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["join", "train.py"], ["must be host:port/id", "got 'train.py'"]),
        (["join", "203.0.113.7:31337", "train.py"], ["got '203.0.113.7:31337'. Copy the whole address"]),
        (["serve", "203.0.113.7:31337", "train.py"], ["got '203.0.113.7:31337'. Copy the whole address"]),
        (["join", HERE, "trian.py"], ["got 'trian.py', which is no file here. Check the path"]),
        (["join", HERE, "train.py", "--x"], ["with `strategy=SwarmStrategy(...)`, but train.py ended"]),
        (
            ["join", HERE, "--invite", "swarm-invite-1.x", "train.py"],
            ["got 'the text of `--invite`': it was cut or changed on its way"],
        ),
        (["join", HERE, "--announce", "203.0.113.8", "train.py"], ["`announce` must be the address and the port"]),
        (["join", HERE, "--listen", "example.org", "train.py"], ["`listen` must be an IP address", "'example.org'"]),
    ],
)
def test_what_cannot_join_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: list[str]
) -> None:
    assert command(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.removeprefix("Importing torch, Lightning and train.py.\n").startswith("lightning-swarm: error: ")
    for part in said:
        assert part in error


@pytest.mark.parametrize("arguments", [["join"], ["join", HERE], ["serve"], ["serve", HERE, "--listen", "0.0.0.0"]])
def test_without_a_program_the_usage_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, *arguments)
    assert f"usage: lightning-swarm {arguments[0]} " in capsys.readouterr().err


def test_the_script_runs_as_python_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "their_helper.py").write_text("")
    (tmp_path / "there" / "script.py").write_text("import sys, their_helper\nprint(__name__, sys.argv)\nsys.exit(7)\n")
    with pytest.raises(SystemExit, match="7"):
        command(monkeypatch, "serve", HERE, "there/script.py", "--lr", "1")
    sys.modules.pop("their_helper", None)
    assert capsys.readouterr().out == "__main__ ['there/script.py', '--lr', '1']\n"


def test_what_is_told_goes_before_what_the_script_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_swarm import SwarmStrategy

    config = SwarmStrategy(role="both", listen="127.0.0.1:9", identity_path="mine").config
    for name, value in zip(NAMES, (HERE, "0.0.0.0:5", "203.0.113.8:5", "key", "server", "aws", "invite"), strict=True):
        monkeypatch.setenv(name, value)
    told = process.apply_environment(config, 0)
    found = str(told.initial_peers[0]), str(told.listen), str(told.announce[0]), told.identity_path, told.role
    assert found == (HERE, "0.0.0.0:5", "203.0.113.8:5", "key", "server")
    assert (told.preemption, told.invite) == ("aws", "invite")
    child = process.apply_environment(config, 1)
    assert (str(child.listen), child.identity_path, child.role) == ("0.0.0.0:6", "key.1", "server")


@pytest.mark.parametrize("is_text", [False, True])
def test_an_invitation_reaches_the_program_in_a_file_without_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_text: bool
) -> None:
    """It is given as text, or on standard input."""
    line = to_text(Owner("swarm", Identity.generate()).invite(Role.SERVER, uses=1, expires_at_s=4e9))
    read: list[str] = []

    def run(program: list[str]) -> None:
        path = os.environ[process.INVITE]
        read.extend(Path(path).read_text() for _ in range(2))  # child processes read it, too
        status = Path(path).stat()
        assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)
        SwarmLauncher.launched = True

    monkeypatch.setattr(programs._bootstrap, "run", run)
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    assert command(monkeypatch, "join", HERE, "--invite", line if is_text else "-", "train.py") == 0
    assert read == [line] * 2
    monkeypatch.setattr(sys, "stdin", io.StringIO(line[:-3]))
    assert command(monkeypatch, "join", HERE, "--invite", line[:-3] if is_text else "-", "train.py") == 2
    err = capsys.readouterr().err
    assert f"got '{'the text of `--invite`' if is_text else 'standard input'}': it was cut or changed" in err
    assert line[20:60] not in err


def test_no_other_user_sees_an_invitation_in_the_list_of_processes() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom lightning_swarm.cli.given_invitation import hide_argument\n"
        "hide_argument(sys.argv[2])\nprint(Path('/proc/self/cmdline').read_text().split(chr(0))[3:-1], sys.argv[2])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "--invite", "swarm-invite-1.x", "more"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{['--invite', 16 * '*', 'more']} swarm-invite-1.x\n"


@pytest.mark.parametrize("arguments", [["generate", HERE, "--prompt", "Hi"], ["http", f"small={HERE}"]])
def test_who_waits_for_a_served_model_is_told_what_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Unreachable("nobody is there")

    monkeypatch.setattr("lightning_swarm.serving.remote_model.remote_model", refuse)
    assert command(monkeypatch, *arguments) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Importing torch and transformers.",
        f"Connecting to {HERE}.",
        "lightning-swarm: error: nobody is there",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--weights", "."], "`--weights` is for served models, and `--version` for runs that train"),
        (["--adapter", "."], "`--adapter` is for served models"),
        (["--max-new-tokens", "99999"], "options of a text must be within their ranges"),
        (["--sample", "--seed", "-1"], "options of a text must be within their ranges"),
        (["--invite", "swarm-invite-1.x"], "got 'the text of `--invite`': it was cut"),
    ],
)
def test_a_run_is_not_asked_for_what_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert command(monkeypatch, "generate", HERE, "--prompt", "Hi", "--version", "pin", *more) == 2
    assert said in capsys.readouterr().err
