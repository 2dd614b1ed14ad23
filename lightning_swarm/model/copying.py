"""Copies values whose parts have known counterparts, such as what refers to modules that are copied, too."""

from __future__ import annotations

import copy
import functools
from collections import ChainMap
from types import CellType, FunctionType
from typing import Any


# Below, `counterparts` are by the `id` of what each takes the place of; copies are added to them.
def copied(value: Any, counterparts: dict[int, Any]) -> Any:
    """Copy a value with what it refers to; one that cannot be copied is shared."""
    if isinstance(value, FunctionType):
        return _rebound(value, counterparts)
    attempt: ChainMap[int, Any] = ChainMap({}, counterparts)  # a part that was copied before a failure is of no use
    try:
        made = copy.deepcopy(value, attempt)  # type: ignore[arg-type]  # it needs `get` and items only
    except Exception:  # noqa: BLE001 - locks, tensors of a graph and whatever else: each has an error of its own
        return value
    counterparts.update(attempt.maps[0])
    return made


def copied_hooks(register: Any, counterparts: dict[int, Any]) -> Any:
    """Copy a register of hooks; those of other objects stay the user's, with what they collect."""
    made = register.copy()
    for key, hook in register.items() if isinstance(register, dict) else ():
        made[key] = _counterpart(hook, counterparts)
    return made


def _counterpart(value: Any, counterparts: dict[int, Any]) -> Any:
    """Replace a module, or a callable that refers to one, by its counterpart; return other values as they are."""
    if id(value) in counterparts:
        return counterparts[id(value)]
    owner = getattr(value, "__self__", None)
    if isinstance(value, functools.partial | FunctionType) or (owner is not None and id(owner) in counterparts):
        return copied(value, counterparts)
    return value


def _rebound(function: FunctionType, counterparts: dict[int, Any]) -> FunctionType:
    """Make a closure refer to counterparts; all else that it refers to is shared, so that it writes where it did."""
    counterparts[id(function)] = function  # it may refer to itself
    cells = []
    for cell in function.__closure__ or ():
        try:
            content = _counterpart(cell.cell_contents, counterparts)
            cells.append(cell if content is cell.cell_contents else CellType(content))
        except ValueError:  # nothing is in it yet
            cells.append(cell)
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    counterparts[id(function)] = made
    return made
