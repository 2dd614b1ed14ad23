"""Optimizers that servers cannot step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_swarm.errors import ConfigError

ONE_OPTIMIZER = "`configure_optimizers` must return one optimizer, got {}. Use one, with parameter groups."


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
