"""What the first block writes into its arguments, as `nn.ReLU(inplace=True)` does: its caller has to see that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.protocol.serialization import Tree

WRITTEN: Final = "written arguments"
"""Stands for the name of an attribute, where the first block's arguments are collected if it wrote into them."""

_TENSORS: Final = "tensors"
_REPLACED: Final = "replaced"
_MISSING: Final = object()


class InputWatch:
    """Finds what is written into arguments between its beginning and `written`."""

    def __init__(self, inputs: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Note arguments; `tensors` are those in them, in order, which nothing has written yet."""
        self._tensors = tensors
        self._containers = [(path, one, _items(one)) for path, one in _containers(inputs, ())]

    def written(self) -> Tree | None:
        """Return the tensors that were written, by place, and the places in lists and dicts; None: nothing was."""
        tensors = {str(place): tensor for place, tensor in enumerate(self._tensors) if tensor._version}
        replaced = [
            [*path, key]
            for path, container, before in self._containers
            for now in (_items(container),)
            for key in {**before, **now}
            if now.get(key, _MISSING) is not before.get(key, _MISSING)
        ]
        return {_TENSORS: tensors, _REPLACED: replaced} if tensors or replaced else None


def write_back(
    args: tuple[Any, ...], tensors: Sequence[Tensor], written: Tree, unavailable: Callable[[str], Any]
) -> None:
    """Write into a caller's arguments what was written on a server; `unavailable` makes what is not to be had."""
    try:
        for place, value in written[_TENSORS].items():
            _copy(tensors[int(place)], value)
        for *path, key in written[_REPLACED]:
            owner: Any = args
            for step in path:
                owner = owner[step]
            _replace(owner, key, unavailable(f"the first block replaced {key!r} in a {type(owner).__name__}"))
    except ConfigError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"a server wrote into arguments that the call does not have: {error!r}") from error


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


def _containers(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The lists and dicts in a value, and where they are."""
    if isinstance(value, list | dict):
        yield path, value
    if isinstance(value, list | dict | tuple):
        for key, item in _items(value).items():
            yield from _containers(item, (*path, key))


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
