"""Lightning's two import trees, `lightning.pytorch` and `pytorch_lightning`: the same code, separate classes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.strategy.step_estimate import EstimatedSteps

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    CallbackBase = Callback
else:
    CallbackBase = object
"""Base of callbacks that are `written_once`, which adds the Callback of either tree at run time."""

OWN_PACKAGES: Final = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_swarm")
"""Packages whose code is not the user's."""


class ImportTree:
    """The parts of one import tree that the package uses, except enums: these are equal in both trees."""

    def __init__(self, name: str, *, strategies: str) -> None:
        def load(module: str, attribute: str) -> Any:
            return getattr(import_module(f"{name}.{module}"), attribute)

        self.name = name  # name of its package
        self.strategies = strategies  # the module from which a script imports its SwarmStrategy
        self.trainer: type[Any] = import_module(name).Trainer
        self.module: type[Any] = import_module(name).LightningModule
        self.data_module: type[Any] = import_module(name).LightningDataModule
        self.strategy: type[Any] = load("strategies", "Strategy")
        self.accelerator: type[Any] = load("accelerators", "Accelerator")
        self.call: ModuleType = load("trainer", "call")
        self.callbacks = import_module(f"{name}.callbacks")
        self.csv_logger: type[Any] = load("loggers", "CSVLogger")
        self.misconfiguration: type[Exception] = load("utilities.exceptions", "MisconfigurationException")
        self.configure_optimizers: Callable[..., Any] = load("core.optimizer", "_configure_optimizers")
        self.extract_batch_size: Callable[[Any], int] = load("utilities.data", "extract_batch_size")
        self.is_overridden: Callable[..., bool] = load("utilities.model_helpers", "is_overridden")
        self.to_uncompiled: Callable[[Any], Any] = load("utilities.compile", "to_uncompiled")
        self.is_shuffled: Callable[[Any], bool] = load("utilities.data", "_is_dataloader_shuffled")
        self.make_sampler: Callable[..., Any] = load("trainer.connectors.data_connector", "_get_distributed_sampler")
        self.make_loader: Callable[..., Any] = load("utilities.data", "_update_dataloader")
        estimate = vars(self.trainer)["estimated_stepping_batches"]
        if not isinstance(estimate, EstimatedSteps):
            self.trainer.estimated_stepping_batches = EstimatedSteps(estimate.fget, doc=estimate.__doc__)

    @property
    def strategy_path(self) -> str:
        """Return the path of SwarmStrategy for YAML files."""
        return f"{self.strategies}.SwarmStrategy"

    @property
    def other(self) -> ImportTree:
        """Return the other tree; this tree if no script has imported the other."""
        return next((tree for tree in IMPORT_TREES if tree is not self), self)

    def use_own_logger(self) -> None:
        """Make both trees log and warn under this tree's name, for which a script may have set levels and filters."""
        # By default both use the name of the tree that was imported last.
        rank_zero = import_module(f"{self.name}.utilities.rank_zero")
        shared = rank_zero.rank_zero_module  # one module for both trees
        shared.log = logging.getLogger(rank_zero.__name__)
        shared.rank_zero_deprecation_category = rank_zero.LightningDeprecationWarning

    def deprecate(self, argument: str, *, instead: str) -> None:
        """Warn of a deprecated argument of `SwarmStrategy`, as Lightning warns of its own."""
        import_module(f"{self.name}.utilities.rank_zero").rank_zero_deprecation(
            f"`SwarmStrategy({argument}=...)` is deprecated. Write `{instead}`.",
            stacklevel=7,  # the line that makes the strategy
        )


LIGHTNING: Final = ImportTree("lightning.pytorch", strategies="lightning_swarm")
PYTORCH_LIGHTNING: ImportTree  # made at its first use
IMPORT_TREES: Final = [LIGHTNING]  # trees that a script may have imported


def __getattr__(name: str) -> ImportTree:
    # Import it only if a script does, because the import changes the logger and warnings that Lightning uses.
    if name != "PYTORCH_LIGHTNING":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    tree = globals()[name] = ImportTree("pytorch_lightning", strategies="lightning_swarm.pytorch_lightning")
    IMPORT_TREES.append(tree)
    explain_mixed_imports()
    # The tree that was imported first is presumably the script's own.
    min(IMPORT_TREES, key=lambda tree: list(sys.modules).index(tree.name)).use_own_logger()
    return tree


def mixed_import(base: str, cls: type[object], wanted: ImportTree) -> ConfigError:
    """Return the error for a class from another tree than the Trainer's; `base` is the name of its base class."""
    return ConfigError.like(
        TypeError,
        f"a {base} must come from the Trainer's import of Lightning: {cls.__name__} is from "
        f"`{wanted.other.name}`, the Trainer from `{wanted.name}`. Change the import of {base} to `{wanted.name}`.",
    )


def explain_mixed_imports() -> None:
    """Make Lightning raise `mixed_import`'s message if a LightningModule is of the other tree."""
    # Lightning detects mixed imports before it calls the strategy, but its message names only the user's class.
    for tree in IMPORT_TREES:
        for name in ("utilities.compile", "utilities.model_helpers"):
            module = import_module(f"{tree.name}.{name}")
            module._check_mixed_imports = partial(_check_mixed_imports, tree)  # type: ignore[attr-defined]


def _check_mixed_imports(tree: ImportTree, instance: object) -> None:
    other = tree.other
    for base in (other.module, other.data_module, other.callbacks.Callback):
        if isinstance(instance, base):
            raise TypeError(str(mixed_import(base.__name__, type(instance), tree)))


def tree_of(trainer: Any) -> ImportTree:
    """Return a Trainer's import tree."""
    return next(tree for tree in IMPORT_TREES if isinstance(trainer, tree.trainer))


def tree_of_class(cls: object) -> ImportTree | None:
    """Return the tree of a class of LightningModules, data modules or strategies; None for any other object."""
    bases = set(cls.__mro__) if isinstance(cls, type) else set()  # `issubclass` matches strategies of both trees
    return next((tree for tree in IMPORT_TREES if bases & {tree.module, tree.data_module, tree.strategy}), None)


def callbacks_named(*names: str) -> tuple[type[Any], ...]:
    """Return Lightning's callback classes of these names, from each imported tree whose version has them."""
    modules = [tree.callbacks for tree in IMPORT_TREES]
    return tuple(getattr(module, name) for module in modules for name in names if hasattr(module, name))


def callbacks_of(trainer: Any, *names: str) -> list[Any]:
    """Return the Trainer's callbacks that are instances of Lightning's classes of these names."""
    return [callback for callback in trainer.callbacks if isinstance(callback, callbacks_named(*names))]
