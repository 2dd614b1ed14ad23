"""Parameters that a user of bitsandbytes has optimized otherwise than the rest: embeddings with 32 bits of state, say.

One `GlobalOptimManager` for the whole process knows them, by a parameter's id and by its place in its parameter group.
A stage has only some of a group, and other optimizers in this process have other stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def place(optimizer: Optimizer) -> None:
    """Have overrides by place be those of this optimizer's parameters, where they stand now; before each step."""
    manager = _manager(optimizer)
    if manager is not None:
        manager.index2config.clear()
        manager.register_parameters(optimizer.param_groups)


def copy(optimizer: Optimizer, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Let copies of parameters be optimized as these are.

    Args:
        optimizer: Which still has the parameters themselves.
        pairs: Of a parameter and its copy.
    """
    manager = _manager(optimizer)
    if manager is not None:
        optimizer.check_overrides()  # type: ignore[attr-defined]  # only now are those that a module named found
        configs = manager.pid2config
        configs.update({id(copied): configs[id(own)] for own, copied in pairs if id(own) in configs})


def _manager(optimizer: Optimizer) -> Any:
    """Told by what it has: bitsandbytes is slow to import, and few use its optimizers."""
    manager = getattr(optimizer, "mng", None)
    return manager if hasattr(manager, "index2config") else None
