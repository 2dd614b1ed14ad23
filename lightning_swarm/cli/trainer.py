"""The commands that build a Trainer: `fit`, `validate`, `test`, `predict`, and `SwarmCLI` behind them."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any, Final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
    _global_add_class_path,
    instantiate_class,
)
from typing_extensions import override

from lightning_swarm.config import Limits
from lightning_swarm.errors import ConfigError
from lightning_swarm.strategy import SwarmStrategy

_CLASS_PATH: Final = "lightning_swarm.SwarmStrategy"

TRAINER_COMMANDS: Final[Mapping[str, str]] = {
    "fit": "Train a model on a swarm, which begins with this machine's devices.",
    "validate": "Run a model's validation loop once.",
    "test": "Run a model's test loop once.",
    "predict": "Run a model's predictions.",
}
"""What each one does."""

_MODEL_AND_DATA: Final = """

Any LightningModule and LightningDataModule will do. Name them by their import path, from the current folder:

    lightning-swarm {name} --model my_project.Net --data my_project.Data \\
        --trainer.devices 4 --trainer.strategy.num_stages 2

or in a file, which --print_config writes for the options that come before it:

    lightning-swarm {name} --config run.yaml

What can be set of the swarm: --trainer.strategy.help {strategy}
"""


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


class _SaveConfig(SaveConfigCallback):
    """Saves what `fit` was run with, into the folder that a logger makes for it."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Without a logger it would be the current folder, where the user's own files are.
        if stage == "fit" and trainer.loggers:
            super().setup(trainer, pl_module, stage)


class SwarmCLI(LightningCLI):
    """A LightningCLI whose strategy is `SwarmStrategy` unless another one is named.

    Used as LightningCLI is: ``SwarmCLI(MyModel, MyData)`` in a script, or without classes. ``trainer_defaults`` with a
    strategy comes before this one's. Needs jsonargparse: ``pip install "lightning-swarm[cli]"``.
    """

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        if "strategy" not in self.trainer_defaults:
            parser.set_defaults({"trainer.strategy": {"class_path": _CLASS_PATH}})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if args is None or isinstance(args, list):
            self.config = parser.parse_args(_with_class_path(sys.argv[1:] if args is None else args))
        else:
            super().parse_arguments(parser, args)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError:
            # jsonargparse buries what a class says of its arguments in what it says of types.
            _refuse(self._get(self.config, "trainer").get("strategy"))
            raise

    @override
    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """``--optimizer`` makes a new optimizer at each call: every stage steps one of its own."""
        super()._add_configure_optimizers_method_to_model(subcommand)
        if "configure_optimizers" not in vars(self.model):
            return
        parser = self._parser(subcommand)
        optimizer, scheduler = self._chosen(parser._optimizers), self._chosen(parser._lr_schedulers)

        def configure_optimizers(module: LightningModule) -> Any:
            made: Any = instantiate_class(module.parameters(), optimizer)
            return self.configure_optimizers(module, made, instantiate_class(made, scheduler) if scheduler else None)

        update_wrapper(configure_optimizers, self.configure_optimizers)
        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    def _chosen(self, registered: Mapping[str, tuple[Any, str]]) -> Any:
        """Class path and arguments of the one that the model does not make itself."""
        for key, (kind, link_to) in registered.items():
            if link_to == "AUTOMATIC":
                chosen = self._get(self.config_init, key)
                return chosen if isinstance(kind, tuple) else _global_add_class_path(kind, chosen)
        return None


def _refuse(strategy: Any) -> None:
    """Raise the swarm's own error if it is its arguments that cannot work."""
    if not isinstance(strategy, str) and strategy.get("class_path") == _CLASS_PATH:
        given = strategy.as_dict().get("init_args", {})
        limits = Limits(**given.pop("limits", {}))
        of_lightning = ("accelerator", "checkpoint_io", "precision_plugin")
        SwarmStrategy(limits=limits, **{name: value for name, value in given.items() if name not in of_lightning})


def run_trainer() -> int:
    """Do what the process's arguments say. Returns the exit status."""
    _require_jsonargparse()
    from jsonargparse import DefaultHelpFormatter

    class Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
        """Keeps the lines of descriptions."""

    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # a console script finds no model in the current folder otherwise
    parsers: dict[str, dict[str, Any]] = {
        name: {
            "exit_on_error": False,
            "usage": f"lightning-swarm {name} --model CLASS [--data CLASS] [options], or --config FILE [options]",
            "formatter_class": Help,
            "description": line + _MODEL_AND_DATA.format(name=name, strategy=_CLASS_PATH),
        }
        for name, line in TRAINER_COMMANDS.items()
    }
    own = {"prog": "lightning-swarm", "formatter_class": Help, "exit_on_error": False}
    try:
        SwarmCLI(save_config_callback=_SaveConfig, parser_kwargs={**own, **parsers})
    except argparse.ArgumentError as error:
        name = sys.argv[1] if sys.argv[1] in TRAINER_COMMANDS else "fit"
        raise ConfigError(_shortened(str(error)) + _HINT.format(name=name, strategy=_CLASS_PATH)) from error
    return 0


def _shortened(message: str) -> str:
    """What jsonargparse says of an option, without the types that it tried in vain."""
    lines = [line for line in message.splitlines() if line.strip() and not line.strip(" -").startswith(_NOISE)]
    return "\n".join(lines)


def _require_jsonargparse() -> None:
    try:
        importlib.metadata.version("jsonargparse")
        importlib.metadata.version("docstring-parser")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{', '.join(TRAINER_COMMANDS)} need jsonargparse with its extra `signatures`, and {error.name} is not "
            'installed. Run: pip install "lightning-swarm[cli]"'
        ) from error


def _with_class_path(arguments: Sequence[str]) -> list[str]:
    """The strategy by its class where it is named by its short name: only a class can have further options.

    So `--trainer.strategy=swarm --trainer.strategy.num_stages=2` works.
    """
    option, name = "--trainer.strategy", SwarmStrategy.strategy_name
    given: list[str] = []
    for argument in arguments:
        if argument == f"{option}={name}":
            given.append(f"{option}={_CLASS_PATH}")
        else:
            given.append(_CLASS_PATH if argument == name and given and given[-1] == option else argument)
    return given
