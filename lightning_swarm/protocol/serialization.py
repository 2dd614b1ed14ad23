"""Converts nested values to a flat list of tensors and a structure that can be sent, and back.

A *tree* is an input or output of a stage: nested tuples, lists and dicts with string keys, whose leaves are tensors,
`None`, booleans, numbers and strings. Its *structure* is the same nesting in plain builtins, with each tensor replaced
by its index in the flat list:

=================  =========================================
in the tree        in the structure
=================  =========================================
a constant         itself
a tensor           ``["tensor", index]``
an encoded tensor  ``["encoded", codec, dtype, shape, *indices of its parts]``
a tuple            ``["tuple", *children]``
a list             ``["list", *children]``
a dict             a dict of its children
=================  =========================================

Only lists and dicts are used, because msgpack does not distinguish tuples from lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.network.tensors import TensorSpec, parse_spec

Tree: TypeAlias = Any  # nested tuples, lists and dicts of tensors and constants
Structure: TypeAlias = Any  # the nesting of a tree in builtins that msgpack can encode

MAX_DEPTH: Final = 32  # nested containers; much deeper structures would overflow the stack of decoders in C
MAX_PARTS: Final = 8  # most parts of an encoded tensor
_MAX_CODEC_CHARS: Final = 32
_CONSTANTS: Final = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class Encoded:
    """An encoded tensor, as a leaf of a tree."""

    codec: str  # name
    spec: TensorSpec  # dtype and shape of the tensor
    parts: tuple[Tensor, ...]  # the codec's output

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of the tensor's dimensions."""
        return len(self.spec.shape)


def flatten(tree: Tree) -> tuple[Structure, list[Tensor]]:
    """Split a tree into its structure and its tensors, in order; a repeated tensor is listed again.

    Raises:
        ConfigError: The tree contains an unsupported value.
    """
    tensors: list[Tensor] = []
    return _flatten(tree, tensors, None, 0), tensors


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Tree:
    """Rebuild a tree from its tensors and an untrusted structure; raise `ProtocolError` if that is malformed."""
    missing = set(range(len(tensors)))
    tree = _unflatten(structure, tensors, missing, 0)
    if missing:
        raise ProtocolError(
            f"a structure must name each of its tensors once, but {len(missing)} of {len(tensors)} are not named "
            f"(the first is {min(missing)}). The message was refused."
        )
    return tree


def leaves(tree: Tree) -> list[Tensor | Encoded]:
    """Return the tensors of a tree, in its order."""
    tensors: list[Tensor | Encoded] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Tree, into: list[Tensor | Encoded]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for child in tree:
            _collect(child, into)
    elif kind is dict:
        for child in tree.values():
            _collect(child, into)
    elif isinstance(tree, (Tensor, Encoded)):
        into.append(tree)


def transform(tree: Tree, change: Callable[[Any], Tensor | Encoded]) -> Tree:
    """Return the tree with `change` applied to each tensor. `flatten` must accept the tree."""
    kind = type(tree)
    if kind is tuple or kind is list:
        changed = [transform(child, change) for child in tree]
        return changed if kind is list else tuple(changed)
    if kind is dict:
        return {key: transform(child, change) for key, child in tree.items()}
    return change(tree) if isinstance(tree, (Tensor, Encoded)) else tree


def is_differentiable(leaf: Tensor | Encoded) -> bool:
    """Return whether a leaf's dtype allows gradients; encoded tensors have real floating-point dtypes, which do."""
    return isinstance(leaf, Encoded) or leaf.is_floating_point() or leaf.is_complex()


def named(names: Sequence[str], values: Any) -> dict[str, Any]:
    """Return a dict from names to untrusted values; refuse a different number of values, and repeated names."""
    if not isinstance(values, (list, tuple)) or not len(values) == len(names) == len(set(names)):
        raise ProtocolError(
            f"a message must have one value for each of its {len(names)} names, and no name twice. It was refused."
        )
    return dict(zip(names, values, strict=True))


# A path in a tree: the path of its container, and its key there. It is formatted only for errors, because each call
# of a stage flattens a few trees.
_Path: TypeAlias = "tuple[_Path, str | int] | None"


def _path_text(path: _Path) -> str:
    return "value" if path is None else f"{_path_text(path[0])}[{path[1]!r}]"


def _flatten(tree: Tree, tensors: list[Tensor], path: _Path, depth: int) -> Structure:
    """Return the structure of a tree at a path of the whole tree, and add its tensors to `tensors`."""
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided or tree.is_nested:
            raise ConfigError(
                f"tensors between stages must be dense, got one with layout {tree.layout} at {_path_text(path)}. "
                "Pass `to_dense()` of it, or its parts, such as `indices()` and `values()`, and rebuild it in a block."
            )
        tensors.append(tree)
        return ["tensor", len(tensors) - 1]
    if isinstance(tree, Encoded):
        tensors.extend(tree.parts)
        indices = range(len(tensors) - len(tree.parts), len(tensors))
        return ["encoded", tree.codec, tree.spec.dtype, list(tree.spec.shape), *indices]
    # Exact types, because a namedtuple or an enum would come back as another type.
    kind = type(tree)
    if kind in _CONSTANTS:
        if kind is int and not -(2**63) <= tree < 2**64:
            raise ConfigError(
                f"an integer between stages must fit in 64 bits, got {tree} at {_path_text(path)}. Pass it as a string."
            )
        return tree
    if kind not in (tuple, list, dict):
        raise ConfigError(
            "values between stages must be tensors, None, bool, int, float or str, in plain tuples, lists and dicts, "
            f"got {kind.__module__}.{kind.__qualname__} at {_path_text(path)}. Convert it in the block that makes it, "
            "and back in the block that gets it (a named tuple or dataclass to a tuple or dict, an array to a tensor)."
        )
    if depth == MAX_DEPTH:
        raise ConfigError(
            f"values between stages may be nested {MAX_DEPTH} deep, got more at {_path_text(path)}. "
            "Flatten them. A container may contain itself."
        )
    if kind is not dict:
        return [kind.__name__, *[_flatten(child, tensors, (path, i), depth + 1) for i, child in enumerate(tree)]]
    for key in tree:
        if type(key) is not str:
            raise ConfigError(
                f"keys of a dict between stages must be strings, got {key!r} ({type(key).__name__}) at "
                f"{_path_text(path)}. Use strings, or pass a list."
            )
    return {key: _flatten(child, tensors, (path, key), depth + 1) for key, child in tree.items()}


def _unflatten(structure: Structure, tensors: Sequence[Tensor], missing: set[int], depth: int) -> Tree:
    """Rebuild a tree from a structure, and remove the indices of its tensors from `missing`."""
    kind = type(structure)
    if kind in _CONSTANTS:
        return structure
    if depth > MAX_DEPTH:
        raise ProtocolError(f"a structure may be nested {MAX_DEPTH} deep, got more. The message was refused.")
    if kind is dict:
        if not all(type(key) is str for key in structure):
            raise ProtocolError("keys in a structure must be strings, got another type. The message was refused.")
        return {key: _unflatten(child, tensors, missing, depth + 1) for key, child in structure.items()}
    if kind is not list or not structure:
        raise ProtocolError(
            f"a node of a structure must be a constant, a dict or a tagged list, got {kind.__name__}. "
            "The message was refused."
        )
    tag, *children = structure
    if tag == "tensor":
        return tensor_at(children, tensors, missing)
    if tag == "encoded":
        return _encoded(children, tensors, missing)
    if tag not in ("tuple", "list"):
        # The tag is untrusted, so the error quotes only its beginning.
        raise ProtocolError(
            f"a tag in a structure must be tensor, tuple or list, got {str(tag)[:40]!r}. The message was refused."
            if type(tag) is str
            else f"a tag in a structure must be a string, got {type(tag).__name__}. The message was refused."
        )
    values = [_unflatten(child, tensors, missing, depth + 1) for child in children]
    return tuple(values) if tag == "tuple" else values


def tensor_at(children: Sequence[Any], tensors: Sequence[Tensor], missing: set[int]) -> Tensor:
    """Return the tensor to which a node refers by index; `missing`: the indices that no node has used yet."""
    if len(children) != 1 or type(children[0]) is not int or children[0] not in missing:
        raise ProtocolError(
            f"a structure must name each of its {len(tensors)} tensors once, by its index, "
            "got an index that is out of range, repeated or no integer. The message was refused."
        )
    missing.remove(children[0])
    return tensors[children[0]]


def _encoded(children: list[Any], tensors: Sequence[Tensor], missing: set[int]) -> Encoded:
    # A node with too few children is read as one without parts, which is refused below.
    codec, dtype, shape, *indices = children if len(children) > 3 else ("", "", [])
    if type(codec) is not str or len(codec) > _MAX_CODEC_CHARS or not 0 < len(indices) <= MAX_PARTS:
        raise ProtocolError(
            f"an encoded tensor in a structure must name its codec and at most {MAX_PARTS} parts, got {len(indices)}. "
            "The message was refused."
        )
    try:
        spec = msgspec.convert([dtype, shape], TensorSpec)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"an encoded tensor must have a dtype and a shape: {error}. The message was refused."
        ) from error
    parse_spec(spec)
    return Encoded(codec, spec, tuple(tensor_at([index], tensors, missing) for index in indices))
