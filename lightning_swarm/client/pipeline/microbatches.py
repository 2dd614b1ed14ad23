"""Cutting a batch into microbatches, and putting their outputs and gradients together again. Pure.

Everything is cut along dimension 0 into views; nothing is copied but what is concatenated from several parts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import argument_of
from lightning_swarm.protocol import serialization

_REDUCED = (
    "Return per-sample losses (reduction='none') from the last block and reduce them in training_step, "
    "or return tensors with one row for each sample."
)


@dataclass(frozen=True)
class MicrobatchInput:
    """What one microbatch brings to the pipeline.

    Attributes:
        num_rows: How many rows it has.
        args: Positional arguments of the first stage.
        kwargs: Extras, for the stages that name them.
    """

    num_rows: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def num_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], shared: Collection[str]) -> int:
    """Rows of a batch: the common length of dimension 0 of everything that is split.

    Raises:
        ConfigError: No positional argument holds a tensor, a tensor has no dimension 0, lengths differ,
            or the batch is empty.
    """
    rows: int | None = None
    first = ""
    for where, tensor, is_keyword in _split_tensors(args, kwargs, shared):
        if is_keyword and (rows is None or _is_for_all(tensor)):
            continue
        _refuse_scalar(where, tensor)
        if rows is None:
            rows, first = tensor.shape[0], where
        elif tensor.shape[0] != rows:
            remedy = "name it in `shared=(...)` if every microbatch needs it whole" if is_keyword else ""
            remedy = remedy or "pass it as a keyword and name it in `shared=(...)` if every microbatch needs it whole"
            raise ConfigError(
                "tensors that are split must have the same length in dimension 0, got "
                f"{rows} in {first} and {tensor.shape[0]} in {where}. Make them agree, or {remedy}."
            )
    if rows is None:
        raise ConfigError(
            f"a pipeline must be called with at least one positional tensor, got {len(args)} positional arguments "
            "without any. Pass the batch first: `self.net(x, ...)`."
        )
    if rows == 0:
        raise ConfigError(f"a batch must have at least one row, got 0 in {first}. Skip empty batches.")
    return rows


def split(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, size: int, shared: Collection[str]
) -> list[MicrobatchInput]:
    """Cut the arguments of a call into microbatches.

    Args:
        args: Positional arguments: trees whose tensors ``[rows, ...]`` are split along dimension 0.
        kwargs: Keyword arguments, split likewise. One with a single row for all samples, or without dimensions, goes
            whole to each microbatch: it would be broadcast.
        size: Rows of a microbatch; the last one may have fewer.
        shared: Names of keyword arguments that go whole to each microbatch whatever their shape.

    Returns:
        The microbatches in order. Their tensors are views. What is no tensor goes whole to each.

    Raises:
        ConfigError: As in `num_rows`, or `size` is below 1.
    """
    if size < 1:
        raise ConfigError(f"`microbatch_size` must be at least 1, got {size}. Raise it.")
    rows = num_rows(args, kwargs, shared)
    whole = {name: value for name, value in kwargs.items() if argument_of(name) in shared}
    structure, tensors = serialization.flatten(
        (args, {name: value for name, value in kwargs.items() if name not in whole})
    )
    starts = range(0, rows, size)
    chunks = [(tensor,) * len(starts) if _is_for_all(tensor) else torch.split(tensor, size) for tensor in tensors]
    microbatches = []
    for number, start in enumerate(starts):
        part_args, part_kwargs = serialization.unflatten(structure, [parts[number] for parts in chunks])
        # In the caller's order of keywords.
        ordered = {name: whole[name] if name in whole else part_kwargs[name] for name in kwargs}
        microbatches.append(MicrobatchInput(min(size, rows - start), part_args, ordered))
    return microbatches


def concat(outputs: Sequence[serialization.Tree], sizes: Sequence[int]) -> serialization.Tree:
    """Put the outputs of microbatches together along dimension 0.

    Args:
        outputs: One tree for each microbatch, in order, all of one structure.
        sizes: Rows of each microbatch; every tensor of its output is ``[size, ...]``.

    Raises:
        ConfigError: An output has no dimension 0 or the wrong length in it, or the structures, the constants
            in them, or the shapes or dtypes of their rows differ.
    """
    flat = [serialization.flatten(output) for output in outputs]
    structure = flat[0][0]
    for number, (other, _) in enumerate(flat):
        if other != structure:
            raise ConfigError(
                "the last block must return the same structure for every microbatch, with equal constants, "
                f"got {_shorten(structure)} for microbatch 0 and {_shorten(other)} for microbatch {number}. "
                "Return tensors with one row for each sample in place of numbers."
            )
    columns = list(zip(*(tensors for _, tensors in flat), strict=True))
    return serialization.unflatten(structure, [_concat_rows(column, sizes) for column in columns])


def split_gradients(gradients: Sequence[Tensor | None], sizes: Sequence[int]) -> list[tuple[Tensor | None, ...]]:
    """Cut the gradients of a concatenated output into those of its microbatches, as views.

    Args:
        gradients: One for each tensor of the output, ``[rows, ...]``; `None` where it has none.
        sizes: Rows of each microbatch.

    Returns:
        For each microbatch, one gradient for each tensor of its output.
    """
    columns = [[None] * len(sizes) if g is None else torch.split(g, list(sizes)) for g in gradients]
    return [tuple(column[number] for column in columns) for number in range(len(sizes))]


def concat_gradients(gradients: Sequence[Sequence[Tensor | None]], sizes: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Put the input gradients of microbatches together: the way back of `split`.

    Args:
        gradients: For each microbatch, one gradient for each of its split tensors, or `None`.
        sizes: Rows of each microbatch.

    Returns:
        One gradient for each tensor; `None` where no microbatch has one. A microbatch without one counts as zero.
    """
    return tuple(_concat_column(column, sizes) for column in zip(*gradients, strict=True))


def _split_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], shared: Collection[str]
) -> list[tuple[str, Tensor, bool]]:
    named: list[tuple[str, Any, bool]] = [(f"positional argument {i}", value, False) for i, value in enumerate(args)]
    named += [(f"`{name}`", value, True) for name, value in kwargs.items() if argument_of(name) not in shared]
    return [(where, tensor, is_kw) for where, value, is_kw in named for tensor in serialization.flatten(value)[1]]


def _is_for_all(tensor: Tensor) -> bool:
    """Of a keyword argument: whether it belongs to no sample. In a batch of one, every microbatch is the batch."""
    return tensor.ndim == 0 or tensor.shape[0] == 1


def _refuse_scalar(where: str, tensor: Tensor) -> None:
    if tensor.ndim == 0:
        raise ConfigError(
            f"tensors must have a dimension 0 to be split along, got a 0-dimensional one in {where}. "
            "Pass it as a keyword, or pass a Python number."
        )


def _concat_rows(column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    for number, (tensor, size) in enumerate(zip(column, sizes, strict=True)):
        if tensor.ndim == 0:
            raise ConfigError(
                "the last block must return tensors with one row for each sample, got a 0-dimensional one. " + _REDUCED
            )
        if tensor.shape[0] != size:
            raise ConfigError(
                f"the last block must return one row for each of the {size} samples of microbatch {number}, got shape "
                f"{tuple(tensor.shape)}. {_REDUCED}"
            )
        if tensor.shape[1:] != column[0].shape[1:] or tensor.dtype != column[0].dtype:
            raise ConfigError(
                "rows must have the same shape and dtype in every microbatch, got "
                f"{tuple(column[0].shape)} {column[0].dtype} in microbatch 0 and {tuple(tensor.shape)} {tensor.dtype} "
                f"in microbatch {number}. Pad to a fixed length in the DataLoader."
            )
    return column[0] if len(column) == 1 else torch.cat(tuple(column))


def _concat_column(column: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    some = next((gradient for gradient in column if gradient is not None), None)
    if some is None or len(column) == 1:
        return some
    rest = some.shape[1:]
    return torch.cat([some.new_zeros(n, *rest) if g is None else g for g, n in zip(column, sizes, strict=True)])


def _shorten(structure: serialization.Structure) -> str:
    text = repr(structure)
    return text if len(text) <= 80 else text[:77] + "..."
