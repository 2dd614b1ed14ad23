"""In-place writes of blocks into their arguments, as by `nn.ReLU(inplace=True)`, which the caller must see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model.fidelity.watched import same
from lightning_swarm.model.partition.call_binding import CALLS, CARRIED, argument_of
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.serialization import Tree

WRITTEN: Final = "written argument "
"""Prefix of an argument's name. Together they name the writes into it, which are sent with values left on modules."""

POSITIONAL: Final = ""  # the name of all positional arguments together

Given: TypeAlias = Mapping[str, tuple[Any, Sequence[Tensor]]]
"""A call's arguments by name: the tuple or dict that holds the argument, and the argument's tensors in order."""

_TENSORS: Final = "tensors"  # keys of the writes into one argument
_REPLACED: Final = "replaced"
_MISSING: Final = object()


class CallWatch:
    """Finds writes into the arguments of a stage, from construction until `written`."""

    def __init__(self, inputs: Any, keywords: Mapping[str, Any]) -> None:
        """Record the arguments, whose tensors are new copies: a later `_version` above 0 shows a write."""
        arguments = {POSITIONAL: inputs, **{name: {name: keywords[name]} for name in arguments_in(keywords)}}
        self.tensors = {name: cast(list[Tensor], serialization.leaves(value)) for name, value in arguments.items()}
        self._containers = {
            name: [(path, each, _items(each)) for path, each in containers(value)] for name, value in arguments.items()
        }

    def written(self, sent: Mapping[str, Sequence[Tensor]], *, checks_values: bool) -> dict[str, Tree]:
        """Return, by argument, the written tensors by index, and the replaced indices in lists and dicts.

        Omits keyword arguments that still equal the values `sent`. If `checks_values`, compares all values, and refuses
        writes that torch does not count.
        """
        if checks_values:
            self._check_counted(sent)
        written = {}
        for argument, argument_tensors in self.tensors.items():
            tensors = {str(index): tensor for index, tensor in enumerate(argument_tensors) if tensor._version}
            replaced = [
                [*path, key]
                for path, container, before in self._containers[argument]
                for now in (_items(container),)  # names the present items
                for key in {**before, **now}
                if now.get(key, _MISSING) is not before.get(key, _MISSING)
            ]
            if replaced or (tensors and (argument == POSITIONAL or _differ(tensors, sent[argument]))):
                written[argument] = {_TENSORS: tensors, _REPLACED: replaced}
        return written

    def _check_counted(self, sent: Mapping[str, Sequence[Tensor]]) -> None:
        """Refuse writes that no tensor's `_version` counts, which would go unnoticed."""
        for argument, content in sent.items():
            for tensor, before in zip(self.tensors[argument], content, strict=True):
                if not tensor._version and not same(tensor.cpu(), before.cpu()):
                    raise ConfigError(
                        f"blocks must write into their arguments by operations that autograd sees: {text_of(argument)} "
                        "was written by `.data`, or by an array that shares its memory. Write into the tensor itself, "
                        "under `torch.no_grad()` if that is to have no gradient."
                    )

    def tensors_held_elsewhere(
        self, aliases: Mapping[int, Sequence[str]], *, is_first: bool
    ) -> list[tuple[str, Tensor]]:
        """Return the arguments' tensors that code before this stage may still hold, each with the name of a holder.

        `aliases` are the holders that earlier stages report: index of a tensor in this stage's input -> names.
        """
        inputs = self.tensors[POSITIONAL]
        held = [(text_of(POSITIONAL), tensor) for tensor in inputs] if is_first else []
        held += [(name, inputs[i]) for i, names in aliases.items() if 0 <= i < len(inputs) for name in names]
        keywords = self.tensors.keys() - {POSITIONAL}
        return held + [(text_of(name), tensor) for name in keywords for tensor in self.tensors[name]]


def arguments_in(keywords: Iterable[str]) -> list[str]:
    """Return the names of extras that are the user's arguments."""
    return [name for name in keywords if name not in (CALLS, CARRIED)]


def written_indices(written: Tree) -> list[int]:
    """Return the indices of an argument's tensors that were written, and -1 if lists or dicts were."""
    return [int(index) for index in written[_TENSORS]] + [-1] * bool(written[_REPLACED])


def text_of(argument: str) -> str:
    """Name an argument in a message."""
    return f"`{argument_of(argument)}`" if argument != POSITIONAL else "a positional argument"


def write_back(given: Given, argument: str, written: Tree, unavailable: Callable[[str], Any]) -> None:
    """Repeat a server's writes in the caller's argument; `unavailable` makes stand-ins for values not sent."""
    try:
        owners, tensors = given[argument]
        for index, value in written[_TENSORS].items():
            _check_unshared(tensors[int(index)], argument, given)
            _copy(tensors[int(index)], value)
        for *path, key in written[_REPLACED]:
            owner: Any = owners
            for step in path:
                owner = owner[step]
            value = unavailable(f"a block replaced {key!r} in a {type(owner).__name__}")
            if isinstance(owner, list) and key >= len(owner):
                owner.append(value)
            else:
                owner[key] = value
    except ConfigError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a server wrote into arguments that the call does not have: {error!r}") from error


def _check_unshared(tensor: Tensor, argument: str, given: Given) -> None:
    """Refuse writes into memory that two arguments of the call share, because servers had a copy for each."""
    owners = [name for name, (_, tensors) in given.items() for other in tensors if overlap(tensor, other)]
    if len(owners) > 1:
        owners.remove(argument)
        raise ConfigError(
            "a block must not write into memory that two arguments of its call share, because servers get a separate "
            f"copy of each; a block wrote into {text_of(argument)}, whose memory is also in {text_of(owners[0])}. Pass "
            "a clone of one of them."
        )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have elements in the same memory."""
    start = one.untyped_storage().data_ptr()
    if one is other or not start or start != other.untyped_storage().data_ptr() or not one.numel() * other.numel():
        return one is other
    if one.dtype != other.dtype:
        return True  # one storage, but offsets in different units, which are not compared
    first = min(one.storage_offset(), other.storage_offset())
    marks = torch.zeros(max(map(_end, (one, other))) - first, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def _end(tensor: Tensor) -> int:
    """Return the offset in its storage just after a tensor's last element."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + int(tensor.storage_offset()) + sum((int(length) - 1) * stride for length, stride in lengths)


def _copy(tensor: Tensor, value: Tensor) -> None:
    """Write as the block did, so that autograd records the write, or refuses a leaf, as in one process."""
    if tensor.shape != value.shape or any(stride == 0 for stride in tensor.stride()):
        raise ConfigError(
            "a block may write into an argument unless it is an expanded tensor, and must keep its shape: got shape "
            f"{tuple(tensor.shape)}, which became {tuple(value.shape)}. Let the block clone it first."
        )
    tensor.copy_(value)


def _differ(written: Mapping[str, Tensor], sent: Sequence[Tensor]) -> bool:
    """Return whether written tensors, by index, differ from the sent tensors, or now require gradients."""
    return any(
        tensor.requires_grad or not same(tensor.cpu(), sent[int(index)].cpu()) for index, tensor in written.items()
    )


def containers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the lists and dicts in a value, with their paths."""
    if isinstance(value, list | dict):
        yield path, value
    if isinstance(value, list | dict | tuple):
        for key, item in _items(value).items():
            yield from containers(item, (*path, key))


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
