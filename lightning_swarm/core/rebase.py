"""Classes that are written once and derived from two base classes, one in each of Lightning's two import trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar, get_type_hints

_T = TypeVar("_T")


def written_once(base: type[Any], **attributes: Any) -> Callable[[type[_T]], type[_T]]:
    """Derive the decorated class from `base`; `rebased` derives it from another base class as well."""
    # At run time the decorated class must not derive from `base` itself: it precedes a base class in the list of bases,
    # and its `super()` then reaches that base class. Type checkers ignore class decorators, so for them the class
    # statement must name `base`.
    return lambda written: _derived(written, base, written.__module__, attributes)


def rebased(derived: type[Any], base: type[Any], module: str, **attributes: Any) -> Any:
    """Derive a `written_once` class from another base class, under its own name in another module."""
    return _derived(written_part(derived), base, module, attributes)


def written_part(derived: type[_T]) -> type[_T]:
    """Return the part that all derivations of a `written_once` class share, for `isinstance`."""
    return derived.__bases__[0]


def _derived(written: type[Any], base: type[Any], module: str, attributes: Mapping[str, Any]) -> Any:
    own = {"__module__": module, "__doc__": written.__doc__, **attributes}
    if "__init__" in vars(written):
        own["__init__"] = _typed_as(base.__init__, written.__init__)
    return type(written.__name__, (written, base), own)


def _typed_as(base_init: Any, init: Any) -> FunctionType:
    """Copy `init` with the base class's types for shared parameters; command lines are checked by these types."""
    typed = FunctionType(init.__code__, init.__globals__, init.__name__, init.__defaults__, init.__closure__)
    typed.__kwdefaults__ = init.__kwdefaults__
    hints = get_type_hints(base_init)
    typed.__annotations__ = {name: hints.get(name, hint) for name, hint in init.__annotations__.items()}
    return typed
