"""What the Trainer, or its LightningModule, asks for and a swarm does not do."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError
from lightning_swarm.framework import framework_of
from lightning_swarm.rules.callbacks import check_callbacks
from lightning_swarm.rules.imports import check_callback_imports

_log = logging.getLogger(__name__)

_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")

# They may do other things, so they are called, with a word about what they will not find.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")

_STEP_HOOKS = ("optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad")


def check_trainer(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    """Refuse what the Trainer or the LightningModule asks for and a swarm does not do.

    Raises:
        ConfigError: With the remedy.
    """
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
    """Refuse further peers of this machine where there is no script to start again for them.

    Raises:
        ConfigError: This is a notebook, or a Python prompt.
    """
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
    """Refuse to start a run without data. Lightning would notice, too, when all peers are up.

    Args:
        trainer: Knows what is to be done.
        module: May bring the data.
        handed: What the Trainer's method was called with, by the names of its arguments.

    Raises:
        ConfigError: Nobody brings data.
    """
    assert trainer.state.fn is not None
    function, framework = trainer.state.fn.value, framework_of(trainer)
    hook = _LOADERS[function]
    loaders = handed.get("train_dataloaders", handed.get("dataloaders"))
    data = next((one for one in (loaders, handed.get("datamodule")) if one is not None), module)
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
    """Refuse to compile where nothing would be compiled.

    Raises:
        ConfigError: This torch leaves the code under a dispatch mode as it is, without a word.
    """
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
