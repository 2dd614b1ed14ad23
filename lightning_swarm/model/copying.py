"""Copies values whose parts have known counterparts, such as what refers to modules that are copied, too."""

from __future__ import annotations

import copy
import functools
from collections import ChainMap
from typing import Any


# Below, `counterparts` are by the `id` of what each takes the place of; copies are added to them.
def copied(value: Any, counterparts: dict[int, Any]) -> Any:
    """Copy a value with what it refers to; one that cannot be copied is shared."""
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
        if isinstance(hook, functools.partial) or id(getattr(hook, "__self__", None)) in counterparts:
            made[key] = copied(hook, counterparts)
    return made
