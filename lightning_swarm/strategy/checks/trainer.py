"""Refuses what the Trainer, or its LightningModule, asks for and a swarm does not do."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.strategy.framework import ImportTree, callbacks_named, callbacks_of, framework_of, mixed_import

# They read or write the weights of the trainer's own module, which during a run live on the servers.
_WEIGHT_CALLBACKS = ("ModelPruning",)

# It looks for the largest batch that fits into memory by batches that fail, but they fail on the servers.
_MEMORY_CALLBACKS = ("BatchSizeFinder",)

# They train for a while, then restore the weights and the step that they found. `Tuner` works through them.
_TRIAL_CALLBACKS = ("LearningRateFinder",)

# They read or replace weights of the whole module, or change what trains, between two batches of the lead.
WHOLE_MODULE_CALLBACKS = ("BaseFinetuning", "LearningRateFinder", "StochasticWeightAveraging", "WeightAveraging")


def check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that cannot do here what they are for."""
    for callback in callbacks_of(trainer, *_WEIGHT_CALLBACKS):
        raise ConfigError(
            "callbacks must not read or change weights during fit, they live on the servers: "
            f"got {type(callback).__name__}. Remove it for now."
        )
    for callback in callbacks_of(trainer, *_MEMORY_CALLBACKS):
        raise ConfigError(
            "callbacks must not look for the batch that fits into memory, it is cut into microbatches for the "
            f"servers': got {type(callback).__name__}. Choose `microbatch_size` for the smallest server, and the "
            "batch size for the training."
        )


def makes_trials(trainer: Trainer) -> bool:
    """True if a callback may train for a while and then restore what it found."""
    return bool(callbacks_of(trainer, *_TRIAL_CALLBACKS))


def of_tuner(callback: object) -> str:
    """Names what the user may have written in place of the callback."""
    return ", through which `Tuner.lr_find` works" if isinstance(callback, callbacks_named(*_TRIAL_CALLBACKS)) else ""


def check_strategy(strategy: Strategy, framework: ImportTree) -> None:
    """Refuse a strategy of one import tree in a Trainer of the other. Lightning has handed over its accelerator."""
    if not isinstance(strategy.accelerator, framework.accelerator):
        other = framework.other
        raise ConfigError(
            f"{type(strategy).__name__} must come from the Trainer's import of Lightning: it is for "
            f"`{framework.name}`, the Trainer is from `{other.name}`. Write `from {other.strategies} import "
            f"SwarmStrategy`, or import the Trainer from `{framework.name}`."
        )


def check_data_module(trainer: Trainer, datamodule: LightningDataModule) -> None:
    """Refuse a data module of the other import tree, which Lightning would take for a DataLoader."""
    wanted = framework_of(trainer)
    if not isinstance(datamodule, wanted.data_module):
        raise mixed_import("LightningDataModule", type(datamodule), wanted)


def check_callback_imports(trainer: Trainer) -> None:
    """Refuse callbacks of the other import tree."""
    wanted = framework_of(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if not isinstance(callback, wanted.callbacks.Callback):
            raise mixed_import("Callback", type(callback), wanted)


_log = logging.getLogger(__name__)

_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")

# They may do other things, so they are called, with a warning that there are no gradients.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")

_STEP_HOOKS = ("optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad")


def check_trainer(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    """Refuse what the Trainer or the LightningModule asks for and a swarm does not do."""
    if trainer.num_nodes != 1:
        raise ConfigError(
            f"`num_nodes` must be 1: a swarm has peers, not nodes; got {trainer.num_nodes}. Leave it out, and type on "
            "the other machines the line that the first one prints: lightning-swarm join ADDRESS train.py"
        )
    check_callback_imports(trainer)
    _check_precision(trainer)
    if config.delay_optimizer_step and trainer.precision == "16-mixed":
        raise ConfigError(
            "with `delay_optimizer_step` a step begins before the one before it has shown whether its gradients fit "
            "the range of float16, which `precision='16-mixed'` needs to know. Use 'bf16-mixed', or leave out "
            "`delay_optimizer_step`."
        )
    if trainer.state.fn == TrainerFn.FITTING:
        _check_training(trainer, module, config)


def check_interactive(num_devices: int) -> None:
    """Refuse further peers of this machine in a notebook or at a prompt, where no script can run again for them."""
    if num_devices > 1 and _IS_INTERACTIVE:
        raise ConfigError(
            "in a notebook or at a Python prompt `devices` must be 1: above it this script would be started again for "
            f"every peer, and there is none; got {num_devices}. Use `devices=1` (with any `num_stages`), or put the "
            "code into a script."
        )


_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def check_data(trainer: Trainer, module: LightningModule, handed: Mapping[str, object]) -> None:
    """Refuse to start a run without data. Lightning would notice, too, but only when all peers are up.

    `handed` are the arguments of the Trainer's method, by name.
    """
    assert trainer.state.fn is not None
    function, framework = trainer.state.fn.value, framework_of(trainer)
    hook = _LOADERS[function]
    loaders = handed.get("train_dataloaders", handed.get("dataloaders"))
    data = next((source for source in (loaders, handed.get("datamodule")) if source is not None), module)
    if isinstance(data, (framework.data_module, framework.module)) and not framework.is_overridden(hook, data):
        others = "no dataloader and no data module" if data is module else "a data module"
        raise ConfigError(
            f"`{function}` must have data: it was given {others}, and {type(data).__name__} has no "
            f"`{hook}`. Give it one, or define `{hook}`; a machine without data can help with `lightning-swarm join`."
        )


def _check_training(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    is_overridden = framework_of(trainer).is_overridden
    if not module.automatic_optimization:
        raise ConfigError(
            "`automatic_optimization` must be True: the swarm steps the optimizer on its servers; got False. "
            "Let Lightning optimize, or train without the swarm."
        )
    for hook in _STEP_HOOKS:
        if is_overridden(hook, module):
            raise ConfigError(
                f"`{hook}` must be Lightning's own: gradients and optimizers live on the servers; "
                f"{type(module).__name__} overrides it. Remove the override."
            )
    for hook in _GRADIENT_HOOKS:
        if is_overridden(hook, module):
            _log.warning("`%s` finds no gradients in a swarm: they are on the servers.", hook)
    check_callbacks(trainer)
    if config.target_batch_size is not None and trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            "`target_batch_size` and `accumulate_grad_batches` both say when a step ends: got "
            f"{config.target_batch_size} and {trainer.accumulate_grad_batches}. Set one of them."
        )


def check_compiling() -> None:
    """Refuse to compile with a torch that silently leaves code under a dispatch mode as it is."""
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        raise ConfigError(
            "`torch.compile` of a swarm's stages needs a newer torch, which compiles where random numbers are keyed; "
            f"got {torch.__version__}. Update torch, or pass the module uncompiled."
        )


def _check_precision(trainer: Trainer) -> None:
    if trainer.precision not in _PRECISIONS:
        raise ConfigError(
            f"`precision` must be one of {list(_PRECISIONS)}, got {trainer.precision!r}. Choose one of them."
        )
