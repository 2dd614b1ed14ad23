"""The commands that build a Trainer: `fit`, `validate`, `test`, `predict`."""

from __future__ import annotations

import argparse
import importlib.metadata
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import yaml

from lightning_swarm.cli import pytorch_lightning, swarm_cli
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.strategy.framework import LIGHTNING, ImportTree, framework_of_class, mixed_import

_MODEL, _DATA, _STRATEGY = "model", "data", "trainer.strategy"
_CLASSES: Final = (_MODEL, _DATA, _STRATEGY)  # the import tree of the first one that is given decides

TRAINER_COMMANDS: Final[Mapping[str, str]] = {
    "fit": "Train a model on a swarm, which begins with this machine's devices.",
    "validate": "Run a model's validation loop once.",
    "test": "Run a model's test loop once.",
    "predict": "Run a model's predictions.",
}

_MODEL_AND_DATA: Final = """

Any LightningModule and LightningDataModule will do. Name them by their import path, from the current folder:

    lightning-swarm {name} --model my_project.Net --data my_project.Data \\
        --trainer.devices 4 --trainer.strategy.num_stages 2

or in a file, which --print_config writes for the options that come before it:

    lightning-swarm {name} --config run.yaml{weights}

{note}What can be set of the swarm: --trainer.strategy.help {strategy}
"""


_NOTES: Final = {
    "predict": "What `predict_step` returns is kept nowhere, unless a BasePredictionWriter among `trainer.callbacks` "
    "writes it.\n\n"
}

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

Classes are named by their import path from the current folder, like my_project.Net. What can be set:

    lightning-swarm {name} --help
    lightning-swarm {name} --model.help my_project.Net
    lightning-swarm {name} --trainer.strategy.help {strategy}"""


def choose_framework(arguments: Sequence[str], commands: Sequence[str]) -> ImportTree:
    """The import tree whose Trainer can run a command line, which begins with one of `commands`.

    A file or class that cannot be read or imported decides nothing: the real parser reports what is wrong with it.
    Raises a ConfigError if the data module is from another tree than the model.
    """
    named: dict[str, Any] = {}
    for option, value in _options(arguments):
        if option in ("-c", "--config"):
            named.update(_named_in_file(value, [*arguments, *commands], commands))
        for name in _CLASSES:
            if option in (f"--{name}", f"--{name}.class_path", f"--{name}.help"):
                named[name] = value
    found = {name: _imported(named.get(name)) for name in _CLASSES}
    trees = {name: framework_of_class(kind) for name, kind in found.items()}
    model, data = trees[_MODEL], trees[_DATA]
    if model is not None and data is not None and data is not model:
        raise mixed_import("LightningDataModule", found[_DATA], model)
    return next((tree for tree in trees.values() if tree is not None), LIGHTNING)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for argument, following in zip_longest(arguments, arguments[1:]):
        option, equals, value = argument.partition("=")
        yield option, value if equals else following


def _named_in_file(path: str | None, candidates: Sequence[str], commands: Sequence[str]) -> Iterator[tuple[str, Any]]:
    try:
        content = yaml.safe_load(Path(path or "").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return
    # A file that is named before the command has a section for each command.
    sections = (_at(content, name) for name in candidates if name in commands)
    section = next((section for section in sections if section is not None), content)
    for name in _CLASSES:
        value = _at(section, *name.split("."))
        if value is not None:
            yield name, _at(value, "class_path") or value


def _at(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _imported(path: Any) -> Any:
    if not isinstance(path, str) or "." not in path:
        return None
    try:
        return pkgutil.resolve_name(path)
    except Exception:  # noqa: BLE001 - the parser imports it again, and names the option
        return None


def run_trainer() -> int:
    """Run `fit` or another Trainer command with the process's arguments; returns the exit status."""
    require_jsonargparse(*TRAINER_COMMANDS)
    from jsonargparse import DefaultHelpFormatter

    class Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
        """Keeps the line breaks of descriptions."""

    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # a console script finds no model in the current folder otherwise
    framework = choose_framework(sys.argv[1:], [*TRAINER_COMMANDS])
    tree = swarm_cli if framework is LIGHTNING else pytorch_lightning
    parsers: dict[str, dict[str, Any]] = {
        name: {
            "exit_on_error": False,
            "usage": f"lightning-swarm {name} --model CLASS [--data CLASS] [options], or --config FILE [options]",
            "formatter_class": Help,
            "description": line
            + _MODEL_AND_DATA.format(
                name=name,
                # Untrained weights are of no use to the other commands.
                weights="" if name == "fit" else " --ckpt_path last.ckpt",
                note=_NOTES.get(name, ""),
                strategy=framework.strategy_path,
            ),
        }
        for name, line in TRAINER_COMMANDS.items()
    }
    own = {"prog": "lightning-swarm", "formatter_class": Help, "exit_on_error": False}
    try:
        tree.SwarmCLI(save_config_callback=tree.SaveConfig, parser_kwargs={**own, **parsers})
    except argparse.ArgumentError as error:
        name = sys.argv[1] if sys.argv[1] in TRAINER_COMMANDS else "fit"
        hint = _HINT.format(name=name, strategy=framework.strategy_path)
        raise ConfigError(_shortened(str(error)) + hint) from error
    return 0


def _shortened(message: str) -> str:
    """Jsonargparse's error about an option, without the types that it tried in vain."""
    lines = [line for line in message.splitlines() if line.strip() and not line.strip(" -").startswith(_NOISE)]
    return "\n".join(lines)


def require_jsonargparse(*commands: str) -> None:
    """Raise a ConfigError that tells how to install jsonargparse, which these commands need, if it is missing."""
    try:
        importlib.metadata.version("jsonargparse")
        importlib.metadata.version("docstring-parser")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{', '.join(commands)} need jsonargparse with its extra `signatures`, and {error.name} is not "
            'installed. Run: pip install "lightning-swarm[cli]"'
        ) from error
