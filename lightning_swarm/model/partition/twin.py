"""Copies modules but not their tensors, for a server in a process whose user code keeps the original modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from lightning_swarm.model.fidelity.copying import copy_hooks, copy_value
from lightning_swarm.model.partition.blocks import Blocks

_TENSORS: Final = ("_parameters", "_buffers")


def twin_of(model: nn.Module, blocks: Blocks) -> tuple[nn.Module, Blocks]:
    """Copy a model and its blocks; parameters and buffers are still the model's own objects."""
    inside = {id(module): module for block in blocks.modules for module in block.modules()}
    modules = {id(module): module for module in (*model.modules(), blocks.root)} | inside
    trainer = getattr(model, "_trainer", None)
    # Objects outside of blocks are not copied, because user code reads the values that blocks and hooks leave there.
    tensors = (t for m in modules.values() for t in (*m._parameters.values(), *m._buffers.values()))
    known: dict[int, Any] = {id(value): value for value in (trainer, *modules.values(), *tensors)}
    # All twins exist before any is filled, so that references to a module in a block become references to its twin.
    # Scripted modules, which are outside of blocks, cannot be copied this way, and stay the user's own objects.
    scripted = {key for key, module in modules.items() if isinstance(module, torch.jit.ScriptModule)}
    twins = {key: module if key in scripted else type(module).__new__(type(module)) for key, module in modules.items()}
    known.update({key: twins[key] for key in inside})
    for key, module in reversed(modules.items()):  # inner modules first
        if key not in scripted:
            _fill(twins[key], module, twins, known, deep=key in inside)
    own = tuple(twins[id(block)] for block in blocks.modules)
    return twins[id(model)], replace(blocks, root=twins[id(blocks.root)], modules=own)


def _fill(
    twin: nn.Module, module: nn.Module, twins: Mapping[int, nn.Module], known: dict[int, Any], *, deep: bool
) -> None:
    """Set a twin's attributes to its module's values; with `deep`, to copies of the values."""
    state = {}
    for name, value in vars(module).items():
        if name == "_modules":
            state[name] = {key: twins.get(id(held), held) for key, held in value.items()}
        elif name in _TENSORS:
            state[name] = value.copy()
        elif name.startswith("_") and isinstance(value, (dict, set)):  # torch's registers of hooks and of names
            state[name] = copy_hooks(value, known)
        else:
            state[name] = copy_value(value, known) if deep else value  # a LightningModule may refer to its data
    if isinstance(module, OptimizedModule):  # it must wrap the twin of its inner module
        state.pop("forward", None)
        twin.__setstate__(state)
    else:
        vars(twin).update(state)
