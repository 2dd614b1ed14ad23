"""What needs a model whose weights are all here, or that is as it was made."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError
from lightning_swarm.framework import callbacks_named
from lightning_swarm.origin import is_on_meta
from lightning_swarm.rules.callbacks import of_tuner

# They read weights, or put others into the module.
_OF_WHOLE_MODULES = ("BaseFinetuning", "LearningRateFinder", "StochasticWeightAveraging", "WeightAveraging")


def check_new_layers(trainer: Trainer, *, restored: bool) -> None:
    """Refuse to put layers into a model of which a callback has made a copy by now, or which a checkpoint has not.

    Args:
        trainer: Whose.
        restored: Whether its model comes from a checkpoint.

    Raises:
        ConfigError: With the remedy.
    """
    if restored:
        raise ConfigError(
            "a run goes on with the boundary layers of its checkpoint, got `boundary` and a checkpoint without any. "
            "Leave `boundary` out; or load the weights into the module and begin without `ckpt_path`: the optimizer's "
            "state would not fit."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if isinstance(callback, callbacks_named("StochasticWeightAveraging", "WeightAveraging")):
            raise ConfigError(
                "boundary layers must be in the model before callbacks copy it, and `boundary` puts them in later: got "
                f"{type(callback).__name__}. Call `insert_boundary(self, ...)` in the LightningModule's `__init__`."
            )


def check_in_memory(module: LightningModule, what: str) -> None:
    """Refuse what needs all of a module's weights in this process.

    Args:
        module: Which.
        what: In words.

    Raises:
        ConfigError: Some of them are on meta.
    """
    if is_on_meta(module):
        raise ConfigError(
            f"a module on torch's meta device has its weights on the servers only, got {type(module).__name__} where "
            f"{what}. Build it without `torch.device('meta')`, if this machine has room for all of it."
        )


def check_on_meta(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    """Refuse what a module cannot be used for whose weights are on meta.

    Raises:
        ConfigError: With the remedy.
    """
    if config.split == "time":
        check_in_memory(module, "`split='time'` is to measure its blocks")
    for callback in trainer.callbacks if trainer.state.fn == TrainerFn.FITTING else ():  # type: ignore[attr-defined]
        if isinstance(callback, callbacks_named(*_OF_WHOLE_MODULES)):
            check_in_memory(module, f"{type(callback).__name__}{of_tuner(callback)} works with all of them")
