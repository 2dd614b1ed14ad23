"""The program's command line and folder at start are known even after changes to `sys.argv` or `chdir`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_swarm.core import program

SCRIPT = """
import os, sys
sys.argv.pop(1)
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
from lightning_swarm.peer import process
print(process.child_command()[3:])
from lightning_swarm.core import program
print(program.start_folder())
"""


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["train.py", "0.1"], ["train.py", "0.1"]),
        (["-X", "dev", "-O", "train.py", "-m"], ["train.py", "-m"]),
        (["-Wdefault", "-m", "pack.train", "-x"], ["-m", "pack.train", "-x"]),
        (["-mpack.train", "1"], ["-m", "pack.train", "1"]),
        ([], []),
    ],
)
def test_pythons_own_options_are_none_of_the_programs(asked: list[str], found: list[str]) -> None:
    assert program._program(asked) == found


@pytest.mark.parametrize("name", ["train.py", "./train.py", "code/train.py", "absolute"])
def test_a_script_is_started_again_as_it_was(tmp_path: Path, name: str) -> None:
    path = tmp_path / ("train.py" if name == "absolute" else name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(SCRIPT)
    word = str(path) if name == "absolute" else name
    command = [sys.executable, "-W", "ignore", word, "0.1", "--more"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == str([str(path), "0.1", "--more"])
    # If the path is absolute, the folder before the package's import cannot be determined.
    assert said[1] == str(tmp_path if name != "absolute" else tmp_path / "elsewhere")


def test_a_program_that_runs_another_one_hands_on_its_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "cProfile", "train.py", "0.1"])
    monkeypatch.setattr(sys, "argv", ["train.py", "0.1"])
    assert program.own_arguments(str(tmp_path / "train.py")) == ["0.1"]
    assert program.module_arguments("pack.train") == ["0.1"]
