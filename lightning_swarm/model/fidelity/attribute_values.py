"""Plain values of modules' attributes, which can be sent to peers: numbers, strings, None, and short lists of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final

from lightning_swarm.core.errors import ProtocolError

SCALARS: Final = frozenset({type(None), bool, int, float, str})
_SEQUENCES: Final = frozenset({list, tuple})
_CONTAINERS: Final = _SEQUENCES | {dict, set}
_MAX_LENGTH: Final = 4096  # characters of a string, or items of a sequence
_MAX_DEPTH: Final = 4


def is_plain(value: object, depth: int = _MAX_DEPTH) -> bool:
    """Return whether a value is plain, so that it can be sent."""
    kind = type(value)
    if isinstance(value, list | tuple) and kind in _SEQUENCES:
        return depth > 0 and len(value) <= _MAX_LENGTH and all(is_plain(item, depth - 1) for item in value)
    if isinstance(value, str):
        return kind is str and len(value) <= _MAX_LENGTH
    # Messages carry integers of 64 bits.
    return kind in SCALARS and not (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63)


def fits(value: object, first: object) -> bool:
    """Return whether `value` may replace `first` in an attribute: both are of one kind, or one of them is None."""
    kinds = (bool | int | float, str, list | tuple)
    return first is None or value is None or any(isinstance(value, kind) and isinstance(first, kind) for kind in kinds)


def same(value: Any, other: Any) -> bool:
    """Return whether values are equal, or one object; False if `==` has no single truth value, as for tensors."""
    if value is other:
        return True
    try:
        return type(value) is type(other) and bool(value == other)
    except (RuntimeError, ValueError, TypeError):
        return False


def pack(value: Any) -> Any:
    """Encode a plain value for the wire, and mark each sequence as tuple or list, because the wire has only lists."""
    return [type(value) is tuple, *map(pack, value)] if type(value) in _SEQUENCES else value


def unpack(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Decode a value of `pack`; raise `ProtocolError` for any other value."""
    if type(value) is list:
        if depth == 0 or not value or len(value) > _MAX_LENGTH + 1 or type(value[0]) is not bool:
            raise ProtocolError("a list for a module's attribute must begin with a bool, True for tuples, and be short")
        items = [unpack(item, depth - 1) for item in value[1:]]
        return tuple(items) if value[0] else items
    if not is_plain(value):
        raise ProtocolError(f"a module's attribute must be a plain value, got a {type(value).__name__}")
    return value


class Comparison:
    """Compares entries of dicts with wanted values, in C because each call does so; identical objects are equal."""

    def __init__(self, dicts: Iterable[Mapping[str, Any]], wanted: Iterable[Mapping[str, Any]]) -> None:
        """Prepare to compare each dict with its `wanted` entries, of which there must be at least one."""
        self._dicts = list(dicts)
        self._getters, self._values = [], []
        for entries in wanted:
            self._getters.append(itemgetter(*entries))  # returns a value, not a tuple, if there is one name
            self._values.append(tuple(entries.values()) if len(entries) > 1 else next(iter(entries.values())))

    def holds(self) -> bool:
        """Return whether all values equal the wanted values."""
        try:
            return [get(values) for get, values in zip(self._getters, self._dicts, strict=True)] == self._values
        except (KeyError, RuntimeError, ValueError, TypeError):  # an entry is gone, or a tensor has replaced it
            return False


def copy_containers(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Copy the containers in a value, `depth` levels deep, so that later changes in place do not reach the copy."""
    kind = type(value)
    if not depth or kind not in _CONTAINERS:
        return value
    if kind is dict:
        return {key: copy_containers(item, depth - 1) for key, item in value.items()}
    return kind(copy_containers(item, depth - 1) for item in value)


def is_comparable(value: object) -> bool:
    """Return whether a value consists of numbers and strings, in containers of limited depth and size."""
    are_scalars = list(islice(_are_scalars(value, _MAX_DEPTH), _MAX_LENGTH + 1))
    return len(are_scalars) <= _MAX_LENGTH and all(are_scalars)


def _are_scalars(value: Any, depth: int) -> Iterator[bool]:
    if depth and type(value) in _CONTAINERS:
        for item in chain(value, value.values()) if type(value) is dict else value:
            yield from _are_scalars(item, depth - 1)
    else:
        yield type(value) in SCALARS
