"""Temporary replacement of a method, and of attributes, on a single object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Override:
    """Replaces one object's method until `remove`. Copies of the object, also by pickle, keep their own method."""

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        self.replaced: Callable[..., Any] = getattr(owner, name)
        # A user may have set a method on the object itself, which `remove` must restore.
        self._had_own = name in vars(owner) and not isinstance(self.replaced, Override)
        self.__wrapped__ = self.replaced  # Lightning looks up the class that defines the method
        self._owner = owner
        self._name = name
        self._call = call
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self._owner, self._name)  # a copy has no attributes yet, so it gets its class's method

    def remove(self) -> None:
        """Restore the object's own method."""
        if self._had_own:
            vars(self._owner)[self._name] = self.replaced
        else:
            vars(self._owner).pop(self._name, None)


@contextmanager
def changed(owner: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object within this context, and restore their former values afterwards."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
