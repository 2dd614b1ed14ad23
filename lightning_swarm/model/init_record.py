"""Records the calls that initialise tensors on torch's meta device, and repeats them on a device with memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError

INITIALISERS: Final = {
    function.__code__: function
    for function in (init._no_grad_trunc_normal_, init.orthogonal_, init.dirac_, init.sparse_)
}
"""Torch's initialisers, by their code, that read values and therefore silently do nothing on meta."""

_EMPTY: Final = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
}
"""Operators that make a tensor without content."""

_FILLING: Final = {f"aten::{name}_" for name in ("copy", "fill", "normal", "uniform", "zero")}
"""Operators whose result does not depend on the old content."""

_IS_META: Final = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property, in torch's stubs


@dataclass(frozen=True)
class StorageView:
    """The place of a tensor in its storage."""

    storage: int  # the storage's address, which identifies it
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class MaterializedTensor:
    """A tensor with values that a recorded call read, and its version at that time."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call of one of torch's operators or initialisers."""

    function: Any
    leaves: Sequence[Any]  # flattened arguments, with a `StorageView` or `MaterializedTensor` in place of each tensor
    spec: Any  # structure of the arguments
    made: Sequence[StorageView | None]  # returned tensors; None for a tensor that existed before
    reads: frozenset[int]  # addresses of storages, as in `StorageView`
    writes: frozenset[int]
    fills: frozenset[int]  # the part of `writes` whose old content does not matter
    dtype: torch.dtype  # the default dtype during the call
    # The generators that the call may have drawn from, an explicit generator first, with their states before the call.
    # Empty: the call is not random. None: the call is random, and drawing was disabled.
    drawn: Sequence[tuple[torch.Generator, Tensor]] | None


_Effects: TypeAlias = tuple[Sequence[StorageView | None], frozenset[int], frozenset[int], frozenset[int]]
"""The fields `made`, `reads`, `writes` and `fills` of a `RecordedCall`."""


class InitRecord:
    """Records the calls that make or change tensors on meta inside of `recording`, and computes the tensors' values.

    `draws=False` skips random initialisation, which would be wasted if weights are loaded from files.
    """

    def __init__(self, *, draws: bool = True) -> None:
        self._draws = draws
        self._calls: list[RecordedCall] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other storage gets its address
        self._sources: dict[int, Callable[[], Tensor]] = {}  # storage of a stand-in -> function that returns its values
        self._device = torch.device("cpu")

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """Record the calls that are made inside, and draw their random numbers as they would be drawn on `device`."""
        self._device = device
        with _OperatorRecorder(self), _FunctionRecorder(self):
            yield

    def view(self, tensor: Tensor) -> StorageView:
        """Return the place of a tensor on meta, and keep its storage alive."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._storages.setdefault(address, storage)
        return StorageView(address, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def stand_in(self, like: Tensor, source: Callable[[], Tensor]) -> Tensor:
        """Make a tensor on meta whose values `source` returns whenever they are needed."""
        tensor = torch.empty_like(like, device="meta", memory_format=torch.contiguous_format)
        self._sources[self.view(tensor).storage] = source
        return tensor

    def forget_sources(self) -> bool:
        """Drop the sources of stand-ins, and the calls that read these; return whether there were any."""
        dropped = self._sources.keys()
        self._calls = [call for call in self._calls if not call.reads & dropped]
        self._sources = {}
        return bool(dropped)

    def uninitialised(self, views: Sequence[StorageView]) -> list[StorageView]:
        """Return the places that were never filled, or whose content was computed from such places."""
        if not self._needed({view.storage for view in views})[1]:
            return []
        return [view for view in views if self._needed({view.storage})[1]]

    def values(self, views: Sequence[StorageView], device: torch.device) -> list[Tensor]:
        """Compute the values of tensors on meta; uninitialised tensors get arbitrary values."""
        kept = {view.storage for view in views}
        replay = CallReplay(self._device, self._storages, self._sources)
        replay.replay(self._needed(kept)[0], kept)
        return [replay.tensor(view).to(device) for view in views]

    def record(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Record an operator's call, if it made or changed a tensor on meta."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in (*inputs, *outputs)) or function._schema.name in _EMPTY:
            return
        reads = {self.view(tensor).storage for tensor in inputs if tensor.is_meta}
        views = [self.view(tensor) if tensor.is_meta else None for tensor in outputs]
        made = [view if view is not None and view.storage not in reads else None for view in views]
        writes = {view.storage for view in made if view is not None}
        fills = set(writes)
        for tensor in written_tensors(function, args, kwargs):
            if tensor.is_meta:
                storage = self.view(tensor).storage
                writes.add(storage)
                # A storage is filled if all of it is written, and none of it is read.
                covers = tensor.numel() * tensor.itemsize == self._storages[storage].nbytes()
                others = {self.view(other).storage for other in inputs if other is not tensor and other.is_meta}
                if covers and function._schema.name in _FILLING and storage not in others:
                    fills.add(storage)
        if writes:  # a call without writes only made a view of a tensor
            is_random = torch.Tag.nondeterministic_seeded in function.tags
            effects = (made, frozenset(reads - fills), frozenset(writes), frozenset(fills))
            self._append(function, (args, kwargs), effects, is_random=is_random)

    def record_initialiser(self, function: Any, arguments: dict[str, Any]) -> None:
        """Record the call of one of torch's initialisers, which fills the argument `tensor`."""
        filled = frozenset({self.view(arguments["tensor"]).storage})
        self._append(function, ((), arguments), ((), frozenset(), filled, filled), is_random=True)

    def _append(
        self, function: Any, arguments: tuple[Any, dict[str, Any]], effects: _Effects, *, is_random: bool
    ) -> None:
        drawn: Sequence[tuple[torch.Generator, Tensor]] | None = ()
        if is_random:
            drawn = self._draw(function, *arguments) if self._draws else None
        leaves, spec = tree_flatten(arguments)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = self.view(leaf) if leaf.is_meta else MaterializedTensor(leaf, leaf._version)
        self._calls.append(RecordedCall(function, leaves, spec, *effects, torch.get_default_dtype(), drawn))

    def _draw(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Sequence[tuple[torch.Generator, Tensor]]:
        """Draw random numbers and drop them, so that generators move as if the model had been built with values.

        Return the generators that may have been used, with their states before.
        """
        generators = [kwargs.get("generator"), _default_generator(self._device)]
        drawn = [(generator, generator.get_state()) for generator in generators if generator is not None]
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            args, kwargs = tree_map(self._with_zeros, (args, kwargs))
            function(*args, **kwargs)
        return drawn

    def _with_zeros(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_meta:
            return torch.zeros_like(leaf, device=self._device)
        return self._device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _needed(self, storages: Collection[int]) -> tuple[list[RecordedCall], set[int]]:
        """Find the calls that fill some storages, in order, and the storages that no call filled."""
        wanted, needed = set(storages), []
        for call in reversed(self._calls):
            if call.writes & wanted:
                needed.append(call)
                wanted -= call.fills
                wanted |= call.reads
        written = {storage for call in needed for storage in call.writes}
        return needed[::-1], wanted - written - self._sources.keys()


class _OperatorRecorder(TorchDispatchMode):
    def __init__(self, record: InitRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._record.record(func, args, kwargs or {}, result)
        return result


class _FunctionRecorder(TorchFunctionMode):
    """Records functions that call no operator if their tensors are on meta."""

    def __init__(self, record: InitRecord) -> None:
        super().__init__()
        self._record = record

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == "meta":
            # On meta, torch would drop the values.
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        result = func(*args, **kwargs)
        if result is True and func == _IS_META:
            # The caller may be an initialiser, which reads this property of its tensor. It is recognized by its code
            # object, because user code may have imported it under any name. Frames of other modes may lie in between.
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__":
                frame = frame.f_back
            code = frame.f_code
            if code in INITIALISERS:
                arguments = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
                self._record.record_initialiser(INITIALISERS[code], arguments)
        return result


def written_tensors(function: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among an operator's arguments that it writes to."""
    parameters = function._schema.arguments
    values = {**dict(zip((parameter.name for parameter in parameters), args, strict=False)), **kwargs}
    written = [item.name for item in parameters if item.alias_info is not None and item.alias_info.is_write]
    return [leaf for name in written for leaf in tree_leaves(values.get(name)) if isinstance(leaf, Tensor)]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    generator: torch.Generator = module.default_generators[index]
    return generator


@dataclass(eq=False)
class CallReplay:
    """Repeats recorded calls on a device."""

    _device: torch.device
    _meta_storages: dict[int, torch.UntypedStorage]  # address of a storage on meta -> the storage, which has its size
    _sources: dict[int, Callable[[], Tensor]]  # storage -> function that reads its values from elsewhere
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # the same addresses -> on the device

    def replay(self, calls: Sequence[RecordedCall], kept: Collection[int]) -> None:
        """Repeat calls, and drop each storage after its last use, unless it is among `kept`."""
        last_use = {storage: index for index, call in enumerate(calls) for storage in (*call.reads, *call.writes)}
        before = torch.get_default_dtype()
        try:
            for index, call in enumerate(calls):
                self._repeat(call)
                for storage in (*call.reads, *call.writes):
                    if last_use[storage] == index and storage not in kept:
                        self._storages.pop(storage, None)
        finally:
            torch.set_default_dtype(before)

    def tensor(self, view: StorageView) -> Tensor:
        """Return the tensor at a place in a storage, with its values after the calls so far."""
        storage = self._storages.get(view.storage)
        if storage is None and view.storage in self._sources:
            storage = self._sources[view.storage]().to(self._device).contiguous().untyped_storage()
        if storage is None:
            storage = torch.UntypedStorage(self._meta_storages[view.storage].nbytes(), device=self._device)
        self._storages[view.storage] = storage
        blank = torch.empty(0, dtype=view.dtype, device=self._device)
        return blank.set_(storage, view.offset, view.size, view.stride)

    @torch.no_grad()
    def _repeat(self, call: RecordedCall) -> None:
        torch.set_default_dtype(call.dtype)
        args, kwargs = tree_unflatten([self._argument(leaf) for leaf in call.leaves], call.spec)
        if call.drawn is None:
            raise ConfigError(
                f"random tensors of a model must be in its files, but {call.function} fills a tensor that is not. "
                "Register it as a persistent buffer, and save the model again."
            )
        result = _draw_again(call, call.drawn, args, kwargs) if call.drawn else call.function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for view, tensor in zip(call.made, tensors, strict=bool(call.made)):  # `made` is empty for an initialiser
            if view is not None:
                self._put(view, tensor)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, StorageView):
            return self.tensor(leaf)
        if isinstance(leaf, MaterializedTensor):
            if leaf.tensor._version != leaf.version:
                raise ConfigError(
                    "tensors from which a model on meta is made must not change until the run begins, but a tensor of "
                    f"shape {tuple(leaf.tensor.shape)} has changed. Use a copy of it, or build the model later."
                )
            return leaf.tensor
        return self._device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _put(self, view: StorageView, tensor: Tensor) -> None:
        if (tensor.stride(), tensor.storage_offset()) == (view.stride, view.offset):
            self._storages[view.storage] = tensor.untyped_storage()
        else:  # an operator may lay out its result differently on another device
            self.tensor(view).copy_(tensor)


def _draw_again(
    call: RecordedCall, drawn: Sequence[tuple[torch.Generator, Tensor]], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Repeat a random call with a copy of its generator, or with the default generators, whose states are restored."""
    generator, state = drawn[0]
    function = _with_generator(call.function)
    if function is not None:
        copied = torch.Generator(generator.device)
        copied.set_state(state)
        return function(*args, **{**kwargs, "generator": copied})
    before = [(generator, generator.get_state()) for generator, _ in drawn]
    try:
        for generator, state in drawn:
            generator.set_state(state)
        return call.function(*args, **kwargs)
    finally:
        for generator, state in before:
            generator.set_state(state)


def _with_generator(function: Any) -> Any:
    """Return a variant of a function that draws only from its argument `generator`, or None."""
    if function in INITIALISERS.values():
        # `sparse_` also shuffles, without its generator.
        has_generator = "generator" in function.__code__.co_varnames and function is not init.sparse_
        return function if has_generator else None
    if any(argument.name == "generator" for argument in function._schema.arguments):
        return function
    return getattr(function.overloadpacket, "generator", None)
