"""Detects in-place changes of tensors and objects in modules' attributes, which set no attribute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.model.fidelity.attribute_values import Comparison, copy_containers, is_comparable, same
from lightning_swarm.model.fidelity.code_reads import NAMESPACES, is_users

_FEW_BYTES: Final = 512  # largest tensors and arrays whose values are compared, too
NO_SETTINGS: Final = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)
_MAX_DEPTH: Final = 3  # nesting of objects
_MAX_ITEMS: Final = 64  # entries of an object that are searched for nested objects
_UNSET: Final[tuple[object, ...]] = (None, [], (), {}, set())
_LIBRARIES: Final = ("torch", "lightning", "pytorch_lightning", "lightning_swarm", "numpy", "builtins")


@dataclass(frozen=True)
class _Held:
    """The tensor or settings in an attribute, with their first state."""

    title: str  # the module's name in messages
    name: str  # the attribute's name
    value: Any
    first: Any


class Contents:
    """Finds in-place changes of tensors, and of settings in objects, such as a config that blocks share."""

    def __init__(self, attributes: Iterable[tuple[str, str, Any]]) -> None:
        """Record the contents of attributes, each given as the module's title, the attribute's name and its value."""
        distinct = {id(value): (title, name, value) for title, name, value in attributes}.values()
        held = [_Held(title, name, value, _array_state(value)) for title, name, value in distinct]
        self._arrays = [array for array in held if array.first is not None]
        self._objects: list[_Held] = []
        for title, name, settings in (nested for item in distinct for nested in _nested(*item)):
            # Settings that are None or empty at first may be filled in when a model runs.
            first = {
                key: copy_containers(item)
                for key, item in settings.items()
                if str(key)[:1] != "_" and is_comparable(item) and item not in _UNSET
            }
            if first:
                self._objects.append(_Held(title, name, settings, first))
        self._comparison = Comparison([held.value for held in self._objects], [held.first for held in self._objects])

    def changed(self) -> list[tuple[str, str, Any]]:
        """Return the changes, each as the module's title, the attribute's name and its present value."""
        changes = [(h.title, h.name, h.value) for h in self._arrays if _array_state(h.value) != h.first]
        if not self._comparison.holds():
            for held in self._objects:
                changes += [
                    (held.title, f"{held.name}.{key}", held.value.get(key))
                    for key, value in held.first.items()
                    if key not in held.value or not same(held.value[key], value)
                ]
        return changes


def _array_state(value: Any) -> Any:
    """Return a tensor's version, and the contents of a small tensor or array, to see changes; None for other values."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.is_inference():
            return None
        is_small = value.nbytes <= _FEW_BYTES and value.device.type == "cpu" and not value.is_sparse
        return value._version, repr(value.detach().resolve_conj().flatten().tolist()) if is_small else None
    is_array = type(value).__module__ == "numpy" and getattr(value, "nbytes", _FEW_BYTES + 1) <= _FEW_BYTES
    return value.tobytes() if is_array else None


def _nested(title: str, name: str, value: Any, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, str, dict[Any, Any]]]:
    """Yield the settings in an attribute, and in users' objects nested in it."""
    settings = _settings(value)
    yield title, name, settings
    for key, item in islice(settings.items(), _MAX_ITEMS) if depth else ():
        if str(key)[:1] != "_" and (isinstance(item, NAMESPACES) or is_users(type(item).__module__)):
            yield from _nested(title, f"{name}.{key}", item, depth - 1)


def _settings(value: Any) -> dict[Any, Any]:
    """Return an object's settings: its attributes, or the object itself if it is a dict; empty for library objects."""
    if isinstance(value, dict):
        return value
    settings = getattr(value, "__dict__", None)
    if isinstance(value, NO_SETTINGS) or type(settings) is not dict:
        return {}
    return {} if is_in_packages(_LIBRARIES, type(value).__module__) else settings
