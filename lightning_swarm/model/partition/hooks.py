"""Hooks of users on modules in blocks: those that observe are called by trainers, those that change values by peers."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import logging
import queue
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.module_names import is_of
from lightning_swarm.model.partition.stages import Named

HOOKS: Final = "hooks on modules"
"""Key of what a trainer tells of its hooks, in the extras. No argument has this name."""

OBSERVED: Final = "observed calls"
"""Stands for the name of an attribute, where a module's calls are collected for a hook."""

_OWN: Final = ("torch", "lightning", "pytorch_lightning", "lightning_swarm")
_GIVING_NONE: Final = {"append", "extend", "insert", "update", "setattr", "__setitem__", "setdefault"}
_CONTAINERS: Final = (set, dict, list, deque, queue.Queue, queue.SimpleQueue, logging.Logger)
_OF_CONTAINERS: Final = {
    *("add", "discard", "remove", "clear", "sort", "reverse", "appendleft", "extendleft", "put", "put_nowait"),
    *("log", "debug", "info", "warning", "error", "exception", "critical"),
}
"""Methods of those that return None. Tensors have some of the same names, so the object counts, too."""
_REMEDY: Final = "Return what it is for from the block."


def is_users(hook: Any) -> bool:
    """Return whether a hook is none of torch's, Lightning's or this package's own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not is_of(_OWN, home)


def observes(hook: Any) -> bool:
    """Return whether a hook's code shows that it takes note of a value: it returns None, or keeps something."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = inspect.unwrap(hook) if callable(hook) else hook
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        function = inspect.getattr_static(type(hook), "__call__", None)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return False
    code = list(dis.get_instructions(function))
    pairs = itertools.pairwise(code)
    returns_value = any(
        after.opname == "RETURN_VALUE" and (before.opname, before.argval) != ("LOAD_CONST", None)
        for before, after in pairs
    ) or any(one.opname == "RETURN_CONST" and one.argval is not None for one in code)
    keeps = any(one.opname in ("STORE_ATTR", "STORE_GLOBAL") for one in code)
    return (
        not returns_value
        or keeps
        or not _GIVING_NONE.isdisjoint(function.__code__.co_names)
        or _notes(hook, function, code)
    )


def _notes(hook: Any, function: FunctionType, code: Sequence[dis.Instruction]) -> bool:
    """Return whether a hook's code calls a method of a container or a logger that it finds, or only prints."""
    found = inspect.getclosurevars(function)
    known = {**found.builtins, **found.globals, **found.nonlocals}
    owner = getattr(hook, "__self__", None)
    if owner is not None:
        known[function.__code__.co_varnames[0]] = owner
    at: Any = None
    for one in code:
        if one.opname.startswith(("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST", "LOAD_NAME")):
            at = known.get(one.argval)
            if at is print and function.__name__ == "<lambda>":
                return True
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if isinstance(at, _CONTAINERS) and one.argval in _OF_CONTAINERS:
                return True
            at = inspect.getattr_static(at, one.argval, None)
            at = None if isinstance(at, property) else at
        elif one.opname not in ("PUSH_NULL", "CACHE", "PRECALL"):
            at = None
    return False


def _of_user(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    return [(key, hook) for key, hook in hooks.items() if is_users(hook)] if hooks else []


def check_global() -> None:
    """Refuse hooks on the modules of the whole process."""
    for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        for _, hook in _of_user(hooks):
            raise ConfigError(
                "hooks on all modules of a process are not called where other peers compute blocks: got "
                f"{_name(hook)}, registered by `register_module_forward_hook` or the like. Register it on modules."
            )


def has_user_hooks(module: nn.Module) -> bool:
    """Return whether there are forward hooks of users on a module."""
    return bool(user_hooks(module))


def user_hooks(module: nn.Module) -> list[str]:
    """Return the names of the forward hooks of users on a module."""
    return [_name(hook) for hooks in (module._forward_hooks, module._forward_pre_hooks) for _, hook in _of_user(hooks)]


def told(named: Iterable[Named]) -> dict[str, Any]:
    """Return what servers must know of a trainer's hooks: whom to observe, and how many change a module's values."""
    observed, changing = [], {}
    for name, module in _hooked(named):
        if any(_observing(module)):
            observed.append(name)
        if number := _num_changing(module):
            changing[name] = number
        _check_backward(name, module)
    return {HOOKS: {"observed": observed, "changing": changing}} if observed or changing else {}


def _hooked(named: Iterable[Named]) -> list[Named]:
    """Return the modules that have hooks, which most have not."""
    return [
        (name, module)
        for name, module in named
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ]


def _observing(module: nn.Module) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Return the observing hooks, forward ones and those before it."""
    forward, before = (
        [(key, hook) for key, hook in _of_user(hooks) if observes(hook)]
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    )
    return forward, before


def _num_changing(module: nn.Module) -> int:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return sum(not observes(hook) for own in hooks for _, hook in _of_user(own))


def _check_backward(name: str, module: nn.Module) -> None:
    for hooks in (module._backward_hooks, module._backward_pre_hooks):
        for _, hook in _of_user(hooks):
            if observes(hook):
                raise ConfigError(
                    f"the gradients within blocks are on other peers, where no hook can take note of them: got "
                    f"{_name(hook)} as a backward hook of {name!r}. Register a hook on the pipeline's input or output."
                )


def call_observing(name: str, module: nn.Module, calls: Sequence[Any]) -> None:
    """Call a module's observing hooks for its calls on peers, whose values are put together."""
    forward, before = _observing(module)
    with_kwargs = {*module._forward_hooks_with_kwargs, *module._forward_pre_hooks_with_kwargs}
    for key, hook in (*forward, *before):
        if key in with_kwargs:
            raise ConfigError(f"hooks in blocks get no keyword arguments: got {_name(hook)} of {name!r}. {_REMEDY}")
    for args, output in calls:
        results = [(hook, hook(module, args)) for _, hook in before]
        results += [(hook, hook(module, args, output)) for _, hook in forward]
        for hook, result in results:
            if result is not None:
                raise ConfigError(f"a hook may observe or change a value, not both: got {_name(hook)}. {_REMEDY}")


@contextlib.contextmanager
def recording(modules: Mapping[str, nn.Module], said: Any) -> Iterator[dict[str, list[Any]]]:
    """Have no observing hook called inside, and yield the calls of the modules that a trainer observes."""
    hooked = dict(_hooked(modules.items()))
    if said is None and not hooked:
        yield {}
        return
    observed, changing = _checked(said, modules)
    own = {name: number for name, module in hooked.items() if (number := _num_changing(module))}
    if own != changing:
        names = sorted(name for name in own.keys() | changing.keys() if own.get(name) != changing.get(name))
        raise ConfigError(
            f"a hook that changes a value must be on every peer's module: {names[:5]} have other ones on the trainer "
            "than on a server. Register it in `__init__` or `configure_model`, for the whole run."
        )
    calls: dict[str, list[Any]] = {}
    with contextlib.ExitStack() as stack:
        for name in [name for name in modules if name in observed or name in hooked]:
            if name in observed or has_user_hooks(modules[name]):
                stack.enter_context(_replaced(name, modules[name], calls if name in observed else None))
        yield calls


def _checked(said: Any, modules: Mapping[str, nn.Module]) -> tuple[set[str], dict[str, int]]:
    if said is None:
        return set(), {}
    observed, changing = (said.get("observed"), said.get("changing")) if isinstance(said, dict) else (None, None)
    if not isinstance(observed, list) or not isinstance(changing, dict):
        raise ProtocolError("hooks must be told as a list of those that observe and a dict of those that change values")
    if not {*map(str, observed), *changing} <= modules.keys():
        raise ProtocolError("hooks were told of modules that are not in the stage")
    return set(observed), changing


@contextlib.contextmanager
def _replaced(name: str, module: nn.Module, calls: dict[str, list[Any]] | None) -> Iterator[None]:
    """Leave observing hooks out inside, and record calls."""
    before = module._forward_hooks, module._forward_pre_hooks
    forward, early = ({key for key, _ in hooks} for hooks in _observing(module))
    hooks: OrderedDict[int, Any] = OrderedDict(
        (key, _changing(hook) if is_users(hook) and key not in module._forward_hooks_with_kwargs else hook)
        for key, hook in before[0].items()
        if key not in forward
    )
    noted: list[tuple[Tensor, int]] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        assert calls is not None
        calls[name].append([args, output])
        noted.extend((one, one._version) for one in tree_leaves([args, output]) if isinstance(one, Tensor))

    if calls is not None:
        calls[name] = []
        hooks[-1] = note
    module._forward_hooks = hooks
    module._forward_pre_hooks = OrderedDict((key, hook) for key, hook in before[1].items() if key not in early)
    try:
        yield
    finally:
        module._forward_hooks, module._forward_pre_hooks = before
    # A hook may have kept the tensor, or have computed with it at once; only one of these could be had here.
    if any(tensor._version != version for tensor, version in noted):
        raise ConfigError(
            "what a hook in blocks observes must stay what it is: a later layer overwrites an argument or the output "
            f"of {name!r} in place. Leave `inplace=True` out there. {_REMEDY}"
        )


def _changing(hook: Any) -> Any:
    def checked(*args: Any) -> Any:
        result = hook(*args)
        if result is None:
            raise ConfigError(
                f"a forward hook in a block must always return a value, or never: {_name(hook)} returned None, so it "
                f"only took note of a microbatch on a peer. Leave its `return` out, or return the output. {_REMEDY}"
            )
        return result

    return checked


def _name(hook: Any) -> str:
    return f"`{getattr(hook, '__qualname__', type(hook).__qualname__)}`"
