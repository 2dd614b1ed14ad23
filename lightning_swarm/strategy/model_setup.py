"""Prepares the module, and the run, that a Trainer's settings ask for."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import nn
from torch.optim import Optimizer

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import add_hooks, boundary_layers
from lightning_swarm.model.deferred_init import InitialWeights, is_on_meta, staying_on_meta
from lightning_swarm.model.optimizer_state import kind_of
from lightning_swarm.model.partition import (
    Blocks,
    choose_ranges,
    find_blocks,
    insert_boundaries,
    layers_by_block,
    plan_boundaries,
    time_costs,
)
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.lead import RunSpec
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.framework import ImportTree, framework_of

_log = logging.getLogger(__name__)


def check(trainer: Trainer, config: SwarmConfig, num_stages: int, *, restored: bool) -> None:
    """Refuse a model that cannot be cut, as far as it can be seen before the model is configured.

    A model that is `restored` from a checkpoint may get boundary layers from it.
    """
    module, is_overridden = trainer.lightning_module, framework_of(trainer).is_overridden
    if is_overridden("setup", module) or is_overridden("configure_model", module):
        return
    # The model is what it will be. How a cut is balanced may cost time; whether there is one does not.
    named = config.split if not isinstance(config.split, str) else "parameters"
    blocks = find_blocks(module, config.pipeline)
    ranges = choose_ranges(blocks, num_stages, named, seams=layers_by_block(module, blocks))
    if config.split == named and not restored and config.boundary is not None:
        if not boundary_layers(module):
            checks.check_new_layers(trainer, restored=False)
        plan_boundaries(module, blocks, ranges, config.boundary)


def choose(trainer: Trainer, blocks: Blocks, config: SwarmConfig, num_stages: int) -> Sequence[range]:
    """Choose the blocks of each stage, for a run that begins."""
    return choose_ranges(
        blocks,
        num_stages,
        config.split,
        lambda: _block_costs(trainer, blocks),
        seams=layers_by_block(trainer.lightning_module, blocks),
    )


def insert_layers(
    trainer: Trainer, blocks: Blocks, config: SwarmConfig, ranges: Sequence[range], *, restored: bool
) -> None:
    """Insert the boundary layers that the user asks for. A model that has such layers is cut where they stand."""
    if config.boundary is not None:
        if not boundary_layers(trainer.lightning_module):
            checks.check_new_layers(trainer, restored=restored)
        insert_boundaries(trainer.lightning_module, blocks, ranges, config.boundary)


def _block_costs(trainer: Trainer, blocks: Blocks) -> Sequence[int]:
    """Measure what each block of the Trainer's module costs on this machine, for ``split="time"``."""
    module, strategy = trainer.lightning_module, trainer.strategy
    example = module.example_input_array
    if example is None:
        raise ConfigError(
            "`split='time'` measures the blocks with an example, so `example_input_array` must be set: "
            f"{type(module).__name__} has none. Set it in `__init__` to what `forward` takes, a batch of a usual "
            "size, or use `split='parameters'`."
        )
    example = strategy.batch_to_device(strategy.precision_plugin.convert_input(example), strategy.root_device)
    return time_costs(module, blocks, example, context=strategy.precision_plugin.forward_context)


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """Makes the models that a peer cuts into stages, and its server computes with, from LightningModules."""

    config: SwarmConfig
    framework: ImportTree
    device: torch.device  # on which this peer computes
    initial_weights: InitialWeights  # of weights that a module does not hold
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None  # of the stages; None: they run as they are
    knows_length: bool  # this process's Trainer knows how long the run is: the lead, whose data counts

    def of(self, module: LightningModule, *, keep: bool) -> PeerModel:
        """A peer's copy of the model; `keep` is that of `PeerModel`."""
        return PeerModel(
            module,
            find_blocks(module, self.config.pipeline),
            _optimizer_maker(module, self.framework, knows_length=self.knows_length),
            ComputeSettings(self.device, self.compiler, self.config.offload_optimizer),
            keep=keep,
            origin=self.initial_weights.weights,
        )

    def served(self, module: LightningModule) -> PeerModel:
        """The model of a peer that only serves, moved to its device as a loop would do."""
        module.trainer.precision_plugin.convert_module(module)
        with staying_on_meta():
            module.to(self.device)
        return self.of(module, keep=False)

    def beside(self, module: LightningModule, own: PeerModel, *, shared: bool, written: bool) -> PeerModel:
        """The model of a trainer's own server: what the trainer cuts itself, if nothing speaks against it.

        The run is `shared` if others train in it, or may come to. The module is `written` if callbacks write weights.
        """
        if shared or is_on_meta(module):
            # It computes for others while the trainer's own thread is in user code; or it alone has room for weights.
            return self.of(_twin(module), keep=not is_on_meta(module))
        if written:  # the stages' weights must not change with it
            apart = copy.deepcopy(module)
            apart.trainer = module.trainer
            return self.of(apart, keep=False)
        return own


def set_up(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Set the module up as for a loop, without entering one and without touching data.

    The data module, for a LightningModule that asks it for a size, say, is neither prepared nor set up.
    """
    module.trainer = trainer
    if datamodule is not None:
        trainer._data_connector.attach_datamodule(module, datamodule)
    trainer.strategy.setup_environment()
    call = framework_of(trainer).call
    call._call_lightning_module_hook(trainer, "setup", stage=trainer.state.fn)
    call._call_configure_model(trainer)


def remember(module: nn.Module) -> Callable[[PeerModel], None]:
    """Remember what serving changes in a module, but for weights; what is returned restores it after serving."""
    on_meta = is_on_meta(module)
    modes = [(child, child.training) for child in module.modules()]
    trains = {name: parameter.requires_grad for name, parameter in module.named_parameters()}

    def put_back(served: PeerModel) -> None:
        if not on_meta:
            served.fill()
        for child, training in modes:
            child.training = training
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trains.get(name, parameter.requires_grad))
        add_hooks(module)

    return put_back


def could_lead(trainer: Trainer, module: LightningModule, config: SwarmConfig, handed: Mapping[str, Any]) -> bool:
    """True if a process that serves has all that the lead needs; `handed` are the arguments of the Trainer's method."""
    if config.role != "auto" or trainer.state.fn != TrainerFn.FITTING or not has_whole_model(module, config):
        return False
    try:
        checks.check_trainer(trainer, module, config)
        checks.check_data(trainer, module, handed)
    except ConfigError as error:
        _log.info("This peer cannot take the run over: %s", error)
        return False
    return True


def has_whole_model(module: nn.Module, config: SwarmConfig) -> bool:
    """True if the weights can come here from the servers, as a rollback needs them at the lead."""
    return config.state_dict_type == "full" and not is_on_meta(module)


def _optimizer_maker(
    module: LightningModule, framework: ImportTree, *, knows_length: bool
) -> Callable[[int | None], Optimizer]:
    """A function that makes the user's optimizer for a server, from the run's number of steps, if that is known."""

    def make(total_steps: int | None) -> Optimizer:
        fit_loop = module.trainer.fit_loop
        own = fit_loop.max_epochs, fit_loop.epoch_loop.max_steps
        if not knows_length and total_steps is not None:
            # `estimated_stepping_batches` must return what it does at the lead.
            fit_loop.max_epochs, fit_loop.epoch_loop.max_steps = -1, total_steps
        try:
            configured: Any = module.configure_optimizers()
        finally:
            fit_loop.max_epochs, fit_loop.epoch_loop.max_steps = own
        return checks.check_optimizers(framework.configure_optimizers(configured)[0])

    return make


def _twin(module: LightningModule) -> LightningModule:
    """Copy modules, so that modes and hooks are separate, with the same parameters, buffers and whatever else.

    Not `deepcopy`: a module may refer to its data, or to what cannot be copied.
    """
    copied = _copy(module, {})
    assert isinstance(copied, type(module))
    copied._trainer = module._trainer  # which a copy of a LightningModule leaves out
    return copied


def _copy(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    copied = known[id(module)] = copy.copy(module)
    for name, value in list(vars(copied).items()):
        if name.startswith("_") and isinstance(value, (dict, set)):  # torch's own registers
            copied.__dict__[name] = value.copy()
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else _copy(child, known)
    return copied


def how_to_go_on(trainer: Trainer) -> str:
    """Tell the user what to do when a run broke off."""
    saved = {
        Path(path)
        for callback in trainer.checkpoint_callbacks
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, "")) and Path(path).exists()
    }
    if not saved:
        return "No checkpoint of this run is left to go on from: start it again, with a ModelCheckpoint."
    newest = max(saved, key=lambda path: path.stat().st_mtime)
    return f"Start the run again with `ckpt_path={str(newest)!r}`: it goes on from there, with the peers that it finds."


def run_spec(
    trainer: Trainer,
    ranges: Sequence[range],
    selection: Selection | None,
    *,
    num_servers: int,
    num_trainers: int,
    open_to_trainers: bool,
    first_step: int,
) -> RunSpec:
    """The run that the Trainer asks for; the arguments, each as in `RunSpec`, are what it does not know."""
    clip_at = trainer.gradient_clip_val or None  # Lightning takes 0 for not clipping
    by_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
    return RunSpec(
        ranges=ranges,
        num_servers=num_servers,
        num_trainers=num_trainers,
        open_to_trainers=open_to_trainers and selection is not None,
        seed=torch.initial_seed() % (1 << 62),
        gradient_clip_norm=clip_at if by_norm else None,
        gradient_clip_value=None if by_norm else clip_at,
        first_step=first_step,
        selection=selection,
        # Trial steps do not count, and Lightning sets a limit of its own for them.
        max_steps=trainer.max_steps if trainer.max_steps != -1 and not checks.makes_trials(trainer) else None,
        total_steps=_total_steps(trainer) if selection is not None else None,
        optimizer=kind_of(trainer.optimizers[0]) if selection is not None else None,
    )


def _total_steps(trainer: Trainer) -> int | None:
    """Steps of the whole run, if the Trainer knows them without loading data too early."""
    if trainer.max_epochs == -1:
        return trainer.max_steps if trainer.max_steps != -1 else None
    if trainer.train_dataloader is None:
        return None
    steps = trainer.estimated_stepping_batches
    return int(steps) if steps != float("inf") else None
