"""Which names the code of users' functions reads, and which of their functions it may call."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any, Final

from torch import nn
from torch.autograd import Function

from lightning_swarm.core.module_names import is_of
from lightning_swarm.model.partition.leftovers import OF_TORCH

# Their globals are their own affair, such as whether a warning was shown.
_LIBRARIES: Final = {
    *sys.stdlib_module_names - {"__main__"},
    *("torch", "torchvision", "torchaudio", "torchmetrics", "lightning", "pytorch_lightning", "lightning_swarm"),
    *("transformers", "timm", "diffusers", "accelerate", "peft", "bitsandbytes", "einops", "numpy", "scipy"),
    *("xformers", "flash_attn", "triton", "sklearn"),
}
_KINDS: Final = {"LOAD_NAME": "LOAD_GLOBAL", "STORE_NAME": "STORE_GLOBAL", "LOAD_METHOD": "LOAD_ATTR"}
_FILLING: Final = {"append", "extend", "insert", "setdefault", "update", "add", "pop", "popleft", "clear"}
_OF_FUNCTIONS: Final = ("forward", "setup_context", "backward", "vjp", "jvp")
_MAX_DEPTH: Final = 4  # of functions that call each other
NOTHING: Final = object()
NAMESPACES: Final = (Namespace, SimpleNamespace)
"""Classes of the standard library whose objects hold settings of users."""


def is_users(module_name: object) -> bool:
    """Tell whether a Python module, by its name, is none of a library that is known."""
    return isinstance(module_name, str) and not is_of(_LIBRARIES, module_name)


class Cells:
    """The variables around a function, as a mapping."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        """The value of a variable, as it is now."""
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it is empty
            return NOTHING


@dataclass(frozen=True)
class Reads:
    """The names that a function reads, and those inside of it."""

    globals: frozenset[str]  # what it sets itself is left out, here and below
    attributes: frozenset[str]
    modes_of: frozenset[str]  # the names before `.training`, but for its own; "": it has none
    a_class: bool
    fills_containers: bool  # such as a cache: then they are left out, too


@functools.lru_cache(4096)
def reads(code: CodeType) -> Reads:
    """Find what a function reads."""
    names: defaultdict[str, set[Any]] = defaultdict(set)
    for part in _nested(code):
        before, before_name = "", ""
        for one in dis.get_instructions(part):
            kind = _KINDS.get(one.opname, one.opname)
            names[kind].add(one.argval)
            if kind == "LOAD_ATTR" and one.argval in _FILLING and before in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR"):
                names["STORE_SUBSCR"].add(one.argval)
            if kind == "LOAD_ATTR" and one.argval == "training" and before_name not in code.co_varnames[:1]:
                names["training"].add(before_name)
            before, before_name = kind, _loaded(one)
    globals_, attributes = names["LOAD_GLOBAL"] - names["STORE_GLOBAL"], names["LOAD_ATTR"] - names["STORE_ATTR"]
    return Reads(
        globals=frozenset(globals_),
        attributes=frozenset(attributes),
        modes_of=frozenset(names["training"]),
        a_class="type" in globals_ or "__class__" in attributes,
        fills_containers="STORE_SUBSCR" in names,
    )


def _loaded(one: dis.Instruction) -> str:
    """The name of what an instruction loads; some load two."""
    value = one.argval[-1] if isinstance(one.argval, tuple) and one.argval else one.argval
    return value if one.opname.startswith("LOAD_") and isinstance(value, str) else ""


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """The variables around a function, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if name != "__class__"}


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """The values that arguments have if they are not given, by name."""
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def functions_of(module: nn.Module) -> list[FunctionType]:
    """The functions of users' classes and attributes that a module may run, and those that they call."""
    own = [value for name, value in vars(module).items() if name not in OF_TORCH]
    kinds = [kind for kind in type(module).__mro__ if is_users(kind.__module__)]
    of_kinds = (value for kind in kinds for name, value in vars(kind).items() if name != "__init__")  # it has run
    return _collected([*of_kinds, *own])


def methods_of(value: object, names: Collection[str]) -> list[FunctionType]:
    """The methods and properties of these names of an object of a user's class, and those that they call."""
    kind, found = type(value), list[FunctionType]()
    for _ in range(_MAX_DEPTH if is_users(kind.__module__) else 0):
        known, found = found, _collected(inspect.getattr_static(kind, name, None) for name in sorted(names))
        if len(found) == len(known):
            break
        names = frozenset(names).union(*(reads(function.__code__).attributes for function in found))
    return found


def _collected(values: Iterable[Any]) -> list[FunctionType]:
    found: dict[CodeType, FunctionType] = {}
    for value in values:
        _collect(value, found, _MAX_DEPTH)
    return list(found.values())


def _collect(value: Any, found: dict[CodeType, FunctionType], depth: int) -> None:
    """Add a function, and those that it calls by a global or a variable around it."""
    for function in _called(value):
        if function.__code__ in found or not depth or not is_users(function.__module__):
            continue
        found[function.__code__] = function
        cells = cells_of(function)
        called = [function.__globals__.get(name) for name in reads(function.__code__).globals]
        for one in (*called, *(Cells(cells)[name] for name in cells)):
            _collect(one, found, depth - 1)


def _called(value: Any) -> Iterator[FunctionType]:
    """The functions that a call of a value runs, or the use of a property."""
    if isinstance(value, functools.partial | functools.cached_property | property):
        value = value.fget if isinstance(value, property) else value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        yield value
        return
    kind = value if isinstance(value, type) else type(value)
    if not is_users(kind.__module__) or isinstance(value, nn.Module):
        return  # a module is one of a stage, or has weights
    names = _OF_FUNCTIONS if issubclass(kind, Function) else ("__init__",) if kind is value else ("__call__",)
    for name in names:
        function = inspect.getattr_static(kind, name, None)
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            yield function
