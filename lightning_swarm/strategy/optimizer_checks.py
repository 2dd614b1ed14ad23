"""Refuses optimizers whose steps servers cannot take, and reads hyperparameters and trained parameters for servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch import LightningModule
from msgspec.structs import replace as replace_fields
from torch.optim import Optimizer

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.optimizer_state import parameter_names, parameters_of, read_selection
from lightning_swarm.model.optimizer_template import OptimizerTemplate, check_hooks, instance_step
from lightning_swarm.protocol.messages.run import Selection

_ONE_OPTIMIZER = "`configure_optimizers` must return one optimizer, got {}. Use one, with parameter groups."


@contextlib.contextmanager
def refusing_several_optimizers() -> Iterator[None]:
    """Replace Lightning's error for several optimizers, whose remedy a swarm does not support."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" in str(error):
            raise ConfigError.like(RuntimeError, _ONE_OPTIMIZER.format("several")) from error
        raise


def check_optimizers(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return the only optimizer. Refuses zero or several, and an optimizer that needs a closure or sparse gradients."""
    if len(optimizers) != 1:
        raise ConfigError(_ONE_OPTIMIZER.format(len(optimizers)))
    optimizer = optimizers[0]
    if not parameters_of(optimizer):  # Lightning's stand-in for None
        raise ConfigError(
            "`configure_optimizers` must return an optimizer with parameters, got none. Return one, or leave out "
            "`strategy` for a loop that only reads batches."
        )
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigError(
            f"the optimizer must step from one dense gradient, got {type(optimizer).__name__}. Use SGD or AdamW."
        )
    if "_optimizer_state_dict_pre_hooks" not in vars(optimizer):  # its `__init__` does not call `Optimizer.__init__`
        Optimizer.__setstate__(optimizer, {})
    _check_attributes(optimizer)
    check_hooks(optimizer)
    hyperparameters(optimizer)
    return optimizer


def check_steps(optimizer: Optimizer, module: LightningModule, *, in_stages: bool) -> frozenset[str]:
    """Refuse an optimizer that servers cannot step. `in_stages`: each server has only one stage's parameters.

    Returns the keys of the optimizer's parameter groups that its steps write.
    """
    if instance_step(optimizer) is not None:  # a trial step of user code could have side effects
        return frozenset()
    return OptimizerTemplate(optimizer, parameter_names(module)).check_steps(in_stages=in_stages)


def unportable(optimizer: Optimizer, module: LightningModule) -> str:
    """Return why steps of an optimizer may differ in bits between kinds of machines; empty if they cannot."""
    if instance_step(optimizer) is not None:
        return f"{type(optimizer).__name__} has a `step` of its own"
    return OptimizerTemplate(optimizer, parameter_names(module)).unportable()


def _check_attributes(optimizer: Optimizer) -> None:
    """Refuse lists with a tensor per parameter in attributes, which do not travel with a stage to another peer."""
    shapes = [parameter.shape for parameter in parameters_of(optimizer)]
    for name, value in vars(optimizer).items():
        if not isinstance(value, (list, tuple)) or name == "param_groups":
            continue
        entries = [inner for entry in value for inner in (entry if isinstance(entry, (list, tuple)) else (entry,))]
        if [getattr(entry, "shape", None) for entry in entries] == shapes:
            raise ConfigError(
                "an optimizer must keep tensors about its parameters in its `state`, which moves with the parameters "
                f"from peer to peer; {type(optimizer).__name__} keeps a list `{name}` of {len(shapes)} tensors of the "
                "parameters' shapes. Keep each tensor in `self.state[parameter]`."
            )


def hyperparameters(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return each parameter group without its parameters. Refuses values that are not plain."""
    # `dict.items` avoids the watched methods of a group, because user code does not read here.
    return [
        {name: _plain(name, value) for name, value in dict.items(group) if name != "params"}
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


def new_selection(
    session: Session, module: LightningModule, optimizer: Optimizer, pending_samples: int
) -> Selection | None:
    """Return which parameters train now; None if unchanged. Refuses changes in mid-step or among several trainers."""
    current = read_selection(module, optimizer)
    if current == session.selection:
        return None
    known = {name for stage in session.run.manifest.stages for name, _, _ in stage.parameters}
    if new := sorted(current.groups.keys() - known):
        raise ConfigError(
            f"parameters must be in the module when a run begins, got new parameters in its optimizer: {new[:5]}. Make "
            "them in `__init__`, `setup` or `configure_model`, and freeze them until they train."
        )
    # New frozen parameters stay on this trainer.
    selection = replace_fields(current, frozen=[name for name in current.frozen if name in known])
    if selection == session.selection:
        return None
    if session.is_shared:
        raise ConfigError(
            "in a run of several trainers, the set of trained parameters must not change, because the trainers are "
            "at different batches; the set has changed. Freeze parameters and add groups before `fit`, or use "
            "`role='auto'`."
        )
    if pending_samples:
        assert session.selection is not None
        changed = sorted(set(session.selection.frozen) ^ set(selection.frozen)) or "parameter groups"
        raise ConfigError(
            "the set of trained parameters, and their groups, may change only when a step begins, because servers sum "
            f"a step's gradients: {changed} changed with {pending_samples} samples in the open step. "
            "Change it at the beginning of an accumulation window; with `target_batch_size`, choose a size that "
            "divides the samples of an epoch."
        )
    return selection
