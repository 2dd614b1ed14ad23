"""Makes stamps of the values that user code can reach. Two stamps are equal if the value did not change in between.

If several trainers train, each has its own values in attributes, globals and closures. `own_values` compares their
stamps to warn if the values change.
"""

from __future__ import annotations

import array
import enum
import itertools
import sys
import types
import weakref
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.model.fidelity.attribute_values import SCALARS
from lightning_swarm.model.fidelity.code_reads import NOTHING, Cells, cells_of, nested
from lightning_swarm.strategy.framework import OWN_PACKAGES

_OPAQUE: Final = frozenset({*OWN_PACKAGES, "torch", "numpy", "torchmetrics", *sys.stdlib_module_names})
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
# Other mappings are excluded, because reading one may run code, or load a file for each name.
_MAPPINGS: Final = (dict, types.MappingProxyType)
_CONTAINERS: Final = (list, tuple, set, frozenset, deque, array.array, *_MAPPINGS)
_MAX_DEPTH: Final = 4
_MAX_PATH: Final = 3  # levels of nested objects whose attributes have stamps of their own
_MAX_ITEMS: Final = 4096  # items stamped per value; further items count only in the lengths of containers
_MAX_BYTES: Final = 1 << 16  # bytes hashed per array; a larger contiguous array is sampled at regular intervals
_MAX_ELEMENTS: Final = 4096  # elements hashed of an array that is not contiguous, from its beginning


class _SameObject:
    """A stamp that equals another if both are of the same object with the same content. Keeps no object alive."""

    def __init__(self, value: object, content: object) -> None:
        self._of, self._content = weakref.ref(value), content

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SameObject):
            return NotImplemented
        own = self._of()
        return own is not None and own is other._of() and self._content == other._content

    __hash__ = None  # type: ignore[assignment]


def stamp(value: Any) -> Any:
    """Stamp a value. Functions, files and other libraries' objects are not examined: their stamp is None."""
    return _stamp(value, _MAX_DEPTH, itertools.count())


def _stamp(value: Any, depth: int, num_items: Iterator[int]) -> Any:
    """Stamp a value and, up to `depth` levels, the values in it; `num_items` counts the items stamped so far."""
    if type(value) in SCALARS:
        return "nan" if value != value else (type(value), value)  # NaN does not equal itself
    if isinstance(value, torch.Tensor):  # tensors of inference mode do not count writes
        return _SameObject(value, None if value.is_inference() else value._version)
    if isinstance(value, enum.Enum):
        return type(value), value.name
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
        return _SameObject(value, (value.shape, value.dtype.str, _content(value)))
    if isinstance(value, _CONTAINERS):
        try:
            items = [] if not depth else value.items() if isinstance(value, _MAPPINGS) else value
            first_items = itertools.takewhile(lambda _: next(num_items) < _MAX_ITEMS, items)
            stamps = [_stamp(item, depth - 1, num_items) for item in first_items]
        except RuntimeError:  # another thread changes the container
            return None
        return type(value), len(value), stamps
    if depth and is_user_object(value):
        return [(key, _stamp(item, depth - 1, num_items)) for key, item in attributes_of(value).items()]
    return None


def _content(value: np.ndarray) -> int | None:
    """Return a checksum of an array, or of a sample if it is large or not contiguous; None for Python objects."""
    if value.dtype.hasobject:
        return None
    sample: np.ndarray
    if value.flags.c_contiguous:
        sample = value.reshape(-1)[:: max(1, value.nbytes // _MAX_BYTES)]
    else:
        sample = value.flat[:_MAX_ELEMENTS]
    return zlib.crc32(np.ascontiguousarray(sample).view(np.uint8).data)


def is_user_object(value: object) -> bool:
    """Return whether a value is a user's object with attributes: a namespace, a dataset, or of a class in user code."""
    cls = type(value)
    if isinstance(value, nn.Module | type | enum.Enum | types.FunctionType | types.ModuleType):
        return False
    if not hasattr(value, "__dict__"):
        return False
    is_known = cls in (Namespace, types.SimpleNamespace) or isinstance(value, Dataset)
    return is_known or _is_user_code(cls.__module__)


@cache  # stamps of a model check the classes of all its modules each time
def _is_user_code(module_name: str) -> bool:
    """Return whether a Python module is user code. Installed packages are not: they may change private state."""
    if is_in_packages(_OPAQUE, module_name):
        return False
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return not _INSTALLED & {*Path(file).parts}


def attributes_of(value: object) -> dict[str, Any]:
    """Return an object's attributes, and the data attributes of its classes in user code."""
    attributes: dict[str, Any] = {}
    for base in reversed(type(value).__mro__):
        if _is_user_code(base.__module__):
            attributes |= {
                key: item
                for key, item in list(vars(base).items())
                if key[:2] != "__" and not callable(item) and not hasattr(item, "__get__")
            }
    return attributes | vars(value)


def stamps_of(name: str, value: object, *, within: tuple[object, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield path and stamp of a value, or of each attribute of a user's object; `within` are the objects around it."""
    if any(value is outer for outer in within):
        return
    if not is_user_object(value) or len(within) == _MAX_PATH:
        yield name, stamp(value)
    else:
        for key, item in attributes_of(value).items():
            yield from stamps_of(f"{name}.{key}", item, within=(*within, value))


def callable_stamps(name: str, function: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and stamp of each value that a callable refers to: attributes, bound arguments, outer variables."""
    if isinstance(function, partial):
        yield from stamps_of(name, [function.args, function.keywords])
        yield from callable_stamps(name, function.func)
    elif isinstance(function, types.MethodType):
        yield from callable_stamps(name, function.__func__)
        yield from stamps_of(name, function.__self__)
    elif isinstance(function, types.FunctionType):
        yield from closure_stamps(function)
    else:
        yield from stamps_of(name, function)


def closure_stamps(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield paths and stamps of the globals that a function names, and of its variables from enclosing functions."""
    names, cells = sorted(names_in(function.__code__) & function.__globals__.keys()), cells_of(function)
    values = [(name, function.__globals__[name]) for name in names] + [(name, Cells(cells)[name]) for name in cells]
    for name, value in values:
        if value is not NOTHING and (not callable(value) or is_user_object(value)):
            yield from stamps_of(name, value)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code, nested functions included."""
    return {name for part in nested(code) for name in part.co_names}


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class and its bases define in user code."""
    for base in cls.__mro__:
        if _is_user_code(base.__module__):
            yield from (value for value in vars(base).values() if isinstance(value, types.FunctionType))
