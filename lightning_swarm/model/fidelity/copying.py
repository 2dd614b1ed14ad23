"""Copies values and replaces objects in them by known counterparts, such as modules by their copies."""

from __future__ import annotations

import copy
import functools
from collections import ChainMap
from types import CellType, FunctionType
from typing import Any


# Below, `counterparts` maps the `id` of an object to its replacement; copies are added to it.
def copy_value(value: Any, counterparts: dict[int, Any]) -> Any:
    """Copy a value with the objects that it refers to; return the value itself if it cannot be copied."""
    if isinstance(value, FunctionType):
        return _rebind(value, counterparts)
    memo: ChainMap[int, Any] = ChainMap({}, counterparts)  # a failed copy leaves `counterparts` unchanged
    try:
        result = copy.deepcopy(value, memo)  # type: ignore[arg-type]  # deepcopy only gets and sets items
    except Exception:  # noqa: BLE001 - locks, tensors of a graph and the like raise different errors
        return value
    counterparts.update(memo.maps[0])
    return result


def copy_hooks(register: Any, counterparts: dict[int, Any]) -> Any:
    """Copy a register of hooks. Hooks of objects without counterparts are shared, so both copies add to their data."""
    result = register.copy()
    for key, hook in register.items() if isinstance(register, dict) else ():  # a set has only names
        result[key] = _counterpart(hook, counterparts)
    return result


def _counterpart(value: Any, counterparts: dict[int, Any]) -> Any:
    """Replace a module, or a callable that refers to one, by its counterpart; return other values as they are."""
    if id(value) in counterparts:
        return counterparts[id(value)]
    owner = getattr(value, "__self__", None)
    if isinstance(value, functools.partial | FunctionType) or (owner is not None and id(owner) in counterparts):
        return copy_value(value, counterparts)
    return value


def _rebind(function: FunctionType, counterparts: dict[int, Any]) -> FunctionType:
    """Copy a function so that its closure refers to counterparts; other objects stay shared with the original."""
    counterparts[id(function)] = function  # it may refer to itself
    cells = []
    for cell in function.__closure__ or ():
        try:
            content = _counterpart(cell.cell_contents, counterparts)
            cells.append(cell if content is cell.cell_contents else CellType(content))
        except ValueError:  # the cell is empty
            cells.append(cell)
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    new.__kwdefaults__ = function.__kwdefaults__
    vars(new).update(vars(function))
    counterparts[id(function)] = new
    return new
