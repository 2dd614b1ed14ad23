"""Sharded checkpoints in torch.distributed.checkpoint's format, written and read in parts, without executing code."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
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
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.readable import few
from lightning_swarm.model.optimizer_state import GROUP
from lightning_swarm.model.sharded_index import read_index
from lightning_swarm.network.tensors import dtype_name
from lightning_swarm.protocol.messages.state import WrittenValue

REST: Final = "meta.pt"
"""The file with everything in a checkpoint except weights and optimizer state. The name is Lightning's."""

# Keys in checkpoints of Lightning's `FSDPStrategy`.
WEIGHTS: Final = "model"
OPTIMIZER: Final = "optimizer_0"

_INDEX: Final = ".metadata"


def write(folder: Path, part: int, content: Mapping[str, Any]) -> list[WrittenValue]:
    """Write one part of an existing folder; `content` is a nested mapping with tensors and other values."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner(dict(content), None, False)
    writer.set_up_storage_writer(False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The writer names its files by a plan's index in the list of all plans, so earlier plans are empty.
    plan = planner.finish_plan(writer.prepare_global_plan([*[SavePlan([])] * part, plan])[part])
    results: Sequence[WriteResult] = writer.write_data(plan, planner).wait()
    tensors = {item.index.fqn: item.tensor_data for item in plan.items}
    return [_written(result, tensors[result.index.fqn], planner.mappings[result.index.fqn]) for result in results]


def _written(result: WriteResult, tensor: TensorWriteData | None, path: Sequence[str | int]) -> WrittenValue:
    stored = result.storage_data
    return WrittenValue(
        path=list(path),
        file=str(stored.relative_path),
        offset=stored.offset,
        num_bytes=stored.length,
        dtype=None if tensor is None else dtype_name(tensor.properties.dtype),
        shape=[] if tensor is None else list(tensor.size),
    )


def check(written: Iterable[WrittenValue], part: int, names: Collection[str]) -> None:
    """Raise `ProtocolError` for values that a peer cannot have written for these parameters and buffers."""
    for value in written:
        start = value.path[:1] if value.path[0] == WEIGHTS else value.path[:2]
        # The next element of the path must be one of `names`.
        name = start in ([WEIGHTS], [OPTIMIZER, "state"]) and value.path[len(start) : len(start) + 1]
        if not name or name[0] not in names or not re.fullmatch(rf"__{part}_\d+\.distcp", value.file):
            raise ProtocolError(
                f"part {part} of a checkpoint may have only its own state, in its own files; got {value}"
            )
        _dtype(value)


def finish(folder: Path, written: Sequence[WrittenValue], aliases: Mapping[str, str]) -> None:
    """Write the index of a folder whose parts are all written; `aliases` maps further names of weights to names."""
    further = [
        msgspec.structs.replace(value, path=[WEIGHTS, alias])
        for value in written
        if value.path[0] == WEIGHTS
        for alias, name in aliases.items()
        if value.path[1] == name
    ]
    values = [*written, *further]
    # The rest does the work of the planner in torch's coordinating process.
    _, metadata = create_default_global_save_plan([SavePlan([_item(value) for value in values])])
    metadata.planner_data = {_key(value): tuple(value.path) for value in values}
    results = [
        WriteResult(_item(value).index, value.num_bytes, _StorageInfo(value.file, value.offset, value.num_bytes))
        for value in values
    ]
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])


def _key(value: WrittenValue) -> str:
    return ".".join(map(str, value.path))


def _dtype(value: WrittenValue) -> torch.dtype | None:
    dtype = None if value.dtype is None else getattr(torch, value.dtype, None)
    if value.dtype is not None and not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"a tensor's dtype must be the name of a dtype of torch, got {value.dtype!r}")
    return dtype


def _item(value: WrittenValue) -> WriteItem:
    dtype = _dtype(value)
    if dtype is None:
        return WriteItem(MetadataIndex(_key(value)), WriteItemType.BYTE_IO)
    size, start = torch.Size(value.shape), torch.Size([0] * len(value.shape))
    data = TensorWriteData(ChunkStorageMetadata(start, size), TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(_key(value), start), WriteItemType.TENSOR, tensor_data=data)


def is_folder(path: Path) -> bool:
    """Return whether a path is a sharded checkpoint."""
    return (path / _INDEX).is_file()


class ShardedCheckpoint:
    """Reads a sharded checkpoint, in parts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = FileSystemReader(path)
        self._metadata = read_index(path / _INDEX)
        self._check_files()
        self._paths: dict[str, tuple[Any, ...]] = self._metadata.planner_data

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        sizes = {name: file.stat().st_size if (file := self._path / name).is_file() else -1 for name in sorted(ends)}
        problems = [f"{name} is missing" for name, size in sizes.items() if size < 0]
        problems += [f"{name} is cut off" for name, size in sizes.items() if 0 <= size < ends[name]]
        if problems:
            raise ConfigError(
                f"a sharded checkpoint must have all of its files in one folder; in {self._path} "
                f"{few(problems)}. Copy the files into it, or use another checkpoint."
            )

    @cached_property
    def _keys(self) -> dict[str, dict[str, list[str]]]:
        """The keys of each weight, and of each parameter's optimizer state."""
        # Paths begin with (WEIGHTS, name) or (OPTIMIZER, "state", parameter, key).
        keys: dict[str, dict[str, list[str]]] = {WEIGHTS: {}, OPTIMIZER: {}}
        for key, path in self._paths.items():
            if (path[0] == WEIGHTS and len(path) > 1) or (path[:2] == (OPTIMIZER, "state") and len(path) > 3):
                keys[path[0]].setdefault(path[1 if path[0] == WEIGHTS else 2], []).append(key)
        return keys

    @property
    def weights(self) -> dict[str, Tensor]:
        """The names of the weights in the folder, with tensors on meta of their shapes and dtypes."""
        stored = {name: self._metadata.state_dict_metadata[keys[0]] for name, keys in self._keys[WEIGHTS].items()}
        return {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            for name, tensor in stored.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

    def read_weights(self, names: Iterable[str]) -> dict[str, Any]:
        """Read the weights of these names."""
        keys = [key for name in names for key in self._keys[WEIGHTS][name]]
        return dict(self._read(keys).get(WEIGHTS, {}))

    def read_weight(self, name: str) -> Any:
        """Read one weight."""
        return self.read_weights([name])[name]

    def read_all(self) -> dict[str, Any]:
        """Read everything, under the names under which it was written."""
        return self._read(list(self._paths))

    @property
    def has_optimizer(self) -> bool:
        """True if the state of an optimizer was saved."""
        return any(path[:2] == (OPTIMIZER, "param_groups") for path in self._paths.values())

    def read_groups(self) -> dict[str, Any]:
        """Read the optimizer's groups, and the values that it wrote into them, in the form of `number_to_name`."""
        groups = [key for key, path in self._paths.items() if path[:2] == (OPTIMIZER, "param_groups")]
        written = [
            key for key, path in self._paths.items() if path[:2] == (OPTIMIZER, "state") and path[3:4] == (GROUP,)
        ]
        return {"state": {}, **self._read([*groups, *written])[OPTIMIZER]}

    def read_state(self, names: Iterable[str] | None) -> dict[str, Any]:
        """Read the optimizer's state of the parameters of these names; None: of all parameters."""
        keys_by_name = self._keys[OPTIMIZER]
        keys = [key for name in (keys_by_name if names is None else names) for key in keys_by_name.get(name, ())]
        return dict(self._read(keys).get(OPTIMIZER, {}).get("state", {}))

    def _read(self, keys: Sequence[str]) -> dict[str, Any]:
        targets: dict[str, Any] = dict.fromkeys(keys)
        for key in keys:
            stored = self._metadata.state_dict_metadata[key]
            if isinstance(stored, TensorStorageMetadata):
                targets[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, self._metadata, True)
        self._reader.set_up_storage_reader(self._metadata, True)
        try:
            self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except Exception as error:  # torch raises many kinds of errors for malformed bytes
            raise ConfigError(
                "a sharded checkpoint must hold tensors, numbers and text that torch.distributed.checkpoint wrote; "
                f"reading {self._path} failed: {str(error).splitlines()[0]}. Use another checkpoint."
            ) from error
        return _nested({self._paths[key]: planner.state_dict[key] for key in keys})


class _Planner(DefaultLoadPlanner):
    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Torch's own planner would execute the pickle.
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _nested(values: Mapping[Sequence[Any], Any]) -> dict[str, Any]:
    """Build nested mappings and lists from values by their paths."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        inner = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Convert mappings with numbers as keys to lists; keys of an optimizer's state are names, never numbers."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return list(items.values()) if items and all(isinstance(key, int) for key in items) else items
