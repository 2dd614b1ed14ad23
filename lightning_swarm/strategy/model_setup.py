"""Prepares a Trainer's module for a run: decides whether and where to cut the model, and builds it on each peer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.override import changed
from lightning_swarm.model import partition
from lightning_swarm.model.boundary_layers import add_hooks, boundary_layers
from lightning_swarm.model.deferred_init import StayOnMeta, is_on_meta
from lightning_swarm.model.partition import Blocks
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.protocol.messages.run import StageManifest, ranges_of
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel
from lightning_swarm.strategy import checks, optimizer_checks
from lightning_swarm.strategy.base import StrategyBase
from lightning_swarm.strategy.data.on_peers import call_with_data_if_needed
from lightning_swarm.strategy.framework import ImportTree, tree_of

_log = logging.getLogger(__name__)


def check(strategy: StrategyBase, trainer: Trainer, *, restored: bool) -> None:
    """Refuse a model that cannot be cut, as far as this is known before the model is configured."""
    module, is_overridden = trainer.lightning_module, tree_of(trainer).is_overridden
    config, num_stages = strategy.config, strategy.config.num_stages or strategy.num_devices
    if is_overridden("setup", module) or is_overridden("configure_model", module):
        return
    if computes_alone(strategy, trainer) or stays_whole(strategy, module):
        return
    # The model is final. Measuring blocks for a balanced cut may take long, so check only whether a cut exists.
    split = config.split if not isinstance(config.split, str) else "parameters"
    blocks = partition.find_blocks(module, config.pipeline)
    ranges = partition.choose_ranges(blocks, num_stages, split, seams=partition.layers_by_block(module, blocks))
    cut_is_final = config.split == split and not restored  # a checkpoint may add boundary layers to the model
    if cut_is_final and config.boundary is not None:
        if not boundary_layers(module):
            checks.check_new_layers(trainer, restored=False)
        partition.plan_boundaries(module, blocks, ranges, config.boundary)


def computes_alone(strategy: StrategyBase, trainer: Trainer) -> bool:
    """Return whether no server is needed: no other peer takes part, or this process evaluates the model alone."""
    if strategy.is_plain:
        return True
    if trainer.state.fn == TrainerFn.FITTING:
        return False
    if strategy.waits_for_fit(trainer) or stays_whole(strategy, trainer.lightning_module):
        return True  # the process holds the whole model
    has_parameters = next(trainer.lightning_module.parameters(), None) is not None
    return trainer.num_devices == 1 and not has_parameters  # then servers would hold nothing


def stays_whole(strategy: StrategyBase, module: LightningModule) -> bool:
    """Return whether the model stays whole in this process's run, which it joins, has taken over, or begins."""
    stages = _stages_of_run(strategy)
    if stages:
        return not ranges_of(stages)
    config = strategy.config
    if not config.may_stay_uncut(strategy.num_devices) or partition.defines_stages(module):
        return False
    return config.role == "both" or strategy.is_plain or not partition.can_be_cut(module)  # "auto" cuts if it can


def _stages_of_run(strategy: StrategyBase) -> Sequence[StageManifest]:
    """Return the stages of the run that already exists; none if this process begins a run."""
    return strategy.joined.manifest.stages if strategy.joined is not None else strategy.inherited_stages


def _blocks(strategy: StrategyBase, module: LightningModule) -> Blocks:
    """Return the blocks of a module; no blocks if the model stays whole, or, on a server, cannot be cut."""
    config = strategy.config
    may_be_whole = config.only_serves and config.pipeline is None and not partition.defines_stages(module)
    if stays_whole(strategy, module) or (may_be_whole and not partition.can_be_cut(module)):
        return partition.no_blocks(module)
    return partition.find_blocks(module, config.pipeline)


def cut(strategy: StrategyBase, module: LightningModule, *, restored: bool) -> None:
    """Choose the stages, insert boundary layers between them, and initialize the weights outside of the stages."""
    config, trainer = strategy.config, module.trainer
    if computes_alone(strategy, trainer):
        strategy.initial_weights.fill_outside(module, partition.no_blocks(module), strategy.root_device)
        return
    blocks = _blocks(strategy, module)
    if blocks.is_empty and strategy.compiler is not None:
        rank_zero_warn(
            "in a swarm, `torch.compile` of a whole LightningModule compiles only stages, but this model is not cut, "
            "so it runs uncompiled. Compile its layers, as in `self.net = torch.compile(self.net)`."
        )
    strategy.ranges = _ranges(strategy, module, blocks)
    if config.boundary is not None:  # a model that already has boundary layers is cut at them
        if not boundary_layers(module):
            checks.check_new_layers(trainer, restored=restored)
        partition.insert_boundaries(module, blocks, strategy.ranges, config.boundary)
    strategy.initial_weights.fill_outside(module, blocks, strategy.root_device)


def _ranges(strategy: StrategyBase, module: LightningModule, blocks: Blocks) -> Sequence[range]:
    """Return the blocks of each stage, as in the run that already exists; a new run chooses them."""
    if blocks.is_empty:
        return ()
    return ranges_of(_stages_of_run(strategy)) or partition.choose_ranges(
        blocks,
        strategy.config.num_stages or strategy.num_devices,
        strategy.config.split,
        lambda: _block_costs(module.trainer, blocks),
        seams=partition.layers_by_block(module, blocks),
    )


def _block_costs(trainer: Trainer, blocks: Blocks) -> Sequence[int]:
    """Measure the time of each block of the Trainer's module on this machine, for ``split="time"``."""
    module, strategy = trainer.lightning_module, trainer.strategy
    example = module.example_input_array
    if example is None:
        raise ConfigError(
            "`split='time'` measures the blocks with an example, so `example_input_array` must be set: "
            f"{type(module).__name__} has none. Set it in `__init__` to a batch of the usual size, as `forward` "
            "receives it, or use `split='parameters'`."
        )
    example = strategy.batch_to_device(strategy.precision_plugin.convert_input(example), strategy.root_device)
    return partition.time_costs(module, blocks, example, context=strategy.precision_plugin.forward_context)


def peer_model(
    strategy: StrategyBase, module: LightningModule, optimizer: Callable[[int | None], Optimizer] | None = None
) -> PeerModel:
    """Return a model to cut into stages. `optimizer` gets the number of steps, or None; by default, the Trainer's."""
    config = strategy.config
    return PeerModel(
        module,
        _blocks(strategy, module),
        optimizer or (lambda _: strategy.optimizers[0]),
        ComputeSettings(strategy.root_device, strategy.compiler, config.offload_optimizer),
        initial_weights=strategy.initial_weights.weights,
    )


def served_model(strategy: StrategyBase, module: LightningModule) -> PeerModel:
    """Return the model of a peer that only serves, converted and moved to its device as by Lightning's loop."""
    module.trainer.precision_plugin.convert_module(module)
    with StayOnMeta():
        module.to(strategy.root_device)
    return peer_model(strategy, module, partial(_make_optimizer, module, strategy.framework))


def set_up(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Call the module's setup hooks as Lightning does before a loop, without data if possible."""
    module.trainer = trainer
    if datamodule is not None:  # the module may read a value from it, such as a number of classes
        trainer._data_connector.attach_datamodule(module, datamodule)
    strategy: StrategyBase = trainer.strategy  # type: ignore[assignment]
    strategy.setup_environment()
    call = tree_of(trainer).call

    def build() -> None:
        call._call_lightning_module_hook(trainer, "setup", stage=trainer.state.fn)
        call._call_configure_model(trainer)

    call_with_data_if_needed(strategy, trainer, "build the model in `setup` and `configure_model`", build)


def remember(module: nn.Module) -> Callable[[PeerModel], None]:
    """Return a function that, after serving, restores a module's modes, `requires_grad`, and memory for its weights."""
    on_meta = is_on_meta(module)
    modes = [(child, child.training) for child in module.modules()]
    trains = {name: parameter.requires_grad for name, parameter in module.named_parameters()}

    def restore(served: PeerModel) -> None:
        if not on_meta:
            served.fill()
        for child, training in modes:
            child.training = training
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trains.get(name, parameter.requires_grad))
        add_hooks(module)

    return restore


def could_lead(
    trainer: Trainer, module: LightningModule, config: SwarmConfig, call_arguments: Mapping[str, Any]
) -> bool:
    """Return whether a server could become the lead; `call_arguments` are the arguments of the Trainer's method."""
    if config.role != "auto" or trainer.state.fn != TrainerFn.FITTING or not has_whole_model(module, config):
        return False
    try:
        checks.check_trainer(trainer, module, config)
        checks.check_data(trainer, module, call_arguments)
    except ConfigError as error:
        _log.info("This peer cannot take over the run: %s", error)
        return False
    return True


def has_whole_model(module: nn.Module, config: SwarmConfig) -> bool:
    """Return whether the whole model's weights can be gathered here, which a rollback requires of the lead."""
    return config.state_dict_type == "full" and not is_on_meta(module)


def _make_optimizer(module: LightningModule, framework: ImportTree, total_steps: int | None) -> Optimizer:
    """Make the user's optimizer on a peer without data, with the run's number of steps if it is known."""
    strategy: StrategyBase = module.trainer.strategy  # type: ignore[assignment]
    with changed(strategy, total_steps=total_steps):  # `estimated_stepping_batches` must return the lead's value
        make, task = module.configure_optimizers, "make the optimizer"
        configured: Any = call_with_data_if_needed(strategy, module.trainer, task, make)
    return optimizer_checks.check_optimizers(framework.configure_optimizers(configured)[0])
