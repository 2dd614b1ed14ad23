"""Folders in the format of torch.distributed.checkpoint: written in parts by several processes, and read in parts.

What is in them has the names that Lightning's `FSDPStrategy` gives it. Nothing that is read is executed.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model.optimizer_state import GROUP
from lightning_swarm.protocol.messages.state import WrittenValue

REST: Final = "meta.pt"
"""The file with what a checkpoint holds beside weights and optimizer state. The name is Lightning's."""


WEIGHTS: Final = "model"
OPTIMIZER: Final = "optimizer_0"

_INDEX: Final = ".metadata"
_MAX_NAMED: Final = 5
_KNOWN: Final = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
"""What is in an index beside the records of its own module, dtypes and paths."""


def write(folder: Path, part: int, content: Mapping[str, Any]) -> list[WrittenValue]:
    """Write a part of what a folder is to hold.

    Args:
        folder: It exists.
        part: Which; others have other numbers.
        content: Mappings of mappings of tensors and other values.

    Raises:
        OSError: It cannot be written.
    """
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner(dict(content), None, False)
    writer.set_up_storage_writer(False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The writer names its files by a part's place in the list of all.
    plan = planner.finish_plan(writer.prepare_global_plan([*[SavePlan([])] * part, plan])[part])
    found: Sequence[WriteResult] = writer.write_data(plan, planner).wait()
    tensors = {item.index.fqn: item.tensor_data for item in plan.items}
    return [_written(one, tensors[one.index.fqn], planner.mappings[one.index.fqn]) for one in found]


def _written(result: WriteResult, tensor: TensorWriteData | None, path: Sequence[str | int]) -> WrittenValue:
    stored = result.storage_data
    return WrittenValue(
        path=list(path),
        file=str(stored.relative_path),
        offset=stored.offset,
        num_bytes=stored.length,
        dtype=None if tensor is None else str(tensor.properties.dtype).removeprefix("torch."),
        shape=[] if tensor is None else list(tensor.size),
    )


def check(written: Iterable[WrittenValue], part: int, names: Collection[str]) -> None:
    """Refuse what somebody claims to have written for these parameters and buffers, and cannot have.

    Raises:
        ProtocolError: Names the first such thing.
    """
    for one in written:
        place = one.path[:1] if one.path[0] == WEIGHTS else one.path[:2]
        named = place in ([WEIGHTS], [OPTIMIZER, "state"]) and one.path[len(place) : len(place) + 1]
        if not named or named[0] not in names or not re.fullmatch(rf"__{part}_\d+\.distcp", one.file):
            raise ProtocolError(f"part {part} of a checkpoint has state of its own, in files of its own; got {one}")
        _dtype(one)


def finish(folder: Path, written: Sequence[WrittenValue], also: Mapping[str, str]) -> None:
    """Write the index of a folder, when all of its parts are there.

    Args:
        folder: Where.
        written: All of them.
        also: Further names of weights, and the names under which they were written.
    """
    aliases = [
        WrittenValue(**{**_fields(one), "path": [WEIGHTS, alias]})
        for one in written
        if one.path[0] == WEIGHTS
        for alias, name in also.items()
        if one.path[1] == name
    ]
    everything = [*written, *aliases]
    # Here and below the planner's own part of a coordinator.
    _, metadata = create_default_global_save_plan([SavePlan([_item(one) for one in everything])])
    metadata.planner_data = {_key(one): tuple(one.path) for one in everything}
    results = [
        WriteResult(_item(one).index, one.num_bytes, _StorageInfo(one.file, one.offset, one.num_bytes))
        for one in everything
    ]
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])


def _fields(one: WrittenValue) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def _key(one: WrittenValue) -> str:
    return ".".join(map(str, one.path))


def _dtype(one: WrittenValue) -> torch.dtype | None:
    dtype = None if one.dtype is None else getattr(torch, one.dtype, None)
    if one.dtype is not None and not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"a tensor has a dtype of torch's, got {one.dtype!r}")
    return dtype


def _item(one: WrittenValue) -> WriteItem:
    dtype = _dtype(one)
    if dtype is None:
        return WriteItem(MetadataIndex(_key(one)), WriteItemType.BYTE_IO)
    size, start = torch.Size(one.shape), torch.Size([0] * len(one.shape))
    data = TensorWriteData(ChunkStorageMetadata(start, size), TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(_key(one), start), WriteItemType.TENSOR, tensor_data=data)


def is_folder(path: Path) -> bool:
    """Whether it is one of these."""
    return (path / _INDEX).is_file()


class ShardedCheckpoint:
    """A folder that was written.

    Args:
        path: Where.

    Raises:
        ConfigError: Parts of it are missing, or its index holds more than names and numbers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = FileSystemReader(path)
        try:
            with (path / _INDEX).open("rb") as file:
                self._metadata: Metadata = _Unpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise ConfigError(
                f"a sharded checkpoint must have an index that torch.distributed.checkpoint wrote; {path / _INDEX} "
                f"cannot be read: {error}. Take another checkpoint."
            ) from error
        self._check_files()

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        sizes = {name: one.stat().st_size if (one := self._path / name).is_file() else -1 for name in ends}
        missing = sorted(name for name, size in sizes.items() if size < 0)
        short = sorted(name for name, size in sizes.items() if 0 <= size < ends[name])
        if missing or short:
            found = [*(f"{name} is missing" for name in missing), *(f"{name} is cut off" for name in short)]
            more = f", ... ({len(found)} in all)" if len(found) > _MAX_NAMED else ""
            raise ConfigError(
                f"a sharded checkpoint must have all of its files in one folder; in {self._path} "
                f"{', '.join(found[:_MAX_NAMED])}{more}. Copy them there from where they are, or take "
                "another checkpoint."
            )

    @cached_property
    def _paths(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = self._metadata.planner_data
        return found

    @cached_property
    def _keys(self) -> dict[str, dict[str, list[str]]]:
        """Of each weight, and of the state of each parameter."""
        found: dict[str, dict[str, list[str]]] = {WEIGHTS: {}, OPTIMIZER: {}}
        for key, path in self._paths.items():
            if path[0] == WEIGHTS or path[:2] == (OPTIMIZER, "state"):
                found[path[0]].setdefault(path[1 if path[0] == WEIGHTS else 2], []).append(key)
        return found

    @property
    def weights(self) -> dict[str, Tensor]:
        """What weights there are, on meta."""
        kinds = {name: self._metadata.state_dict_metadata[keys[0]] for name, keys in self._keys[WEIGHTS].items()}
        return {
            name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            for name, one in kinds.items()
            if isinstance(one, TensorStorageMetadata)
        }

    def read_weights(self, names: Iterable[str]) -> dict[str, Any]:
        """Some of them, from the files."""
        keys = [key for name in names for key in self._keys[WEIGHTS][name]]
        return dict(self._read(keys).get(WEIGHTS, {}))

    def read_all(self) -> dict[str, Any]:
        """Everything, in the names under which it was written."""
        return self._read(list(self._paths))

    @property
    def has_optimizer(self) -> bool:
        """Whether the state of an optimizer was saved."""
        return any(path[:2] == (OPTIMIZER, "param_groups") for path in self._paths.values())

    def read_groups(self) -> dict[str, Any]:
        """The optimizer's parameter groups, as `optimizer_state.by_names` has them; of its state, what is theirs."""
        groups = [key for key, path in self._paths.items() if path[:2] == (OPTIMIZER, "param_groups")]
        written = [key for key, path in self._paths.items() if path[:2] == (OPTIMIZER, "state") and path[3] == GROUP]
        return {"state": {}, **self._read([*groups, *written])[OPTIMIZER]}

    def read_state(self, names: Iterable[str] | None) -> dict[str, Any]:
        """The optimizer's state of some parameters, by their names; None: of all."""
        own = self._keys[OPTIMIZER]
        keys = [key for name in (own if names is None else names) for key in own.get(name, ())]
        return dict(self._read(keys).get(OPTIMIZER, {}).get("state", {}))

    def _read(self, keys: Sequence[str]) -> dict[str, Any]:
        blank: dict[str, Any] = {}
        for key in keys:
            kind = self._metadata.state_dict_metadata[key]
            if isinstance(kind, TensorStorageMetadata):
                blank[key] = torch.empty(kind.size, dtype=kind.properties.dtype)
            else:
                blank[key] = None
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(blank, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return _nested({self._paths[key]: planner.state_dict[key] for key in keys})


class _Planner(DefaultLoadPlanner):
    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Torch's own would execute what is there.
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Unpickler(pickle.Unpickler):
    """Of the index, which is a pickle of records."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        of_kind = module in (Metadata.__module__, "torch") or module.split(".", maxsplit=1)[0] == "pathlib"
        found = super().find_class(module, name) if of_kind or (module, name) in _KNOWN else None
        if (module, name) in _KNOWN or isinstance(found, torch.dtype if module == "torch" else type):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")


def _nested(values: Mapping[Sequence[Any], Any]) -> dict[str, Any]:
    """The mappings and lists whose keys the paths are."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    found: dict[str, Any] = {key: _with_lists(value) for key, value in root.items()}
    return found


def _with_lists(value: Any) -> Any:
    """Numbers are the keys of lists, never of mappings: those of an optimizer's state are names."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(one) for key, one in value.items()}
    return list(inner.values()) if inner and all(isinstance(key, int) for key in inner) else inner
