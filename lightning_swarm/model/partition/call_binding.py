"""Records how a user's forward calls the blocks of a `ModuleList`, to repeat the calls on a server.

The record travels with each microbatch: as its extras, and as values beside its hidden state.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from torch import nn

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.protocol import serialization

CALLS: Final = "calls of the blocks"
"""Key of the blocks' calls in the extras, which also have the values of arguments. No argument has this name."""

CARRIED: Final = "carried with the hidden state"
"""Key of a pair: the names of values that travel with the hidden state, and the name of the last block.

After the last block, only the hidden state is returned.
"""

_MAX_CACHED_CALLS: Final = 64  # decoded JSON that is cached, because all steps of a generated text have the same calls
_MAX_CACHED_CHARS: Final = 1 << 16  # longer JSON is decoded each time
_NTH: Final = "#"  # separates an argument's name from the number of its value, if the argument has several

Pick: TypeAlias = int | str | tuple[int, int]  # an index, a key, or (index, required number of parts)


@dataclass(frozen=True)
class BlockCall:
    """One call of a block."""

    arguments: Mapping[str, Any]  # all but the hidden state, by name
    # The forward's selections from the block's output, which the next block gets: ``(0,)`` for ``x = block(x)[0]``,
    # ``((0, 2),)`` for ``x, weights = block(x)``.
    picks: tuple[Pick, ...] = ()


def bind(
    names: Sequence[str],
    calls: Iterable[BlockCall],
    shared: Collection[str] = (),  # arguments without a dimension of samples; they get no gradient
    *,
    carries: bool = True,  # whether values that need a gradient travel with the hidden state
) -> tuple[list[Any], dict[str, Any]]:
    """Convert calls of the named blocks to carried values, which need a gradient, and to extras."""
    # Blocks may get different values under one name, such as the masks of local and of global attention. Each value
    # travels once, and each call names the value of each argument.
    values: dict[str, Any] = {}
    bound = {
        name: (
            {argument: _add_value(values, argument, value) for argument, value in call.arguments.items()},
            call.picks,
        )
        for name, call in zip(names, calls, strict=True)
    }
    # Values that need a gradient, such as an encoder's output, travel with the hidden state from block to block. Their
    # gradients return with the hidden state's gradient.
    carried = [
        name
        for name, value in values.items()
        if carries and argument_of(name) not in shared and any(t.requires_grad for t in serialization.flatten(value)[1])
    ]
    extras = {name: value for name, value in values.items() if name not in carried} | {CALLS: bound}
    return [values[name] for name in carried], extras | ({CARRIED: [carried, names[-1]]} if carried else {})


def argument_of(name: str) -> str:
    """Return the name of the argument that an extra is for."""
    return name.partition(_NTH)[0]


def packed_calls(calls: Any) -> str:
    """Return the calls of `bind` as JSON, because a string is encoded faster than nested values."""
    return msgspec.json.encode(serialization.flatten(calls)[0]).decode()


def _unpacked_calls(calls: Any) -> Any:
    """Return the calls of the blocks from their JSON, which may be untrusted, or unchanged if they are not packed."""
    if not isinstance(calls, str):
        return calls
    return _decode_calls(calls) if len(calls) <= _MAX_CACHED_CHARS else _decode_calls.__wrapped__(calls)


@functools.lru_cache(_MAX_CACHED_CALLS)
def _decode_calls(text: str) -> Any:
    try:
        return serialization.unflatten(msgspec.json.decode(text), [])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"the calls of blocks must be JSON, got {text[:40]!r}: {error}") from error


def extras_for(extras: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Select the extras that the blocks of these names need from the extras of `bind`."""
    calls = _unpacked_calls(extras[CALLS])
    bound = {name: call for name, call in calls.items() if name in names}
    wanted = {value for arguments, _ in bound.values() for value in arguments.values()}
    found = {name: value for name, value in extras.items() if name in wanted or name == CARRIED}
    return {**found, CALLS: bound if calls is extras[CALLS] else extras[CALLS]}


def extras_after(extras: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Select the extras that the blocks not in `names` need."""
    return extras_for(extras, [name for name in _unpacked_calls(extras[CALLS]) if name not in names])


def call_bound(
    blocks: Iterable[nn.Module],
    names: Sequence[str | None],  # None for a layer between blocks, which takes only the hidden state
    inputs: tuple[Any, ...],  # the hidden state and the carried values, or one tuple of these
    extras: Mapping[str, Any],
) -> Any:
    """Call blocks in order, with the extras of `bind`; before the last block, the result has the carried values."""
    carried, last = extras.get(CARRIED, ([], names[-1]))
    if carried and len(inputs) == 1:
        (inputs,) = inputs  # the output of the block before, which is such a tuple
    hidden, *others = inputs
    extras, calls = {**extras, **dict(zip(carried, others, strict=True))}, _unpacked_calls(extras[CALLS])
    for block, name in zip(blocks, names, strict=True):
        arguments, picks = calls[name] if name is not None else ({}, ())
        hidden = block(hidden, **{argument: extras[value] for argument, value in arguments.items()})
        for pick in picks:
            hidden = _select(hidden, pick, name)
    return hidden if not carried or last in names else (hidden, *others)


def _select(output: Any, pick: Pick, name: str | None) -> Any:
    if not isinstance(output, tuple | list | dict):
        raise ConfigError(
            f"between blocks, only a tuple, list or dict that a block returned may be indexed, got [{pick!r}] of "
            f"block {name!r}, which returned a {type(output).__name__}. The index of a tensor would select a sample "
            "of the microbatch. Index it in the block."
        )
    values: Any = output
    if not isinstance(pick, tuple):
        return values[pick]
    index, count = pick
    values = list(output)
    if len(values) != count:
        raise ConfigError(
            f"a block must return as many values as the forward unpacks, {count}; block {name!r} returned "
            f"{len(values)}. Unpack all of them."
        )
    return values[index]


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are the same tensors in equal containers."""
    structure, tensors = serialization.flatten(one)
    other_structure, others = serialization.flatten(other)
    return structure == other_structure and all(a is b for a, b in zip(tensors, others, strict=True))


def _add_value(values: dict[str, Any], argument: str, value: Any) -> str:
    """Add a value to `values`, unless an argument of this name has it already, and return the value's name."""
    name, count = argument, 1
    while name in values and not _same(values[name], value):
        count += 1
        name = f"{argument}{_NTH}{count}"
    values.setdefault(name, value)
    return name
