"""Lightning's two import trees, `lightning.pytorch` and `pytorch_lightning`: the same code, classes of their own.

Both are always imported. The second one costs a tenth of a second, for what is large in them is shared: torch. So
``import lightning_swarm`` is enough for either.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from lightning_swarm.core.errors import ConfigError


@dataclass(frozen=True)
class ImportTree:
    """What is needed of one tree. Its enums are compared by value."""

    name: str  # as a script imports it
    strategies: str  # from where a script imports SwarmStrategy for it
    trainer: type[Any]
    module: type[Any]
    data_module: type[Any]
    strategy: type[Any]
    accelerator: type[Any]
    call: ModuleType
    callbacks: ModuleType
    misconfiguration: type[Exception]
    configure_optimizers: Callable[..., Any]
    extract_batch_size: Callable[[Any], int]
    is_overridden: Callable[..., bool]
    to_uncompiled: Callable[[Any], Any]
    is_shuffled: Callable[[Any], bool]
    distributed_sampler: Callable[..., Any]
    with_sampler: Callable[..., Any]

    @classmethod
    def load(cls, name: str, *, strategies: str) -> ImportTree:
        """Import a tree."""
        root = import_module(name)

        def of(module: str, attribute: str) -> Any:
            return getattr(import_module(f"{name}.{module}"), attribute)

        return cls(
            name=name,
            strategies=strategies,
            trainer=root.Trainer,
            module=root.LightningModule,
            data_module=root.LightningDataModule,
            strategy=of("strategies", "Strategy"),
            accelerator=of("accelerators", "Accelerator"),
            call=of("trainer", "call"),
            callbacks=import_module(f"{name}.callbacks"),
            misconfiguration=of("utilities.exceptions", "MisconfigurationException"),
            configure_optimizers=of("core.optimizer", "_configure_optimizers"),
            extract_batch_size=of("utilities.data", "extract_batch_size"),
            is_overridden=of("utilities.model_helpers", "is_overridden"),
            to_uncompiled=of("utilities.compile", "to_uncompiled"),
            is_shuffled=of("utilities.data", "_is_dataloader_shuffled"),
            distributed_sampler=of("trainer.connectors.data_connector", "_get_distributed_sampler"),
            with_sampler=of("utilities.data", "_update_dataloader"),
        )

    @property
    def strategy_path(self) -> str:
        """Of SwarmStrategy, as YAML names it."""
        return f"{self.strategies}.SwarmStrategy"

    @property
    def other(self) -> ImportTree:
        """The other tree."""
        return next(one for one in FRAMEWORKS if one is not self)

    def take_messages(self) -> None:
        """Have what both trees say be logged in the name of this one, for which a script may have set a level.

        The tree that is imported last takes it for itself.
        """
        own = import_module(f"{self.name}.utilities.rank_zero")
        own.rank_zero_module.log = logging.getLogger(own.__name__)  # it is one for both


LIGHTNING: Final = ImportTree.load("lightning.pytorch", strategies="lightning_swarm")
PYTORCH_LIGHTNING: Final = ImportTree.load("pytorch_lightning", strategies="lightning_swarm.pytorch_lightning")
FRAMEWORKS: Final = (LIGHTNING, PYTORCH_LIGHTNING)
# The script's own, as far as it can be told from here: the one that was imported first.
min(FRAMEWORKS, key=lambda framework: list(sys.modules).index(framework.name)).take_messages()


def mixed_import(kind: str, found: type[object], wanted: ImportTree) -> ConfigError:
    """What to say of a class of the other tree than the Trainer's.

    Args:
        kind: The name of its base class, equal in both trees.
        found: The class.
        wanted: The Trainer's.
    """
    return ConfigError(
        f"a {kind} must come from the Trainer's import of Lightning: {found.__name__} is from "
        f"`{wanted.other.name}`, the Trainer from `{wanted.name}`. Change the import of {kind} to `{wanted.name}`."
    )


def explain_mixed_imports() -> None:
    """Have Lightning say what is wrong with a LightningModule of the other tree.

    It looks for mixed imports itself, before it asks the strategy anything, but in the name of the object's own class
    only, which is the user's: it ends in "got `Net`". Only the words of that TypeError change.
    """
    for framework in FRAMEWORKS:
        for name in ("utilities.compile", "utilities.model_helpers"):
            module = import_module(f"{framework.name}.{name}")
            module._check_mixed_imports = partial(_check_mixed_imports, framework)  # type: ignore[attr-defined]


def _check_mixed_imports(framework: ImportTree, instance: object) -> None:
    other = framework.other
    for kind in (other.module, other.data_module, other.callbacks.Callback):
        if isinstance(instance, kind):
            raise TypeError(str(mixed_import(kind.__name__, type(instance), framework)))


def framework_of(trainer: Any) -> ImportTree:
    """The tree whose Trainer it is."""
    return next(framework for framework in FRAMEWORKS if isinstance(trainer, framework.trainer))


def framework_of_class(found: object) -> ImportTree | None:
    """The tree from which a LightningModule, data module or strategy was derived. None: it is no such class."""
    bases = set(found.__mro__) if isinstance(found, type) else set()  # `issubclass` takes each strategy for both
    return next((one for one in FRAMEWORKS if bases & {one.module, one.data_module, one.strategy}), None)


def callbacks_named(*names: str) -> tuple[type[Any], ...]:
    """Lightning's callbacks of these names, of both trees, as far as their versions have them."""
    modules = [framework.callbacks for framework in FRAMEWORKS]
    return tuple(getattr(module, name) for module in modules for name in names if hasattr(module, name))
