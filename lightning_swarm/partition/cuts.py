"""Stages made of a model's blocks, without changing the model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_swarm.boundary import BoundaryLayer
from lightning_swarm.partition import refusals
from lightning_swarm.partition.blocks import Blocks
from lightning_swarm.partition.boundaries import layers_behind
from lightning_swarm.partition.stages import Named, Run, Slot, Slots, StageModule, spec_of


def parameter_costs(blocks: Blocks) -> tuple[int, ...]:
    """Number of parameter elements of each block. A parameter that a block holds twice counts once."""
    refusals.check_initialised(blocks.named_modules())
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
    refusals.check_ranges(ranges, len(blocks.modules))
    layers = layers_behind(model, blocks)
    outside = _outside(model, [*blocks.modules, *layers.values()])
    refusals.check_modules(list(blocks.named_modules()), outside)
    runs = [_run(blocks, layers, indices) for indices in ranges]
    refusals.check_statistics(runs)
    names = [tuple(blocks.names[i] for i in indices) for indices in ranges]
    parameters, buffers = _parameter_slots(model), _buffer_slots(model)
    held = [_ids(block.parameters() for _, block in run) for run in runs]
    refusals.check_registered(blocks, set(parameters) | set(buffers))
    tied = {key for key in parameters if sum(key in ids for ids in held) > 1}
    refusals.check_dtypes(parameters, held, tied)
    if blocks.modules == tuple(blocks.root._modules.values()):
        refusals.check_untied(outside, held)  # those of `configure_stages` may hold what the model has elsewhere, too
    stages = []
    for index, run in enumerate(runs):
        inside = _ids(block.buffers() for _, block in run)
        slots = Slots(
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
        slots = Slots(around, ())
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
