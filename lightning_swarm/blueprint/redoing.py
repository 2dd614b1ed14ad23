"""What was done to tensors on meta, done again where they have values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.utils._pytree import tree_leaves, tree_unflatten

from lightning_swarm.blueprint.notes import INITIALISERS, Done, Known, Place
from lightning_swarm.errors import ConfigError


class Redoing:
    """Does again what was done.

    Args:
        device: Where.
        storages: Those on meta.
        sources: Of what has values from elsewhere.
    """

    def __init__(
        self,
        device: torch.device,
        storages: dict[int, torch.UntypedStorage],
        sources: dict[int, Callable[[], Tensor]],
    ) -> None:
        self._device = device
        self._storages = storages
        self._sources = sources
        self._real: dict[int, torch.UntypedStorage] = {}

    def run(self, needed: Sequence[Done], kept: Collection[int]) -> None:
        """Do it, and keep what of it is in the storages `kept`."""
        last = {storage: index for index, done in enumerate(needed) for storage in (*done.reads, *done.writes)}
        before = torch.get_default_dtype()
        try:
            for index, done in enumerate(needed):
                self._do(done)
                for storage in (*done.reads, *done.writes):
                    if last[storage] == index and storage not in kept:
                        self._real.pop(storage, None)
        finally:
            torch.set_default_dtype(before)

    def tensor(self, place: Place) -> Tensor:
        """What is there now."""
        storage = self._real.get(place.storage)
        if storage is None and place.storage in self._sources:
            storage = self._sources[place.storage]().to(self._device).contiguous().untyped_storage()
        if storage is None:
            storage = torch.UntypedStorage(self._storages[place.storage].nbytes(), device=self._device)
        self._real[place.storage] = storage
        blank = torch.empty(0, dtype=place.dtype, device=self._device)
        return blank.set_(storage, place.offset, place.size, place.stride)

    @torch.no_grad()
    def _do(self, done: Done) -> None:
        torch.set_default_dtype(done.dtype)
        args, kwargs = tree_unflatten([self._given(leaf) for leaf in done.leaves], done.spec)
        result = _drawn_again(done, args, kwargs) if done.drawn else done.function(*args, **kwargs)
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for place, tensor in zip(done.made, found, strict=bool(done.made)):
            if place is not None:
                self._put(place, tensor)

    def _given(self, leaf: Any) -> Any:
        if isinstance(leaf, Place):
            return self.tensor(leaf)
        if isinstance(leaf, Known):
            if leaf.tensor._version != leaf.version:
                raise ConfigError(
                    "what a model on meta is made from must stay as it is until the run begins, got a tensor of shape "
                    f"{tuple(leaf.tensor.shape)} that was written to since. Use a copy of it, or build the model later."
                )
            return leaf.tensor
        return self._device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _put(self, place: Place, tensor: Tensor) -> None:
        if (tensor.stride(), tensor.storage_offset()) == (place.stride, place.offset):
            self._real[place.storage] = tensor.untyped_storage()
        else:  # an operator may lay out its result otherwise on another device
            self.tensor(place).copy_(tensor)


def _drawn_again(done: Done, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call what draws. Nobody else's generator is touched, where the function takes one."""
    generator, state = done.drawn[0]
    function = _with_generator(done.function)
    if function is not None:
        own = torch.Generator(generator.device)
        own.set_state(state)
        return function(*args, **{**kwargs, "generator": own})
    before = [(generator, generator.get_state()) for generator, _ in done.drawn]
    try:
        for generator, state in done.drawn:
            generator.set_state(state)
        return done.function(*args, **kwargs)
    finally:
        for generator, state in before:
            generator.set_state(state)


def _with_generator(function: Any) -> Any:
    """The same, where it draws from the generator that it is given and no other; None: there is no such function."""
    if function in INITIALISERS.values():
        takes_one = "generator" in function.__code__.co_varnames and function is not init.sparse_  # which shuffles, too
        return function if takes_one else None
    if any(argument.name == "generator" for argument in function._schema.arguments):
        return function
    return getattr(function.overloadpacket, "generator", None)
