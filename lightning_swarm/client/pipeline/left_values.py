"""Stand-ins for values that forwards leave on modules: pending until servers have computed them, or unavailable.

While the user's forward calls blocks one by one, nothing is computed yet. `PendingValues` replaces the attributes that
the blocks will set by `Pending` tensors. Torch operations on these are deferred until the last block's call, when all
blocks are computed together.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from types import FrameType, FunctionType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError


class StandIn(Tensor):
    """Stands in for a value. `_use` handles its uses: it computes, defers the operation, or raises."""

    @classmethod
    def make(cls) -> Self:
        """Make a stand-in. Its subclass sets how the value is found."""
        return Tensor._make_subclass(cls, torch.empty(0))

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _use(func, args, kwargs or {}, sys._getframe(1))

    @override
    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types here
        return "<left by a forward on another peer>"


class Unavailable(StandIn):
    """A value that the trainer cannot get. Every use raises an error with the reason."""

    reason: str

    @classmethod
    def because(cls, reason: str) -> Unavailable:
        """Make a stand-in whose uses raise an error with this text."""
        stand_in = cls.make()
        vars(stand_in)["reason"] = reason
        return stand_in

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unavailable.because, (vars(self)["reason"],)


class UnavailableObject:
    """An unavailable value that is no tensor. Every use raises an error."""

    def __init__(self, reason: str) -> None:
        vars(self)["_reason"] = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copying and pickling look up such names
            raise AttributeError(name)
        raise ConfigError(self._reason)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the use."""
        raise ConfigError(self._reason)

    __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __float__ = __int__ = __contains__ = __call__
    __hash__ = object.__hash__


class Pending(StandIn):
    """A value that is known after the last block's call, or a result computed from such a value."""

    @classmethod
    def of(cls, compute: Callable[[], Any] | None, what: str) -> Pending:
        """Make a stand-in whose value comes from `compute`, or else from `PendingValues`; `what` names it in errors."""
        stand_in = cls.make()
        vars(stand_in).update(compute=compute, what=what)
        return stand_in

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _value_of(self).__reduce_ex__(protocol)


def _is_known(pending: Pending) -> bool:
    """Return whether a pending value is known, or can be computed now."""
    state = vars(pending)
    return "value" in state or (state["compute"] is not None and all(map(_is_known, state["compute"].needs)))


def _value_of(stand_in: StandIn) -> Any:
    """Return a stand-in's value, computing it if necessary; raise if it is unavailable."""
    state = vars(stand_in)
    if "reason" in state:
        raise ConfigError(state["reason"])
    if "value" not in state:
        state["value"] = state["compute"]()
    value = state["value"]
    return _value_of(value) if isinstance(value, StandIn) else value


class _Deferred:
    """A call of a torch function, deferred until the pending values among its arguments are known."""

    def __init__(self, func: Any, args: Any, kwargs: Any, needs: list[Pending]) -> None:
        self._call = func, args, kwargs
        self._grad = torch.is_grad_enabled()
        self.needs = needs

    def __call__(self) -> Any:
        with torch.set_grad_enabled(self._grad):
            return _compute(*self._call)


# Methods that change a tensor in place, or return something other than a tensor, cannot be deferred.
_NOT_DEFERRABLE = frozenset(
    [
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__len__",
        "__iter__",
        "__contains__",
        "__format__",
        "__get__",
        "__complex__",
        "__setitem__",
        "__set__",
        "__delete__",
        "item",
        "tolist",
        "numpy",
        "size",
        "dim",
        "backward",
    ]
)


def _use(func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
    """Call a torch function on stand-ins, or defer the call if a value is pending; `frame` is the user's code."""
    stand_ins: list[StandIn] = []
    tree_map_only(StandIn, stand_ins.append, (args, kwargs))
    pending = [value for value in stand_ins if isinstance(value, Pending)]
    unknown = [value for value in pending if not _is_known(value)]
    if not unknown:
        return _compute(func, args, kwargs)
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and _is_augmented_assignment(frame):
        name = name[:-1]  # `x += y` can be deferred as `x = x + y`
        func = getattr(torch, name)
    what = vars(unknown[0])["what"]
    if name in _NOT_DEFERRABLE or (name.endswith("_") and not name.endswith("__")):
        raise ConfigError(
            f"{what} is computed when the last block is called, because the swarm computes all blocks together: got a "
            f"use in `{name}` before. Read it after the loop over the blocks."
        )
    return Pending.of(_Deferred(func, args, kwargs, pending), what)


def _is_augmented_assignment(frame: FrameType) -> bool:
    """Return whether a frame currently executes an operation such as ``x += y``, which assigns its result to ``x``."""
    now = next((item for item in dis.get_instructions(frame.f_code) if item.offset == frame.f_lasti), None)
    if now is None:
        return False
    return now.opname.startswith("INPLACE_") or (now.opname == "BINARY_OP" and now.argrepr[-1] == "=")


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function with the values of its stand-ins."""
    args, kwargs = tree_map_only(StandIn, _value_of, (args, kwargs))
    return func(*args, **kwargs)


class PendingValues:
    """Replaces attributes by pending values until the forwards that set these attributes have run."""

    def __init__(self, modules: Mapping[str, nn.Module], sites: Collection[tuple[str, str]]) -> None:
        """Replace the attributes at `sites`, and the attributes that the code of the modules' forwards assigns."""
        by_code = {(name, key) for name, module in modules.items() for key in _assigned_by(module)}
        # (module, attribute, pending value, former value); the pending value twice if there is no former value
        self._pending: list[tuple[nn.Module, str, Pending, Any]] = []
        for name, key in sorted(by_code | {*sites}):
            attributes = vars(modules[name])
            pending = Pending.of(None, f"`{key}` of block {name!r}")
            self._pending.append((modules[name], key, pending, attributes.get(key, pending)))
            attributes[key] = pending

    def restore(self) -> None:
        """Restore the attributes' former values."""
        for module, key, pending, former in self._pending:
            if former is not pending:
                vars(module)[key] = former
            elif vars(module).get(key) is pending:
                del vars(module)[key]

    def make_unavailable(self) -> None:
        """Make the pending values unavailable, because they stay on the servers."""
        for module, key, pending, _ in self._pending:
            vars(pending)["value"] = Unavailable.because(
                f"`{key}` of a {type(module).__name__} is set by its forward on a server, and is not returned while "
                "text is generated. To read it, call the model without a cache, by `use_cache=False`"
            )

    def settle(self) -> None:
        """Set the pending values to the attributes' current values, which the servers have returned."""
        for module, key, pending, _ in self._pending:
            missing = f"`{key}` of a {type(module).__name__} was read, but its forward did not set it"
            value = vars(module).get(key, pending)
            vars(pending)["value"] = Unavailable.because(missing) if value is pending else value


def _assigned_by(module: nn.Module) -> list[str]:
    """Return the attributes that a module's forward sets, except attributes that cannot be pending."""
    values = vars(module)
    hashable: Any = type(module)
    return [
        name
        for name in set_in_forward(hashable)
        if isinstance(values.get(name), Tensor | float | int | None)
        and not isinstance(values.get(name), bool)
        and not hasattr(type(module), name)
        and not any(name in registered for registered in (module._parameters, module._buffers, module._modules))
    ]


@functools.cache
def set_in_forward(module_class: Any) -> frozenset[str]:
    """Return the names of the attributes that the code of a class's forward, and of methods that it calls, assigns."""
    todo, seen, assigned = ["forward"], set[str](), set[str]()
    while todo:
        function = inspect.getattr_static(module_class, todo.pop(), None)
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, FunctionType) or (function.__module__ or "").startswith("torch."):
            continue
        for instruction in dis.get_instructions(function):
            name = instruction.argval
            if instruction.opname == "STORE_ATTR":
                assigned.add(name)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name not in seen:
                seen.add(name)
                todo.append(name)
    return frozenset(assigned)
