import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.network.tensors import TensorSpec
from lightning_swarm.protocol.serialization import MAX_DEPTH, Encoded, flatten, leaves, unflatten

C = torch.tensor([1])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    value: int


class Color(enum.IntEnum):
    RED = 1


def nested(depth: int) -> Any:
    tree: Any = torch.zeros(1)
    for _ in range(depth):
        tree = [tree]
    return tree


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


A, B = torch.zeros(2, 3), torch.ones(4)

TREES = [
    A,
    None,
    True,
    3,
    -(2**63),
    2**64 - 1,
    2.5,
    "text",
    (),
    [],
    {},
    (A,),
    [A, B],
    (A, [B, (A, None)], {"mask": B, "n": 3, "tensor": [], "tuple": ("tensor", 0)}),
    ["tensor", 0],
    ["tuple", "list", ["tensor"]],
    torch.nn.Parameter(A),
    nested(MAX_DEPTH),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: repr(tree)[:30])
def test_a_tree_survives_msgpack(tree: Any) -> None:
    structure, tensors = flatten(tree)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(structure))

    assert travelled == structure
    assert same(unflatten(travelled, tensors), tree)


def test_tensors_are_listed_in_order_and_once_for_each_place() -> None:
    _, tensors = flatten({"x": (A, B), "y": A})

    assert [id(tensor) for tensor in tensors] == [id(A), id(B), id(A)]


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        (Pair(A, B), "Pair"),
        (Record(1), "Record"),
        (OrderedDict(x=A), "OrderedDict"),
        (Color.RED, "Color"),
        (np.float32(1), "numpy.float32"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (torch.float32, "dtype"),
    ],
)
def test_what_cannot_travel_is_refused(tree: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        flatten((A, {"key": [tree]}))

    text = str(error.value)
    assert "must be tensors, None, bool" in text
    assert kind in text
    assert "value[1]['key'][0]" in text
    assert "Convert it in the block" in text


def test_keys_must_be_strings() -> None:
    with pytest.raises(ConfigError, match=r"must be strings, got 3 \(int\) at value\[0\]\. Use strings"):
        flatten([{3: A}])


def test_integers_must_fit_in_the_message() -> None:
    with pytest.raises(ConfigError, match=r"fit in 64 bits, got 18446744073709551616 at value\[0\]\. Pass it"):
        flatten([2**64])


def test_depth_is_bounded_also_for_a_tree_that_holds_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)

    for tree in (nested(MAX_DEPTH + 1), endless):
        with pytest.raises(ConfigError, match=r"nested 32 deep, got more at value.*Flatten them"):
            flatten(tree)


def deep(depth: int, leaf: Any) -> Any:
    structure = leaf
    for _ in range(depth):
        structure = ["list", structure]
    return structure


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (["tensor", 2], "out of range"),
        (["tensor", -1], "out of range"),
        (["tensor", True], "no integer"),
        (["tensor", 0.0], "no integer"),
        (["tensor", "0"], "no integer"),
        (["tensor", [0]], "no integer"),
        (["tensor"], "each of its 2 tensors once"),
        (["tensor", 0, 1], "each of its 2 tensors once"),
        (["tuple", ["tensor", 0], ["tensor", 0]], "repeated"),
        (["tuple", ["tensor", 1]], "1 of 2 are not named (the first is 0)"),
        (None, "2 of 2 are not named"),
        ([], "a tagged list, got list"),
        (["set", 1], "got 'set'"),
        (["x" * 10_000], "got 'x"),
        ([["tuple"]], "must be a string, got list"),
        ([None, 1], "must be a string, got NoneType"),
        ((["tensor", 0],), "got tuple"),
        (b"abc", "got bytes"),
        ({1: None}, "keys in a structure must be strings"),
        (deep(100_000, ["tensor", 0]), "nested 32 deep"),
        (deep(33, ["tensor", 0]), "nested 32 deep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_structure_is_refused(structure: Any, words: str) -> None:
    with pytest.raises(ProtocolError) as error:
        unflatten(structure, [A, B])

    assert words in str(error.value)
    assert "refused" in str(error.value)
    assert len(str(error.value)) < 300


def test_an_encoded_tensor_travels_as_its_parts() -> None:
    spec = TensorSpec("float64", (2, 3))
    tree = {"hidden": Encoded("8bit", spec, (A, B)), "rest": (C,)}
    structure, tensors = flatten(tree)
    assert structure == {"hidden": ["encoded", "8bit", "float64", [2, 3], 0, 1], "rest": ["tuple", ["tensor", 2]]}
    assert tensors == [A, B, C]
    found = unflatten(msgspec.msgpack.decode(msgspec.msgpack.encode(structure)), tensors)
    assert found == tree
    assert [leaf.shape for leaf in leaves(found)] == [(2, 3), C.shape]


@pytest.mark.parametrize(
    "structure",
    [
        ["encoded"],
        ["encoded", "8bit", "float32", [2]],
        ["encoded", "8bit", "float32", [2], 0],
        ["encoded", "8bit", "float32", [2], 0, 0],
        ["encoded", "8bit", "float32", [2], 0, "1"],
        ["encoded", "8bit", "float32", [-2], 0, 1],
        ["encoded", "8bit", "float32", [1 << 40, 1 << 40], 0, 1],
        ["encoded", "8bit", "float9", [2], 0, 1],
        ["encoded", "x" * 1000, "float32", [2], 0, 1],
        ["encoded", 8, "float32", [2], 0, 1],
        ["encoded", "8bit", "float32", 2, 0, 1],
        ["encoded", "8bit", "float32", [2], *range(20)],
    ],
)
def test_a_malformed_encoded_tensor_is_refused(structure: Any) -> None:
    with pytest.raises(ProtocolError) as error:
        unflatten(structure, [A, B])
    assert len(str(error.value)) < 400
