"""What is done to tensors on torch's meta device, written down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from typing_extensions import override

from lightning_swarm.blueprint.notes import INITIALISERS, Done, Known, Place
from lightning_swarm.blueprint.redoing import Redoing

_BLANK: Final = {f"aten::{name}" for name in ("empty", "empty_like", "empty_permuted", "empty_strided")} | {
    f"aten::{name}" for name in ("new_empty", "new_empty_strided")
}
"""They make a tensor with nothing in it."""

_FILLING: Final = {f"aten::{name}_" for name in ("copy", "fill", "normal", "uniform", "zero")}
"""What they write does not depend on what was there."""

_IS_META: Final = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property, in torch's stubs


class Blueprint:
    """What was done to tensors on meta inside of `recording`."""

    def __init__(self) -> None:
        self._done: list[Done] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no other one gets its number
        self._sources: dict[int, Callable[[], Tensor]] = {}
        self._device = torch.device("cpu")

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """Write down what is done inside.

        Random numbers are drawn as they would be on `device`, and dropped: what is drawn afterwards is what would be
        drawn after the model was built.
        """
        self._device = device
        with _Operators(self), _Functions(self):
            yield

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor on meta is."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        self._storages.setdefault(number, storage)
        return Place(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def stand_in(self, like: Tensor, source: Callable[[], Tensor]) -> Tensor:
        """A tensor on meta that has the values of `source`, which is asked for them whenever they are needed."""
        tensor = torch.empty_like(like, device="meta", memory_format=torch.contiguous_format)
        self._sources[self.place(tensor).storage] = source
        return tensor

    def forget_sources(self) -> bool:
        """Drop what was done with stand-ins, and what they stood for. Whether there were any."""
        dropped = self._sources.keys()
        self._done = [done for done in self._done if not done.reads & dropped]
        self._sources = {}
        return bool(dropped)

    def blank(self, places: Sequence[Place]) -> list[Place]:
        """Those of them into which nothing was ever put, or what came from nothing."""
        if not self._needed({place.storage for place in places})[1]:
            return []
        return [place for place in places if self._needed({place.storage})[1]]

    def values(self, places: Sequence[Place], device: torch.device) -> list[Tensor]:
        """What would be there, had it not been on meta. Of what is blank, anything.

        Args:
            places: Where.
            device: For the results.

        Raises:
            ConfigError: A tensor that went into them has changed since.
        """
        kept = {place.storage for place in places}
        redoing = Redoing(self._device, self._storages, self._sources)
        redoing.run(self._needed(kept)[0], kept)
        return [redoing.tensor(place).to(device) for place in places]

    def note(self, function: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        """Write down an operator that was called, if it changed or made a tensor on meta."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in (*inputs, *outputs)) or function._schema.name in _BLANK:
            return
        reads = {self.place(tensor).storage for tensor in inputs if tensor.is_meta}
        places = [self.place(tensor) if tensor.is_meta else None for tensor in outputs]
        made = [place if place is not None and place.storage not in reads else None for place in places]
        changed = [tensor for tensor in _changed(function, args, kwargs) if tensor.is_meta]
        writes = {place.storage for place in made if place is not None}
        fills = set(writes)
        for tensor in changed:
            place = self.place(tensor)
            writes.add(place.storage)
            covers = tensor.numel() * tensor.itemsize == self._storages[place.storage].nbytes()
            others = [one for one in inputs if one is not tensor and one.is_meta]
            if covers and function._schema.name in _FILLING and not _any_at(self, others, place.storage):
                fills.add(place.storage)
        if writes:  # else it looks at a part of something
            is_random = torch.Tag.nondeterministic_seeded in function.tags
            drawn = self._draw(function, args, kwargs) if is_random else ()
            self._write_down(function, (args, kwargs), made, reads - fills, writes, fills, drawn)

    def note_initialiser(self, function: Any, given: dict[str, Any]) -> None:
        """Write down one of torch's, which fills the argument `tensor`."""
        storage = {self.place(given["tensor"]).storage}
        drawn = self._draw(function, (), given)
        self._write_down(function, ((), given), (), set(), storage, storage, drawn)

    def _write_down(
        self,
        function: Any,
        arguments: tuple[Any, dict[str, Any]],
        made: Sequence[Place | None],
        reads: Collection[int],
        writes: Collection[int],
        fills: Collection[int],
        drawn: Sequence[tuple[torch.Generator, Tensor]],
    ) -> None:
        leaves, spec = tree_flatten(arguments)
        noted = [self._noted(leaf) for leaf in leaves]
        sets = (frozenset(reads), frozenset(writes), frozenset(fills))
        self._done.append(Done(function, noted, spec, made, *sets, torch.get_default_dtype(), drawn))

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self.place(leaf) if leaf.is_meta else Known(leaf, leaf._version)

    def _draw(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Sequence[tuple[torch.Generator, Tensor]]:
        """Draw, and drop it. From which generators, and their states before."""
        generators = [kwargs.get("generator"), _default_generator(self._device)]
        drawn = [(generator, generator.get_state()) for generator in generators if generator is not None]
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            args, kwargs = tree_map(self._stuffed, (args, kwargs))
            function(*args, **kwargs)
        return drawn

    def _stuffed(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_meta:
            return torch.zeros_like(leaf, device=self._device)
        return self._device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _needed(self, storages: Collection[int]) -> tuple[list[Done], set[int]]:
        """What has to be done again for these, in order; and storages in which nothing was ever put."""
        wanted, needed = set(storages), []
        for done in reversed(self._done):
            if done.writes & wanted:
                needed.append(done)
                wanted -= done.fills
                wanted |= done.reads
        written = {storage for done in needed for storage in done.writes}
        return needed[::-1], wanted - written - self._sources.keys()


class _Operators(TorchDispatchMode):
    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blueprint = blueprint

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._blueprint.note(func, args, kwargs or {}, found)
        return found


class _Functions(TorchFunctionMode):
    """What leaves no trace in operators where it is on meta."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self._blueprint = blueprint

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == "meta":
            # Torch would drop the numbers.
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        found = func(*args, **kwargs)
        if found is True and func == _IS_META:
            # Whoever asks, by whatever name it was imported. In between there may be another mode.
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__":
                frame = frame.f_back
            code = frame.f_code
            if code in INITIALISERS:
                given = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
                self._blueprint.note_initialiser(INITIALISERS[code], given)
        return found


def _changed(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among its arguments that an operator writes to."""
    given = {**dict(zip((one.name for one in function._schema.arguments), args, strict=False)), **kwargs}
    written = [one.name for one in function._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [leaf for name in written for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]


def _any_at(blueprint: Blueprint, tensors: Sequence[Tensor], storage: int) -> bool:
    return any(blueprint.place(tensor).storage == storage for tensor in tensors)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    generator: torch.Generator = module.default_generators[index]
    return generator
