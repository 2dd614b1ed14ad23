"""The commands that run a user's program: the Trainer's, such as `fit`, and `join` and `serve` for further peers."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import yaml

from lightning_swarm.cli import serving
from lightning_swarm.cli.arguments import Command, add_address, add_identity
from lightning_swarm.cli.given_invitation import INVITE_HELP, invitation_file
from lightning_swarm.cli.output import say
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.process import collecting_rarely
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.peer import _bootstrap
from lightning_swarm.peer.config import Preemption
from lightning_swarm.peer.process import ANNOUNCE, IDENTITY, INVITE, JOIN, LISTEN, PREEMPTION, ROLE

if TYPE_CHECKING:
    from lightning_swarm.strategy.framework import ImportTree

_MODEL, _DATA, _STRATEGY = "model", "data", "trainer.strategy"
_CLASSES: Final = (_MODEL, _DATA, _STRATEGY)  # the first class that is given decides the import tree

TRAINER_COMMANDS: Final[Mapping[str, str]] = {
    "fit": "Train a model on a swarm, which begins with this machine's devices.",
    "validate": "Run a model's validation loop once.",
    "test": "Run a model's test loop once.",
    "predict": "Run a model's predictions.",
}

_MODEL_AND_DATA: Final = """

Works with any LightningModule and LightningDataModule. Name them by their import path, from the current folder:

    lightning-swarm {name} --model my_project.Net --data my_project.Data \\
        --trainer.devices 4 --trainer.strategy.num_stages 2

or in a file, which --print_config writes for the options that come before it:

    lightning-swarm {name} --config run.yaml{weights}

{note}To show the options of the swarm: --trainer.strategy.help {strategy}
"""

_NOTES: Final = {
    "predict": "The results of `predict_step` are not kept, unless a BasePredictionWriter in `trainer.callbacks` "
    "writes them.\n\n"
}

# Beginnings of lines in jsonargparse's errors that only list the types that it tried.
_NOISE: Final = (
    "Does not validate against any",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Given value type:",
    "Given value: NestedArg",
)

_HINT: Final = """

Classes are named by their import path from the current folder, like my_project.Net. To show all options:

    lightning-swarm {name} --help
    lightning-swarm {name} --model.help my_project.Net
    lightning-swarm {name} --trainer.strategy.help {strategy}"""


def choose_framework(arguments: Sequence[str], commands: Sequence[str]) -> ImportTree:
    """Return the import tree, `lightning.pytorch` or `pytorch_lightning`, of the classes that a command line names."""
    from lightning_swarm.strategy.framework import LIGHTNING, mixed_import, tree_of_class

    named: dict[str, Any] = {}
    for argument, following in zip_longest(arguments, arguments[1:]):
        option, equals, text = argument.partition("=")
        value = text if equals else following
        if option in ("-c", "--config"):
            named.update(_named_in_file(value, [*arguments, *commands], commands))
        for name in _CLASSES:
            if option in (f"--{name}", f"--{name}.class_path", f"--{name}.help"):
                named[name] = value
    classes = {name: _imported(named.get(name)) for name in _CLASSES}
    trees = {name: tree_of_class(imported) for name, imported in classes.items()}
    model, data = trees[_MODEL], trees[_DATA]
    if model is not None and data is not None and data is not model:
        raise mixed_import("LightningDataModule", classes[_DATA], model)
    return next((tree for tree in trees.values() if tree is not None), LIGHTNING)


def _named_in_file(path: str | None, candidates: Sequence[str], commands: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of `_CLASSES` that a configuration file sets, with their class paths."""
    try:
        content = yaml.safe_load(Path(path or "").read_text())
    except (OSError, ValueError, yaml.YAMLError):  # the real parser reports the error
        return
    # In `--config FILE fit` the file has a section for each command; in `fit --config FILE` it has only options.
    sections = (_value_at(content, name) for name in candidates if name in commands)
    section = next((section for section in sections if section is not None), content)
    for name in _CLASSES:
        value = _value_at(section, *name.split("."))
        if value is not None:
            yield name, _value_at(value, "class_path") or value


def _value_at(content: Any, *keys: str) -> Any:
    """Return the value in nested mappings; None if a key is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _imported(path: Any) -> Any:
    if not isinstance(path, str) or "." not in path:
        return None
    try:
        return pkgutil.resolve_name(path)
    except Exception:  # noqa: BLE001 - the parser imports the class again, and its error names the option
        return None


def cli_module(arguments: Sequence[str], commands: Sequence[str]) -> Any:
    """Import the module whose `SwarmCLI` can run a command line, which may name classes of the current folder."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # without it, a console script finds no model in the current folder
    in_lightning = choose_framework(arguments, commands).name == "lightning.pytorch"
    return import_module(f"lightning_swarm.cli.{'swarm_cli' if in_lightning else 'pytorch_lightning'}")


def run_trainer() -> int:
    """Run `fit` or another Trainer command with the process's arguments; returns the exit status."""
    require_jsonargparse(*TRAINER_COMMANDS)
    from jsonargparse import DefaultHelpFormatter

    class Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
        """Keeps the line breaks of descriptions."""

    cli = cli_module(sys.argv[1:], [*TRAINER_COMMANDS])
    strategy_path = cli.SwarmCLI.strategy_class.framework.strategy_path
    parsers: dict[str, dict[str, Any]] = {
        name: {
            "exit_on_error": False,
            "usage": f"lightning-swarm {name} --model CLASS [--data CLASS] [options], or --config FILE [options]",
            "formatter_class": Help,
            "description": line
            + _MODEL_AND_DATA.format(
                name=name,
                # The other commands need trained weights.
                weights="" if name == "fit" else " --ckpt_path last.ckpt",
                note=_NOTES.get(name, ""),
                strategy=strategy_path,
            ),
        }
        for name, line in TRAINER_COMMANDS.items()
    }
    own = {"prog": "lightning-swarm", "formatter_class": Help, "exit_on_error": False}
    try:
        cli.SwarmCLI(save_config_callback=cli.SaveConfig, parser_kwargs={**own, **parsers})
    except argparse.ArgumentError as error:
        name = sys.argv[1] if sys.argv[1] in TRAINER_COMMANDS else "fit"
        lines = [line for line in str(error).splitlines() if line.strip() and not line.strip(" -").startswith(_NOISE)]
        raise ConfigError("\n".join(lines) + _HINT.format(name=name, strategy=strategy_path)) from error
    return 0


def require_jsonargparse(*commands: str) -> None:
    """Raise a ConfigError with the remedy if jsonargparse, which these commands need, is not installed."""
    try:
        importlib.metadata.version("jsonargparse")
        importlib.metadata.version("docstring-parser")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{', '.join(commands)} need jsonargparse with its extra `signatures`, but {error.name} is not "
            'installed. Run: pip install "lightning-swarm[cli]"'
        ) from error


_PEER_OPTIONS: Final = ("--listen", "--announce", "--identity", "--invite", "--preemption")

_ADDRESS: Final = "203.0.113.7:31337/12D3..."

_JOIN: Final = f"""\
Join a run that another machine started; this needs no data. Takes the starter's address and program, as the starter \
prints them.

    lightning-swarm join {_ADDRESS} train.py
    lightning-swarm join {_ADDRESS} --listen 0.0.0.0:31337 --invite anna.invite train.py --width 512
    lightning-swarm join {_ADDRESS} -m my_project.train
    lightning-swarm join {_ADDRESS} --config run.yaml
    lightning-swarm join {_ADDRESS} --model my_project.Net

The program must build the same model as the starter's. Its first `fit` serves until the run is over and then ends the
process with exit status 0. If the program has data and the run's lead dies, it may take over the lead. Then `fit`
trains, and the program continues after it. If its strategy's `role` is "both" or "trainer", it trains beside the lead
at once, with data of its own, if the run accepts trainers.

On Ctrl-C or SIGTERM it leaves between two steps, as soon as the run can spare it, and ends with exit status 0.
A second signal ends it at once. With --preemption, a cloud's notice of preemption has the effect of the first signal.
"""

_SERVE: Final = f"""\
Serve stages, without training, for a run that is started elsewhere, or of a finished model.

    lightning-swarm serve {_ADDRESS} train.py    for a run that exists
    lightning-swarm serve --listen 0.0.0.0:31337 train.py       for a later run: prints how to start it
    lightning-swarm serve --listen 0.0.0.0:31337 --config run.yaml
    lightning-swarm serve --weights my-llama/                   a finished model: see `serve --weights . --help`

Like `join`, but it reads no data and trains nothing, whatever the `role` of the program's strategy. It may be started
before the run.
"""


def _add_arguments(parser: argparse.ArgumentParser, *, needs_address: bool) -> None:
    add_address(parser, nargs=None if needs_address else "?")
    parser.add_argument(
        "--listen",
        metavar="IP[:PORT]",
        help="address to listen on; 0.0.0.0 for all networks (default: the program's)",
    )
    parser.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="address at which others reach this peer behind a router (repeatable; default: the address that it "
        "listens on, because the program's setting is for the machine that started the run)",
    )
    add_identity(parser)
    parser.add_argument("--invite", metavar="INVITATION", help=f"{INVITE_HELP} (default: the program's)")
    parser.add_argument(
        "--preemption",
        choices=get_args(Preemption),
        help="the cloud whose notices of preemption to obey; auto: the cloud that answers (default: the program's)",
    )


PEER_COMMANDS: Final = {
    name: Command(
        name,
        description,
        partial(_add_arguments, needs_address=name == "join"),
        usage=f"lightning-swarm {name} {address} [options] PROGRAM [its arguments]",
        epilog="PROGRAM: a script, -m MODULE, or --config FILE or --model CLASS with options of `lightning-swarm fit`.",
    )
    for name, address, description in (("join", "ADDRESS", _JOIN), ("serve", "[ADDRESS]", _SERVE))
}


def run_peer(name: str, arguments: Sequence[str]) -> int:
    """Run `join` or `serve`; returns the exit status, unless the program itself ends the process."""
    if name == "serve" and any(argument.partition("=")[0] in serving.SERVED_OPTIONS for argument in arguments):
        return serving.run_serve(arguments)  # of a finished model
    own, program = _split(arguments, address_first=name == "join")
    parser = PEER_COMMANDS[name].parser()
    chosen = parser.parse_args(own)
    environment = _environment(name, chosen)
    if not program:
        parser.error("add the program, as the starter prints it: a script, -m MODULE, --config FILE or --model CLASS")
    with invitation_file(chosen.invite) as invitation:
        os.environ.update(environment if invitation is None else {**environment, INVITE: invitation})
        with collecting_rarely():  # the launcher restores usual collection when `fit` begins
            _run_program(name, program)
    return 0


def _run_program(name: str, program: Sequence[str]) -> None:
    """Run a program whose `fit` joins a run, according to the environment; refuse a program without such a `fit`."""
    if program[0].startswith("-") and program[0] != "-m":
        say("Importing torch, Lightning and the model.")
        sys.argv[1:] = ["fit", *program]
        run_trainer()
    else:
        if program[0] != "-m" and not Path(program[0]).is_file():
            raise ConfigError(
                f"the program for `{name}` must be a script, -m MODULE, --config FILE or --model CLASS, got "
                f"{program[0]!r}, which is no file here. Check the path; options of `{name}` come before the program."
            )
        say(f"Importing torch, Lightning and {program[1] if program[0] == '-m' else program[0]}.")
        _bootstrap.run([*program])
    from lightning_swarm.strategy.launcher import SwarmLauncher

    if not SwarmLauncher.launched:
        raise ConfigError(
            f"a program for `{name}` must call `fit` of a Trainer with `strategy=SwarmStrategy(...)`, but "
            f"{program[0]} ended without such a call. Use the strategy that the starter uses."
        )


def _split(arguments: Sequence[str], *, address_first: bool) -> tuple[list[str], list[str]]:
    """Split the command line into this command's own arguments, and the program with its arguments."""
    own: list[str] = []
    program = list(arguments)
    has_address = False
    while program:
        if program[0] in _PEER_OPTIONS:
            own += program[:2]
            del program[:2]
        elif program[0].startswith(tuple(f"{option}=" for option in _PEER_OPTIONS)) or program[0] in ("-h", "--help"):
            own.append(program.pop(0))
        elif not has_address and not program[0].startswith("-") and (address_first or _looks_like_address(program[0])):
            has_address = True
            own.append(program.pop(0))
        else:
            break
    return own, program


def _looks_like_address(text: str) -> bool:
    return (":" in text or text.startswith(("/ip4/", "/ip6/", "/dns"))) and not Path(text).exists()


def _environment(name: str, chosen: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables with which the program's `fit` joins or serves."""
    variables = {
        JOIN: str(Address.parse(chosen.address)) if chosen.address else None,
        LISTEN: str(HostPort.to_listen(chosen.listen)) if chosen.listen else None,
        # Set even if empty, because the program's own values are for the machine that it was written for.
        ANNOUNCE: " ".join(str(HostPort.to_announce(text)) for text in chosen.announce) or os.environ.get(ANNOUNCE, ""),
        IDENTITY: chosen.identity or os.environ.get(IDENTITY, ""),
        PREEMPTION: chosen.preemption,
        ROLE: "server" if name == "serve" else None,
    }
    return {variable: value for variable, value in variables.items() if value is not None}
