"""Refuses models that cannot be partitioned into stages or trained in stages, and calls of single modules in blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few
from lightning_swarm.model.partition.blocks import Blocks
from lightning_swarm.model.partition.stages import Named, Slot, StageModules


def guard(blocks: Iterable[nn.Module], *, callable_blocks: bool = False) -> list[RemovableHandle]:
    """Refuse calls of modules in blocks that have parameters, until the returned handles are removed."""
    # Servers train the parameters, and gradients of the user's own calls would not reach the servers.
    blocks = list(blocks)
    parts = {
        id(part): part
        for block in blocks
        for part in block.modules()
        if part._parameters or isinstance(part, OptimizedModule)
    }
    if callable_blocks:  # the swarm replaces the blocks' forwards, so blocks may be called
        for block in blocks:
            parts.pop(id(block), None)
    return [part.register_forward_pre_hook(functools.partial(_refuse, id(part))) for part in parts.values()]


def _refuse(guarded: int, part: nn.Module, _inputs: Any) -> None:
    # In a compiled stage, this check would break the traced graph. Calls of a compiled module are checked before.
    if not torch.compiler.is_compiling() and id(part) == guarded:  # a copy keeps this hook, but may be called
        raise ConfigError(
            "modules in the pipeline must not be called on their own during a run, because their weights are on the "
            f"servers; got a call of {type(part).__name__}. Call the whole pipelined module. For values without a "
            "gradient, call a copy of the module (`copy.deepcopy`)."
        )


def check_ranges(ranges: Sequence[range], num_blocks: int) -> None:
    """Refuse stages that do not cover the blocks in order."""
    covered = [index for indices in ranges for index in indices]
    if covered != list(range(num_blocks)) or not all(ranges):
        raise ConfigError(
            f"stages must cover blocks 0..{num_blocks - 1} in order, none empty, got {list(ranges)}. "
            "Cut the same model on every peer."
        )


def check_modules(inside: Sequence[Named], outside: Sequence[Named]) -> None:
    """Refuse layers, inside and outside of blocks, that cannot be trained in stages."""
    modules = [*inside, *outside]
    check_initialised(modules)
    _refuse_any(
        (name for name, m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse),
        "gradients must be dense to be averaged, got `sparse=True` in {}. Set `sparse=False`.",
    )
    parameters = ((name, *item) for name, module in modules for item in module.named_parameters(recurse=False))
    _refuse_any(
        (f"{name}.{key}" for name, key, tensor in parameters if tensor.is_complex() and tensor.requires_grad),
        "trained parameters must be real, because gradients are summed as real numbers: {} are complex. Store real "
        "parameters (`torch.view_as_real`) and use `torch.view_as_complex` in forward, or freeze them.",
    )
    # The swarm keeps running statistics of `BatchNorm` only.
    with_statistics = (
        f"{name} ({type(m).__name__})"
        for name, m in inside
        if isinstance(m, nn.SyncBatchNorm) or (isinstance(m, _InstanceNorm) and m.track_running_stats)
    )
    _refuse_any(
        with_statistics,
        "only `BatchNorm` layers may update buffers in forward, because the swarm keeps no other running statistics; "
        "got {}. Use BatchNorm, GroupNorm, LayerNorm, or InstanceNorm with `track_running_stats=False`.",
    )
    _refuse_any(
        (f"{name}.{key}" for name, m in inside for key, value in vars(m).items() if isinstance(value, torch.Generator)),
        "blocks must not keep a random generator, because each peer would draw from its own copy; got {}. Draw "
        "without `generator` in the blocks, or draw in `training_step` and pass the numbers to the blocks.",
    )
    candidates = [*inside, *((name, m) for name, m in outside if next(m.parameters(), None) is not None)]
    _refuse_any(
        (name for name, module in candidates if isinstance(module, torch.jit.ScriptModule)),
        "modules that are scripted or traced by `torch.jit` must be outside of blocks and have no parameters, got {}. "
        "Leave `torch.jit` out, or use `torch.compile`. Keep a frozen module in a list, `self.teacher = [scripted]`.",
    )


def _refuse_any(names: Iterable[str], rule: str) -> None:
    """Raise the error of a rule if it is broken; `{}` in its text stands for the names that break it."""
    if culprits := list(names):
        raise ConfigError(rule.format(few(culprits)))


def check_registered(blocks: Blocks, registered: set[int]) -> None:
    """Refuse blocks with tensors that are not the model's own; `registered` are the ids of the model's tensors."""
    unknown = (
        f"{key} of block {name!r}"
        for name, block in zip(blocks.names, blocks.modules, strict=True)
        for key, tensor in (*block.named_parameters(), *block.named_buffers())
        if id(tensor) not in registered
    )
    _refuse_any(
        unknown,
        "parameters and buffers of blocks must belong to the model, got {} that do not. Create the layers in "
        "`__init__` or `configure_model` as attributes of the model; `configure_stages` only arranges them.",
    )


def check_dtypes(parameters: Mapping[int, Slot], held: Sequence[set[int]], tied: set[int]) -> None:
    """Refuse parameters that are tied between stages with and without float64 parameters.

    `parameters` are slots by id, `held` the ids of each stage's parameters, `tied` the ids that several stages have.
    """
    # Such stages would step differently, because each sums gradients in the dtype of its widest parameter.
    is_wide = {key: getattr(owner, name).dtype == torch.float64 for key, (_, owner, name) in parameters.items()}
    wide = [any(is_wide[key] for key in ids) for ids in held]
    mixed = (
        parameters[key][0]
        for key in parameters
        if key in tied and len({wide[index] for index, ids in enumerate(held) if key in ids}) > 1
    )
    _refuse_any(
        mixed,
        "stages that share a parameter must all have float64 parameters, or all have none, got {}, shared by stages "
        "with and without float64 parameters. Convert the model to one dtype, or choose `split` so that the blocks "
        "that share it are in one stage.",
    )


def check_untied(outside: Iterable[Named], held: Sequence[set[int]]) -> None:
    """Refuse parameters that are in blocks and outside of them; `held` are the ids of each stage's parameters."""
    shared = (
        f"{name}.{key}" if name else key
        for name, module in outside
        for key, parameter in module._parameters.items()
        if parameter is not None and any(id(parameter) in ids for ids in held)
    )
    _refuse_any(
        shared,
        "a parameter must be either in the pipeline's blocks, which servers train, or outside of them, where "
        "trainers train it; got {} outside, tied to a parameter of a block. Untie it, or define "
        "`configure_stages(self)` so that all layers that share it are in one stage.",
    )


def check_statistics(stages: Sequence[StageModules]) -> None:
    """Refuse batch norms that are in several stages."""
    held = [{id(m) for _, block in stage for m in block.modules() if isinstance(m, _BatchNorm)} for stage in stages]
    num_shared = sum(map(len, held)) - len(set[int]().union(*held))
    if num_shared:
        raise ConfigError(
            "a batch norm must be in one stage only, which keeps its running statistics: got "
            f"{num_shared} in several stages. Use separate norms, or choose `split` so that each norm is in one stage."
        )


def check_initialised(modules: Iterable[Named]) -> None:
    """Refuse lazy layers that do not know their shapes."""
    lazy = (
        f"{name} ({type(m).__name__})"
        for name, m in modules
        if isinstance(m, LazyModuleMixin)
        and any(is_lazy(t) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    )
    _refuse_any(
        lazy,
        "layers must know their shapes before the model is cut, got uninitialised lazy layers: {}. Pass them their "
        "input sizes, or run one batch through the model in `configure_model`.",
    )
