"""`SwarmCLI`: a LightningCLI, of either import tree, that trains on a swarm."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import update_wrapper
from itertools import zip_longest
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

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

from lightning_swarm.core.limits import Limits
from lightning_swarm.core.rebase import written_once
from lightning_swarm.strategy.strategy import SwarmStrategy

# At run time `written_once` derives these classes from the base classes of either import tree.
if TYPE_CHECKING:
    _LightningCLI = LightningCLI
    _SaveConfigCallback = SaveConfigCallback
else:
    _LightningCLI = _SaveConfigCallback = object


@written_once(SaveConfigCallback)
class SaveConfig(_SaveConfigCallback):
    """Saves the configuration of `fit` in the folder that a logger creates."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Without a logger, Lightning would write into the current folder, where the user's own files are.
        if stage == "fit" and trainer.loggers:
            super().setup(trainer, pl_module, stage)


@written_once(LightningCLI, strategy_class=SwarmStrategy)
class SwarmCLI(_LightningCLI):
    """A LightningCLI whose strategy is `SwarmStrategy` unless another one is named.

    Use it as LightningCLI: ``SwarmCLI(MyModel, MyData)`` in a script, or without classes. A strategy in
    ``trainer_defaults`` takes precedence. Needs jsonargparse: ``pip install "lightning-swarm[cli]"``.
    """

    strategy_class: ClassVar[type[SwarmStrategy]]

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        if "strategy" not in self.trainer_defaults:
            parser.set_defaults({"trainer.strategy": {"class_path": self.strategy_class.framework.strategy_path}})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if args is None or isinstance(args, list):
            self.config = parser.parse_args(self._with_class_path(sys.argv[1:] if args is None else args))
        else:
            super().parse_arguments(parser, args)

    def _with_class_path(self, arguments: Sequence[str]) -> list[str]:
        """Replace the strategy's short name by its class path, because only a class can have further options."""
        option, name = "--trainer.strategy", self.strategy_class.strategy_name
        path = self.strategy_class.framework.strategy_path
        replaced: list[str] = []
        for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
            if argument == f"{option}.help" and following.startswith("-"):
                replaced.append(f"{argument}={path}")
            elif argument == f"{option}={name}":
                replaced.append(f"{option}={path}")
            else:
                replaced.append(path if argument == name and replaced and replaced[-1] == option else argument)
        return replaced

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError:
            # jsonargparse hides a class's own error about its arguments behind an error about types.
            self._raise_own_error(self._get(self.config, "trainer").get("strategy"))
            raise

    def _raise_own_error(self, strategy: Any) -> None:
        """Raise the strategy's own error if its arguments are at fault."""
        if not isinstance(strategy, str) and strategy.get("class_path") == self.strategy_class.framework.strategy_path:
            # Build the strategy from the parsed arguments, so that its own error is raised here.
            options = strategy.as_dict().get("init_args", {})
            limits = Limits(**options.pop("limits", {}))
            if options.get("boundary"):
                options["boundary"] = instantiate_class((), options["boundary"])
            of_lightning = ("accelerator", "checkpoint_io", "precision_plugin")
            self.strategy_class(
                limits=limits, **{name: value for name, value in options.items() if name not in of_lightning}
            )

    @override
    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Make ``--optimizer`` build a new optimizer at each call, because every stage needs its own."""
        super()._add_configure_optimizers_method_to_model(subcommand)
        if "configure_optimizers" not in vars(self.model):
            return
        parser = self._parser(subcommand)
        optimizer, scheduler = self._chosen(parser._optimizers), self._chosen(parser._lr_schedulers)

        def configure_optimizers(module: LightningModule) -> Any:
            built: Any = instantiate_class(module.parameters(), optimizer)
            return self.configure_optimizers(module, built, instantiate_class(built, scheduler) if scheduler else None)

        update_wrapper(configure_optimizers, self.configure_optimizers)
        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    def _chosen(self, registered: Mapping[str, tuple[Any, str]]) -> Any:
        """Return the class path and arguments of the optimizer or scheduler that Lightning makes for the model."""
        for key, (kind, link_to) in registered.items():
            if link_to == "AUTOMATIC":
                chosen = self._get(self.config_init, key)
                return chosen if isinstance(kind, tuple) else _global_add_class_path(kind, chosen)
        return None
