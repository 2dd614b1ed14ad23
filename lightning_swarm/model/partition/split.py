"""Which blocks make up which stage, as the user's settings say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import (
    Boundary,
    BoundaryLayer,
    boundary_layers,
    described,
    insert_boundary,
    sized,
)
from lightning_swarm.model.partition import checks
from lightning_swarm.model.partition.blocks import Blocks
from lightning_swarm.model.partition.policy import balanced, named
from lightning_swarm.model.partition.stages import Named, Run, Slot, StageModule, TensorIndex, spec_of


def layers_behind(model: nn.Module, blocks: Blocks) -> dict[int, BoundaryLayer]:
    """The boundary layers of a model, by the indices of the blocks that they stand after.

    Raises:
        ConfigError: One stands after something else.
    """
    layers = boundary_layers(model)
    places = {id(model.get_submodule(name)): name for name in layers}
    behind = {i: places.pop(id(block)) for i, block in enumerate(blocks.modules) if id(block) in places}
    if len(behind) < len(layers):
        raise ConfigError(
            "boundary layers must stand after blocks of the pipeline, got ones after "
            f"{sorted(places.values())}. Leave them out, or name another `pipeline`."
        )
    return {index: layers[name] for index, name in behind.items()}


def insert_at_cuts(model: nn.Module, blocks: Blocks, ranges: Sequence[range], boundary: Boundary) -> None:
    """Put a boundary layer at each cut, unless the model has its own by now: then there must be one at each.

    Args:
        model: Will have them for good.
        blocks: Of its pipeline.
        ranges: The blocks of each stage.
        boundary: Which layers.

    Raises:
        ConfigError: As `check_cuts` does.
    """
    new = check_cuts(model, blocks, ranges, boundary)
    if new:
        insert_boundary(model, boundary, new)


def check_cuts(model: nn.Module, blocks: Blocks, ranges: Sequence[range], boundary: Boundary) -> list[str]:
    """After what new boundary layers would stand, by full names: a model that has its own gets none.

    Args:
        model: Stays as it is.
        blocks: Of its pipeline.
        ranges: The blocks of each stage.
        boundary: Which layers.

    Raises:
        ConfigError: There is no cut, or no room at one; or the model's own layers are others.
    """
    cuts = [indices.stop - 1 for indices in ranges[:-1]]
    own = layers_behind(model, blocks)
    if own:
        _check_own(described(model), boundary)
        missing = [blocks.names[index] for index in cuts if index not in own]
        if missing:
            raise ConfigError(
                "a model that has boundary layers must be cut where they stand, after blocks "
                f"{[blocks.names[index] for index in own]}, got cuts after {missing}. Correct `split`, or leave it out."
            )
    elif not cuts:
        raise ConfigError(
            "`boundary` stands between stages, so there must be at least 2, got 1. Raise `num_stages`, or leave "
            "`boundary` out."
        )
    else:
        new = [_full_name(model, blocks, index) for index in cuts]
        sized(model, boundary, new)
        return new
    return []


def _check_own(own: Mapping[str, Boundary], boundary: Boundary) -> None:
    for name, there in own.items():
        if type(there) is not type(boundary) or there.ratio != boundary.ratio:
            raise ConfigError(
                f"`boundary` must be what the model has, maybe from its checkpoint: {there!r} stands after {name!r}, "
                f"got {boundary!r}. Leave `boundary` out, or begin with a model without."
            )


def _full_name(model: nn.Module, blocks: Blocks, index: int) -> str:
    block = blocks.modules[index]
    name: str | None = next((name for name, module in model.named_modules() if module is block), None)
    if name is None:
        raise ConfigError(
            f"a boundary layer must stand after a part of the model, got block {blocks.names[index]!r}, a "
            f"{type(block).__name__} that is none: without a swarm nobody would go through the layer. Make it an "
            "attribute of the model, or cut elsewhere with `split=...`."
        )
    if sum(one is block for one in blocks.modules) > 1:
        raise ConfigError(
            f"a boundary layer must stand after a block that comes once, got {name!r}, which comes again. Cut "
            "elsewhere, with `split=...`."
        )
    return name


def parameter_costs(blocks: Blocks) -> tuple[int, ...]:
    """Number of parameter elements of each block. A parameter that a block holds twice counts once."""
    checks.check_initialised(blocks.named_modules())
    return tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks.modules)


def batch_norms(blocks: Blocks) -> list[str]:
    """Names of the layers of blocks that normalise by statistics over the batch, which here is the microbatch."""
    return [name for name, module in blocks.named_modules() if isinstance(module, _BatchNorm)]


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
    checks.check_ranges(ranges, len(blocks.modules))
    layers = layers_behind(model, blocks)
    outside = _outside(model, [*blocks.modules, *layers.values()])
    checks.check_modules(list(blocks.named_modules()), outside)
    runs = [_run(blocks, layers, indices) for indices in ranges]
    checks.check_statistics(runs)
    names = [tuple(blocks.names[i] for i in indices) for indices in ranges]
    parameters, buffers = _parameter_slots(model), _buffer_slots(model)
    held = [_ids(block.parameters() for _, block in run) for run in runs]
    checks.check_registered(blocks, set(parameters) | set(buffers))
    tied = {key for key in parameters if sum(key in ids for ids in held) > 1}
    checks.check_dtypes(parameters, held, tied)
    if blocks.modules == tuple(blocks.root._modules.values()):
        checks.check_untied(outside, held)  # those of `configure_stages` may hold what the model has elsewhere, too
    stages = []
    for index, run in enumerate(runs):
        inside = _ids(block.buffers() for _, block in run)
        slots = TensorIndex(
            tuple(
                _inside(slot, model, run) if key in tied else slot
                for key, slot in parameters.items()
                if key in held[index]
            ),
            tuple(slot for key, slot in buffers.items() if key in inside),
        )
        stages.append(StageModule(spec_of(index, names[index], slots), run, slots))
    around = tuple(slot for key, slot in parameters.items() if not any(key in ids for ids in held))
    if around:
        slots = TensorIndex(around, ())
        stages.append(StageModule(spec_of(len(runs), (), slots, on_trainers=True), (), slots))
    return tuple(stages)


def _parameter_slots(model: nn.Module) -> dict[int, Slot]:
    """Where each parameter lives, by its identity, in the order of `model.named_parameters()`."""
    slots: dict[int, Slot] = {}
    for prefix, owner in model.named_modules():
        for key, value in owner._parameters.items():
            if value is not None:
                slots.setdefault(id(value), (f"{prefix}.{key}" if prefix else key, owner, key))
    return slots


def _inside(slot: Slot, model: nn.Module, run: Run) -> Slot:
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


def _buffer_slots(model: nn.Module) -> dict[int, Slot]:
    slots: dict[int, Slot] = {}
    for prefix, owner in model.named_modules():
        for key, value in owner._buffers.items():
            if value is not None:
                slots.setdefault(id(value), (f"{prefix}.{key}" if prefix else key, owner, key))
    return slots


def _ids(groups: Iterable[Iterator[Tensor]]) -> set[int]:
    return {id(tensor) for group in groups for tensor in group}


def _run(blocks: Blocks, layers: Mapping[int, BoundaryLayer], indices: range) -> Run:
    before = layers.get(indices.start - 1)
    run: list[tuple[str | None, nn.Module]] = [] if before is None else [(None, before.decompress)]
    for index in indices:
        run.append((blocks.names[index], blocks.modules[index]))
        if index in layers:
            goes_on_elsewhere = indices.stop == index + 1 < len(blocks.modules)
            run.append((None, layers[index].compress if goes_on_elsewhere else layers[index]))
    return run


def _outside(model: nn.Module, run: Iterable[nn.Module]) -> list[Named]:
    """The modules that are no part of what stages run."""
    inside = {id(module) for one in run for module in one.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def choose_ranges(
    blocks: Blocks,
    num_stages: int,
    split: str | tuple[str, ...],
    measured: Callable[[], Sequence[int]] | None = None,
    *,
    seams: Collection[int] = (),
) -> tuple[range, ...]:
    """Which blocks make up which stage.

    Args:
        blocks: What is cut.
        num_stages: Into how many.
        split: As in `SwarmConfig`.
        measured: What each block costs, for ``split="time"``; None: any cut will do.
        seams: Blocks that boundary layers stand after. If there are any, stages end only there, or as `split` names.

    Raises:
        ConfigError: Too few blocks, unknown names, or names that disagree with `num_stages`.
    """
    if isinstance(split, str):
        by_size = parameter_costs(blocks)
        costs = measured() if split == "time" and measured else by_size
        return _at_seams(costs, num_stages, seams) if seams else balanced(costs, num_stages)
    ranges = named(blocks.names, list(split))
    if len(ranges) != num_stages:
        raise ConfigError(
            f"`split` must name the beginnings of `num_stages` stages: it makes {len(ranges)}, and `num_stages` is "
            f"{num_stages}. Make them agree."
        )
    return ranges


def _at_seams(costs: Sequence[int], num_stages: int, seams: Collection[int]) -> tuple[range, ...]:
    ends = sorted({*seams, len(costs) - 1})
    if not 1 <= num_stages <= len(ends):
        raise ConfigError(
            f"a model with boundary layers is cut where they stand: `num_stages` must be 1..{len(ends)}, got "
            f"{num_stages}. Lower it, or name the blocks where stages begin with `split=[...]`."
        )
    parts = [range(start + 1, end + 1) for start, end in zip([-1, *ends], ends, strict=False)]
    runs = balanced([sum(costs[index] for index in part) for part in parts], num_stages)
    return tuple(range(parts[run.start].start, parts[run.stop - 1].stop) for run in runs)
