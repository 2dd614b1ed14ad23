"""Partitions a model into stages by the user's settings, with boundary layers between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import (
    Boundary,
    BoundaryLayer,
    boundary_layers,
    describe_layers,
    insert_boundary,
    plan_layers,
)
from lightning_swarm.model.partition import checks
from lightning_swarm.model.partition.blocks import Blocks
from lightning_swarm.model.partition.stage_ranges import balanced_ranges, named_ranges
from lightning_swarm.model.partition.stages import Named, Slot, StageModule, StageModules, TensorIndex, spec_of


def layers_by_block(model: nn.Module, blocks: Blocks) -> dict[int, BoundaryLayer]:
    """Return a model's boundary layers by the indices of the blocks that they stand after."""
    layers = boundary_layers(model)
    names = {id(model.get_submodule(name)): name for name in layers}
    after = {i: names.pop(id(block)) for i, block in enumerate(blocks.modules) if id(block) in names}
    if len(after) < len(layers):
        raise ConfigError(
            "boundary layers must stand after blocks of the pipeline, got layers after "
            f"{sorted(names.values())}. Leave them out, or name another `pipeline`."
        )
    return {index: layers[name] for index, name in after.items()}


def insert_boundaries(model: nn.Module, blocks: Blocks, ranges: Sequence[range], boundary: Boundary) -> None:
    """Insert a boundary layer after each stage but the last, unless the model has boundary layers already."""
    new = plan_boundaries(model, blocks, ranges, boundary)
    if new:
        insert_boundary(model, boundary, new)


def plan_boundaries(model: nn.Module, blocks: Blocks, ranges: Sequence[range], boundary: Boundary) -> list[str]:
    """Return the full names of the blocks after which new layers would stand; none if the model has layers already."""
    last_blocks = [indices.stop - 1 for indices in ranges[:-1]]
    existing = layers_by_block(model, blocks)
    if existing:
        for name, layer in describe_layers(model).items():
            if type(layer) is not type(boundary) or layer.ratio != boundary.ratio:
                raise ConfigError(
                    f"`boundary` must equal the layers that the model has, maybe from its checkpoint: {layer!r} stands "
                    f"after {name!r}, got {boundary!r}. Leave `boundary` out, or begin with a model without layers."
                )
        missing = [blocks.names[index] for index in last_blocks if index not in existing]
        if missing:
            raise ConfigError(
                "a model that has boundary layers must be cut where they stand, after blocks "
                f"{[blocks.names[index] for index in existing]}, got cuts after {missing}. Correct `split`, or leave "
                "it out."
            )
        return []
    if not last_blocks:
        raise ConfigError(
            "`boundary` stands between stages, so there must be at least 2, got 1. Raise `num_stages`, or leave "
            "`boundary` out."
        )
    new = [_full_name(model, blocks, index) for index in last_blocks]
    plan_layers(model, boundary, new)
    return new


def _full_name(model: nn.Module, blocks: Blocks, index: int) -> str:
    block = blocks.modules[index]
    name: str | None = next((name for name, module in model.named_modules() if module is block), None)
    if name is None:
        raise ConfigError(
            "a boundary layer must stand after a module that is an attribute of the model, got block "
            f"{blocks.names[index]!r}, a {type(block).__name__} that is not. Without a swarm, the layer would not be "
            "called. Make the block an attribute of the model, or cut elsewhere with `split=...`."
        )
    if sum(other is block for other in blocks.modules) > 1:
        raise ConfigError(
            f"a boundary layer must stand after a block that is called once, got {name!r}, which the pipeline repeats. "
            "Cut elsewhere, with `split=...`."
        )
    return name


def parameter_costs(blocks: Blocks) -> tuple[int, ...]:
    """Count the parameter elements of each block; a parameter that a block holds twice counts once."""
    checks.check_initialised(blocks.named_modules())
    return tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks.modules)


def build_stages(model: nn.Module, blocks: Blocks, ranges: Sequence[range]) -> tuple[StageModule, ...]:
    """Build a stage for each range of a LightningModule's blocks, without changing it; parameters may be on meta.

    Parameters outside of all blocks are in one more stage, on the trainers.
    """
    if not blocks.is_empty:
        checks.check_ranges(ranges, len(blocks.modules))
    layers = layers_by_block(model, blocks)
    outside = _outside(model, [*blocks.modules, *layers.values()])
    checks.check_modules(blocks.named_modules(), outside)
    computed = [_stage_modules(blocks, layers, indices) for indices in ranges]
    checks.check_statistics(computed)
    names = [tuple(blocks.names[i] for i in indices) for indices in ranges]
    parameters = _slots(model, lambda module: module._parameters)
    buffers = _slots(model, lambda module: module._buffers)
    held = [_ids(block.parameters() for _, block in modules) for modules in computed]  # stage -> ids of its parameters
    checks.check_registered(blocks, set(parameters) | set(buffers))
    tied = {key for key in parameters if sum(key in ids for ids in held) > 1}
    checks.check_dtypes(parameters, held, tied)
    if blocks.modules == tuple(blocks.root._modules.values()):
        checks.check_untied(outside, held)  # blocks of `configure_stages` may share parameters with other modules
    stages = []
    for index, modules in enumerate(computed):
        inside = _ids(block.buffers() for _, block in modules)
        own_parameters = {key: slot for key, slot in parameters.items() if key in held[index]}
        slots = TensorIndex(
            tuple(
                _slot_in_stage(slot, model, modules) if key in tied else slot for key, slot in own_parameters.items()
            ),
            tuple(slot for key, slot in buffers.items() if key in inside),
        )
        stages.append(StageModule(spec_of(index, names[index], slots), modules, slots, outside))
    for index, stage in enumerate(stages):
        stage.read_later = frozenset[str]().union(*(later.keywords for later in stages[index + 1 :]))
    around = tuple(slot for key, slot in parameters.items() if not any(key in ids for ids in held))
    if blocks.is_empty:
        slots = TensorIndex(around, tuple(buffers.values()))
        stages.append(StageModule(spec_of(0, (), slots, on_trainers=True), (), slots, outside))
    elif around:
        slots = TensorIndex(around, ())
        stages.append(StageModule(spec_of(len(computed), (), slots, on_trainers=True), (), slots))
    return tuple(stages)


def _slots(model: nn.Module, tensors_of: Callable[[nn.Module], Mapping[str, Tensor | None]]) -> dict[int, Slot]:
    """Return the slot of each parameter or buffer, by its `id`, in the order of the model's modules."""
    slots: dict[int, Slot] = {}
    for prefix, owner in model.named_modules():
        for key, tensor in tensors_of(owner).items():
            if tensor is not None:
                slots.setdefault(id(tensor), (f"{prefix}.{key}" if prefix else key, owner, key))
    return slots


def _slot_in_stage(slot: Slot, model: nn.Module, computed: StageModules) -> Slot:
    """Return the slot of a tied parameter in a module of the stage, so that the stage sees a replaced parameter."""
    name, owner, key = slot
    parameter = owner._parameters[key]
    inside = {id(module) for _, block in computed for module in block.modules()}
    for module in model.modules():
        if id(module) in inside:
            for own_key, value in module._parameters.items():
                if value is parameter:
                    return name, module, own_key
    return slot


def _ids(groups: Iterable[Iterator[Tensor]]) -> set[int]:
    return {id(tensor) for group in groups for tensor in group}


def _stage_modules(blocks: Blocks, layers: Mapping[int, BoundaryLayer], indices: range) -> StageModules:
    """Return the modules of a stage: its blocks and boundary layers, or the halves of layers at its ends."""
    before = layers.get(indices.start - 1)
    modules: list[tuple[str | None, nn.Module]] = [] if before is None else [(None, before.decompress)]
    for index in indices:
        modules.append((blocks.names[index], blocks.modules[index]))
        if index in layers:
            stage_ends_here = indices.stop == index + 1 < len(blocks.modules)
            modules.append((None, layers[index].compress if stage_ends_here else layers[index]))
    return modules


def _outside(model: nn.Module, modules: Iterable[nn.Module]) -> list[Named]:
    inside = {id(module) for part in modules for module in part.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def choose_ranges(
    blocks: Blocks,
    num_stages: int,
    split: str | tuple[str, ...],
    measured: Callable[[], Sequence[int]] | None = None,  # times for ``split="time"``; None: count parameters
    *,
    seams: Collection[int] = (),  # blocks before boundary layers, where stages end unless `split` names blocks
) -> tuple[range, ...]:
    """Choose the blocks of each stage by the settings `num_stages` and `split` of `SwarmConfig`."""
    if isinstance(split, str):
        by_size = parameter_costs(blocks)
        costs = measured() if split == "time" and measured else by_size
        return _ranges_at_seams(costs, num_stages, seams) if seams else balanced_ranges(costs, num_stages)
    ranges = named_ranges(blocks.names, list(split))
    if len(ranges) != num_stages:
        raise ConfigError(
            f"`split` must name the first blocks of `num_stages` stages, got {len(ranges)} stages and `num_stages` of "
            f"{num_stages}. Make them agree."
        )
    return ranges


def _ranges_at_seams(costs: Sequence[int], num_stages: int, seams: Collection[int]) -> tuple[range, ...]:
    """Choose balanced ranges that end only at seams, by treating the blocks between two seams as one."""
    ends = sorted({*seams, len(costs) - 1})
    if not 1 <= num_stages <= len(ends):
        raise ConfigError(
            f"a model with boundary layers is cut where they stand: `num_stages` must be 1..{len(ends)}, got "
            f"{num_stages}. Lower it, or name the blocks where stages begin with `split=[...]`."
        )
    parts = [range(start + 1, end + 1) for start, end in zip([-1, *ends], ends, strict=False)]
    chosen = balanced_ranges([sum(costs[index] for index in part) for part in parts], num_stages)
    return tuple(range(parts[group.start].start, parts[group.stop - 1].stop) for group in chosen)
