"""Boundary layers and cuts: which stands behind which block, and new ones where a model is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_swarm.boundary import Boundary, BoundaryLayer, boundary_layers, described, insert_boundary, sized
from lightning_swarm.errors import ConfigError
from lightning_swarm.partition.blocks import Blocks


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
