"""What cannot work, or not yet, is refused before anything starts: the rule, what was found, what to do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError
from lightning_swarm.framework import Framework, callbacks_named, framework_of, mixed_import
from lightning_swarm.origin import is_on_meta
from lightning_swarm.session import Session
from lightning_swarm.shards import Folder, is_folder

_log = logging.getLogger(__name__)

_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")

# They read or write the weights of the trainer's own module, which during a run live on the servers.
_WEIGHT_CALLBACKS = ("ModelPruning",)

# It looks for the largest batch that fits into memory, in batches that fail: on the servers, where it cannot see it.
_MEMORY_CALLBACKS = ("BatchSizeFinder",)

# They train for a while, then restore the weights and the step that they found. `Tuner` works through them.
_TRIAL_CALLBACKS = ("LearningRateFinder",)

# They change what the servers hold between two batches of the lead; other trainers have batches under way then.
_OF_ONE_TRAINER = ("BaseFinetuning", "LearningRateFinder", "StochasticWeightAveraging", "WeightAveraging")

ONE_OPTIMIZER = "`configure_optimizers` must return one optimizer, got {}. Use one, with parameter groups."

# They read weights, or put others into the module.
_OF_WHOLE_MODULES = ("BaseFinetuning", "LearningRateFinder", "StochasticWeightAveraging", "WeightAveraging")

# They may do other things, so they are called, with a word about what they will not find.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")

_STEP_HOOKS = ("optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad")


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


def _check_callback_imports(trainer: Trainer) -> None:
    wanted = framework_of(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if not isinstance(callback, wanted.callbacks.Callback):
            raise mixed_import("Callback", type(callback), wanted)


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
    _check_callback_imports(trainer)
    _check_precision(trainer)
    if config.delay_optimizer_step and trainer.precision == "16-mixed":
        raise ConfigError(
            "with `delay_optimizer_step` a step begins before the one before it has shown whether its gradients fit "
            "the range of float16, which `precision='16-mixed'` needs to know. Use 'bf16-mixed', or leave out "
            "`delay_optimizer_step`."
        )
    if trainer.state.fn == TrainerFn.FITTING:
        _check_training(trainer, module, config)


def check_trainers(trainer: Trainer, config: SwarmConfig) -> None:
    """Refuse what several trainers cannot do together.

    Raises:
        ConfigError: With the remedy.
    """
    if config.target_batch_size is None:
        raise ConfigError(
            "`role='both'` on several devices needs `target_batch_size`: Lightning's own arithmetic counts the batches "
            "of one trainer; got None. Set the number of samples of a step, those of all trainers together."
        )
    if config.delay_optimizer_step:
        raise ConfigError(
            "with `delay_optimizer_step` one trainer must bring all batches, for what several log of a step is put "
            "together when its record comes, and others have begun the next one by then; got `role='both'`. Use "
            "`role='auto'`, or leave out `delay_optimizer_step`."
        )
    if trainer.precision == "16-mixed":
        raise ConfigError(
            "the trainers of a step must scale their losses alike, and with `precision='16-mixed'` each finds a scale "
            "of its own. Use 'bf16-mixed' with `role='both'`, or 16-mixed with `role='auto'`."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if isinstance(callback, callbacks_named(*_OF_ONE_TRAINER)):
            raise ConfigError(
                "callbacks must not change weights or what trains while other trainers are in the middle of a batch: "
                f"got {type(callback).__name__}{_of_tuner(callback)}. Use it with `role='auto'`."
            )


def check_servers(config: SwarmConfig, num_devices: int) -> None:
    """Refuse a run in which nobody would serve.

    Raises:
        ConfigError: With the remedy.
    """
    if config.role == "trainer" and num_devices < 2 and not config.initial_peers:
        raise ConfigError(
            f"`role='trainer'` needs servers: `devices` must be at least 2, got {num_devices}. "
            "Raise `devices`, name servers that wait in `initial_peers`, or leave `role` out."
        )


def may_be_shared(trainer: Trainer, config: SwarmConfig) -> bool:
    """Whether others may come to train in a run that this program begins: then nothing may keep several from it."""
    if config.role not in ("both", "trainer") or trainer.state.fn != TrainerFn.FITTING or config.deterministic:
        return False
    try:
        check_trainers(trainer, config)
    except ConfigError:
        return False
    return True


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
            check_in_memory(module, f"{type(callback).__name__}{_of_tuner(callback)} works with all of them")


def _of_tuner(callback: object) -> str:
    """What the user may have written instead of the callback."""
    return ", through which `Tuner.lr_find` works" if isinstance(callback, callbacks_named(*_TRIAL_CALLBACKS)) else ""


def check_alone(session: Session, name: str) -> None:
    """Refuse a collective operation in a batch: the others are in batches of their own."""
    if session.is_shared and session.pipeline.batch is not None:
        refuse_collective(name)


def refuse_collective(name: str) -> NoReturn:
    """Refuse what needs all trainers at one place."""
    raise ConfigError(
        f"trainers of a swarm do not wait for each other within a step, so there is nothing that `{name}` could "
        "collect. Use `self.log(..., sync_dist=True)`, which counts over the batches of all of them."
    )


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


_NAMED_CHECKPOINTS = ("best", "last", "hpc", "registry")


def check_ckpt_path(path: object) -> None:
    """Refuse a checkpoint that is not there. What Lightning looks up itself passes: a name, the registry, a URL.

    Raises:
        ConfigError: There is no such file.
    """
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _NAMED_CHECKPOINTS:
        return
    if not Path(str(path)).exists():
        raise ConfigError(
            f"`ckpt_path` must be a checkpoint's path, 'best' or 'last', got {str(path)!r}, which is not there. "
            f"Correct it, seen from {Path.cwd()}, or leave it out."
        )


def check_folder(path: object, storage_options: object) -> None:
    """Refuse to write a sharded checkpoint where, or how, it cannot be.

    Raises:
        ConfigError: It is no folder of this machine, or options of a `CheckpointIO` are given.
    """
    if "://" in str(path):
        raise ConfigError(
            f"with `state_dict_type='sharded'` servers write into a folder, got {str(path)!r}. Name one that this "
            "machine sees as a path, or use `state_dict_type='full'`."
        )
    if storage_options is not None:
        raise ConfigError(
            "`storage_options` are for a `CheckpointIO`, which writes no sharded checkpoints; got "
            f"{storage_options!r}. Leave them out, or use `state_dict_type='full'`."
        )


def find_folder(path: object) -> Folder | None:
    """The sharded checkpoint that is there; None: it is an ordinary one.

    Raises:
        ConfigError: It is a folder and no checkpoint, or not all of one.
    """
    if "://" in str(path) or not Path(str(path)).is_dir():
        return None
    folder = Path(str(path))
    if not is_folder(folder):
        raise ConfigError(
            f"a checkpoint must be a file, or a folder that was written with `state_dict_type='sharded'`; {folder} is "
            "a folder without an index `.metadata`. Name the checkpoint in it."
        )
    return Folder(folder)


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
    _check_callbacks(trainer)
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


def check_optimizers(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The only optimizer.

    Raises:
        ConfigError: There is none, more than one, or one that needs a closure or sparse gradients.
    """
    if len(optimizers) != 1:
        raise ConfigError(ONE_OPTIMIZER.format(len(optimizers)))
    optimizer = optimizers[0]
    if not any(group["params"] for group in optimizer.param_groups):  # what Lightning makes of None
        raise ConfigError("`configure_optimizers` must return an optimizer with parameters, got none. Return one.")
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigError(
            f"the optimizer must step from one dense gradient, got {type(optimizer).__name__}. Use SGD or AdamW, say."
        )
    hyperparameters(optimizer)
    return optimizer


def hyperparameters(optimizer: Optimizer) -> list[dict[str, object]]:
    """All that a parameter group says beside its parameters, as plain numbers.

    Raises:
        ConfigError: A value is none.
    """
    return [
        {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: object) -> object:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, one) for one in value]
    raise ConfigError(
        f"hyperparameters of a parameter group must be numbers, text or lists of them: `{name}` is a "
        f"{type(value).__name__}. Keep it outside the optimizer."
    )


def _check_precision(trainer: Trainer) -> None:
    if trainer.precision not in _PRECISIONS:
        raise ConfigError(
            f"`precision` must be one of {list(_PRECISIONS)}, got {trainer.precision!r}. Choose one of them."
        )


def _check_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if isinstance(callback, callbacks_named(*_WEIGHT_CALLBACKS)):
            raise ConfigError(
                "callbacks must not read or change weights during fit, they live on the servers: "
                f"got {type(callback).__name__}. Remove it for now."
            )
        if isinstance(callback, callbacks_named(*_MEMORY_CALLBACKS)):
            raise ConfigError(
                "callbacks must not look for the batch that fits into memory, it is cut into microbatches for the "
                f"servers': got {type(callback).__name__}. Choose `microbatch_size` for the smallest server, and the "
                "batch size for the training."
            )


def makes_trials(trainer: Trainer) -> bool:
    """Whether a callback may train for a while and then go back."""
    return any(isinstance(one, callbacks_named(*_TRIAL_CALLBACKS)) for one in trainer.callbacks)  # type: ignore[attr-defined]
