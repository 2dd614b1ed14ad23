"""What a peer's server takes from the LightningModule, as Lightning would: the module set up, and its optimizer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_swarm import rules
from lightning_swarm.boundary import hook
from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError
from lightning_swarm.framework import Framework, framework_of
from lightning_swarm.origin import Origin, is_on_meta, staying_on_meta
from lightning_swarm.partition import find_blocks
from lightning_swarm.server.model import Model

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Models:
    """Makes what a peer cuts into stages, and its server computes with, of LightningModules.

    Args:
        config: The user's settings.
        framework: Of the modules.
        device: Where this peer computes.
        origin: Of weights that a module does not hold.
        compiler: Of the stages; None: they run as they are.
        knows_length: Whether this process's own Trainer can say how long the run is: the lead, whose data counts.
    """

    config: SwarmConfig
    framework: Framework
    device: torch.device
    origin: Origin
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    knows_length: bool

    def of(self, module: LightningModule, *, keep: bool) -> Model:
        """A peer's copy of the model, `keep` as in `Model`."""
        return Model(
            module,
            find_blocks(module, self.config.pipeline),
            _optimizer_maker(module, self.framework, knows_length=self.knows_length),
            self.device,
            keep=keep,
            compiler=self.compiler,
            offload=self.config.offload_optimizer,
            origin=self.origin.weights,
        )

    def served(self, module: LightningModule) -> Model:
        """Of a peer that only serves: moved there, as a loop would have it."""
        module.trainer.precision_plugin.convert_module(module)
        with staying_on_meta():
            module.to(self.device)
        return self.of(module, keep=False)

    def beside(self, module: LightningModule, own: Model, *, shared: bool, written: bool) -> Model:
        """Of a trainer's own server.

        Args:
            module: The trainer's.
            own: What the trainer cuts: the same, if nothing speaks against it.
            shared: Whether others train in the run, or may come to.
            written: Whether callbacks write into the module's weights.
        """
        if shared or is_on_meta(module):
            # It computes for others while the trainer's own thread is in user code; or it alone has room for weights.
            return self.of(_twin(module), keep=not is_on_meta(module))
        if written:  # and its stages' weights are no part of that
            apart = copy.deepcopy(module)
            apart.trainer = module.trainer
            return self.of(apart, keep=False)
        return own


def set_up(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Bring the module to where a loop would begin with it. Enters none, and touches no data.

    Args:
        trainer: Of this process; it never runs.
        module: That its strategy is connected with.
        datamodule: For a LightningModule that asks it for a size, say. It is neither prepared nor set up.
    """
    module.trainer = trainer
    if datamodule is not None:
        trainer._data_connector.attach_datamodule(module, datamodule)
    trainer.strategy.setup_environment()
    call = framework_of(trainer).call
    call._call_lightning_module_hook(trainer, "setup", stage=trainer.state.fn)
    call._call_configure_model(trainer)


def remember(module: nn.Module) -> Callable[[Model], None]:
    """What serving changes in a module: what is returned puts it back, but for weights. It takes what was served."""
    on_meta = is_on_meta(module)
    modes = [(one, one.training) for one in module.modules()]
    trains = {name: one.requires_grad for name, one in module.named_parameters()}

    def put_back(served: Model) -> None:
        if not on_meta:
            served.make_whole()
        for one, training in modes:
            one.training = training
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trains.get(name, parameter.requires_grad))
        hook(module)

    return put_back


def could_lead(trainer: Trainer, module: LightningModule, config: SwarmConfig, handed: Mapping[str, Any]) -> bool:
    """Whether a process that serves has all that it takes to go on as the lead.

    Args:
        trainer: Of this process.
        module: That it serves.
        config: The user's settings.
        handed: What the Trainer's method was called with.
    """
    if config.role != "auto" or trainer.state.fn != TrainerFn.FITTING or not has_whole_model(module, config):
        return False
    try:
        rules.check_trainer(trainer, module, config)
        rules.check_data(trainer, module, handed)
    except ConfigError as error:
        _log.info("This peer cannot take the run over: %s", error)
        return False
    return True


def has_whole_model(module: nn.Module, config: SwarmConfig) -> bool:
    """Whether the weights can come here from the servers, as the lead of a run that goes back has them."""
    return config.state_dict_type == "full" and not is_on_meta(module)


def _optimizer_maker(
    module: LightningModule, framework: Framework, *, knows_length: bool
) -> Callable[[int | None], Optimizer]:
    """What makes the user's optimizer for a server; it gets the run's number of steps, if that is known."""

    def make(total_steps: int | None) -> Optimizer:
        fit_loop = module.trainer.fit_loop
        own = fit_loop.max_epochs, fit_loop.epoch_loop.max_steps
        if not knows_length and total_steps is not None:
            # `estimated_stepping_batches` shall answer what it does at the lead.
            fit_loop.max_epochs, fit_loop.epoch_loop.max_steps = -1, total_steps
        try:
            configured: Any = module.configure_optimizers()
        finally:
            fit_loop.max_epochs, fit_loop.epoch_loop.max_steps = own
        return rules.check_optimizers(framework.configure_optimizers(configured)[0])

    return make


def _twin(module: LightningModule) -> LightningModule:
    """The same parameters, buffers and whatever else, in modules of their own: their modes and hooks are nobody else's.

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
