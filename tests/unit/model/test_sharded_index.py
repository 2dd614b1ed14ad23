"""Indexes of sharded checkpoints: torch's are read, and malicious indexes have no effect."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pkgutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model import sharded_format, sharded_index
from lightning_swarm.model.export import join_shards
from lightning_swarm.model.sharded_format import ShardedCheckpoint
from lightning_swarm.model.sharded_index import read_index

METADATA = "torch.distributed.checkpoint.metadata"
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros((), dtype=torch.bfloat16), "c": torch.zeros(0, 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint written by torch itself, with a tensor of each kind and other values."""
    content = {
        "model": WEIGHTS,
        "optimizer_0": {"param_groups": [{"lr": 0.1, "params": ["a"]}], "state": {"a": {"step": 3}}},
    }
    with pytest.warns(UserWarning, match="intent is to save in a single process"):
        save(content, storage_writer=FileSystemWriter(tmp_path / "one.ckpt"), no_dist=True)
    torch.save({"state_dict": {}}, tmp_path / "one.ckpt" / "meta.pt")
    return tmp_path / "one.ckpt"


def test_what_torch_wrote_is_read_as_torch_reads_it(folder: Path) -> None:
    ours, theirs = read_index(folder / ".metadata"), FileSystemReader(folder).read_metadata()
    assert (ours.state_dict_metadata, ours.planner_data) == (theirs.state_dict_metadata, theirs.planner_data)
    assert ours.storage_data == theirs.storage_data
    content = ShardedCheckpoint(folder).read_all()
    torch.testing.assert_close(content["model"], WEIGHTS, rtol=0.0, atol=0.0)
    assert content["optimizer_0"]["param_groups"] == [{"lr": 0.1, "params": ["a"]}]


# ---------------------------------------------------------------------- by hand: pickle's own writer refuses such names


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def called(module: str, name: str, argument: bytes) -> bytes:
    return b"\x80\x04" + named(module, name) + argument + b"\x85R."


def set_on(module: str, name: str, attribute: str) -> bytes:
    """Return a pickle that sets an attribute of a named object; a state of two parts sets the second by `setattr`."""
    return b"\x80\x04" + named(module, name) + b"N}" + text(attribute) + text("changed") + b"s\x86b."


NAMES = [
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    (METADATA, "torch.ctypes.util.subprocess.Popen"),
    (METADATA, "Metadata.__init__"),
    (METADATA, "torch"),
    ("torch", "load"),
    ("torch", "hub.load"),
    ("torch.serialization", "load"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("pathlib", "Path.touch"),
    ("pathlib", "os.system"),
    ("collections", "OrderedDict.fromkeys"),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_no_name_outside_of_an_index_is_looked_up(module: str, name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(called(module, name, text(f"touch {mark}")))
    with pytest.raises(ConfigError, match=rf"cannot be read: it names {module}\.{name}, which is not part of an index"):
        read_index(tmp_path / ".metadata")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        (METADATA, "Metadata", "state"),
        (METADATA, "MetadataIndex", "__eq__"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo", "relative_path"),
        ("torch.serialization", "_get_layout", "cache"),
        ("pathlib", "PosixPath", "__truediv__"),
        ("collections", "OrderedDict", "get"),
        ("torch", "Size", "numel"),
        ("torch", "float32", "itemsize"),
    ],
)
def test_nothing_in_this_process_is_changed(module: str, name: str, attribute: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(set_on(module, name, attribute))
    target = pkgutil.resolve_name(f"{module}:{name}")
    before = dict(vars(sharded_index._IndexRecord)), getattr(target, attribute, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_index(tmp_path / ".metadata")
    assert (dict(vars(sharded_index._IndexRecord)), getattr(target, attribute, None)) == before


# ---------------------------------------------------------------------- records of an index, with other contents


def replace(index: Metadata, **changes: Any) -> Metadata:
    return dataclasses.replace(index, **changes)


def with_stored(index: Metadata, **changes: Any) -> Metadata:
    place = MetadataIndex("model.a", torch.Size([0, 0]))
    stored = dataclasses.replace(index.storage_data[place], **changes)
    return replace(index, storage_data={**index.storage_data, place: stored})


def with_tensor(index: Metadata, change: Callable[[TensorStorageMetadata], None]) -> Metadata:
    entry = copy.deepcopy(index.state_dict_metadata["model.a"])
    change(entry)
    return replace(index, state_dict_metadata={**index.state_dict_metadata, "model.a": entry})


def with_path(index: Metadata, path: object) -> Metadata:
    return replace(index, planner_data={**index.planner_data, "model.a": path})


def grow(entry: TensorStorageMetadata) -> None:
    """Claim a tensor of 4 TB."""
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 20, 1 << 20])


def shrink(entry: TensorStorageMetadata) -> None:
    entry.chunks[0].sizes = torch.Size([1, 3])


def move(entry: TensorStorageMetadata) -> None:
    entry.chunks[0].offsets = torch.Size([1, 0])


CHANGES: dict[str, Callable[[Metadata], Any]] = {
    "it names '../secret', which is not a file name": lambda index: with_stored(index, relative_path="../secret"),
    "it names '/etc/passwd', which": lambda index: with_stored(index, relative_path="/etc/passwd"),
    "it names '..', which": lambda index: with_stored(index, relative_path=".."),
    r"it names 'a\\x1b\[2J', which": lambda index: with_stored(index, relative_path="a\x1b[2J"),
    "it names 'aaaa": lambda index: with_stored(index, relative_path="a" * 4096),
    "it names '', which": lambda index: with_stored(index, relative_path=""),
    "it has a value at -1 of": lambda index: with_stored(index, offset=-1),
    r"got transforms \['zstd'\]": lambda index: with_stored(index, transform_descriptors=["zstd"]),
    "have fewer bytes of 'model.a' than its shape needs": lambda index: with_tensor(index, grow),
    "do not cover it": lambda index: with_tensor(index, shrink),
    r"parts of a tensor of shape \(2, 3\) do not": lambda index: with_tensor(index, move),
    "a value has no path": lambda index: with_path(index, ()),
    "a value has no path, got 'model'": lambda index: with_path(index, "model"),
    "two of its values have the same path": lambda index: with_path(index, ("model", "b")),
    "path of one leads through the other": lambda index: with_path(index, ("model", "b", "c")),
    "its values and paths have different names": lambda index: replace(index, planner_data={}),
    "it lacks a Metadata where the format requires one": lambda index: {"state_dict_metadata": {}},
    "lacks a Metadata where": lambda index: replace(index, storage_data=None),
    "lacks a _StorageInfo where": lambda index: replace(index, storage_data={MetadataIndex("a"): "__0_0.distcp"}),
    "lacks a MetadataIndex where": lambda index: replace(index, storage_data={"a": _StorageInfo("a", 0, 1)}),
    "fewer bytes of": lambda index: replace(index, storage_data={}),
    "a key must be a string, got 3": lambda index: replace(index, planner_data={**index.planner_data, 3: ("a",)}),
}


@pytest.mark.parametrize("message", CHANGES)
def test_an_index_that_no_writer_writes_is_refused(message: str, folder: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    assert read_index(folder / ".metadata").planner_data == index.planner_data
    (folder / ".metadata").write_bytes(pickle.dumps(CHANGES[message](index)))
    with pytest.raises(ConfigError, match=message):
        ShardedCheckpoint(folder)


NESTED = b")" + b"\x85" * 100_000  # too deep for `repr`
BYTES: dict[str, bytes] = {
    "empty": b"",
    "no operations": b"\x80\x04",
    "a memo of gigabytes": b"\x80\x04]r\xff\xff\xff\x07.",
    "an object outside": b"\x80\x04Pone\n.",
    "marks": b"(" * 100,
    "a record without a state": b"\x80\x04" + named(METADATA, "Metadata") + b")\x81.",
    "a nested path": b"\x80\x04"
    + named(METADATA, "Metadata")
    + b")\x81}("
    + b"".join(text(field) + b"}" for field in ("state_dict_metadata", "storage_data"))
    + text("planner_data")
    + b"}"
    + text("a")
    + NESTED
    + b"sub.",
}


@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
def test_bytes_that_are_no_index_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"must have an index that torch\.distributed\.checkpoint wrote"):
            read_index(tmp_path / ".metadata")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("sprung"),)


@pytest.mark.parametrize("name", ["meta.pt", "__0_0.distcp"])
def test_no_other_file_of_the_folder_is_executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if name == "meta.pt":
        torch.save({"state_dict": {}, "loops": Trap()}, folder / name)
    else:
        (place,) = (place for place in read_index(folder / ".metadata").storage_data if place.fqn.endswith("step"))
        bomb, index = pickle.dumps(Trap()), FileSystemReader(folder).read_metadata()
        with (folder / name).open("ab") as file:
            stored = _StorageInfo(name, file.tell(), len(bomb))
            file.write(bomb)
        index.storage_data[place] = stored
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match=r"holds other objects, or is broken|reading .* failed"):
        join_shards(folder, folder / "out.ckpt")
    assert not (folder / "sprung").exists()
    assert not (folder / "out.ckpt").exists()


def test_groups_without_parameters_are_no_optimizers(tmp_path: Path) -> None:
    sharded_format.finish(
        tmp_path, sharded_format.write(tmp_path, 0, {"optimizer_0": {"param_groups": [{"lr": 0.1}]}}), {}
    )
    torch.save({}, tmp_path / "meta.pt")
    with pytest.raises(ConfigError, match=r"optimizer state must be as Lightning writes it, got KeyError"):
        join_shards(tmp_path, tmp_path / "out.ckpt")


def test_an_old_torch_is_said_to_be_unsafe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    join_shards(folder, folder.parent / "out.ckpt")
    assert "torch 2.9.1+cpu may execute code that a checkpoint's author hid in it" in caplog.text


def test_the_writer_of_this_package_writes_what_is_read(tmp_path: Path) -> None:
    written = sharded_format.write(tmp_path, 0, {"model": WEIGHTS})
    sharded_format.finish(tmp_path, written, {"tied": "a"})
    assert [*ShardedCheckpoint(tmp_path).read_weights(["tied"])] == ["tied"]
