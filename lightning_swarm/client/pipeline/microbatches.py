"""Cuts a batch into microbatches along dimension 0, and joins their outputs and gradients. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import argument_of
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import to_cpu

_REMEDY = (
    "Return per-sample losses (reduction='none') from the last block and reduce them in training_step, "
    "or return tensors with one row for each sample, or set `microbatch_size` to the length of dimension 0, so that "
    "each batch is computed whole."
)


@dataclass(frozen=True)
class CallArguments:
    """A call's arguments, flattened once: their structure, and the tensors that are cut and sent."""

    structure: serialization.Structure  # tuple of positional arguments
    tensors: Sequence[Tensor]  # tensors of the positional arguments
    keywords: Mapping[str, tuple[serialization.Structure, Sequence[Tensor]]]  # name -> {name: value}, flattened

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArguments:
        """Flatten arguments; raise `ConfigError` if some of them cannot be sent."""
        structure, tensors = serialization.flatten(args)
        return cls(structure, tensors, {name: serialization.flatten({name: value}) for name, value in kwargs.items()})

    @property
    def kind(self) -> object:
        """A key that calls from one line of code share: the arguments' names, numbers of dimensions and dtypes."""
        by_name = [("", self.tensors), *((name, tensors) for name, (_, tensors) in self.keywords.items())]
        return tuple((name, *((tensor.ndim, tensor.dtype) for tensor in tensors)) for name, tensors in by_name)

    def argument_text(self, index: int) -> str:
        """Name the positional argument of the tensor with this index, for an error message."""
        args = serialization.unflatten(self.structure, self.tensors)
        ends = accumulate(len(serialization.leaves(arg)) for arg in args)
        return f"positional argument {bisect_right(list(ends), index)}"


@dataclass(frozen=True)
class MicrobatchInput:
    """The arguments of one microbatch."""

    num_rows: int
    tensors: Sequence[Tensor]  # positional arguments, in `CallArguments.structure`
    kwargs: dict[str, Any]  # keyword arguments of all stages


def num_rows(arguments: CallArguments, shared: Collection[str]) -> int:
    """Return a batch's rows, the common length of dimension 0 of all tensors that are cut; refuse other lengths."""
    for index, tensor in enumerate(arguments.tensors):
        if tensor.ndim == 0:
            raise ConfigError(
                "tensors must have a dimension 0 along which they are split, got a 0-dimensional tensor in "
                f"{arguments.argument_text(index)}. Pass it as a keyword, or pass a Python number."
            )
    if not arguments.tensors:
        raise ConfigError(
            "a pipeline must be called with at least one positional tensor, got "
            f"{len(serialization.unflatten(arguments.structure, ()))} positional arguments without any. "
            "Pass the batch first: `self.net(x, ...)`."
        )
    rows = len(arguments.tensors[0])
    for index, tensor in enumerate(arguments.tensors):
        if len(tensor) != rows:
            remedy = "pass it as a keyword and name it in `shared=(...)` if every microbatch needs it whole"
            raise _lengths_differ(arguments, rows, len(tensor), arguments.argument_text(index), remedy)
    for name, (_, tensors) in arguments.keywords.items():
        for tensor in tensors:
            if argument_of(name) not in shared and not _is_broadcast(tensor) and len(tensor) != rows:
                remedy = "name it in `shared=(...)` if every microbatch needs it whole"
                raise _lengths_differ(arguments, rows, len(tensor), f"`{name}`", remedy)
    if rows == 0:
        where = arguments.argument_text(0)
        raise ConfigError(f"a batch must have at least one row, got 0 in {where}. Skip empty batches.")
    return rows


def _lengths_differ(arguments: CallArguments, rows: int, length: int, where: str, remedy: str) -> ConfigError:
    return ConfigError(
        "tensors that are split must have the same length in dimension 0, got "
        f"{rows} in {arguments.argument_text(0)} and {length} in {where}. Give them equal lengths, or {remedy}."
    )


def detached(arguments: CallArguments) -> CallArguments:
    """Detach a call's tensors from autograd; also copy the tensors of keyword arguments to the CPU, to send them."""
    if any(tensor.requires_grad for _, tensors in arguments.keywords.values() for tensor in tensors):
        raise ConfigError(
            "keyword arguments of the pipelined module must not require a gradient: they go to several stages, and "
            "no gradient comes back for them. Pass the tensor as a positional argument, or detach it."
        )
    keywords = {
        name: (structure, [to_cpu(tensor.detach(), copy=True) for tensor in tensors])
        for name, (structure, tensors) in arguments.keywords.items()
    }
    return replace(arguments, tensors=[tensor.detach() for tensor in arguments.tensors], keywords=keywords)


def take_rows(arguments: CallArguments, indices: Tensor, shared: Collection[str]) -> CallArguments:
    """Return a call's arguments with only these rows of the batch, in this order."""

    def taken(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, indices.to(tensor.device))

    keywords = {
        name: (
            structure,
            [tensor if argument_of(name) in shared or _is_broadcast(tensor) else taken(tensor) for tensor in tensors],
        )
        for name, (structure, tensors) in arguments.keywords.items()
    }
    return replace(arguments, tensors=[taken(tensor) for tensor in arguments.tensors], keywords=keywords)


def split(arguments: CallArguments, *, rows: int, size: int, shared: Collection[str]) -> list[MicrobatchInput]:
    """Cut the arguments of a call into microbatches of `size` rows, or fewer in the last; their tensors are views."""
    # Each microbatch gets whole keyword arguments if they would be broadcast (no dimensions, or a single row for all
    # samples), if their names are in `shared`, or if they are no tensors.
    if size < 1:
        raise ConfigError(f"`microbatch_size` must be at least 1, got {size}. Raise it.")
    starts = range(0, rows, size)
    chunks = [torch.split(tensor, size) for tensor in arguments.tensors]
    keyword_chunks = [
        (
            structure,
            [
                (tensor,) * len(starts)
                if argument_of(name) in shared or _is_broadcast(tensor)
                else torch.split(tensor, size)
                for tensor in tensors
            ],
        )
        for name, (structure, tensors) in arguments.keywords.items()
    ]
    microbatches = []
    for number, start in enumerate(starts):
        kwargs: dict[str, Any] = {}
        for structure, parts in keyword_chunks:
            kwargs |= serialization.unflatten(structure, [part[number] for part in parts])
        tensors = [part[number] for part in chunks]
        microbatches.append(MicrobatchInput(min(size, rows - start), tensors, kwargs))
    return microbatches


def concat(outputs: Sequence[serialization.Tree], sizes: Sequence[int]) -> tuple[serialization.Structure, list[Tensor]]:
    """Join the outputs of microbatches, flat; refuse structures that differ, and lengths other than `sizes`."""
    flat = [serialization.flatten(output) for output in outputs]
    structure = flat[0][0]
    for number, (own_structure, _) in enumerate(flat):
        if own_structure != structure:
            raise ConfigError(
                "the last block must return the same structure for every microbatch, with equal constants, "
                f"got {_shorten(structure)} for microbatch 0 and {_shorten(own_structure)} for microbatch {number}. "
                "Return tensors with one row for each sample in place of numbers."
            )
    columns = list(zip(*(tensors for _, tensors in flat), strict=True))
    return structure, [_concat_rows(column, sizes) for column in columns]


def split_gradients(gradients: Sequence[Tensor | None], sizes: Sequence[int]) -> list[tuple[Tensor | None, ...]]:
    """Cut the gradients ``[rows, ...]`` of a joined output into the gradients of its microbatches, as views."""
    if len(sizes) == 1:
        return [tuple(gradients)]
    columns = [[None] * len(sizes) if grad is None else torch.split(grad, list(sizes)) for grad in gradients]
    return [tuple(column[number] for column in columns) for number in range(len(sizes))]


def concat_gradients(gradients: Sequence[Sequence[Tensor | None]], sizes: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Join the input gradients of microbatches; a missing gradient counts as zero, unless all are missing."""
    return tuple(_concat_column(column, sizes) for column in zip(*gradients, strict=True))


def _is_broadcast(tensor: Tensor) -> bool:
    """Return whether a keyword's tensor is for all samples: it has no dimension, or one row, as in a batch of one."""
    return tensor.ndim == 0 or tensor.shape[0] == 1


def _concat_rows(column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if len(column) == 1:
        return column[0]
    for number, (tensor, size) in enumerate(zip(column, sizes, strict=True)):
        if tensor.ndim == 0:
            raise ConfigError(
                f"the last block must return tensors with one row for each sample, got a 0-dimensional one. {_REMEDY}"
            )
        if tensor.shape[0] != size:
            raise ConfigError(
                f"the last block must return one row for each of the {size} samples of microbatch {number}, got shape "
                f"{tuple(tensor.shape)}. {_REMEDY}"
            )
        if tensor.shape[1:] != column[0].shape[1:] or tensor.dtype != column[0].dtype:
            raise ConfigError(
                "rows must have the same shape and dtype in every microbatch, got "
                f"{tuple(column[0].shape)} {column[0].dtype} in microbatch 0 and {tuple(tensor.shape)} {tensor.dtype} "
                f"in microbatch {number}. Pad to a fixed length in the DataLoader."
            )
    return torch.cat(tuple(column))


def _concat_column(column: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    first = next((gradient for gradient in column if gradient is not None), None)
    if first is None or len(column) == 1:
        return first
    rest = first.shape[1:]
    pairs = zip(column, sizes, strict=True)
    return torch.cat([first.new_zeros(size, *rest) if grad is None else grad for grad, size in pairs])


def _shorten(structure: serialization.Structure) -> str:
    text = repr(structure)
    return text if len(text) <= 80 else text[:77] + "..."
