"""Stand-ins for values that forwards leave on modules: pending until they are computed, or unavailable."""

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
    """Stands in for a value. `_use` handles its uses: it computes, defers the call as a new stand-in, or raises."""

    @classmethod
    def make(cls) -> Self:
        """Make a stand-in without a value."""
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
    """A value that the swarm does not have. Every use is refused with its reason."""

    reason: str

    @classmethod
    def because(cls, reason: str) -> Unavailable:
        """Make a stand-in whose uses raise an error with this text."""
        made = cls.make()
        vars(made)["reason"] = reason
        return made

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unavailable.because, (vars(self)["reason"],)


class UnavailableObject:
    """An unavailable value that is no tensor. Every use is refused."""

    def __init__(self, reason: str) -> None:
        vars(self)["_reason"] = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copying and pickling probe such names
            raise AttributeError(name)
        raise ConfigError(self._reason)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the use."""
        raise ConfigError(self._reason)

    __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __float__ = __int__ = __contains__ = __call__
    __hash__ = object.__hash__


class Pending(StandIn):
    """A value that is known after the last block's call, or a result that depends on such a value."""

    @classmethod
    def of(cls, compute: Callable[[], Any] | None, what: str) -> Pending:
        """Make a stand-in whose value comes from `compute`, or else from `PendingValues`; `what` names it in errors."""
        made = cls.make()
        vars(made).update(compute=compute, what=what)
        return made

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _value_of(self).__reduce_ex__(protocol)


def _is_settled(pending: Pending) -> bool:
    """Return whether a pending value is known, or can be computed now."""
    own = vars(pending)
    return "value" in own or (own["compute"] is not None and all(map(_is_settled, own["compute"].needs)))


def _value_of(stand_in: StandIn) -> Any:
    """Return a stand-in's value, which may have to be computed first; raise if it is unavailable."""
    own = vars(stand_in)
    if "reason" in own:
        raise ConfigError(own["reason"])
    if "value" not in own:
        own["value"] = own["compute"]()
    value = own["value"]
    return _value_of(value) if isinstance(value, StandIn) else value


class _Deferred:
    """A call of torch, deferred until the pending values among its arguments are known."""

    def __init__(self, func: Any, args: Any, kwargs: Any, needs: list[Pending]) -> None:
        self._call = func, args, kwargs
        self._grad = torch.is_grad_enabled()
        self.needs = needs

    def __call__(self) -> Any:
        with torch.set_grad_enabled(self._grad):
            return _computed(*self._call)


# Methods that change a tensor in place, or return something other than a tensor, cannot be deferred.
_CANNOT_WAIT = frozenset(
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
    """Call a function of torch on stand-ins, or defer the call if a value is pending; `frame` is the user's code."""
    found: list[StandIn] = []
    tree_map_only(StandIn, found.append, (args, kwargs))
    waiting = [one for one in found if isinstance(one, Pending) and not _is_settled(one)]
    if not waiting:
        return _computed(func, args, kwargs)
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and _gives_result_a_name(frame):
        name = name[:-1]  # `x += y` can be deferred as `x = x + y`
        func = getattr(torch, name)
    what = vars(waiting[0])["what"]
    if name in _CANNOT_WAIT or (name.endswith("_") and not name.endswith("__")):
        raise ConfigError(
            f"{what} is computed when the last block is called, for the swarm computes all blocks in one go: it went "
            f"to `{name}` before. Read it after the loop over the blocks."
        )
    return Pending.of(_Deferred(func, args, kwargs, [one for one in found if isinstance(one, Pending)]), what)


def _gives_result_a_name(frame: FrameType) -> bool:
    """Return whether a frame is at an operation such as ``x += y``, which assigns its result to ``x``."""
    at = next((item for item in dis.get_instructions(frame.f_code) if item.offset == frame.f_lasti), None)
    return at is not None and (at.opname.startswith("INPLACE_") or (at.opname == "BINARY_OP" and at.argrepr[-1] == "="))


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(StandIn, _value_of, (args, kwargs))
    return func(*args, **kwargs)


class PendingValues:
    """Replaces attributes by pending values until the forwards that set them have run."""

    def __init__(self, modules: Mapping[str, nn.Module], sites: Collection[tuple[str, str]]) -> None:
        """Replace the attributes at `sites`, and the attributes that the code of the modules' forwards assigns."""
        by_code = {(name, key) for name, module in modules.items() for key in _set_by(module)}
        # (module, attribute, pending value, former value); the pending value twice if there was no former one.
        self._pending: list[tuple[nn.Module, str, Pending, Any]] = []
        for name, key in sorted(by_code | {*sites}):
            own = vars(modules[name])
            pending = Pending.of(None, f"`{key}` of block {name!r}")
            self._pending.append((modules[name], key, pending, own.get(key, pending)))
            own[key] = pending

    def put_back(self) -> None:
        """Restore the attributes' earlier values."""
        for module, key, pending, before in self._pending:
            if before is not pending:
                vars(module)[key] = before
            elif vars(module).get(key) is pending:
                del vars(module)[key]

    def lose(self) -> None:
        """Make the pending values unavailable, because they stay on the servers."""
        for module, key, pending, _ in self._pending:
            vars(pending)["value"] = Unavailable.because(
                f"`{key}` of a {type(module).__name__} is set by its forward on a server, and does not come back while "
                "text is generated. Call the model without a cache for it, by `use_cache=False`"
            )

    def settle(self) -> None:
        """Settle the pending values with the attributes' current values, which came back from the servers."""
        for module, key, pending, _ in self._pending:
            missing = f"`{key}` of a {type(module).__name__} was read, and its forward did not set it"
            value = vars(module).get(key, pending)
            vars(pending)["value"] = Unavailable.because(missing) if value is pending else value


def _set_by(module: nn.Module) -> list[str]:
    """Return the attributes that a module's forward sets, except attributes that cannot be pending."""
    own = vars(module)
    hashable: Any = type(module)
    return [
        name
        for name in set_in_forward(hashable)
        if isinstance(own.get(name), Tensor | float | int | None)
        and not isinstance(own.get(name), bool)
        and not hasattr(type(module), name)
        and not any(name in held for held in (module._parameters, module._buffers, module._modules))
    ]


@functools.cache
def set_in_forward(kind: Any) -> frozenset[str]:
    """Return the names of attributes that the code of a class's forward, or of methods that it calls, assigns."""
    todo, seen, found = ["forward"], set[str](), set[str]()
    while todo:
        function = inspect.getattr_static(kind, todo.pop(), None)
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, FunctionType) or (function.__module__ or "").startswith("torch."):
            continue
        for instruction in dis.get_instructions(function):
            name = instruction.argval
            if instruction.opname == "STORE_ATTR":
                found.add(name)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name not in seen:
                seen.add(name)
                todo.append(name)
    return frozenset(found)
