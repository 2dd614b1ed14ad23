"""Continuous batching: computes several texts in one forward, and joins and splits their arguments.

A block's matrix products see the rows of all texts. Each text has its own cache, because texts have different lengths,
so their keys cannot be one tensor. The block's attention, which Hugging Face can replace by name, computes the texts
one by one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

_NAME: Final = "lightning_swarm_joint_"
MASK_DIMENSIONS: Final = 4  # [rows, heads, tokens, keys]; the number of keys differs from text to text


class CannotJoin(Exception):
    """Texts cannot be computed in one forward of these blocks."""


class PerText(tuple[Any, ...]):
    """A tuple of one value for each text, because the values cannot be rows of one tensor."""

    __slots__ = ()


class JointCache:
    """Presents the caches of several texts to blocks as one cache, with the method `update` only."""

    def __init__(self, caches: Sequence[Any], rows: Sequence[int]) -> None:
        """Present the caches of texts; `rows` has the number of rows of each text."""
        self._caches, self._rows = caches, list(rows)

    def update(self, keys: Tensor, values: Tensor, *place: Any, **options: Any) -> tuple[PerText, PerText]:
        """Append each text's rows to its cache, and return the keys and values of each text."""
        rows = zip(self._caches, keys.split(self._rows), values.split(self._rows), strict=True)
        found = [cache.update(own_keys, own_values, *place, **options) for cache, own_keys, own_values in rows]
        return PerText(keys for keys, _ in found), PerText(values for _, values in found)


@contextlib.contextmanager
def attending_jointly(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, make these modules' attention compute the texts of a `JointCache` one by one."""
    from transformers import AttentionInterface

    configs = {id(each): each for each in (getattr(module, "config", None) for module in modules) if each is not None}
    # Bypass the property, which would also change nested configs.
    before = [(config, config._attn_implementation_internal) for config in configs.values() if _attends(config)]
    if not before:
        raise CannotJoin("the blocks' attention is not one of Hugging Face's")
    for name in {name for _, name in before}:
        AttentionInterface.register(_NAME + name, partial(_attend, name))
    try:
        for config, name in before:
            config._attn_implementation_internal = _NAME + name
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _attends(config: Any) -> bool:
    name = getattr(config, "_attn_implementation_internal", None)
    return isinstance(name, str) and name in ("eager", "sdpa")


def _attend(
    name: str, module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Run the attention implementation of this name for each text, with its own keys."""
    if not isinstance(key, PerText):
        raise CannotJoin("these blocks keep their keys elsewhere, or change them before attention")
    base = _implementation(name, module)
    sizes = [len(keys) for keys in key]
    masks = attention_mask
    if isinstance(masks, Tensor) and len(masks) > 1:
        masks = masks.split(sizes)
    elif not isinstance(masks, PerText):
        masks = [masks] * len(sizes)  # one mask, or None, for all texts
    texts = zip(query.split(sizes), key, value, masks, strict=True)
    return torch.cat([base(module, *text, **options)[0] for text in texts]), None


def _implementation(name: str, module: nn.Module) -> Callable[..., Any]:
    model_file = sys.modules[type(module).__module__]  # may define attention of its own under these names
    default = getattr(model_file, "eager_attention_forward", None)
    if default is None:
        raise CannotJoin(f"{type(module).__name__} has no attention that can be called for one text")
    implementation: Callable[..., Any] = model_file.ALL_ATTENTION_FUNCTIONS.get_interface(name, default)
    return implementation


# ------------------------------------------------------------------ rows of several texts


def join_rows(trees: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join copies of several texts' arguments: concatenate rows, keep equal values once, put other masks in `PerText`.

    Args:
        trees: The arguments of each text, all of one structure. A tensor's first dimension is the text's rows, or 1.
        rows: The number of rows of each text.

    Raises:
        CannotJoin: Structures differ, or values without rows differ.
    """
    first = trees[0]
    if isinstance(first, Tensor):
        return _join_tensors(trees, rows)
    if any(type(tree) is not type(first) for tree in trees):
        raise CannotJoin("arguments differ in their types")
    if isinstance(first, dict):
        if any(tree.keys() != first.keys() for tree in trees):
            raise CannotJoin("arguments differ in their names")
        return {key: join_rows([tree[key] for tree in trees], rows) for key in first}
    if type(first) in (tuple, list):
        if any(len(tree) != len(first) for tree in trees):
            raise CannotJoin("arguments differ in their number")
        return type(first)(join_rows(parts, rows) for parts in zip(*trees, strict=True))
    if any(tree != first for tree in trees):
        raise CannotJoin("arguments that are not tensors differ")
    return first


def _join_tensors(tensors: Sequence[Any], rows: Sequence[int]) -> Any:
    first = tensors[0]
    if any(
        not isinstance(t, Tensor) or (t.dtype, t.ndim, t.device) != (first.dtype, first.ndim, first.device)
        for t in tensors
    ):
        raise CannotJoin("tensors of different kinds cannot be rows of one tensor")
    if first.ndim == 0 or any(len(t) not in (1, num) for t, num in zip(tensors, rows, strict=True)):
        if all(t.shape == first.shape and torch.equal(t, first) for t in tensors):
            return first.clone()
        raise CannotJoin("tensors without rows differ")  # as biases of ALiBi ``[rows * heads, 1, keys]``
    if all(t.shape[1:] == first.shape[1:] for t in tensors):
        return torch.cat([t.expand(num, *t.shape[1:]) for t, num in zip(tensors, rows, strict=True)])
    if first.ndim == MASK_DIMENSIONS and all(t.shape[1:-1] == first.shape[1:-1] for t in tensors):
        return PerText(t.clone() for t in tensors)
    raise CannotJoin("tensors of different shapes cannot be rows of one tensor")


def split_rows(tree: Any, rows: Sequence[int]) -> list[Any]:
    """Split the blocks' output into the output of each text; raise `CannotJoin` if it has other rows than the input."""
    if isinstance(tree, Tensor):
        if not tree.ndim or len(tree) != sum(rows):
            raise CannotJoin("an output has other rows than the input")
        return list(tree.split(list(rows)))
    if isinstance(tree, dict):
        parts = {key: split_rows(item, rows) for key, item in tree.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(len(rows))]
    if type(tree) in (tuple, list):
        columns = [split_rows(item, rows) for item in tree]
        return [type(tree)(column[index] for column in columns) for index in range(len(rows))]
    if isinstance(tree, PerText):
        raise CannotJoin("an output differs in more than its rows")
    return [tree] * len(rows)


def kind_of(tree: Any, rows: int) -> Any:
    """Return the properties of a text's arguments, hashable, that must be equal for texts to be joined."""
    if isinstance(tree, Tensor):
        first_dimension = "rows" if tree.ndim and len(tree) in (1, rows) else tuple(tree.shape[:1])
        shape = tree.shape[1:-1] if tree.ndim == MASK_DIMENSIONS else tree.shape[1:]
        return ("tensor", str(tree.dtype), first_dimension, tuple(shape), tree.ndim)
    if isinstance(tree, dict):
        return tuple((key, kind_of(item, rows)) for key, item in tree.items())
    if type(tree) in (tuple, list):
        return (type(tree).__name__, *(kind_of(item, rows) for item in tree))
    return repr(tree)
