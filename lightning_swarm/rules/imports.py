"""One import tree of Lightning for all: what is of the other one is refused."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_swarm.errors import ConfigError
from lightning_swarm.framework import Framework, framework_of, mixed_import


def check_strategy(strategy: Strategy, framework: Framework) -> None:
    """Refuse a strategy of one import tree in a Trainer of the other. Lightning has handed over its accelerator.

    Raises:
        ConfigError: Naming both imports.
    """
    if not isinstance(strategy.accelerator, framework.accelerator):
        other = framework.other
        raise ConfigError(
            f"{type(strategy).__name__} must come from the Trainer's import of Lightning: it is for "
            f"`{framework.name}`, the Trainer is from `{other.name}`. Write `from {other.strategies} import "
            f"SwarmStrategy`, or import the Trainer from `{framework.name}`."
        )


def check_data_module(trainer: Trainer, datamodule: LightningDataModule) -> None:
    """Refuse a data module of the other import tree, which Lightning would take for a DataLoader.

    Raises:
        ConfigError: Naming both imports.
    """
    wanted = framework_of(trainer)
    if not isinstance(datamodule, wanted.data_module):
        raise mixed_import("LightningDataModule", type(datamodule), wanted)


def check_callback_imports(trainer: Trainer) -> None:
    """Likewise, a callback."""
    wanted = framework_of(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if not isinstance(callback, wanted.callbacks.Callback):
            raise mixed_import("Callback", type(callback), wanted)
