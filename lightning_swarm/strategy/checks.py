"""Refuses settings and models that a swarm does not support. Each error states the rule, the value and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_swarm.client.pipeline.differentiation import GradientElsewhere
from lightning_swarm.client.pipeline.local_layers import LocalLayers
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.deferred_init import is_on_meta
from lightning_swarm.model.optimizer_state import parameters_of
from lightning_swarm.model.sharded_format import ShardedCheckpoint, is_folder
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.strategy.framework import ImportTree, callbacks_named, callbacks_of, mixed_import, tree_of

# Callbacks that read or write the weights of the trainer's own module, which live on the servers during a run.
_WEIGHT_CALLBACKS = ("ModelPruning",)

# Callbacks that train for a while, then restore the former weights and step. `Tuner` uses them.
TRIAL_CALLBACKS = ("LearningRateFinder", "BatchSizeFinder")

# Callbacks that use weights of the whole module, or change which parameters train, between two batches of the lead,
# when other trainers are in the middle of a batch.
_WHOLE_MODULE_CALLBACKS = ("BaseFinetuning", *TRIAL_CALLBACKS, "StochasticWeightAveraging", "WeightAveraging")

_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")

_STEP_HOOKS = ("optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad")

# Function of the Trainer -> hook that makes its data.
_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}

_NAMED_CHECKPOINTS = ("best", "last", "hpc", "registry")  # values of `ckpt_path`, or their beginnings before a colon


# ---------------------------------------------------------------------- the Trainer and its callbacks


def check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that read or change weights during `fit`, when the weights live on the servers."""
    for callback in callbacks_of(trainer, *_WEIGHT_CALLBACKS):
        raise ConfigError(
            "callbacks must not read or change weights during fit, because the weights live on the servers: "
            f"got {type(callback).__name__}. Remove it."
        )


def tuner_clause(callback: object) -> str:
    """Return a clause for an error if a callback may come from `Tuner` and not from the user; empty otherwise."""
    return ", through which `Tuner` works" if isinstance(callback, callbacks_named(*TRIAL_CALLBACKS)) else ""


def check_strategy(strategy: Strategy, framework: ImportTree) -> None:
    """Refuse a strategy of one import tree in a Trainer of the other, by the accelerator that Lightning has set."""
    if not isinstance(strategy.accelerator, framework.accelerator):
        other = framework.other
        raise ConfigError(
            f"{type(strategy).__name__} must come from the Trainer's import of Lightning: it is for "
            f"`{framework.name}`, the Trainer is from `{other.name}`. Write `from {other.strategies} import "
            f"SwarmStrategy`, or import the Trainer from `{framework.name}`."
        )


def check_data_module(trainer: Trainer, datamodule: LightningDataModule) -> None:
    """Refuse a data module of the other import tree, which Lightning would take for a DataLoader."""
    wanted = tree_of(trainer)
    if not isinstance(datamodule, wanted.data_module):
        raise mixed_import("LightningDataModule", type(datamodule), wanted)


def check_callback_imports(trainer: Trainer) -> None:
    """Refuse callbacks of the other import tree."""
    wanted = tree_of(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if not isinstance(callback, wanted.callbacks.Callback):
            raise mixed_import("Callback", type(callback), wanted)


def check_plain(trainer: Trainer) -> None:
    """Refuse several nodes and mixed imports, with or without a swarm."""
    if trainer.num_nodes != 1:
        raise ConfigError(
            f"`num_nodes` must be 1: a swarm has peers, not nodes; got {trainer.num_nodes}. Leave it out. On the other "
            "machines, run the command that the first machine prints: lightning-swarm join ADDRESS train.py"
        )
    check_callback_imports(trainer)


def check_trainer(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    """Refuse features of the Trainer or the LightningModule that a swarm does not support."""
    check_plain(trainer)
    if trainer.precision not in _PRECISIONS:
        raise ConfigError(
            f"`precision` must be one of {list(_PRECISIONS)}, got {trainer.precision!r}. Choose one of them."
        )
    if config.settings.delay_optimizer_step and trainer.precision == "16-mixed":
        raise ConfigError(
            "`precision='16-mixed'` must know whether a step's gradients overflowed before the next step begins; "
            "with `delay_optimizer_step`, the next step begins earlier. Use 'bf16-mixed', or leave out "
            "`delay_optimizer_step`."
        )
    if trainer.state.fn == TrainerFn.FITTING:
        _check_training(trainer, module, config)


def check_interactive(num_devices: int, framework: ImportTree) -> None:
    """Refuse several local peers in a notebook or at a prompt, because there is no script for them to run."""
    if num_devices > 1 and _IS_INTERACTIVE:
        raise ConfigError.like(
            framework.misconfiguration,
            "in a notebook or at a Python prompt `devices` must be 1, because every further peer runs the script, but "
            f"there is none; got {num_devices}. Use `devices=1` (with any `num_stages`), or put the code in a script.",
        )


def check_data(trainer: Trainer, module: LightningModule, call_arguments: Mapping[str, object]) -> None:
    """Refuse to start a run without data. Lightning also refuses, but only when all peers are up."""
    assert trainer.state.fn is not None
    function, framework = trainer.state.fn.value, tree_of(trainer)
    hook = _LOADERS[function]
    loaders = call_arguments.get("train_dataloaders", call_arguments.get("dataloaders"))
    data = next((source for source in (loaders, call_arguments.get("datamodule")) if source is not None), module)
    if not isinstance(data, (framework.data_module, framework.module)) or getattr(data, hook) is None:
        return  # Lightning raises an error itself
    if not framework.is_overridden(hook, data):
        passed = "no dataloader and no data module" if data is module else "a data module"
        raise ConfigError.like(
            framework.misconfiguration,
            f"`{function}` must have data: got {passed}, and {type(data).__name__} has no `{hook}`. Pass a dataloader, "
            f"or define `{hook}`; a machine without data can help with `lightning-swarm join`.",
        )


def _check_training(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    is_overridden = tree_of(trainer).is_overridden
    if not module.automatic_optimization:
        raise ConfigError(
            "`automatic_optimization` must be True, because servers step the optimizer; got False. Let Lightning "
            "optimize, or train without the swarm."
        )
    for hook in _STEP_HOOKS:
        # `is_overridden` alone misses a wrapper around Lightning's own method.
        if hook in vars(module) or is_overridden(hook, module):
            raise ConfigError(
                f"`{hook}` must be Lightning's own, because gradients and optimizers live on the servers; "
                f"{type(module).__name__} overrides it. Remove the override."
            )
    check_callbacks(trainer)
    if config.settings.target_batch_size is not None and trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            "only one of `target_batch_size` and `accumulate_grad_batches` may set when a step ends, got "
            f"{config.settings.target_batch_size} and {trainer.accumulate_grad_batches}. Leave one out."
        )


def check_compiling() -> None:
    """Refuse to compile with a torch version that silently skips code under a dispatch mode."""
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        raise ConfigError(
            "`torch.compile` of a swarm's stages needs a torch that compiles under a dispatch mode; got the older "
            f"{torch.__version__}. Update torch, or pass the module uncompiled."
        )


# ---------------------------------------------------------------------- the model and its checkpoints


def check_ckpt_path(path: object) -> None:
    """Refuse a checkpoint that does not exist, except names, registry entries and URLs, which Lightning resolves."""
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _NAMED_CHECKPOINTS:
        return
    if not Path(str(path)).exists():
        raise ConfigError.like(
            FileNotFoundError,
            f"Checkpoint file not found: {path}. `ckpt_path` must be a checkpoint's path, 'best' or 'last'. "
            f"Correct it, relative to {Path.cwd()}, or leave it out.",
        )


def check_folder(path: object, storage_options: object) -> None:
    """Refuse to write a sharded checkpoint anywhere but to a folder of this machine, or with storage options."""
    if "://" in str(path):
        raise ConfigError(
            f"with `state_dict_type='sharded'` servers write into a local folder, got {str(path)!r}. Name such a "
            "folder, or use `state_dict_type='full'`."
        )
    if storage_options is not None:
        raise ConfigError.like(
            TypeError,
            "`storage_options` are for a `CheckpointIO`, which writes no sharded checkpoints; got "
            f"{storage_options!r}. Leave them out, or use `state_dict_type='full'`.",
        )


def find_folder(path: object) -> ShardedCheckpoint | None:
    """Return the sharded checkpoint at a path; None if the path is no local folder. Refuses other folders."""
    if "://" in str(path) or not Path(str(path)).is_dir():
        return None
    folder = Path(str(path))
    if not is_folder(folder):
        raise ConfigError.like(
            IsADirectoryError,
            f"a checkpoint must be a file, or a folder that was written with `state_dict_type='sharded'`; {folder} is "
            "a folder without the index `.metadata`. Name a checkpoint in this folder.",
        )
    return ShardedCheckpoint(folder)


def check_untouched(module: LightningModule, optimizer: Optimizer, around: LocalLayers | None) -> None:
    """Refuse local gradients of the stages' weights, because no step counts them. Layers `around` may have some."""
    in_stages = set(map(id, parameters_of(optimizer)))
    if around is not None:
        in_stages -= set(map(id, around.parameters.values()))
    touched = [
        name
        for name, parameter in module.named_parameters()
        if id(parameter) in in_stages and type(parameter.grad) not in (type(None), GradientElsewhere)
    ]
    if touched:
        raise ConfigError(
            "a loss may reach the pipeline's weights only through the pipeline's forward, because these weights live "
            f"on the servers: the loss reached {touched[:5]} directly. Use the optimizer's weight decay instead of a "
            "penalty, and call the whole pipelined module instead of one of its blocks."
        )


def check_new_layers(trainer: Trainer, *, restored: bool) -> None:
    """Refuse to insert boundary layers into a model that a callback has copied, or that is `restored` without them."""
    if restored:
        raise ConfigError(
            "a resumed run must have the boundary layers of its checkpoint, got `boundary` and a checkpoint without "
            "such layers. Leave `boundary` out; or load only the weights into the module and begin without "
            "`ckpt_path`, because the optimizer's state would not fit."
        )
    for callback in callbacks_of(trainer, "StochasticWeightAveraging", "WeightAveraging"):
        raise ConfigError(
            "boundary layers must be in the model before callbacks copy it, but `boundary` inserts them later: got "
            f"{type(callback).__name__}. Call `insert_boundary(self, ...)` in the LightningModule's `__init__`."
        )


def check_in_memory(module: LightningModule, use: str) -> None:
    """Refuse a use of all weights in this process if some are on the meta device; `use` is a clause for the error."""
    if is_on_meta(module):
        raise ConfigError(
            f"a module on torch's meta device has its weights only on the servers, got {type(module).__name__} where "
            f"{use}. Build it without `torch.device('meta')`, if it fits on this machine."
        )


def check_on_meta(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    """Refuse uses of a module that are impossible while its weights are on torch's meta device."""
    if config.split == "time":
        check_in_memory(module, "`split='time'` measures its blocks")
    for callback in callbacks_of(trainer, *_WHOLE_MODULE_CALLBACKS) if trainer.state.fn == TrainerFn.FITTING else ():
        check_in_memory(module, f"{type(callback).__name__}{tuner_clause(callback)} uses all weights")


# ---------------------------------------------------------------------- several trainers


def check_trainers(trainer: Trainer, config: SwarmConfig) -> None:
    """Refuse settings and callbacks that do not work with several trainers."""
    if config.settings.target_batch_size is None:
        raise ConfigError(
            "`role='both'` on several devices needs `target_batch_size`, because Lightning counts only the batches of "
            "one trainer; got None. Set the number of samples of a step, summed over all trainers."
        )
    if trainer._accelerator_connector._layer_sync is not None:
        raise ConfigError(
            "`sync_batchnorm` must be False, because trainers of a swarm do not wait for each other within a batch: "
            "each batch is normalized by itself, as with one trainer; got True. Leave `sync_batchnorm` out."
        )
    if config.settings.delay_optimizer_step:
        raise ConfigError(
            "with `delay_optimizer_step` a run must have only one trainer; got `role='both'`. If one of several "
            "trainers died, its batches of the late step would be lost, because the others have begun the next step. "
            "Use `role='auto'`, or leave out `delay_optimizer_step` and raise `target_batch_size`."
        )
    for callback in callbacks_of(trainer, *_WHOLE_MODULE_CALLBACKS):
        raise ConfigError(
            "callbacks must not change weights, or which parameters train, while other trainers are in the middle of a "
            f"batch: got {type(callback).__name__}{tuner_clause(callback)}. Use it with `role='auto'`."
        )


def check_scaling(run: RunState, *, scales: bool) -> None:
    """Refuse a trainer that scales its losses if the run's trainers do not, or the reverse."""
    if run.is_shared and (run.scaling is not None) != scales:
        others_do, this_does = ("do", "does not") if run.scaling is not None else ("do not", "does")
        raise ConfigError(
            f"the trainers of run {run.manifest.run_id!r} {others_do} scale their losses, as `precision='16-mixed'` "
            f"does, but this trainer {this_does}. Give all of them the same `precision`."
        )


def check_servers(config: SwarmConfig, num_devices: int) -> None:
    """Refuse a run without servers."""
    if config.role == "trainer" and num_devices < 2 and not config.initial_peers:
        raise ConfigError(
            f"`role='trainer'` needs servers: `devices` must be at least 2, got {num_devices}. "
            "Raise `devices`, name waiting servers in `initial_peers`, or leave `role` out."
        )


def may_be_shared(trainer: Trainer, config: SwarmConfig) -> bool:
    """Return whether other trainers may join the run that this program begins."""
    if config.role not in ("both", "trainer") or trainer.state.fn != TrainerFn.FITTING or config.settings.deterministic:
        return False
    try:
        check_trainers(trainer, config)
    except ConfigError:
        return False
    return True
