"""Refuses what a model, its optimizer or its checkpoints ask for and a swarm does not do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_swarm.client.pipeline.local_layers import LocalLayers
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.deferred_init import is_on_meta
from lightning_swarm.model.sharded_format import ShardedCheckpoint, is_folder
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.strategy.checks.trainer import WHOLE_MODULE_CALLBACKS, of_tuner
from lightning_swarm.strategy.framework import callbacks_of

_NAMED_CHECKPOINTS = ("best", "last", "hpc", "registry")


def check_ckpt_path(path: object) -> None:
    """Refuse a checkpoint that is not there. What Lightning looks up itself passes: a name, the registry, a URL."""
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _NAMED_CHECKPOINTS:
        return
    if not Path(str(path)).exists():
        raise ConfigError(
            f"`ckpt_path` must be a checkpoint's path, 'best' or 'last', got {str(path)!r}, which is not there. "
            f"Correct it, seen from {Path.cwd()}, or leave it out."
        )


def check_folder(path: object, storage_options: object) -> None:
    """Refuse to write a sharded checkpoint elsewhere than into a folder of this machine, or with options."""
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


def find_folder(path: object) -> ShardedCheckpoint | None:
    """The sharded checkpoint at a path; None: an ordinary one. Refuses a folder that is no checkpoint."""
    if "://" in str(path) or not Path(str(path)).is_dir():
        return None
    folder = Path(str(path))
    if not is_folder(folder):
        raise ConfigError(
            f"a checkpoint must be a file, or a folder that was written with `state_dict_type='sharded'`; {folder} is "
            "a folder without an index `.metadata`. Name the checkpoint in it."
        )
    return ShardedCheckpoint(folder)


ONE_OPTIMIZER = "`configure_optimizers` must return one optimizer, got {}. Use one, with parameter groups."


def check_optimizers(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The only optimizer. Refuses none, several, and one that needs a closure or sparse gradients."""
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
    """All that each parameter group holds beside its parameters, as plain values. Refuses other values."""
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
        return [_plain(name, entry) for entry in value]
    raise ConfigError(
        f"hyperparameters of a parameter group must be numbers, text or lists of them: `{name}` is a "
        f"{type(value).__name__}. Keep it outside the optimizer."
    )


def check_new_selection(
    before: Selection | None, selection: Selection, *, is_shared: bool, pending_samples: int
) -> None:
    """Refuse to change what trains in a run of several trainers, or in the middle of a step."""
    if is_shared:
        raise ConfigError(
            "what trains is settled when a run of several trainers begins, for they are not at the same batch: it "
            "has changed. Freeze parameters and add groups before `fit`, or use `role='auto'`."
        )
    if pending_samples:
        assert before is not None
        changed = sorted(set(before.frozen) ^ set(selection.frozen)) or "parameter groups"
        raise ConfigError(
            "which parameters train, and in which group, may change only where a step begins, for its gradients "
            f"are summed on the servers: {changed} changed with {pending_samples} samples in the open step. "
            "Change it at the beginning of an accumulation window; with `target_batch_size`, choose one that "
            "divides the samples of an epoch."
        )


def check_untouched(module: LightningModule, optimizer: Optimizer, around: LocalLayers | None) -> None:
    """Refuse gradients at weights of the servers' stages: they are old here, and such a gradient is in no step."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if around is not None:
        stepped -= set(map(id, around.parameters.values()))
    touched = [
        name for name, parameter in module.named_parameters() if id(parameter) in stepped and parameter.grad is not None
    ]
    if touched:
        raise ConfigError(
            "a loss may reach the pipeline's weights through its forward only, for they live on the servers: "
            f"it reached {touched[:5]} directly. Use the optimizer's weight decay in place of a penalty, and call "
            "the whole pipelined module in place of one of its blocks."
        )


def check_new_layers(trainer: Trainer, *, restored: bool) -> None:
    """Refuse to put layers into a model that a callback has copied by now, or that is `restored` without them."""
    if restored:
        raise ConfigError(
            "a run goes on with the boundary layers of its checkpoint, got `boundary` and a checkpoint without any. "
            "Leave `boundary` out; or load the weights into the module and begin without `ckpt_path`: the optimizer's "
            "state would not fit."
        )
    for callback in callbacks_of(trainer, "StochasticWeightAveraging", "WeightAveraging"):
        raise ConfigError(
            "boundary layers must be in the model before callbacks copy it, and `boundary` puts them in later: got "
            f"{type(callback).__name__}. Call `insert_boundary(self, ...)` in the LightningModule's `__init__`."
        )


def check_in_memory(module: LightningModule, what: str) -> None:
    """Refuse what needs all of a module's weights in this process, if some are on meta; `what` names it."""
    if is_on_meta(module):
        raise ConfigError(
            f"a module on torch's meta device has its weights on the servers only, got {type(module).__name__} where "
            f"{what}. Build it without `torch.device('meta')`, if this machine has room for all of it."
        )


def check_on_meta(trainer: Trainer, module: LightningModule, config: SwarmConfig) -> None:
    """Refuse what a module cannot be used for whose weights are on meta."""
    if config.split == "time":
        check_in_memory(module, "`split='time'` is to measure its blocks")
    for callback in callbacks_of(trainer, *WHOLE_MODULE_CALLBACKS) if trainer.state.fn == TrainerFn.FITTING else ():
        check_in_memory(module, f"{type(callback).__name__}{of_tuner(callback)} works with all of them")
