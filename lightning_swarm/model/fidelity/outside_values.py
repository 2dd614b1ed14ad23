"""Refuses changes of values that blocks read outside of their arguments and modules: globals, closures and objects.

Each peer has its own globals, closures and objects, and would not see a change on another peer.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NoReturn

from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.fidelity import code_reads
from lightning_swarm.model.fidelity.attribute_values import Comparison, copy_containers, is_comparable
from lightning_swarm.model.fidelity.code_reads import NAMESPACES, Cells, Reads
from lightning_swarm.model.fidelity.leftovers import TORCH_ATTRIBUTES
from lightning_swarm.model.fidelity.module_contents import NO_SETTINGS

_TRAINER_NAMES: Final = ("trainer", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "fabric")
_CONTAINERS: Final = (list, tuple, dict, set)
_MAX_DEPTH: Final = 3  # nesting of objects


@dataclass(frozen=True)
class _Source:
    """Values that a block's code reads in one place, by name, with their first values."""

    title: str  # the module whose code reads them
    place: str  # description of the place, for messages
    values: Any  # a mapping with the present values
    first: dict[str, Any]


@dataclass(frozen=True)
class _Block:
    """A module in a block, and the names that its code reads."""

    title: str
    module: nn.Module
    functions: list[FunctionType]
    names: frozenset[str]  # attributes that the code reads
    modes_of: frozenset[str]  # attributes whose train or eval mode the code reads
    held: Collection[int]  # ids of the stage's modules and of their tensors

    @classmethod
    def of(cls, title: str, module: nn.Module, held: Collection[int]) -> _Block:
        """Analyse a module's code."""
        functions = code_reads.functions_of(module)
        reads = [code_reads.reads(function.__code__) for function in functions]
        names = frozenset[str]().union(*(function_reads.attributes for function_reads in reads))
        modes_of = frozenset[str]().union(*(function_reads.modes_of for function_reads in reads))
        return cls(title, module, functions, names, modes_of, held)

    def names_read_from(self, value: Any) -> frozenset[str]:
        """Return the names of attributes that this block's code may read from `value`, an object outside the block."""
        module = self.module
        names = self.names - {*vars(module), *module._parameters, *module._buffers, *module._modules, *TORCH_ATTRIBUTES}
        if isinstance(value, nn.Module) and self.modes_of - module._modules.keys():
            names |= {"training"}  # the only attribute of torch's that is compared
        methods = code_reads.methods_of(value, names)
        names = names.union(*(code_reads.reads(method.__code__).attributes for method in methods))
        return names - (TORCH_ATTRIBUTES - {"training"})


class OutsideValues:
    """Detects changes of values that the code of a stage's modules reads from outside of the modules."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Record the values that titled modules read; refuse weights that other peers cannot have."""
        titles = {id(module): (title, module) for title, module in modules}
        tensors = (t for _, m in titles.values() for t in (*m._parameters.values(), *m._buffers.values()))
        held = {*titles, *map(id, tensors)}
        sources: dict[tuple[int, frozenset[Any]], _Source] = {}  # (id of the mapping, names) -> source
        blocks = [_Block.of(title, module, held) for title, module in titles.values()]
        for block in blocks:
            _refuse_weights(block)
            for source in _sources(block):
                # Blocks may read the same values, which are compared once, for the first of the blocks.
                sources.setdefault((id(source.values), frozenset(source.first)), source)
        self._sources = [source for source in sources.values() if source.first]
        self._comparison = Comparison([s.values for s in self._sources], [s.first for s in self._sources])

    def check(self) -> None:
        """Raise `ConfigError` if a value has changed."""
        if self._comparison.holds():
            return
        for source in self._sources:
            for name, first in source.first.items():
                if not Comparison([source.values], [{name: first}]).holds():
                    remedy = "Read the block's own." if name == "training" else "Keep it as an attribute of the block."
                    _refuse(source.title, name, source.place, remedy)


def _refuse(title: str, name: str, place: str, remedy: str) -> NoReturn:
    """Raise the error of a value that was changed during the run."""
    raise ConfigError(
        "values that blocks read must reach every peer: as an argument, or as a plain attribute of a block, which is "
        f"sent with each call. `{name}`, {place} that the code of {title!r} reads, was changed during the run. {remedy}"
    )


def _sources(block: _Block) -> Iterator[_Source]:
    """Yield all places outside a module from which its code may read plain values."""
    reads = [code_reads.reads(function.__code__) for function in block.functions]
    if any(function_reads.reads_class for function_reads in reads):
        for kind in filter(lambda kind: code_reads.is_users(kind.__module__), type(block.module).__mro__):
            values = {name: value for name, value in vars(kind).items() if name in block.names}
            yield _Source(block.title, f"an attribute of class {kind.__name__}", vars(kind), _plain(values))
    for name, value in vars(block.module).items():
        if name not in TORCH_ATTRIBUTES:
            for item in _referred(value):
                # If the attribute is the object itself, `Contents` watches its settings already.
                if item is not value or isinstance(value, NO_SETTINGS):
                    yield from _object_sources(block, item, block.names_read_from(item))
    for function, function_reads in zip(block.functions, reads, strict=True):
        yield from _function_sources(block, function, function_reads)


def _function_sources(block: _Block, function: FunctionType, reads: Reads) -> Iterator[_Source]:
    """Yield the globals, closure variables and defaults that a function reads."""
    values, cells = function.__globals__, code_reads.cells_of(function)
    globals_ = {name: values[name] for name in reads.globals if name in values and _is_watched(values[name], reads)}
    yield _Source(block.title, f"a global of {values.get('__name__', 'a module')}", values, _plain(globals_))
    variables = Cells(cells)
    enclosed = {name: variables[name] for name in cells if _is_watched(variables[name], reads)}
    if enclosed:
        yield _Source(block.title, f"a variable around `{function.__qualname__}`", variables, _plain(enclosed))
    defaults = {name: value for name, value in code_reads.defaults_of(function).items() if _is_watched(value, reads)}
    yield _Source(block.title, f"a default of `{function.__qualname__}`", defaults, _plain(defaults))
    for name, value in (*globals_.items(), *enclosed.items(), *defaults.items()):
        if type(value) is dict and not is_comparable(value):
            yield _Source(block.title, f"an entry of `{name}`", value, _plain(value))
        for item in _referred(value):
            yield from _object_sources(block, item, block.names_read_from(item))


def _is_watched(value: Any, reads: Reads) -> bool:
    """Return whether changes of a value count. Code may fill containers itself, such as a cache."""
    return not (reads.changes_containers and isinstance(value, _CONTAINERS))


def _object_sources(block: _Block, value: Any, names: Collection[str], depth: int = _MAX_DEPTH) -> Iterator[_Source]:
    """Yield an outside object's attributes of these names, which the block's code may read, and objects inside."""
    attributes = _attributes(block, value)
    if not attributes:
        return
    what = value.__name__ if isinstance(value, type | ModuleType) else type(value).__name__
    if isinstance(value, nn.Module):
        _refuse_unreachable(block.title, what, value, names)
    read = {name: attributes[name] for name in names if name in attributes}
    yield _Source(block.title, f"an attribute of {what}", attributes, _plain(read))
    if not depth:
        return
    # Objects behind properties are compared as well: a property such as `hparams` reads `_hparams`.
    inside = {name: attributes[key] for name in names for key in (name, f"_{name}") if key in attributes}
    for name, item in inside.items():
        if isinstance(item, dict) and not is_comparable(item):
            yield _Source(block.title, f"an entry of `{name}`", item, _plain(item))
        elif not isinstance(item, nn.Module):
            yield from _object_sources(block, item, names, depth - 1)


def _attributes(block: _Block, value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object that may hold settings; empty for a library's own objects."""
    if isinstance(value, ModuleType | type):
        module_name = value.__name__ if isinstance(value, ModuleType) else value.__module__
        return vars(value) if code_reads.is_users(module_name) else {}
    if id(value) in block.held or isinstance(value, (Tensor, FunctionType, MethodType, *_CONTAINERS)):
        return {}
    may_change = isinstance(value, (nn.Module, *NAMESPACES)) or code_reads.is_users(type(value).__module__)
    return getattr(value, "__dict__", {}) if may_change else {}


def _refuse_unreachable(title: str, what: str, value: nn.Module, names: Collection[str]) -> None:
    """Refuse reads that other peers cannot repeat: of an outside module's tensors, or of the Trainer through it."""
    tensors = [name for name in {**value._parameters, **value._buffers} if name in names]
    from_trainer = [name for name in _TRAINER_NAMES if name in names and "_trainer" in vars(value)]
    if reads := sorted([*tensors, *from_trainer]):
        raise ConfigError(
            f"blocks must hold the values that they compute with: the code of {title!r} reads {reads} of {what}, which "
            "is not in the block but only on the trainer. Pass it to the block as an argument, or register it there."
        )


def _values_read(block: _Block) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a block's code reads: attributes, globals and closure variables."""
    yield from ((name, value) for name, value in vars(block.module).items() if name in block.names)
    for function in block.functions:
        for name in code_reads.reads(function.__code__).globals:
            yield name, function.__globals__.get(name)
        cells = code_reads.cells_of(function)
        yield from ((name, Cells(cells)[name]) for name in cells)


def _refuse_weights(block: _Block) -> None:
    """Refuse weights that a block's code reads outside of its stage, because each peer would have its own."""
    for name, value in _values_read(block):
        for item in _referred(value):
            if any(id(parameter) not in block.held for parameter in _parameters(item, block.module)):
                raise ConfigError(
                    f"blocks must hold the weights that they compute with: the code of {block.title!r} reads `{name}` "
                    f"({type(item).__name__}), whose weights are not in its stage. Register it in the block, or pass "
                    "its output to the block as an argument."
                )


def _parameters(item: Any, block: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters that code may use through an object; none of a module that contains the block itself."""
    if isinstance(item, nn.Module):
        return () if any(inner is block for inner in item.modules()) else item.parameters()
    return (item,) if isinstance(item, nn.Parameter) else ()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the values that can be compared."""
    return {
        name: copy_containers(value) for name, value in values.items() if str(name)[:2] != "__" and is_comparable(value)
    }


def _referred(value: Any) -> Iterator[Any]:
    """Yield the objects in a container, or behind a weak reference, a method or a partial; else the value itself."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (*value.args, *value.keywords.values(), *_referred(value.func))
    else:
        yield value
