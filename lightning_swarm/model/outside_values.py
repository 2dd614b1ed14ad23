"""What the code of blocks reads beside its arguments and its own module: globals, closures, and objects behind them.

Other peers have values of their own there, and hear of no change. So a change is refused, by name.
"""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.attribute_values import SCALARS, Comparison, is_plain, kept
from lightning_swarm.model.module_contents import NO_SETTINGS
from lightning_swarm.model.partition.leftovers import OF_TORCH

# Their globals are their own affair, such as whether a warning was shown.
_LIBRARIES: Final = {
    *sys.stdlib_module_names - {"__main__"},
    *("torch", "torchvision", "torchaudio", "torchmetrics", "lightning", "pytorch_lightning", "lightning_swarm"),
    *("transformers", "timm", "diffusers", "accelerate", "peft", "bitsandbytes", "einops", "numpy", "scipy"),
    *("xformers", "flash_attn", "triton", "sklearn"),
}
_OF_TRAINER: Final = ("trainer", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "fabric")
_HOLDERS: Final = (list, tuple, dict, set)
_KINDS: Final = {"LOAD_NAME": "LOAD_GLOBAL", "STORE_NAME": "STORE_GLOBAL", "LOAD_METHOD": "LOAD_ATTR"}
_FILLING: Final = {"append", "extend", "insert", "setdefault", "update", "add", "pop", "popleft", "clear"}
_MAX_DEPTH: Final = 4  # of functions that call each other

_NOTHING: Final = object()


@dataclass(frozen=True)
class _Source:
    """Values that a block's code reads in one place, by name, as they were first."""

    title: str  # of the module whose code it is
    place: str
    values: Any  # a mapping, as it is now
    first: dict[str, Any]


class _Cells:
    """The variables around a function, as a mapping."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it is empty
            return _NOTHING


@dataclass(frozen=True)
class _Reads:
    """The names that a function reads, and those inside of it."""

    globals: frozenset[str]  # what it sets itself is left out, here and below
    attributes: frozenset[str]
    a_class: bool
    fills_containers: bool  # such as a cache: then they are left out, too


@functools.lru_cache(4096)
def _reads(code: CodeType) -> _Reads:
    names: defaultdict[str, set[Any]] = defaultdict(set)
    for part in _nested(code):
        before = ""
        for one in dis.get_instructions(part):
            kind = _KINDS.get(one.opname, one.opname)
            names[kind].add(one.argval)
            if kind == "LOAD_ATTR" and one.argval in _FILLING and before in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR"):
                names["STORE_SUBSCR"].add(one.argval)
            before = kind
    globals_, attributes = names["LOAD_GLOBAL"] - names["STORE_GLOBAL"], names["LOAD_ATTR"] - names["STORE_ATTR"]
    return _Reads(
        globals=frozenset(globals_),
        attributes=frozenset(attributes),
        a_class="type" in globals_ or "__class__" in attributes,
        fills_containers="STORE_SUBSCR" in names,
    )


def _around(function: FunctionType) -> dict[str, CellType]:
    """The variables around a function, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if name != "__class__"}


class OutsideValues:
    """Notices changes of what the code of a stage's modules reads elsewhere."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Note the values, by the modules' titles; refuse what other peers cannot have."""
        found: dict[tuple[int, str], _Source] = {}
        held = {id(module): (title, module) for title, module in modules}
        for title, module in held.values():
            for source in _sources(title, module, held):
                found.setdefault((id(source.values), ",".join(sorted(source.first))), source)
        self._sources = [source for source in found.values() if source.first]
        self._comparison = Comparison([one.values for one in self._sources], [one.first for one in self._sources])

    def check(self) -> None:
        """Refuse what was changed."""
        if self._comparison.holds():
            return
        for one in self._sources:
            for name, first in one.first.items():
                if not Comparison([one.values], [{name: first}]).holds():
                    raise ConfigError(
                        "what blocks read must come to every peer: as an argument, or as a plain attribute of a block, "
                        f"which travels with each call. `{name}`, {one.place} that the code of {one.title!r} reads, "
                        "was changed during the run. Keep it as an attribute of the block."
                    )


def _sources(title: str, module: nn.Module, held: Collection[int]) -> Iterator[_Source]:
    functions = _functions(module)
    reads = [_reads(function.__code__) for function in functions]
    names = frozenset().union(*(one.attributes for one in reads))
    for kind in type(module).__mro__ if any(one.a_class for one in reads) else ():
        if _is_users(kind.__module__):
            values = {name: value for name, value in vars(kind).items() if name in names}
            yield _Source(title, f"an attribute of class {kind.__name__}", vars(kind), _plain(values))
    for name, value in vars(module).items():
        if name not in OF_TORCH:
            for item in _referred(value):
                # `Contents` watches the settings of an object that an attribute holds itself.
                if id(item) not in held and (item is not value or isinstance(value, NO_SETTINGS)):
                    yield from _of_object(title, module, item, names)
    for function, read in zip(functions, reads, strict=True):
        own, cells = function.__globals__, _around(function)
        globals_ = {name: own[name] for name in read.globals if name in own and _is_left_alone(own[name], read)}
        yield _Source(title, f"a global of {own.get('__name__', 'a module')}", own, _plain(globals_))
        around = {name: value for name in cells if _is_left_alone(value := _Cells(cells)[name], read)}
        if around:
            yield _Source(title, f"a variable around `{function.__qualname__}`", _Cells(cells), _plain(around))
        for item in (*globals_.values(), *around.values()):
            for value in _referred(item):
                if id(value) not in held:
                    yield from _of_object(title, module, value, read.attributes)


def _is_left_alone(value: Any, read: _Reads) -> bool:
    """Tell whether code only reads a value. A container that it may fill itself, such as a cache, is its own affair."""
    return not (read.fills_containers and isinstance(value, _HOLDERS))


def _of_object(title: str, module: nn.Module, value: Any, names: Collection[str]) -> Iterator[_Source]:
    """What code that reads attributes of these names reads of an object that is not the block's."""
    own: Mapping[str, Any]
    if isinstance(value, ModuleType):
        own = vars(value) if _is_users(value.__name__) else {}
    elif isinstance(value, type):
        own = vars(value) if _is_users(value.__module__) else {}
    elif value is module or isinstance(value, (Tensor, FunctionType, MethodType, *_HOLDERS)):
        own = {}
    else:
        is_users = isinstance(value, nn.Module) or _is_users(type(value).__module__)
        own = getattr(value, "__dict__", {}) if is_users else {}
    if not own:
        return
    of_module = {*vars(module), *module._parameters, *module._buffers, *module._modules, *OF_TORCH}
    names = [name for name in names if name not in of_module]
    what = value.__name__ if isinstance(value, type | ModuleType) else type(value).__name__
    if isinstance(value, nn.Module):
        _refuse_unreachable(title, what, value, names)
    yield _Source(title, f"an attribute of {what}", own, _plain({name: own[name] for name in names if name in own}))


def _refuse_unreachable(title: str, what: str, value: nn.Module, names: Collection[str]) -> None:
    """Refuse what a block's code reads of a module that is not in the block, and that exists on the trainer alone."""
    tensors = [name for name in {**value._parameters, **value._buffers} if name in names]
    of_trainer = [name for name in _OF_TRAINER if name in names and "_trainer" in vars(value)]
    if found := sorted([*tensors, *of_trainer]):
        raise ConfigError(
            f"blocks must hold what they compute with: the code of {title!r} reads {found} of {what}, which is not in "
            "the block, and is on the trainer only. Give it to the block as an argument or register it there."
        )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that can be compared, as they are now."""
    return {name: kept(value) for name, value in values.items() if name[:2] != "__" and _is_comparable(value)}


def _is_comparable(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in SCALARS and is_plain(item) for key, item in value.items())
    return is_plain(value) or (type(value) is set and all(map(is_plain, value)))


def _referred(value: Any) -> Iterator[Any]:
    """The objects in a container or behind a weak reference; anything else is what it is."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _HOLDERS):
        yield from value
    elif isinstance(value, weakref.ref):
        yield value()
    else:
        yield value


def _functions(module: nn.Module) -> list[FunctionType]:
    """The functions of users' classes and attributes that a module may run, and those that they call."""
    found: dict[CodeType, FunctionType] = {}
    for kind in type(module).__mro__:
        for value in vars(kind).values() if _is_users(kind.__module__) else ():
            _collect(getattr(value, "fget", None) or getattr(value, "__func__", None) or value, found, _MAX_DEPTH)
    for name, value in vars(module).items():
        if name not in OF_TORCH:
            _collect(getattr(value, "__func__", value), found, _MAX_DEPTH)
    return list(found.values())


def _collect(value: Any, found: dict[CodeType, FunctionType], depth: int) -> None:
    if not isinstance(value, FunctionType) or value.__code__ in found or not depth or not _is_users(value.__module__):
        return
    found[value.__code__] = value
    cells = _around(value)
    called = [value.__globals__.get(name) for name in _reads(value.__code__).globals]
    for one in (*called, *(_Cells(cells)[name] for name in cells)):
        _collect(getattr(one, "__func__", one), found, depth - 1)


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _is_users(module_name: Any) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] not in _LIBRARIES
