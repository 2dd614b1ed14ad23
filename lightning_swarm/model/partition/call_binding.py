"""What each block of a list is called with by a forward of the user's own, as extras that travel with a microbatch.

Blocks may be given different values under one name, such as the masks of local and of global attention. Each value
travels once; the call of a block says which of them it takes as which argument. Values that want a gradient, such as an
encoder's output, go with the hidden state from block to block, and their gradient comes back with that one's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol import serialization

CALLS: Final = "calls of the blocks"
"""Beside the values, what the blocks are called with. No argument has this name."""

CARRIED: Final = "carried with the hidden state"
"""Likewise: the names of the values that are, and the last block, which needs to hand them on to nobody."""

_NTH: Final = "#"


Pick: TypeAlias = int | str | tuple[int, int]
"""An index, a key, or a place among as many as there must be."""


@dataclass(frozen=True)
class BlockCall:
    """One block's call.

    Attributes:
        arguments: All but the hidden state, by name.
        picks: What the forward took of what the block gave, one after the other, before it handed that to the next
            block: ``(0,)`` of ``x = block(x)[0]``, ``((0, 2),)`` of ``x, weights = block(x)``.
    """

    arguments: Mapping[str, Any]
    picks: tuple[Pick, ...] = ()


def bind(
    names: Sequence[str], calls: Iterable[BlockCall], shared: Collection[str] = ()
) -> tuple[list[Any], dict[str, Any]]:
    """How blocks are called.

    Args:
        names: Of the blocks.
        calls: Of each of them.
        shared: Arguments that belong to no sample: no gradient comes back for them.

    Returns:
        What is handed to the first block beside the hidden state, to be carried; and the extras.
    """
    values: dict[str, Any] = {}
    bound = {
        name: ({argument: _enter(values, argument, value) for argument, value in call.arguments.items()}, call.picks)
        for name, call in zip(names, calls, strict=True)
    }
    carried = [name for name, value in values.items() if argument_of(name) not in shared and _wants_gradient(value)]
    extras = {name: value for name, value in values.items() if name not in carried} | {CALLS: bound}
    return [values[name] for name in carried], extras | ({CARRIED: [carried, names[-1]]} if carried else {})


def argument_of(name: str) -> str:
    """The argument that an extra's value is for."""
    return name.partition(_NTH)[0]


def taken(extras: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Of the extras that `bind` gave, those for some of the blocks."""
    bound = {name: call for name, call in extras[CALLS].items() if name in names}
    wanted = {value for arguments, _ in bound.values() for value in arguments.values()}
    found = {name: value for name, value in extras.items() if name in wanted or name == CARRIED}
    return {**found, CALLS: bound}


def call_bound(
    blocks: Iterable[nn.Module], names: Sequence[str | None], inputs: tuple[Any, ...], extras: Mapping[str, Any]
) -> Any:
    """Call blocks in order, as the extras say.

    Args:
        blocks: What to call.
        names: Of the blocks; None: of what stands between blocks, and takes nothing but the hidden state.
        inputs: For the first: what the block before it gave, or the hidden state and what is to be carried.
        extras: What `bind` gave, or `taken` of that.

    Returns:
        The hidden state; if there is something to be carried and this is not the end, a tuple with that behind it.
    """
    carried, last = extras.get(CARRIED, ([], names[-1]))
    hidden, *others = inputs if len(inputs) > 1 or not carried else inputs[0]
    extras = {**extras, **dict(zip(carried, others, strict=True))}
    for block, name in zip(blocks, names, strict=True):
        arguments, picks = extras[CALLS][name] if name is not None else ({}, ())
        hidden = block(hidden, **{argument: extras[value] for argument, value in arguments.items()})
        for pick in picks:
            hidden = _picked(hidden, pick, name)
    return hidden if not carried or last in names else (hidden, *others)


def _picked(output: Any, pick: Pick, name: str | None) -> Any:
    if not isinstance(output, tuple | list | dict):
        raise ConfigError(
            f"only a tuple, a list or a dict that a block gives may be indexed between blocks, got [{pick!r}] of block "
            f"{name!r}, which gave a {type(output).__name__}: of a tensor that would be a sample of the microbatch. "
            "Index it in the block."
        )
    values: Any = output
    if not isinstance(pick, tuple):
        return values[pick]
    place, count = pick
    values = list(output)
    if len(values) != count:
        raise ConfigError(
            f"what a block gives must have as many parts as it is unpacked into: {count}, got {len(values)} of block "
            f"{name!r}. Unpack all of them."
        )
    return values[place]


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same tensors in equal containers."""
    structure, tensors = serialization.flatten(one)
    others_structure, others = serialization.flatten(other)
    return structure == others_structure and all(a is b for a, b in zip(tensors, others, strict=True))


def _wants_gradient(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in serialization.flatten(value)[1])


def _enter(values: dict[str, Any], argument: str, value: Any) -> str:
    """The name under which `values` hold the value, from now on if not before."""
    name, count = argument, 1
    while name in values and not same(values[name], value):
        count += 1
        name = f"{argument}{_NTH}{count}"
    values.setdefault(name, value)
    return name
