"""Reads which parameters train, and which group of the optimizer holds each, and checks that a swarm can do it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import boundary_layers
from lightning_swarm.protocol.messages.run import Selection


def read_selection(module: nn.Module, optimizer: Optimizer) -> Selection:
    """Read the selection from the whole model and its optimizer.

    Raises `ConfigError` if the optimizer holds a parameter that is not the module's, which no stage could train, or if
    it leaves out one of a boundary layer.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        shapes = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if shapes:
            raise ConfigError(
                "an optimizer must hold parameters of the LightningModule only, the others are on no server: parameter "
                f"group {index} has foreign ones of the shapes {shapes[:5]}. Make their module an attribute of the "
                "LightningModule, in a block of the pipeline."
            )
    _check_boundaries(module, {id(parameter) for group in optimizer.param_groups for parameter in group["params"]})
    return Selection(
        num_groups=len(optimizer.param_groups),
        groups={
            names[id(parameter)]: index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        },
        frozen=[name for name, parameter in module.named_parameters() if not parameter.requires_grad],
    )


def _check_boundaries(module: nn.Module, held: Collection[int]) -> None:
    for after, layer in boundary_layers(module).items():
        if any(parameter.requires_grad and id(parameter) not in held for parameter in layer.parameters()):
            raise ConfigError(
                f"`configure_optimizers` must train the boundary layers, got an optimizer without the one after "
                f"{after!r}. Give it `self.parameters()`, which has them, or `requires_grad_(False)` them."
            )
