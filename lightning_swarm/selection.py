"""Which parameters train, and which group of the optimizer holds which: read, checked, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_swarm.boundary import boundary_layers
from lightning_swarm.errors import ConfigError, ProtocolError
from lightning_swarm.types.runs import Selection, StageManifest


def read_selection(module: nn.Module, optimizer: Optimizer) -> Selection:
    """What the user's own module and optimizer say.

    Args:
        module: The whole model.
        optimizer: Of its parameters.

    Raises:
        ConfigError: The optimizer holds a parameter that is not the module's: no stage could. Or it does not hold one
            of a boundary layer.
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


def check_selection(selection: Selection, stages: Sequence[StageManifest]) -> None:
    """Refuse a selection that is not of these stages' parameters.

    Raises:
        ProtocolError: It names something else, or wants to train what has no gradient that could be summed.
    """
    dtypes = {name: dtype for stage in stages for name, _, dtype in stage.parameters}
    unknown = sorted((selection.groups.keys() | set(selection.frozen)) - dtypes.keys())
    if unknown:
        raise ProtocolError(f"a selection must be of the run's parameters, got {unknown[:5]}")
    beyond = sorted(name for name, index in selection.groups.items() if index >= selection.num_groups)
    if beyond:
        raise ProtocolError(f"there are {selection.num_groups} parameter groups; {beyond[:5]} are in none of them")
    frozen = set(selection.frozen)
    # Of complex ones a gradient can be taken, but not summed.
    wrong = [
        name
        for name, dtype in dtypes.items()
        if name not in frozen and "float" not in dtype and (name in selection.groups or "complex" not in dtype)
    ]
    if wrong:
        raise ProtocolError(f"trained parameters must be real floating point numbers, {wrong[:5]} are not")


def trained_names(selection: Selection) -> set[str]:
    """Parameters that the optimizer steps: in one of its groups, and not frozen."""
    return selection.groups.keys() - set(selection.frozen)


def first_trained(selection: Selection | None, stages: Sequence[StageManifest]) -> int:
    """The first stage that trains a parameter, has batch norms, or is on the trainers; if there is none, how many are.

    The stages before it need no gradient unless the pipeline's own input does, and hold no receipts.
    """
    trained = trained_names(selection) if selection is not None else set()
    for index, stage in enumerate(stages):
        keeps = bool(stage.statistics) and selection is not None
        if stage.on_trainers or keeps or any(name in trained for name, _, _ in stage.parameters):
            return index
    return len(stages)
