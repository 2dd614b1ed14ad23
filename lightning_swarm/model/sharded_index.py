"""Reads the index of a sharded checkpoint, a pickle, without executing anything in it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import printable


class _IndexRecord:
    """Replaces an object of an index, and keeps its state as plain data."""

    state: Any = None  # stays None if the pickle sets no state

    def __init__(self, *arguments: Any) -> None:
        self.state = arguments

    # A pickle that sets the state of this class, not of an object, fails, because this method then lacks `self`.
    def __setstate__(self, state: Any) -> None:
        self.state = state


def _record(kind: type) -> type[_IndexRecord]:
    return type(kind.__name__, (_IndexRecord,), {})


_METADATA: Final = _record(Metadata)
_TENSOR: Final = _record(TensorStorageMetadata)
_BYTES: Final = _record(BytesStorageMetadata)
_CHUNK: Final = _record(ChunkStorageMetadata)
_PROPERTIES: Final = _record(TensorProperties)
_KEY: Final = _record(MetadataIndex)
_STORED: Final = _record(_StorageInfo)

_MAX_NAME: Final = 200  # characters of a file's name
_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_STAND_INS: Final[Mapping[tuple[str, str], Any]] = {
    **{(_METADATA_MODULE, r.__name__): r for r in (_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _KEY)},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _STORED,
    **dict.fromkeys(
        [
            (_METADATA_MODULE, "StorageMeta"),
            (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
            *(
                (module, name)
                for module in ("pathlib", "pathlib._local")
                for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
            ),
        ],
        _IndexRecord,
    ),
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""All names that an index may have, and the harmless objects that replace them. Unpickling imports nothing."""


# Not `pickle.Unpickler`, in C, which allocates as much as a file names, so that twenty bytes could take gigabytes.
class _Unpickler(pickle._Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an index") from None

    @override
    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside of it")


def read_index(path: Path) -> Metadata:
    """Read an index; raise `ConfigError` if it is malformed, contains other names, or contradicts itself."""
    try:
        with path.open("rb") as file:
            return _metadata(_Unpickler(file).load())
    except Exception as error:  # untrusted bytes may raise anything
        raise ConfigError(
            f"a sharded checkpoint must have an index that torch.distributed.checkpoint wrote; {path} "
            f"cannot be read: {printable(str(error)) or type(error).__name__}. Use another checkpoint."
        ) from error


class _Malformed(Exception):
    """An index has content that no writer of a checkpoint produces."""


def _metadata(raw: Any) -> Metadata:
    """Convert an unpickled index to torch's own form, and check that its parts fit together."""
    index = _fields(raw, _METADATA, state_dict_metadata=dict, storage_data=dict, planner_data=dict)
    tensors = {_text(key): _entry(value) for key, value in index["state_dict_metadata"].items()}
    stored = {_storage_key(key): _stored(value) for key, value in index["storage_data"].items()}
    paths = {_text(key): _path(value) for key, value in index["planner_data"].items()}
    if paths.keys() != tensors.keys():
        raise _Malformed("its values and paths have different names")
    prefixes = {path[:length] for path in paths.values() for length in range(1, len(path))}
    if len({*paths.values()} - prefixes) != len(paths):
        raise _Malformed("two of its values have the same path, or the path of one leads through the other")
    for key, entry in tensors.items():
        _check_stored(key, entry, stored)
    return Metadata(state_dict_metadata=tensors, planner_data=paths, storage_data=stored)


def _entry(raw: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(raw, _BYTES):
        return BytesStorageMetadata()
    tensor = _fields(raw, _TENSOR, properties=_PROPERTIES, size=tuple, chunks=list)
    properties = tensor["properties"].state
    if not isinstance(properties, tuple) or not properties or not isinstance(properties[0], torch.dtype):
        raise _Malformed("a tensor has no dtype")
    size = _size(tensor["size"])
    chunks = [_fields(chunk, _CHUNK, offsets=tuple, sizes=tuple) for chunk in tensor["chunks"]]
    parts = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    is_inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(size)
        and all(start + length <= whole for start, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True))
        for chunk in parts
    )
    # If chunks did not cover the tensor, some of its elements would not be read.
    if not is_inside or sum(math.prod(chunk.sizes) for chunk in parts) != math.prod(size):
        raise _Malformed(f"the parts of a tensor of shape {tuple(size)} do not cover it")
    return TensorStorageMetadata(TensorProperties(dtype=properties[0]), size, parts)


def _storage_key(raw: Any) -> MetadataIndex:
    key = _fields(raw, _KEY, fqn=str)
    offset = key.get("offset")
    return MetadataIndex(key["fqn"], None if offset is None else _size(offset))


def _stored(raw: Any) -> _StorageInfo:
    stored = _fields(raw, _STORED, relative_path=str, offset=int, length=int)
    name, offset, length = stored["relative_path"], stored["offset"], stored["length"]
    is_name = name.isprintable() and len(name) <= _MAX_NAME and name == Path(name).name
    if not is_name or name in ("", "..") or "\\" in name:
        raise _Malformed(f"it names {name!r}, which is not a file name")
    if min(offset, length) < 0:
        raise _Malformed(f"it has a value at {offset} of {length} bytes")
    if stored.get("transform_descriptors"):
        raise _Malformed(f"its values must not be transformed, got transforms {stored['transform_descriptors']}")
    return _StorageInfo(name, offset, length)


def _check_stored(
    key: str, entry: TensorStorageMetadata | BytesStorageMetadata, stored: Mapping[MetadataIndex, _StorageInfo]
) -> None:
    """Check that the files hold as many bytes as a value's shape, because reading allocates by the shape."""
    parts = [(MetadataIndex(key), 0)]
    if isinstance(entry, TensorStorageMetadata):
        item = entry.properties.dtype.itemsize
        parts = [(MetadataIndex(key, chunk.offsets), math.prod(chunk.sizes) * item) for chunk in entry.chunks]
    for storage_key, num_bytes in parts:
        if storage_key not in stored or stored[storage_key].length < num_bytes:
            raise _Malformed(f"the files have fewer bytes of {key!r} than its shape needs")


def _path(raw: Any) -> tuple[str | int, ...]:
    if not isinstance(raw, tuple) or not raw or not all(isinstance(key, str | int) for key in raw):
        raise _Malformed(f"a value has no path, got {raw!r:.100}")
    return raw


def _size(raw: Any) -> torch.Size:
    if not isinstance(raw, tuple) or not all(type(number) is int and number >= 0 for number in raw):
        raise _Malformed(f"a shape must consist of integers of at least 0, got {raw!r:.100}")
    return torch.Size(raw)


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise _Malformed(f"a key must be a string, got {raw!r:.100}")
    return raw


def _fields(raw: Any, kind: type[_IndexRecord], **types: type | Sequence[type]) -> Mapping[str, Any]:
    """Return the state of a record of this kind, after checking that these fields have these types."""
    state = raw.state if type(raw) is kind else None
    if not isinstance(state, dict) or not all(type(state.get(name)) is wanted for name, wanted in types.items()):
        raise _Malformed(f"it lacks a {kind.__name__} where the format requires one")
    return state
