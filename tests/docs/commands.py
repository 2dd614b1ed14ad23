"""Checks commands of the documentation with their real parsers, and with the files that they name."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from lightning_swarm import cli
from lightning_swarm.cli import commands, programs, serving
from lightning_swarm.cli.pytorch_lightning import SwarmCLI as OtherSwarmCLI
from lightning_swarm.cli.swarm_cli import SwarmCLI
from lightning_swarm.network import addresses as addresses_module
from lightning_swarm.peer import _bootstrap
from lightning_swarm.planner.simulator.scenario import ScenarioRuns
from lightning_swarm.strategy.launcher import SwarmLauncher
from tests.docs import my_project
from tests.docs.pages import ROOT

PEER_ID = "12D3KooWLBAcdeFGhijkmnPQRStuvwxyz123456789ABCDEFGHJK"
_MAKEFILE = (ROOT / "Makefile").read_text()
_TARGETS = set(re.findall(r"^([a-z]+):", _MAKEFILE, flags=re.MULTILINE))
_EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
COMMANDS = ("lightning-swarm", "make", "pip", "python")


class NotUnderstood(AssertionError):
    """A command would fail."""


def lines(text: str) -> Iterator[list[str]]:
    """Yield the commands of a block as lists of words, without comments, with continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check(words: list[str]) -> None:
    """Try a command, up to its first action. The current folder has the files that its page shows.

    Raises:
        NotUnderstood: It would fail.
    """
    words = [re.sub(r"12D3\w*\.\.\.", PEER_ID, word) for word in words]
    if ">" in words:  # a test compares the repository's files that are written like this
        words = words[: words.index(">")]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        _check_variable(words.pop(0).partition("=")[0])
    known = {
        "lightning-swarm": _check_ours,
        "make": _check_make,
        "pip": _check_pip,
        "python": _check_python,
        "cd": _check_cd,
        "openssl": _check_openssl,
        "patch": _check_patch,
        "source": _check_source,
    }
    if words[0] not in known:
        raise NotUnderstood(f"no rule for the command {words[0]!r}")
    known[words[0]](words[1:])


def check_span(text: str) -> None:
    """Check a command within a sentence, as `check` does; a bare `lightning-swarm join` names the command only."""
    if text.split(maxsplit=1)[0] not in COMMANDS:  # it may be a message with an apostrophe
        return
    words = shlex.split(text)
    names = {
        *programs.TRAINER_COMMANDS,
        *programs.PEER_COMMANDS,
        "invite",
        "doctor",
        "status",
        "dashboard",
        "plan",
        "export",
        "simulate",
        "generate",
        "http",
        "completion",
    }
    if len(words) > 1 and not (len(words) == 2 and words[1] in names):
        check(words)


def _check_variable(name: str) -> None:
    sources = [*(ROOT / "lightning_swarm").rglob("*.py"), *(ROOT / "tests" / "p2p").glob("*.py")]
    if name != "OMP_NUM_THREADS" and not any(f'"{name}"' in path.read_text() for path in sources):
        raise NotUnderstood(f"nothing reads the variable {name}")


def _check_make(words: list[str]) -> None:
    for word in words:
        name, is_setting, value = word.partition("=")
        if is_setting and not (re.search(rf"\$[({{]{name}[)}}]", _MAKEFILE) or re.search(rf"^{name} ", _MAKEFILE)):
            raise NotUnderstood(f"the Makefile has no variable {name}")
        for path in re.findall(r"tests/[\w/.]+", value):
            if not (ROOT / path).exists():
                raise NotUnderstood(f"there is no {path}")
        if not is_setting and word not in _TARGETS:
            raise NotUnderstood(f"the Makefile has no target {word}")


def _check_pip(words: list[str]) -> None:
    if words == ["wheel", ".", "--no-deps", "--wheel-dir", "dist"]:
        return
    what = [word for word in words[1:] if not word.startswith("-")]
    if words[0] != "install" or len(what) != 1:
        raise NotUnderstood(f"`pip install` takes one thing here, got {words}")
    found = re.fullmatch(r"(?:\.|lightning-swarm)(?:\[([\w,]+)\])?", what[0])
    if found is None or not set(filter(None, (found[1] or "").split(","))) <= _EXTRAS:
        raise NotUnderstood(f"{what[0]} is neither this package nor one of its extras {sorted(_EXTRAS)}")


def _check_openssl(words: list[str]) -> None:
    if words[:3] != ["rand", "-hex", "32"]:
        raise NotUnderstood("it makes keys, of 32 bytes")


def _check_cd(words: list[str]) -> None:
    os.chdir(words[0])


def _check_source(words: list[str]) -> None:
    if words != [".venv/bin/activate"]:
        raise NotUnderstood(f"what is {words}?")


def _check_patch(words: list[str]) -> None:
    if words[:2] not in (["-p1", "<"], ["-Rp1", "<"]) or not Path(words[2]).is_file():
        raise NotUnderstood(f"{words} is no patch of a file that is there")


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise NotUnderstood(f"there is no module {words[1]}")
        if words[2:]:
            _check_options(words[1:], lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    else:
        if not Path(words[0]).is_file():
            raise NotUnderstood(f"the page shows no {words[0]}, and it is in no examples")
        if words[1:]:
            _check_options(words, lambda: runpy.run_path(words[0], run_name="__main__"))


class _ParsedError(Exception):
    """A program's options were read."""


def _check_options(argv: list[str], run: Any) -> None:
    """Run a program until it has read its options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise _ParsedError

    path = [str(Path(argv[0]).resolve().parent), *sys.path]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", path),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
    ):
        imported = sys.modules.pop(argv[0], None)  # forget an import by other tests, so that it runs afresh here
        try:
            run()
        except _ParsedError:
            return
        except SystemExit as error:
            raise NotUnderstood(f"{shlex.join(argv)}: its parser refuses that") from error
        finally:
            if imported is not None:
                sys.modules[argv[0]] = imported
    raise NotUnderstood(f"{argv[0]} reads no options")


# ---------------------------------------------------------------------- lightning-swarm


def _check_ours(words: list[str]) -> None:
    told: list[object] = []
    with _nothing_is_done(told), mock.patch.object(sys, "argv", ["lightning-swarm", *words]):
        try:
            status = cli.main()
        except SystemExit as error:
            status = 0 if error.code in (0, None) else 1
            told.append("help")
    if status != 0 or not told:
        raise NotUnderstood(f"lightning-swarm {shlex.join(words)}: exit status {status}, and its error is above")


@contextmanager
def _nothing_is_done(told: list[object]) -> Iterator[None]:
    """Let commands parse, find their files, and create all objects, then stop and append their action to `told`."""

    def run(arguments: argparse.Namespace) -> int:
        peers = arguments.peer if arguments.command == "doctor" else ()
        named = [getattr(arguments, "address", None), *getattr(arguments, "models", ())]
        addresses = [*peers, *(address.rpartition("=")[2] for address in named if address)]
        told.append([addresses_module.Address.parse(address) for address in addresses])
        if "scenario" in arguments:
            ScenarioRuns(arguments.scenario)
        return 0

    def run_server(arguments: argparse.Namespace) -> int:
        told.append([addresses_module.Address.parse(address) for address in arguments.join])
        return 0

    def run_subcommand(_cli: object, name: str) -> None:
        told.append(name)

    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch.dict(sys.modules, {"my_project": my_project, "my_project.train": ModuleType("train")}),
        mock.patch.object(commands, "_run", run),
        mock.patch.object(serving, "_serve", run_server),
        mock.patch.object(commands, "follow_environment"),
        mock.patch.object(SwarmCLI, "_run_subcommand", run_subcommand),
        mock.patch.object(OtherSwarmCLI, "_run_subcommand", run_subcommand),
        mock.patch.object(_bootstrap, "run", told.append),
        mock.patch.object(SwarmLauncher, "launched", True),
    ):
        yield
