"""Serializes the state of loops and callbacks without pickle. Only the following kinds of values are supported.

=================================  =======================================================
value                              in the structure
=================================  =======================================================
None, bool, int, float, str        itself
bytes                              itself
tensor, on any device              ``["tensor", index]``
numpy array                        ``["array", index]``
numpy number                       ``["number", index]``
integer of more than 64 bits       ``["integer", digits]``
list, tuple, set, `torch.Size`     ``[kind, *children]``
dict, `OrderedDict`, `Counter`     ``[kind, key, value, key, value, ...]``
`torch.dtype`, `torch.device`      ``[kind, name]``
path                               ``["path", text]``
`datetime.timedelta`               ``["seconds", number]``
`Awaited`                          ``["awaited", name]``
=================================  =======================================================

The structure is sent as an additional tensor of bytes, because it may be larger than the body of a call.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.protocol.serialization import tensor_at

MAX_DEPTH: Final = 64
MAX_STRUCTURE_BYTES: Final = 8 << 20  # decoded, a structure takes many times as much memory

_CONSTANTS: Final = frozenset({type(None), bool, float, str, bytes})  # without int, because msgpack limits its size
_MAX_DIGITS: Final = 4096
_SEQUENCES: Final[Mapping[type, str]] = {list: "list", tuple: "tuple", set: "set", torch.Size: "size"}
_DICTS: Final[Mapping[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_NUMPY_CHARS: Final = frozenset("?bBhHiIlLqQefd")  # `dtype.char` of the supported dtypes
_DTYPES: Final = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class NotPlain(SwarmError):
    """A value is too large, or contains an object of an unsupported kind, whose type and path the message names."""


@dataclass(frozen=True, eq=False)
class Awaited:
    """A placeholder for the tensor of this name, which another peer has; None: for the optimizer's state."""

    name: str | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Awaited:
        return self  # copies keep the same placeholder, because placeholders are found by `id`


def pack(value: Any) -> list[Tensor]:
    """Convert a value into its structure, as a tensor of bytes, and its tensors, or raise `NotPlain`."""
    tensors: list[Tensor] = []
    structure = msgspec.msgpack.encode(_packed(value, tensors, "value", 0))
    if len(structure) > MAX_STRUCTURE_BYTES:
        raise NotPlain(
            f"a value may have {MAX_STRUCTURE_BYTES} bytes without its tensors, this one has {len(structure)}"
        )
    return [torch.frombuffer(bytearray(structure), dtype=torch.uint8), *tensors]


def unpack(tensors: Sequence[Tensor]) -> Any:
    """Convert untrusted tensors, as `pack` returns them, back into a value; refuse malformed tensors."""
    if not tensors or tensors[0].dtype != torch.uint8 or tensors[0].dim() != 1:
        raise ProtocolError("a value must begin with the bytes of its structure, got others")
    if tensors[0].nbytes > MAX_STRUCTURE_BYTES:
        raise ProtocolError(
            f"a value may have {MAX_STRUCTURE_BYTES} bytes without its tensors, got {tensors[0].nbytes}"
        )
    parts = list(tensors[1:])
    missing = set(range(len(parts)))
    try:
        structure = msgspec.msgpack.decode(tensors[0].numpy().tobytes())
        value = _Unpacking(parts, missing).value(structure, 0)
    except (msgspec.DecodeError, UnicodeError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ProtocolError(f"a value must contain only supported kinds, got another kind: {error}") from error
    if missing:
        raise ProtocolError(f"a value must name each of its {len(parts)} tensors once; {len(missing)} are not named")
    return value


def _packed(value: Any, tensors: list[Tensor], where: str, depth: int) -> Any:
    """Return the structure of a value, and add its tensors to `tensors`; `where` is its path, for errors."""
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if depth > MAX_DEPTH:
        raise NotPlain(f"{where} is nested more than {MAX_DEPTH} deep")
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *(_packed(item, tensors, f"{where}[{i}]", depth + 1) for i, item in enumerate(value))]
    if kind in _DICTS:
        parts = [part for key, item in value.items() for part in ((key, where), (item, f"{where}[{key!r}]"))]
        return [_DICTS[kind], *(_packed(part, tensors, path, depth + 1) for part, path in parts)]
    return _packed_leaf(value, tensors, where)


def _packed_leaf(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Return the structure of a value that is no container, as `_packed` does; raise `NotPlain` for other kinds."""

    def add(tag: str, tensor: Tensor) -> list[Any]:
        tensors.append(tensor)
        return [tag, len(tensors) - 1]

    if type(value) is int:
        return value if -(2**63) <= value < 2**64 else ["integer", str(value)]
    if isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
        return add("tensor", value.detach().cpu())
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char in _NUMPY_CHARS:
        tag = "array" if isinstance(value, np.ndarray) else "number"
        return add(tag, torch.from_numpy(np.array(value, order="C")))
    if isinstance(value, (torch.dtype, torch.device)):
        return [type(value).__name__, str(value)]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if type(value) is dt.timedelta:
        return ["seconds", value.total_seconds()]
    if isinstance(value, Awaited):
        return ["awaited", value.name]
    raise NotPlain(f"{where} is a {type(value).__module__}.{type(value).__qualname__}")


class _Unpacking:
    """Rebuilds a value from its structure and tensors; `missing` are the indices of tensors not used yet."""

    def __init__(self, tensors: Sequence[Tensor], missing: set[int]) -> None:
        self._tensors = tensors
        self._missing = missing

    def value(self, structure: Any, depth: int) -> Any:
        kind = type(structure)
        if kind in _CONSTANTS or kind is int:
            return structure
        if kind is not list or not structure or type(structure[0]) is not str or depth > MAX_DEPTH:
            raise ProtocolError(f"a node of a value must be a constant or a tagged list, got {kind.__name__}")
        tag, *children = structure
        if tag in _LEAVES and len(children) == 1:
            return _LEAVES[tag](children[0])
        if tag in ("tensor", "array", "number"):
            return self._tensor(tag, children)
        values = [self.value(child, depth + 1) for child in children]
        if tag in _FROM_SEQUENCE:
            return _FROM_SEQUENCE[tag](values)
        if tag in _FROM_DICT and len(values) % 2 == 0:
            return _FROM_DICT[tag](dict(zip(values[::2], values[1::2], strict=True)))
        raise ProtocolError(
            f"a node of a value must have a known tag and its number of parts, got {tag[:40]!r} with {len(children)}"
        )

    def _tensor(self, tag: str, children: Sequence[Any]) -> Any:
        tensor = tensor_at(children, self._tensors, self._missing)
        if tag == "tensor":
            return tensor
        array = tensor.numpy()
        return array if tag == "array" else array[()]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ProtocolError(f"a name in a value must be a string, got {type(value).__name__}")
    return value


def _integer(digits: Any) -> int:
    if len(_text(digits)) > _MAX_DIGITS:
        raise ProtocolError(f"an integer in a value may have {_MAX_DIGITS} digits, got {len(digits)}")
    return int(digits)


def _dtype(name: Any) -> torch.dtype:
    if _text(name) not in _DTYPES:
        raise ProtocolError(f"a dtype in a value must be known to torch, got {name[:40]!r}")
    return _DTYPES[name]


def _seconds(number: Any) -> dt.timedelta:
    if type(number) is not float:
        raise ProtocolError(f"a duration in a value must be a float, got {type(number).__name__}")
    return dt.timedelta(seconds=number)


_LEAVES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "integer": _integer,
    "dtype": _dtype,
    "device": lambda name: torch.device(_text(name)),
    "path": lambda text: Path(_text(text)),
    "seconds": _seconds,
    "awaited": lambda name: Awaited(None if name is None else _text(name)),
}
_FROM_SEQUENCE: Final[Mapping[str, Callable[[list[Any]], Any]]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_FROM_DICT: Final[Mapping[str, Callable[[dict[Any, Any]], Any]]] = {tag: kind for kind, tag in _DICTS.items()}
