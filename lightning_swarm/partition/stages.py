"""Stages: runs of blocks that a server computes, and what they hold under which names.

A stage holds the user's own modules, not copies, and knows their tensors by the names that the
LightningModule's state dict gives them. So a checkpoint needs no translation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from lightning_swarm.errors import ConfigError
from lightning_swarm.nn import accepted_keywords, call_blocks
from lightning_swarm.partition.blocks import Blocks

_MAX_NAMED: Final = 5

_Slot = tuple[str, nn.Module, str]
"""Full name of a tensor in the model, the module that holds it, and its name there."""


class TensorSpec(msgspec.Struct, frozen=True):
    """What must agree between peers about a parameter or buffer.

    Attributes:
        name: Its name in the LightningModule's state dict (the first one, if it has several).
        shape: Its shape.
        dtype: Its dtype, as in ``float32``.
        requires_grad: Whether it is trained; never, for a buffer.
        persistent: Whether the state dict holds it; always, for a parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    persistent: bool = True


class StageSpec(msgspec.Struct, frozen=True):
    """What a stage holds, in the LightningModule's order. Part of the run's manifest."""

    index: int
    block_names: tuple[str, ...]
    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]


class StageModule(nn.Module):
    """A run of the user's blocks.

    Attributes:
        spec: What it holds.
        keywords: The extras that its blocks name.
    """

    def __init__(self, spec: StageSpec, blocks: Sequence[nn.Module], slots: "_Slots") -> None:
        """Hold blocks; see `cut`."""
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(blocks)
        self.keywords = frozenset[str]().union(*map(accepted_keywords, blocks))
        # Places, not tensors: moving a model off meta or to a device replaces its parameter objects.
        self._slots = slots

    def forward(self, inputs: tuple[Any, ...], extras: Mapping[str, Any]) -> Any:
        """Run the blocks.

        Args:
            inputs: All inputs of the first block; of a stage that is not the first, one value.
            extras: Keyword arguments of the pipeline's call. Those that no block here names are ignored.
        """
        return call_blocks(self.blocks, inputs, extras)

    def named_stage_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Full names and parameters, each once, in the LightningModule's order."""
        return [(name, getattr(owner, key)) for name, owner, key in self._slots.parameters]

    def named_stage_buffers(self) -> list[tuple[str, Tensor]]:
        """Full names and buffers, persistent or not, each once, in the LightningModule's order."""
        return [(name, getattr(owner, key)) for name, owner, key in self._slots.buffers]


class _Slots(msgspec.Struct, frozen=True):
    parameters: tuple[_Slot, ...]
    buffers: tuple[_Slot, ...]


def parameter_costs(blocks: Blocks) -> tuple[int, ...]:
    """Number of parameter elements of each block. A parameter that a block holds twice counts once."""
    _refuse_lazy(blocks)
    return tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks.modules)


def cut(model: nn.Module, blocks: Blocks, ranges: Sequence[range]) -> tuple[StageModule, ...]:
    """Make stages of a model's blocks, without changing the model.

    Args:
        model: The LightningModule. Its parameters may be on meta.
        blocks: What `find_blocks` found in it.
        ranges: The block indices of each stage, from `policy`.

    Raises:
        ConfigError: The ranges do not cover the blocks in order, or the model cannot be trained in stages:
            parameters outside of the blocks, tied across stages or unknown to the model, sparse gradients,
            complex parameters, statistics over the batch, layers that are not initialised.
    """
    _check_ranges(ranges, len(blocks.modules))
    _refuse_lazy(blocks)
    _refuse_sparse(blocks)
    _refuse_complex(blocks)
    _refuse_batch_statistics(blocks)
    runs = [tuple(blocks.modules[i] for i in indices) for indices in ranges]
    names = [tuple(blocks.names[i] for i in indices) for indices in ranges]
    parameters, buffers = _parameter_slots(model), _buffer_slots(model)
    held = [_ids(block.parameters() for block in run) for run in runs]
    _refuse_unregistered(blocks, set(parameters) | set(buffers))
    _refuse_outside(parameters, held)
    _refuse_tied(parameters, held, names)
    stages = []
    for index, run in enumerate(runs):
        inside = _ids(block.buffers() for block in run)
        slots = _Slots(
            tuple(slot for key, slot in parameters.items() if key in held[index]),
            tuple(slot for key, slot in buffers.items() if key in inside),
        )
        stages.append(StageModule(_spec(index, names[index], slots), run, slots))
    return tuple(stages)


def _parameter_slots(model: nn.Module) -> dict[int, _Slot]:
    """Where each parameter lives, by its identity, in the order of `model.named_parameters()`."""
    slots: dict[int, _Slot] = {}
    for prefix, owner in model.named_modules():
        for key, value in owner._parameters.items():
            if value is not None:
                slots.setdefault(id(value), (f"{prefix}.{key}" if prefix else key, owner, key))
    return slots


def _buffer_slots(model: nn.Module) -> dict[int, _Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, owner in model.named_modules():
        for key, value in owner._buffers.items():
            if value is not None:
                slots.setdefault(id(value), (f"{prefix}.{key}" if prefix else key, owner, key))
    return slots


def _ids(groups: Iterable[Iterator[Tensor]]) -> set[int]:
    return {id(tensor) for group in groups for tensor in group}


def _spec(index: int, block_names: tuple[str, ...], slots: _Slots) -> StageSpec:
    return StageSpec(
        index, block_names, tuple(map(_tensor_spec, slots.parameters)), tuple(map(_tensor_spec, slots.buffers))
    )


def _tensor_spec(slot: _Slot) -> TensorSpec:
    name, owner, key = slot
    tensor: Tensor = getattr(owner, key)
    dtype = str(tensor.dtype).removeprefix("torch.")
    persistent = key not in owner._non_persistent_buffers_set
    return TensorSpec(name, tuple(tensor.shape), dtype, tensor.requires_grad, persistent)


def _check_ranges(ranges: Sequence[range], num_blocks: int) -> None:
    covered = [index for indices in ranges for index in indices]
    if covered != list(range(num_blocks)) or not all(ranges):
        raise ConfigError(
            f"stages must cover blocks 0..{num_blocks - 1} in order, none empty, got {list(ranges)}. "
            "Cut the same model on every peer."
        )


def _refuse_unregistered(blocks: Blocks, registered: set[int]) -> None:
    unknown = [
        f"{key} of block {name!r}"
        for name, block in zip(blocks.names, blocks.modules, strict=True)
        for key, tensor in (*block.named_parameters(), *block.named_buffers())
        if id(tensor) not in registered
    ]
    if unknown:
        raise ConfigError(
            f"parameters and buffers of blocks must belong to the model, got {_few(unknown)} that do not. "
            "Create the layers in `__init__` or `configure_model` as attributes of the model; `configure_stages` only "
            "arranges them."
        )


def _refuse_outside(parameters: Mapping[int, _Slot], held: Sequence[set[int]]) -> None:
    outside = [slot[0] for key, slot in parameters.items() if not any(key in ids for ids in held)]
    if outside:
        raise ConfigError(
            f"every parameter of the model must be in a block of the pipeline, got {_few(outside)} outside of it. "
            "Put the layers into blocks (`configure_stages` may return composites of layers), or make a frozen tensor "
            "a buffer."
        )


def _refuse_tied(parameters: Mapping[int, _Slot], held: Sequence[set[int]], names: Sequence[tuple[str, ...]]) -> None:
    tied = []
    for key, slot in parameters.items():
        stages = [index for index, ids in enumerate(held) if key in ids]
        if len(stages) > 1:
            tied.append(f"{slot[0]} (stages {', '.join(map(str, stages))})")
    if tied:
        starts = ", ".join(repr(run[0]) for run in names)
        raise ConfigError(
            f"a parameter must be in one stage only, got {_few(tied)} with stages that begin at {starts}. "
            "Untie it, or choose `split` or `num_stages` so that the blocks that share it are in one stage."
        )


def _refuse_sparse(blocks: Blocks) -> None:
    sparse = [name for name, m in _inner(blocks) if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if sparse:
        raise ConfigError(
            f"gradients must be dense to be averaged, got `sparse=True` in {_few(sparse)}. Set `sparse=False`."
        )


def _refuse_complex(blocks: Blocks) -> None:
    found = [
        f"{name}.{key}"
        for name, module in _inner(blocks)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.is_complex() and parameter.requires_grad
    ]
    if found:
        raise ConfigError(
            f"trained parameters must be real, gradients are summed as real numbers: {_few(found)} are complex. Store "
            "them as real ones (`torch.view_as_real`) and use `torch.view_as_complex` in forward, or freeze them."
        )


def _refuse_batch_statistics(blocks: Blocks) -> None:
    # A batch norm without running statistics is no better: it would see microbatches in place of batches.
    found = [
        f"{name} ({type(m).__name__})"
        for name, m in _inner(blocks)
        if isinstance(m, _BatchNorm) or (isinstance(m, _NormBase) and m.track_running_stats)
    ]
    if found:
        raise ConfigError(
            "layers must treat each sample alone and change no buffers in forward, because a batch is cut into "
            f"microbatches that are computed on different peers, got statistics over the batch in {_few(found)}. "
            "Use GroupNorm or LayerNorm, InstanceNorm with `track_running_stats=False`, or a frozen batch norm."
        )


def _refuse_lazy(blocks: Blocks) -> None:
    lazy = [
        f"{name} ({type(m).__name__})"
        for name, m in _inner(blocks)
        if isinstance(m, LazyModuleMixin)
        and any(is_lazy(t) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    ]
    if lazy:
        raise ConfigError(
            f"layers must know their shapes before the model is cut, got lazy ones that do not: {_few(lazy)}. "
            "Give them their input sizes, or run one batch through the model in `configure_model`."
        )


def _inner(blocks: Blocks) -> Iterator[tuple[str, nn.Module]]:
    for block_name, block in zip(blocks.names, blocks.modules, strict=True):
        for name, module in block.named_modules():
            yield (f"{block_name}.{name}" if name else block_name), module


def _few(items: Sequence[str]) -> str:
    more = f", ... ({len(items)} in all)" if len(items) > _MAX_NAMED else ""
    return ", ".join(items[:_MAX_NAMED]) + more
