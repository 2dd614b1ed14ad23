"""Users' hooks on modules in blocks: trainers call the observing hooks, and servers the hooks that change values."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import logging
import operator
import queue
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.core.override import changed
from lightning_swarm.model.partition.stages import Named

HOOKS: Final = "hooks on modules"
"""Key of the description of a trainer's hooks in the extras. No argument has this name."""

OBSERVED: Final = "observed calls"
"""Key of a module's recorded calls, in place of an attribute's name, among the values that a forward left."""

_NOT_USERS: Final = ("torch", "lightning", "pytorch_lightning", "lightning_swarm")
_STORING_NAMES: Final = {"append", "extend", "insert", "update", "setattr", "__setitem__", "setdefault"}
"""Names that store something, whatever the object is, because code does not call them by name on tensors."""
_CONTAINERS: Final = (set, dict, list, deque, queue.Queue, queue.SimpleQueue, logging.Logger)
_CONTAINER_METHODS: Final = {
    *("add", "discard", "remove", "clear", "sort", "reverse", "appendleft", "extendleft", "put", "put_nowait"),
    *("log", "debug", "info", "warning", "error", "exception", "critical"),
}
"""Methods of `_CONTAINERS` that store or log. Tensors have methods of some of these names, too."""
_CAPTURE_MODULE: Final = "transformers.utils.output_capturing"
_REMEDY: Final = "Instead of the hook, let the block return the value that the hook is needed for."


def is_users(hook: Any) -> bool:
    """Return whether a hook is the user's, not torch's, Lightning's or this package's, and is active in this call."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module_name = getattr(hook, "__module__", None) or type(hook).__module__
    if module_name == _CAPTURE_MODULE:
        # transformers registers these hooks in the first call that returns hidden states, and never removes them.
        return bool(sys.modules[module_name]._active_collector.get())
    return not is_in_packages(_NOT_USERS, module_name)


def observes(hook: Any) -> bool:
    """Return whether a hook's code shows that it observes values: it returns None, or stores something."""
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
    ) or any(instruction.opname == "RETURN_CONST" and instruction.argval is not None for instruction in code)
    stores = any(instruction.opname in ("STORE_ATTR", "STORE_GLOBAL") for instruction in code)
    return (
        not returns_value
        or stores
        or not _STORING_NAMES.isdisjoint(function.__code__.co_names)
        or _stores_or_logs(hook, function, code)
    )


def _stores_or_logs(hook: Any, function: FunctionType, code: Sequence[dis.Instruction]) -> bool:
    """Return whether a hook is a lambda that prints, or calls one of `_CONTAINER_METHODS` of a container or logger."""
    variables = inspect.getclosurevars(function)
    known = {**variables.builtins, **variables.globals, **variables.nonlocals}
    owner = getattr(hook, "__self__", None)
    if owner is not None:
        known[function.__code__.co_varnames[0]] = owner
    loaded: Any = None  # the object that the last instruction loaded, if it is known without running the code
    for instruction in code:
        if instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST", "LOAD_NAME")):
            loaded = known.get(instruction.argval)
            if loaded is print and function.__name__ == "<lambda>":
                return True
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if isinstance(loaded, _CONTAINERS) and instruction.argval in _CONTAINER_METHODS:
                return True
            loaded = inspect.getattr_static(loaded, instruction.argval, None)
            loaded = None if isinstance(loaded, property) else loaded
        elif instruction.opname not in ("PUSH_NULL", "CACHE", "PRECALL"):
            loaded = None
    return False


def _user_hooks(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Return the users' hooks among a module's hooks, with their keys."""
    return [(key, hook) for key, hook in hooks.items() if is_users(hook)] if hooks else []


def check_global() -> None:
    """Refuse users' hooks that torch calls for all modules of the process."""
    for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        for _, hook in _user_hooks(hooks):
            raise ConfigError(
                "hooks must be registered on single modules, because other peers do not have a process's global "
                f"hooks; got {_name(hook)}, registered by a function such as `register_module_forward_hook`. Register "
                "it on modules."
            )


def user_hook_names(module: nn.Module) -> list[str]:
    """Return the names of users' forward hooks on a module."""
    return [
        _name(hook) for hooks in (module._forward_hooks, module._forward_pre_hooks) for _, hook in _user_hooks(hooks)
    ]


def describe(named: Iterable[Named]) -> dict[str, Any]:
    """Describe a trainer's hooks to servers: the observed modules, and how many hooks change values of each module."""
    observed, changing = {}, {}
    for name, module in _hooked(named):
        forward, before = _observing(module)
        if forward or before:
            observed[name] = bool(before)  # whether hooks also observe arguments, before the forward
            _check_order(name, module)
        if number := _num_changing(module):
            changing[name] = number
        _check_backward(name, module)
    return {HOOKS: {"observed": observed, "changing": changing}} if observed or changing else {}


def _hooked(named: Iterable[Named]) -> list[Named]:
    return [
        (name, module)
        for name, module in named
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ]


def _observing(module: nn.Module) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Return the observing forward hooks, and the observing hooks before the forward."""
    forward, before = (
        [(key, hook) for key, hook in _user_hooks(hooks) if observes(hook)]
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    )
    return forward, before


def _check_order(name: str, module: nn.Module) -> None:
    """Refuse an observing hook before a changing one, because servers record values after all hooks."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for first, then in itertools.pairwise(hook for _, hook in _user_hooks(hooks)):
            if observes(first) and not observes(then):
                raise ConfigError(
                    f"hooks that observe a layer must come after those that change its values: got {_name(first)} "
                    f"before {_name(then)} of {name!r}. Register {_name(first)} last, or on the layer before."
                )


def _num_changing(module: nn.Module) -> int:
    """Return the number of users' hooks that change values or gradients."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return sum(not observes(hook) for own in hooks for _, hook in _user_hooks(own))


def _check_backward(name: str, module: nn.Module) -> None:
    """Refuse backward hooks that observe."""
    for hooks in (module._backward_hooks, module._backward_pre_hooks):
        for _, hook in _user_hooks(hooks):
            if observes(hook):
                raise ConfigError(
                    "backward hooks in blocks must not observe gradients, which are on other peers: got "
                    f"{_name(hook)} as a backward hook of {name!r}. Register a hook on the pipeline's input or output."
                )


def call_observing(observed: Iterable[tuple[str, nn.Module, Sequence[Any]]]) -> None:
    """Call observing hooks with the calls of their modules on servers, in the order of execution.

    `observed` has names, modules and calls in the form of `recording`, merged from microbatches.
    """
    events: list[tuple[Sequence[int], Any, tuple[Any, ...]]] = []
    for name, module, calls in observed:
        forward, before = _observing(module)
        with_kwargs = {*module._forward_hooks_with_kwargs, *module._forward_pre_hooks_with_kwargs}
        for key, hook in (*forward, *before):
            if key in with_kwargs:
                raise ConfigError(f"hooks in blocks get no keyword arguments: got {_name(hook)} of {name!r}. {_REMEDY}")
        for args, output, began, ended in calls:
            events += [(began, hook, (module, args)) for _, hook in before]
            events += [(ended, hook, (module, args, output)) for _, hook in forward]
    for _, hook, arguments in sorted(events, key=operator.itemgetter(0)):
        if hook(*arguments) is not None:
            raise ConfigError(f"a hook may observe or change a value, not both: got {_name(hook)}. {_REMEDY}")


@contextlib.contextmanager
def recording(modules: Mapping[str, nn.Module], description: Any, stage: int) -> Iterator[dict[str, list[Any]]]:
    """Disable observing hooks inside, and yield the calls of the modules that a trainer observes.

    Each call is a list of its arguments, its output, and its begin and end among all calls, as ``[stage, number]``.
    """
    hooked = dict(_hooked(modules.items()))
    if description is None and not hooked:
        yield {}
        return
    observed, changing = _checked(description, modules)
    here = {name: number for name, module in hooked.items() if (number := _num_changing(module))}
    if here != changing:
        names = sorted(name for name in here.keys() | changing.keys() if here.get(name) != changing.get(name))
        raise ConfigError(
            f"a hook that changes a value must be on every peer's module, but the trainer and a server have different "
            f"hooks on {names[:5]}. Register it in `__init__` or `configure_model`, for the whole run."
        )
    order: list[str] = []
    recorders = {name: _Recorder(name, stage, order, before=before) for name, before in observed.items()}
    with contextlib.ExitStack() as stack:
        for name in [name for name in modules if name in observed or name in hooked]:
            if name in observed or user_hook_names(modules[name]):
                stack.enter_context(_without_observing(modules[name], recorders.get(name)))
        yield {name: recorder.calls for name, recorder in recorders.items()}
    for recorder in recorders.values():
        recorder.check()


def _checked(description: Any, modules: Mapping[str, nn.Module]) -> tuple[dict[str, bool], dict[str, int]]:
    """Return the observed modules and the numbers of changing hooks in a call's description, after checking it."""
    if description is None:
        return {}, {}
    observed, changing = (
        (description.get("observed"), description.get("changing")) if isinstance(description, dict) else (None, None)
    )
    if not isinstance(observed, dict) or not isinstance(changing, dict):
        raise ProtocolError("hooks must be described by two dicts, `observed` and `changing`")
    if not {*observed, *changing} <= modules.keys():
        raise ProtocolError("a description of hooks must name modules of the stage only")
    return observed, changing


class _Recorder:
    """Records a module's calls in place of its observing hooks."""

    def __init__(self, name: str, stage: int, order: list[str], *, before: bool) -> None:
        self.calls: list[Any] = []  # each as `recording` describes it
        self._name, self._stage = name, stage
        self._order = order  # names of modules, one for each begin or end of a call in the stage
        self._before = before  # a hook observes arguments before the forward
        self._open: list[list[int]] = []  # begins of calls that have not ended
        self._versions: list[tuple[Tensor, int]] = []  # observed tensors and their versions at that time

    def begin(self, _: nn.Module, args: Any) -> None:
        """Record the begin of a call, after all hooks before the forward."""
        self._open.append(self._now())
        if self._before:
            self._record_versions(args)

    def end(self, _: nn.Module, args: Any, output: Any) -> None:
        """Record the end of a call, after all forward hooks."""
        self.calls.append([args, output, self._open.pop(), self._now()])
        self._record_versions([args, output])

    def _now(self) -> list[int]:
        """Count a begin or end of a call; return the stage and the count, which order all calls."""
        self._order.append(self._name)
        return [self._stage, len(self._order)]

    def _record_versions(self, value: Any) -> None:
        """Record the tensors in a value with their versions, which writes in place raise."""
        self._versions.extend((leaf, leaf._version) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

    def check(self) -> None:
        """Refuse values that were written later, because a hook may use them before or after the write."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise ConfigError(
                "values that a hook in blocks observes must not be overwritten: the hook or a later layer overwrites "
                f"an argument or the output of {self._name!r} in place. Leave out its `inplace=True`. {_REMEDY}"
            )


def _without_observing(module: nn.Module, recorder: _Recorder | None) -> contextlib.AbstractContextManager[None]:
    """Return a context without a module's observing hooks, in which its calls are recorded if there is a recorder."""
    forward, before = ({key for key, _ in hooks} for hooks in _observing(module))
    hooks: OrderedDict[int, Any] = OrderedDict(
        (key, _must_return(hook) if is_users(hook) and key not in module._forward_hooks_with_kwargs else hook)
        for key, hook in module._forward_hooks.items()
        if key not in forward
    )
    pre_hooks = OrderedDict((key, hook) for key, hook in module._forward_pre_hooks.items() if key not in before)
    if recorder is not None:
        hooks[-1], pre_hooks[-1] = recorder.end, recorder.begin
    return changed(module, _forward_hooks=hooks, _forward_pre_hooks=pre_hooks)


def _must_return(hook: Any) -> Any:
    """Wrap a forward hook that changes values, to raise an error if it returns None, as an observing hook does."""

    def checked(*args: Any) -> Any:
        result = hook(*args)
        if result is None:
            raise ConfigError(
                f"a forward hook in a block must return a value in all calls or in none: {_name(hook)} can return a "
                f"value, but returned None. Leave its `return` out, or return the output. {_REMEDY}"
            )
        return result

    return checked


def _name(hook: Any) -> str:
    return f"`{getattr(hook, '__qualname__', type(hook).__qualname__)}`"
