"""Scripts that complete command lines, run in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_swarm import cli
from lightning_swarm.cli import completion

_BASH = """
source "$0"
complete -p lightning-swarm > /dev/null || exit 1
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_lightning_swarm
printf '%s\\n' "${COMPREPLY[@]}"
"""

# These functions exist only in an interactive zsh; here they print their arguments.
_ZSH = """
function compdef { }
function compadd { print -l -- ${(P)2} }
function _describe { print -l -- ${(P)@[-1]} }
function _files { print FILES }
source $0
words=("$@") CURRENT=$# PREFIX=$words[-1]
_lightning_swarm
"""
COMMANDS = {"bash": _BASH, "zsh": _ZSH}


@pytest.fixture(params=[*COMMANDS])
def shell(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, Path]:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / "script"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-swarm", "completion", name])
        assert cli.main() == 0
    script.write_text(capsys.readouterr().out)
    return name, script


@pytest.mark.parametrize(
    ("line", "found", "missing"),
    [
        (["st"], ["status"], []),
        (["-v", "mem"], ["members"], []),
        (["--ver"], ["--version", "--verbose"], []),
        (["invite", "--"], ["--role", "--uses", "--out"], ["--weights"]),
        (["-vv", "invite", "--"], ["--role"], []),
        (["invite", "--role", ""], ["observer", "server", "trainer", "keeper"], ["--role"]),
        (["serve", "--"], ["--listen", "--preemption", "--weights", "--memory"], []),  # both kinds of `serve`
        (["join", "--preemption", ""], ["auto", "aws", "gcp", "azure"], []),
        (["fit", "--"], ["--model", "--trainer.strategy.num_stages"], ["--weights"]),
        (["plan", "machines.yaml", "--ends", ""], ["stages", "trainer"], []),
        (["completion", ""], ["bash", "zsh"], []),
    ],
)
def test_words_are_completed(shell: tuple[str, Path], line: list[str], found: list[str], missing: list[str]) -> None:
    words = completed(*shell, line)
    assert set(found) <= words
    assert not set(missing) & words


def test_files_are_completed_elsewhere(shell: tuple[str, Path]) -> None:
    name, script = shell
    for line in (["export", "last"], ["fit", "--config", "run"], ["invite", "--out", ""]):
        # Bash completes files without the script.
        assert completed(name, script, line) == ({"FILES"} if name == "zsh" else set())


def completed(name: str, script: Path, line: list[str]) -> set[str]:
    """Return the words that a shell offers after a command line."""
    options = ["--norc"] if name == "bash" else ["--no-rcs"]
    command = [name, *options, "-c", COMMANDS[name], str(script), "lightning-swarm", *line]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return {word.partition(":")[0] for word in done.stdout.splitlines() if word}


def test_the_listed_options_of_the_trainer_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "fit", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    text = capsys.readouterr().out
    # The strategy's options are in a separate help, which another test reads.
    listed = [option for option in completion.TRAINER_OPTIONS if not option.startswith("--trainer.strategy.")]
    assert [option for option in listed if option not in text] == []
