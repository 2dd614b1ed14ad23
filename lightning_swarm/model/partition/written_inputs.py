"""Arguments that blocks write into, as `nn.ReLU(inplace=True)` does: the caller has to see the change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model.partition.call_binding import CALLS, CARRIED, argument_of
from lightning_swarm.model.watched import same
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.serialization import Tree

WRITTEN: Final = "written argument "
"""Stands, before the name of an argument, for an attribute where what blocks wrote into that is collected."""

POSITIONAL: Final = ""
"""The name of all positional arguments together."""

Given: TypeAlias = Mapping[str, tuple[Any, Sequence[Tensor]]]
"""A call's arguments by name: the tuple or dict that has an argument, and the tensors in it, in order."""

_TENSORS: Final = "tensors"
_REPLACED: Final = "replaced"
_MISSING: Final = object()


class CallWatch:
    """Finds what is written into the arguments of a stage between its beginning and `written`."""

    def __init__(self, inputs: Any, keywords: Mapping[str, Any]) -> None:
        """Note arguments, whose tensors nothing has written yet."""
        arguments = {POSITIONAL: inputs, **{name: {name: keywords[name]} for name in arguments_in(keywords)}}
        self.tensors = {name: serialization.flatten(value)[1] for name, value in arguments.items()}  # by argument
        self._containers = {
            name: [(path, one, _items(one)) for path, one in containers(value)] for name, value in arguments.items()
        }

    def written(self, sent: Mapping[str, Sequence[Tensor]], *, closely: bool) -> dict[str, Tree]:
        """Return by argument which tensors were written, by place, and which places in lists and dicts.

        Keyword arguments that still hold what was `sent` are left out. A close look finds all writes.
        """
        if closely:
            self._check_counted(sent)
        found = {}
        for argument, own in self.tensors.items():
            tensors = {str(place): tensor for place, tensor in enumerate(own) if tensor._version}
            replaced = [
                [*path, key]
                for path, container, before in self._containers[argument]
                for now in (_items(container),)
                for key in {**before, **now}
                if now.get(key, _MISSING) is not before.get(key, _MISSING)
            ]
            if replaced or (tensors and (argument == POSITIONAL or _differ(tensors, sent[argument]))):
                found[argument] = {_TENSORS: tensors, _REPLACED: replaced}
        return found

    def _check_counted(self, sent: Mapping[str, Sequence[Tensor]]) -> None:
        """Refuse tensors that were written in a way that torch does not count, so that they go unnoticed."""
        for argument, content in sent.items():
            for tensor, before in zip(self.tensors[argument], content, strict=True):
                if not tensor._version and not same(tensor.cpu(), before.cpu()):
                    raise ConfigError(
                        f"blocks must write into their arguments by operations that autograd sees: {text_of(argument)} "
                        "was written by `.data`, or by an array that shares its memory. Write into the tensor itself, "
                        "under `torch.no_grad()` if that is to have no gradient."
                    )

    def visible(self, in_input: Mapping[int, Sequence[str]], *, is_first: bool) -> list[tuple[str, Tensor]]:
        """Give the tensors that others see, with what they are; `in_input` says so of an earlier stage's output."""
        own = self.tensors[POSITIONAL]
        found = [(text_of(POSITIONAL), one) for one in own] if is_first else []
        found += [(what, own[place]) for place, names in in_input.items() if 0 <= place < len(own) for what in names]
        keywords = self.tensors.keys() - {POSITIONAL}
        return found + [(text_of(name), one) for name in keywords for one in self.tensors[name]]


def arguments_in(keywords: Iterable[str]) -> list[str]:
    """Return the names of those extras that are arguments."""
    return [name for name in keywords if name not in (CALLS, CARRIED)]


def written_places(written: Tree) -> list[int]:
    """Return the places of the tensors that were written among those of an argument, and -1 for lists and dicts."""
    return [int(place) for place in written[_TENSORS]] + [-1] * bool(written[_REPLACED])


def text_of(argument: str) -> str:
    """Name an argument in a message."""
    return f"`{argument_of(argument)}`" if argument != POSITIONAL else "a positional argument"


def write_back(given: Given, argument: str, written: Tree, unavailable: Callable[[str], Any]) -> None:
    """Write into a caller's argument what was written on a server; `unavailable` makes what is not to be had."""
    try:
        owners, tensors = given[argument]
        for place, value in written[_TENSORS].items():
            _check_alone(tensors[int(place)], argument, given)
            _copy(tensors[int(place)], value)
        for *path, key in written[_REPLACED]:
            owner: Any = owners
            for step in path:
                owner = owner[step]
            _replace(owner, key, unavailable(f"a block replaced {key!r} in a {type(owner).__name__}"))
    except ConfigError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a server wrote into arguments that the call does not have: {error!r}") from error


def _check_alone(tensor: Tensor, argument: str, given: Given) -> None:
    """Refuse what was written into memory that the call was given twice: servers had a copy for each."""
    same = [name for name, (_, tensors) in given.items() for other in tensors if overlap(tensor, other)]
    if len(same) > 1:
        same.remove(argument)
        raise ConfigError(
            "a block may write into an argument that the call has once, for servers get a copy of each: a block wrote "
            f"into {text_of(argument)}, whose memory is also in {text_of(same[0])}. Pass a clone of one of them."
        )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have elements in the same memory."""
    start = one.untyped_storage().data_ptr()
    if one is other or not start or start != other.untyped_storage().data_ptr() or not one.numel() * other.numel():
        return one is other
    if one.dtype != other.dtype:
        return True
    first = min(one.storage_offset(), other.storage_offset())
    marks = torch.zeros(max(map(_end, (one, other))) - first, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def _end(tensor: Tensor) -> int:
    """The place in its storage behind a tensor's last element."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + int(tensor.storage_offset()) + sum((int(length) - 1) * stride for length, stride in lengths)


def _copy(tensor: Tensor, value: Tensor) -> None:
    """Write as the block did; autograd goes on from there, or refuses a leaf, as it does in one process."""
    if tensor.shape != value.shape or any(stride == 0 for stride in tensor.stride()):
        raise ConfigError(
            f"a block may write into its argument, but not into one that is expanded, nor change its shape: got one of "
            f"shape {tuple(tensor.shape)}, which became {tuple(value.shape)}. Have the block clone it first."
        )
    tensor.copy_(value)


def _replace(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, list) and key >= len(owner):
        owner.append(value)
    else:
        owner[key] = value


def _differ(written: Mapping[str, Tensor], sent: Sequence[Tensor]) -> bool:
    """Return whether tensors, by place, hold other values than those sent, or depend on weights now."""
    return any(
        tensor.requires_grad or not same(tensor.cpu(), sent[int(place)].cpu()) for place, tensor in written.items()
    )


def containers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Give the lists and dicts in a value, and where they are."""
    if isinstance(value, list | dict):
        yield path, value
    if isinstance(value, list | dict | tuple):
        for key, item in _items(value).items():
            yield from containers(item, (*path, key))


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
