"""Tensors on torch's meta device get their values later: what is done to them is written down, and done again.

So a model that fits nowhere is built as its author wrote it, and any part of it comes to the very values that it would
have if all of it had been built on a device, random ones included.

The idea is that of `deferred_init` in torchdistX.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import Blocks, StageModule
from lightning_swarm.model.sharded_format import ShardedCheckpoint

INITIALISERS: Final = {
    one.__code__: one for one in (init._no_grad_trunc_normal_, init.orthogonal_, init.dirac_, init.sparse_)
}
"""Torch's own initialisers that look at numbers. On meta they do nothing, without a word."""


@dataclass(frozen=True)
class StorageView:
    """Where a tensor is in its storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class MaterializedTensor:
    """A tensor that has values."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """Something that was done.

    Args:
        function: Torch's own operator.
        leaves: Of its arguments, in which tensors are `StorageView`s or `MaterializedTensor`.
        spec: Of the arguments' tree.
        made: Where each of the tensors that it returns is, unless that was there before.
        reads: Storages.
        writes: Storages.
        fills: Of these, those of which nothing stays.
        dtype: The default one.
        drawn: The generators that it may have drawn from, and their states before; first the one that it was given.
    """

    function: Any
    leaves: Sequence[Any]
    spec: Any
    made: Sequence[StorageView | None]
    reads: frozenset[int]
    writes: frozenset[int]
    fills: frozenset[int]
    dtype: torch.dtype
    drawn: Sequence[tuple[torch.Generator, Tensor]]


class CallReplay:
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

    def replay(self, needed: Sequence[RecordedCall], kept: Collection[int]) -> None:
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

    def tensor(self, place: StorageView) -> Tensor:
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
    def _do(self, done: RecordedCall) -> None:
        torch.set_default_dtype(done.dtype)
        args, kwargs = tree_unflatten([self._given(leaf) for leaf in done.leaves], done.spec)
        result = _drawn_again(done, args, kwargs) if done.drawn else done.function(*args, **kwargs)
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for place, tensor in zip(done.made, found, strict=bool(done.made)):
            if place is not None:
                self._put(place, tensor)

    def _given(self, leaf: Any) -> Any:
        if isinstance(leaf, StorageView):
            return self.tensor(leaf)
        if isinstance(leaf, MaterializedTensor):
            if leaf.tensor._version != leaf.version:
                raise ConfigError(
                    "what a model on meta is made from must stay as it is until the run begins, got a tensor of shape "
                    f"{tuple(leaf.tensor.shape)} that was written to since. Use a copy of it, or build the model later."
                )
            return leaf.tensor
        return self._device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _put(self, place: StorageView, tensor: Tensor) -> None:
        if (tensor.stride(), tensor.storage_offset()) == (place.stride, place.offset):
            self._real[place.storage] = tensor.untyped_storage()
        else:  # an operator may lay out its result otherwise on another device
            self.tensor(place).copy_(tensor)


def _drawn_again(done: RecordedCall, args: Any, kwargs: dict[str, Any]) -> Any:
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


_BLANK: Final = {f"aten::{name}" for name in ("empty", "empty_like", "empty_permuted", "empty_strided")} | {
    f"aten::{name}" for name in ("new_empty", "new_empty_strided")
}
"""They make a tensor with nothing in it."""

_FILLING: Final = {f"aten::{name}_" for name in ("copy", "fill", "normal", "uniform", "zero")}
"""What they write does not depend on what was there."""

_IS_META: Final = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property, in torch's stubs


class InitRecord:
    """What was done to tensors on meta inside of `recording`."""

    def __init__(self) -> None:
        self._done: list[RecordedCall] = []
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
        with _OperatorRecorder(self), _FunctionRecorder(self):
            yield

    def place(self, tensor: Tensor) -> StorageView:
        """Where a tensor on meta is."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        self._storages.setdefault(number, storage)
        return StorageView(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

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

    def blank(self, places: Sequence[StorageView]) -> list[StorageView]:
        """Those of them into which nothing was ever put, or what came from nothing."""
        if not self._needed({place.storage for place in places})[1]:
            return []
        return [place for place in places if self._needed({place.storage})[1]]

    def values(self, places: Sequence[StorageView], device: torch.device) -> list[Tensor]:
        """What would be there, had it not been on meta. Of what is blank, anything.

        Args:
            places: Where.
            device: For the results.

        Raises:
            ConfigError: A tensor that went into them has changed since.
        """
        kept = {place.storage for place in places}
        redoing = CallReplay(self._device, self._storages, self._sources)
        redoing.replay(self._needed(kept)[0], kept)
        return [redoing.tensor(place).to(device) for place in places]

    def record(self, function: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
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
        made: Sequence[StorageView | None],
        reads: Collection[int],
        writes: Collection[int],
        fills: Collection[int],
        drawn: Sequence[tuple[torch.Generator, Tensor]],
    ) -> None:
        leaves, spec = tree_flatten(arguments)
        noted = [self._noted(leaf) for leaf in leaves]
        sets = (frozenset(reads), frozenset(writes), frozenset(fills))
        self._done.append(RecordedCall(function, noted, spec, made, *sets, torch.get_default_dtype(), drawn))

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self.place(leaf) if leaf.is_meta else MaterializedTensor(leaf, leaf._version)

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

    def _needed(self, storages: Collection[int]) -> tuple[list[RecordedCall], set[int]]:
        """What has to be done again for these, in order; and storages in which nothing was ever put."""
        wanted, needed = set(storages), []
        for done in reversed(self._done):
            if done.writes & wanted:
                needed.append(done)
                wanted -= done.fills
                wanted |= done.reads
        written = {storage for done in needed for storage in done.writes}
        return needed[::-1], wanted - written - self._sources.keys()


class _OperatorRecorder(TorchDispatchMode):
    def __init__(self, blueprint: InitRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blueprint = blueprint

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._blueprint.record(func, args, kwargs or {}, found)
        return found


class _FunctionRecorder(TorchFunctionMode):
    """What leaves no trace in operators where it is on meta."""

    def __init__(self, blueprint: InitRecord) -> None:
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


def _any_at(blueprint: InitRecord, tensors: Sequence[Tensor], storage: int) -> bool:
    return any(blueprint.place(tensor).storage == storage for tensor in tensors)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
    generator: torch.Generator = module.default_generators[index]
    return generator


_MOVES: Final = (Tensor.to, Tensor.cpu, Tensor.cuda)
_MAX_NAMED: Final = 5


class InitialWeights:
    """Makes values of a module's tensors on meta, of one stage after the other, and forgets them."""

    def __init__(self) -> None:
        self._blueprint = InitRecord()
        self._places: dict[str, StorageView] = {}
        self._spent: weakref.ref[nn.Module] | None = None  # its values are not those that it was made with

    def recording(self, device: torch.device) -> AbstractContextManager[None]:
        """Write down what is done to tensors on meta, as if they were on `device`."""
        return self._blueprint.recording(device)

    @contextmanager
    def restoring(self, module: nn.Module, state: Mapping[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
        """Load a checkpoint's state into the module inside: what is on meta takes it from there when it is needed.

        Args:
            module: Into which.
            state: Of the checkpoint. What is on meta itself has its values from `stand_in`.
            device: As for `recording`.
        """
        own = module.state_dict()
        on_meta = {name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta}
        self._spent = None
        with self.recording(device) if on_meta else contextlib.nullcontext():
            yield {name: self._stand_in(value) if name in on_meta else value for name, value in state.items()}

    def _stand_in(self, value: Any) -> Any:
        has_values = isinstance(value, Tensor) and not value.is_meta
        return self._blueprint.stand_in(value, lambda: value) if has_values else value

    def read_folder(self, module: nn.Module, folder: ShardedCheckpoint) -> dict[str, Any]:
        """The weights in a folder, as `restoring` takes them: what the module has on meta is read when it is needed."""
        on_meta = {name for name, tensor in _tensors(module) if tensor.is_meta}
        found = folder.weights
        here = folder.read_weights(name for name in found if name not in on_meta)
        return {
            name: here[name] if name in here else self._blueprint.stand_in(like, partial(_read, folder, name))
            for name, like in found.items()
        }

    def index_tensors(self, module: nn.Module) -> None:
        """Know where the module's tensors on meta are, before they are converted or moved.

        Raises:
            ConfigError: Some have no values, or those that they were made with are no longer theirs.
        """
        self._places = {name: self._blueprint.place(tensor) for name, tensor in _tensors(module) if tensor.is_meta}
        if self._places and self._spent is not None and self._spent() is module:
            raise ConfigError(
                f"the weights of a module on meta are in no process as a whole, got {type(module).__name__} after a "
                "run of it. Name the checkpoint to go on from: `ckpt_path=...`."
            )
        blank = set(self._blueprint.blank(list(self._places.values())))
        if blank:
            names = [name for name, place in self._places.items() if place in blank]
            more = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
            raise ConfigError(
                "what is on meta must have been filled where that is written down, got nothing that fills "
                f"{', '.join(names[:_MAX_NAMED])}{more}. Build the layers in `configure_model`, have each parameter "
                "and buffer initialised there, or go on from a checkpoint."
            )

    def fill_outside(self, module: nn.Module, blocks: Blocks, device: torch.device) -> None:
        """Give what is in no block its values: the trainer computes with it itself."""
        inside = {id(one) for block in blocks.modules for one in (*block.parameters(), *block.buffers())}
        outside = [(name, tensor) for name, tensor in _tensors(module) if tensor.is_meta and id(tensor) not in inside]
        # One for each, however many modules share it.
        made: dict[int, Any] = {}
        for (_, tensor), value in zip(outside, self._values(outside, device), strict=True):
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
        for owner in module.modules():
            for tensors in (owner._parameters, owner._buffers):
                tensors.update({key: made[id(one)] for key, one in tensors.items() if id(one) in made})

    def weights(self, stage: StageModule) -> dict[str, Tensor]:
        """Parameters and buffers of a stage, by name: its own, and for those on meta what they would be."""
        tensors = stage.named_stage_tensors()
        made = [(name, tensor) for name, tensor in tensors.items() if tensor.is_meta]
        return {**tensors, **dict(zip(dict(made), self._values(made, torch.device("cpu")), strict=True))}

    def spend(self, module: nn.Module, *, trains: bool) -> None:
        """A run has begun: what a checkpoint has brought is forgotten, and what it `trains` is not what was made."""
        brought = self._blueprint.forget_sources()
        if is_on_meta(module) and (brought or trains):
            self._spent = weakref.ref(module)

    def _values(self, tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> list[Tensor]:
        values = self._blueprint.values([self._places[name] for name, _ in tensors], device)
        return [value.to(tensor.dtype) for value, (_, tensor) in zip(values, tensors, strict=True)]


def _read(folder: ShardedCheckpoint, name: str) -> Tensor:
    tensor: Tensor = folder.read_weights([name])[name]
    return tensor


def is_on_meta(module: nn.Module) -> bool:
    """Whether some of its parameters are on torch's meta device, and have no values."""
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def staying_on_meta() -> Iterator[None]:
    """Have modules moved to another device inside of it, but for what is on meta."""
    with _KeepOnMeta():
        yield


class _KeepOnMeta(TorchFunctionMode):
    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
