"""Stages: runs of blocks that a server computes, and what they hold under which names.

A stage holds the user's own modules, not copies, and knows their tensors by the names that the
LightningModule's state dict gives them. So a checkpoint needs no translation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from lightning_swarm.boundary import BoundaryLayer
from lightning_swarm.errors import ConfigError
from lightning_swarm.nn import accepted_keywords, call_blocks
from lightning_swarm.partition import bindings
from lightning_swarm.partition.blocks import Blocks
from lightning_swarm.partition.boundaries import layers_behind

_MAX_NAMED: Final = 5

_Slot = tuple[str, nn.Module, str]
"""Full name of a tensor in the model, the module that holds it, and its name there."""

_Named = tuple[str, nn.Module]

_Run = Sequence[tuple[str | None, nn.Module]]
"""What a stage computes, in order: blocks with their names, and boundary layers without."""


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
    """What a stage holds, in the LightningModule's order. Part of the run's manifest.

    The last one may be *on the trainers*: without blocks, it has the parameters that stand around the pipeline.
    """

    index: int
    block_names: tuple[str, ...]
    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    on_trainers: bool = False


class StageModule(nn.Module):
    """A run of the user's blocks, with the boundary layers between them, and the halves of those at its ends.

    Attributes:
        spec: What it holds.
        keywords: The extras that its blocks name.
    """

    def __init__(self, spec: StageSpec, run: "_Run", slots: "_Slots") -> None:
        """Hold blocks; see `cut`."""
        super().__init__()
        self.spec = spec
        self._names, blocks = [name for name, _ in run], [block for _, block in run]
        self.blocks = nn.ModuleList(blocks)
        self.keywords = frozenset[str]().union(*map(accepted_keywords, blocks))
        # Places, not tensors: moving a model off meta or to a device replaces its parameter objects.
        self._slots = slots

    def forward(self, inputs: tuple[Any, ...], extras: Mapping[str, Any]) -> Any:
        """Run the blocks.

        Args:
            inputs: All inputs of the first block; of a stage that is not the first, one value.
            extras: Keyword arguments of the pipeline's call, those that no block here names are ignored; or what
                `bindings.bind` made of the calls of a list's blocks.
        """
        if bindings.CALLS in extras:
            return bindings.call_bound(self.blocks, self._names, inputs, extras)
        return call_blocks(self.blocks, inputs, extras)

    def taken(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Of a call's extras, those that are for blocks here."""
        if bindings.CALLS in extras:
            return bindings.taken(extras, self.spec.block_names)
        return {name: value for name, value in extras.items() if name in self.keywords}

    def compile_by(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have the whole run of blocks compiled when it is called.

        Args:
            compiler: What ``torch.compile`` makes of the user's options: it takes a function and gives a compiled one.
        """
        self.forward = compiler(self.forward)  # type: ignore[method-assign]

    def named_stage_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Full names and parameters, each once, in the LightningModule's order."""
        return [(name, getattr(owner, key)) for name, owner, key in self._slots.parameters]

    def named_stage_buffers(self) -> list[tuple[str, Tensor]]:
        """Full names and buffers, persistent or not, each once, in the LightningModule's order."""
        return [(name, getattr(owner, key)) for name, owner, key in self._slots.buffers]

    def named_stage_tensors(self) -> dict[str, Tensor]:
        """Both."""
        return {**dict(self.named_stage_parameters()), **dict(self.named_stage_buffers())}

    def copied(self) -> "StageModule":
        """A stage without blocks that has copies of this one's parameters."""
        holder = nn.ParameterList(
            nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for _, parameter in self.named_stage_parameters()
        )
        slots = tuple((name, holder, str(place)) for place, (name, *_) in enumerate(self._slots.parameters))
        return StageModule(self.spec, (), _Slots(slots, ()))


class _Slots(msgspec.Struct, frozen=True):
    parameters: tuple[_Slot, ...]
    buffers: tuple[_Slot, ...]


def parameter_costs(blocks: Blocks) -> tuple[int, ...]:
    """Number of parameter elements of each block. A parameter that a block holds twice counts once."""
    _refuse_lazy(_inner(blocks))
    return tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks.modules)


def cut(model: nn.Module, blocks: Blocks, ranges: Sequence[range]) -> tuple[StageModule, ...]:
    """Make stages of a model's blocks, without changing the model.

    Args:
        model: The LightningModule. Its parameters may be on meta.
        blocks: What `find_blocks` found in it.
        ranges: The block indices of each stage, from `policy`.

    Raises:
        ConfigError: The ranges do not cover the blocks in order, or the model cannot be trained in stages:
            parameters unknown to the model, sparse gradients, complex parameters, layers that keep something of a
            forward, or that are not initialised.

    Returns:
        The stages that the ranges make; then, if parameters are in no block, one that holds them, on the trainers.
    """
    _check_ranges(ranges, len(blocks.modules))
    layers = layers_behind(model, blocks)
    outside = _outside(model, [*blocks.modules, *layers.values()])
    for refuse in (_refuse_lazy, _refuse_sparse, _refuse_complex):
        refuse([*_inner(blocks), *outside])
    _refuse_foreign_statistics(_inner(blocks))
    runs = [_run(blocks, layers, indices) for indices in ranges]
    _refuse_shared_statistics(runs)
    names = [tuple(blocks.names[i] for i in indices) for indices in ranges]
    parameters, buffers = _parameter_slots(model), _buffer_slots(model)
    held = [_ids(block.parameters() for _, block in run) for run in runs]
    _refuse_unregistered(blocks, set(parameters) | set(buffers))
    tied = {key for key in parameters if sum(key in ids for ids in held) > 1}
    _refuse_mixed(parameters, held, tied)
    if blocks.modules == tuple(blocks.root._modules.values()):
        _refuse_shared(outside, held)  # composites of `configure_stages` may hold what the model has elsewhere, too
    stages = []
    for index, run in enumerate(runs):
        inside = _ids(block.buffers() for _, block in run)
        slots = _Slots(
            tuple(
                _inside(slot, model, run) if key in tied else slot
                for key, slot in parameters.items()
                if key in held[index]
            ),
            tuple(slot for key, slot in buffers.items() if key in inside),
        )
        stages.append(StageModule(_spec(index, names[index], slots), run, slots))
    around = tuple(slot for key, slot in parameters.items() if not any(key in ids for ids in held))
    if around:
        slots = _Slots(around, ())
        stages.append(StageModule(_spec(len(runs), (), slots, on_trainers=True), (), slots))
    return tuple(stages)


def _parameter_slots(model: nn.Module) -> dict[int, _Slot]:
    """Where each parameter lives, by its identity, in the order of `model.named_parameters()`."""
    slots: dict[int, _Slot] = {}
    for prefix, owner in model.named_modules():
        for key, value in owner._parameters.items():
            if value is not None:
                slots.setdefault(id(value), (f"{prefix}.{key}" if prefix else key, owner, key))
    return slots


def _inside(slot: _Slot, model: nn.Module, run: _Run) -> _Slot:
    """The place of a parameter that several stages hold in one of them: what moves there must be seen there."""
    name, owner, key = slot
    parameter = owner._parameters[key]
    inside = {id(module) for _, block in run for module in block.modules()}
    for module in model.modules():
        if id(module) in inside:
            for own, value in module._parameters.items():
                if value is parameter:
                    return name, module, own
    return slot


def _buffer_slots(model: nn.Module) -> dict[int, _Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, owner in model.named_modules():
        for key, value in owner._buffers.items():
            if value is not None:
                slots.setdefault(id(value), (f"{prefix}.{key}" if prefix else key, owner, key))
    return slots


def _ids(groups: Iterable[Iterator[Tensor]]) -> set[int]:
    return {id(tensor) for group in groups for tensor in group}


def _spec(index: int, block_names: tuple[str, ...], slots: _Slots, *, on_trainers: bool = False) -> StageSpec:
    parameters, buffers = tuple(map(_tensor_spec, slots.parameters)), tuple(map(_tensor_spec, slots.buffers))
    return StageSpec(index, block_names, parameters, buffers, on_trainers)


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


def _refuse_mixed(parameters: Mapping[int, _Slot], held: Sequence[set[int]], tied: set[int]) -> None:
    """Stages take the same step only with the same bits: gradients are added up as the widest parameter has them."""
    is_wide = {key: getattr(owner, name).dtype == torch.float64 for key, (_, owner, name) in parameters.items()}
    wide = [any(is_wide[key] for key in ids) for ids in held]
    mixed = [
        parameters[key][0]
        for key in parameters
        if key in tied and len({wide[index] for index, ids in enumerate(held) if key in ids}) > 1
    ]
    if mixed:
        raise ConfigError(
            f"stages that share a parameter must have float64 parameters all or none, got {_few(mixed)} in stages of "
            "which some have and some have not. Convert the model to one dtype, or choose `split` so that the blocks "
            "that share it are in one stage."
        )


def _refuse_shared(outside: Iterable[_Named], held: Sequence[set[int]]) -> None:
    shared = [
        f"{name}.{key}" if name else key
        for name, module in outside
        for key, parameter in module._parameters.items()
        if parameter is not None and any(id(parameter) in ids for ids in held)
    ]
    if shared:
        raise ConfigError(
            "a parameter must be in the blocks of the pipeline or outside of them, not in both, for servers train the "
            f"one and trainers the other: got {_few(shared)} outside, tied to a block's. Untie it, or define "
            "`configure_stages(self)` so that all layers that share it are in one stage."
        )


def _refuse_sparse(modules: Iterable[_Named]) -> None:
    sparse = [name for name, m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if sparse:
        raise ConfigError(
            f"gradients must be dense to be averaged, got `sparse=True` in {_few(sparse)}. Set `sparse=False`."
        )


def _refuse_complex(modules: Iterable[_Named]) -> None:
    found = [
        f"{name}.{key}"
        for name, module in modules
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.is_complex() and parameter.requires_grad
    ]
    if found:
        raise ConfigError(
            f"trained parameters must be real, gradients are summed as real numbers: {_few(found)} are complex. Store "
            "them as real ones (`torch.view_as_real`) and use `torch.view_as_complex` in forward, or freeze them."
        )


def batch_norms(blocks: Blocks) -> list[str]:
    """Names of the layers of blocks that normalise by statistics over the batch, which here is the microbatch."""
    return [name for name, module in _inner(blocks) if isinstance(module, _BatchNorm)]


def _refuse_foreign_statistics(modules: Iterable[_Named]) -> None:
    found = [
        f"{name} ({type(m).__name__})"
        for name, m in modules
        if isinstance(m, nn.SyncBatchNorm) or (isinstance(m, _InstanceNorm) and m.track_running_stats)
    ]
    if found:
        raise ConfigError(
            "layers must change no buffers in forward, but for `BatchNorm`, whose running statistics the swarm keeps: "
            f"got {_few(found)}. Use BatchNorm, GroupNorm, LayerNorm, or InstanceNorm with `track_running_stats=False`."
        )


def _refuse_shared_statistics(runs: Sequence[_Run]) -> None:
    held = [{id(m) for _, block in run for m in block.modules() if isinstance(m, _BatchNorm)} for run in runs]
    num_shared = sum(map(len, held)) - len(set[int]().union(*held))
    if num_shared:
        raise ConfigError(
            "a batch norm must be in one stage only, which keeps its running statistics: got "
            f"{num_shared} in several. Give each place a norm of its own, or choose `split` so that they are in one."
        )


def _refuse_lazy(modules: Iterable[_Named]) -> None:
    lazy = [
        f"{name} ({type(m).__name__})"
        for name, m in modules
        if isinstance(m, LazyModuleMixin)
        and any(is_lazy(t) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    ]
    if lazy:
        raise ConfigError(
            f"layers must know their shapes before the model is cut, got lazy ones that do not: {_few(lazy)}. "
            "Give them their input sizes, or run one batch through the model in `configure_model`."
        )


def _run(blocks: Blocks, layers: Mapping[int, BoundaryLayer], indices: range) -> _Run:
    before = layers.get(indices.start - 1)
    run: list[tuple[str | None, nn.Module]] = [] if before is None else [(None, before.decompress)]
    for index in indices:
        run.append((blocks.names[index], blocks.modules[index]))
        if index in layers:
            goes_on_elsewhere = indices.stop == index + 1 < len(blocks.modules)
            run.append((None, layers[index].compress if goes_on_elsewhere else layers[index]))
    return run


def _outside(model: nn.Module, run: Iterable[nn.Module]) -> list[_Named]:
    """The modules that are no part of what stages run."""
    inside = {id(module) for one in run for module in one.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def _inner(blocks: Blocks) -> Iterator[_Named]:
    for block_name, block in zip(blocks.names, blocks.modules, strict=True):
        for name, module in block.named_modules():
            yield (f"{block_name}.{name}" if name else block_name), module


def _few(items: Sequence[str]) -> str:
    more = f", ... ({len(items)} in all)" if len(items) > _MAX_NAMED else ""
    return ", ".join(items[:_MAX_NAMED]) + more
