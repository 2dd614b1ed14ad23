"""Methods that are replaced on one object, for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Override:
    """Takes the place of one object's method until `remove`. A copy of the object, or a pickled one, has its own."""

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        self.replaced: Callable[..., Any] = getattr(owner, name)
        # It was set on the object by a user, and is no method of its class.
        self._is_own = name in vars(owner) and not isinstance(self.replaced, Override)
        self.__wrapped__ = self.replaced  # Lightning asks whose method it is
        self._owner = owner
        self._name = name
        self._call = call
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what takes the method's place."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self._owner, self._name)  # of an owner that has no attributes yet: its class's method

    def remove(self) -> None:
        """Give the object its own method back."""
        if self._is_own:
            vars(self._owner)[self._name] = self.replaced
        else:
            vars(self._owner).pop(self._name, None)
