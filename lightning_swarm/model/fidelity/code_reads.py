"""Static analysis of user functions: the names that their code reads, and the user functions that they may call."""

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

from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.model.fidelity.leftovers import TORCH_ATTRIBUTES

# Known libraries. Their globals are internal, such as whether a warning was shown.
_LIBRARIES: Final = {
    *sys.stdlib_module_names - {"__main__"},
    *("torch", "torchvision", "torchaudio", "torchmetrics", "lightning", "pytorch_lightning", "lightning_swarm"),
    *("transformers", "timm", "diffusers", "accelerate", "peft", "bitsandbytes", "einops", "numpy", "scipy"),
    *("xformers", "flash_attn", "triton", "sklearn"),
}
# instruction -> instruction that counts as the same
_COUNTED_AS: Final = {"LOAD_NAME": "LOAD_GLOBAL", "STORE_NAME": "STORE_GLOBAL", "LOAD_METHOD": "LOAD_ATTR"}
_MUTATING: Final = {"append", "extend", "insert", "setdefault", "update", "add", "pop", "popleft", "clear"}
_FUNCTION_METHODS: Final = ("forward", "setup_context", "backward", "vjp", "jvp")  # of `torch.autograd.Function`
_MAX_DEPTH: Final = 4  # nested calls of functions
NOTHING: Final = object()  # stands for the value of an empty closure variable
NAMESPACES: Final = (Namespace, SimpleNamespace)  # standard library classes whose objects hold users' settings


def is_users(module_name: object) -> bool:
    """Return whether the Python module of this name is user code, that is, no part of a known library."""
    return isinstance(module_name, str) and not is_in_packages(_LIBRARIES, module_name)


class Cells:
    """Maps the names of a function's closure variables to their present values."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        """Return a variable's present value, or `NOTHING` if it has none."""
        try:
            return self._cells[name].cell_contents
        except ValueError:  # the cell is empty
            return NOTHING


@dataclass(frozen=True)
class Reads:
    """The names that the code of a function, and of functions nested in it, reads."""

    globals: frozenset[str]  # without names that the function sets itself, also in `attributes`
    attributes: frozenset[str]
    modes_of: frozenset[str]  # names before `.training`, except the function's own `self`; "" for other expressions
    reads_class: bool  # reads the class of an object, and so perhaps attributes of the class
    changes_containers: bool  # changes containers, such as caches, which are then not watched


@functools.lru_cache(4096)
def reads(code: CodeType) -> Reads:
    """Return the names that a function's code reads."""
    names: defaultdict[str, set[Any]] = defaultdict(set)
    for part in nested(code):
        before, before_name = "", ""
        for instruction in dis.get_instructions(part):
            kind, name = _COUNTED_AS.get(instruction.opname, instruction.opname), instruction.argval
            names[kind].add(name)
            if kind == "LOAD_ATTR" and name in _MUTATING and before in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR"):
                names["STORE_SUBSCR"].add(name)
            if kind == "LOAD_ATTR" and name == "training" and before_name not in code.co_varnames[:1]:
                names["training"].add(before_name)
            before, before_name = kind, _loaded(instruction)
    globals_, attributes = names["LOAD_GLOBAL"] - names["STORE_GLOBAL"], names["LOAD_ATTR"] - names["STORE_ATTR"]
    return Reads(
        globals=frozenset(globals_),
        attributes=frozenset(attributes),
        modes_of=frozenset(names["training"]),
        reads_class="type" in globals_ or "__class__" in attributes,
        changes_containers="STORE_SUBSCR" in names,
    )


def _loaded(instruction: dis.Instruction) -> str:
    """Return the name that an instruction loads, the last if it loads two, or "" if it loads none."""
    value = instruction.argval
    value = value[-1] if isinstance(value, tuple) and value else value
    return value if instruction.opname.startswith("LOAD_") and isinstance(value, str) else ""


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and the code of functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """Return the closure variables of a function, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if name != "__class__"}


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the default values of a function's arguments, by name."""
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def functions_of(module: nn.Module) -> list[FunctionType]:
    """Return the user functions that a module may run: its methods and attributes, and the functions that they call."""
    attributes = [value for name, value in vars(module).items() if name not in TORCH_ATTRIBUTES]
    classes = [kind for kind in type(module).__mro__ if is_users(kind.__module__)]
    methods = (value for kind in classes for name, value in vars(kind).items() if name != "__init__")  # it has run
    return _collected([*methods, *attributes])


def methods_of(value: object, names: Collection[str]) -> list[FunctionType]:
    """Return a user class's methods and properties of these names, and the functions that they call."""
    kind, methods = type(value), list[FunctionType]()
    for _ in range(_MAX_DEPTH if is_users(kind.__module__) else 0):
        known, methods = methods, _collected(inspect.getattr_static(kind, name, None) for name in sorted(names))
        if len(methods) == len(known):
            break
        names = frozenset(names).union(*(reads(method.__code__).attributes for method in methods))
    return methods


def _collected(values: Iterable[Any]) -> list[FunctionType]:
    functions: dict[CodeType, FunctionType] = {}
    for value in values:
        _collect(value, functions, _MAX_DEPTH)
    return list(functions.values())


def _collect(value: Any, into: dict[CodeType, FunctionType], depth: int) -> None:
    """Add a function, and the functions that it calls through globals or closure variables."""
    for function in _called(value):
        if function.__code__ in into or not depth or not is_users(function.__module__):
            continue
        into[function.__code__] = function
        cells = cells_of(function)
        called = [function.__globals__.get(name) for name in reads(function.__code__).globals]
        for other in (*called, *(Cells(cells)[name] for name in cells)):
            _collect(other, into, depth - 1)


def _called(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that run when a value is called, or a property is read."""
    if isinstance(value, functools.partial | functools.cached_property | property):
        value = value.fget if isinstance(value, property) else value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        yield value
        return
    kind = value if isinstance(value, type) else type(value)
    if not is_users(kind.__module__) or isinstance(value, nn.Module):
        return  # analysed as a stage's module, or refused for its weights
    names = _FUNCTION_METHODS if issubclass(kind, Function) else ("__init__",) if kind is value else ("__call__",)
    for name in names:
        function = inspect.getattr_static(kind, name, None)
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            yield function
