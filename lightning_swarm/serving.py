"""What a peer's server takes from the LightningModule, as Lightning would: the module set up, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lightning_swarm import rules
from lightning_swarm.framework import Framework, framework_of


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


def remember(module: nn.Module) -> Callable[[], None]:
    """What serving changes in a module besides weights, modes and what trains: what is returned puts it back."""
    modes = [(one, one.training) for one in module.modules()]
    trains = {name: one.requires_grad for name, one in module.named_parameters()}

    def put_back() -> None:
        for one, training in modes:
            one.training = training
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trains.get(name, parameter.requires_grad))

    return put_back


def optimizer_maker(
    module: LightningModule, framework: Framework, *, knows_length: bool
) -> Callable[[int | None], Optimizer]:
    """What makes the user's optimizer for a server; it gets the run's number of steps, if that is known.

    Args:
        module: Whose `configure_optimizers` it calls.
        framework: Of the module.
        knows_length: Whether this process's own Trainer can say how long the run is: the lead, whose data counts.
    """

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
