"""Shows user code the optimizer's state, which lives on the servers, and refuses changes that servers would lack."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.fidelity.watched import same
from lightning_swarm.model.optimizer_state import GROUP, copied_state, parameter_names, parameters_of
from lightning_swarm.model.optimizer_template import HOOKS, instance_step, optimizers_in
from lightning_swarm.strategy.module_access import ModuleAccess

# Methods by which code uses an optimizer's state.
_READS = (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__"),
    *("get", "pop", "popitem", "clear", "update", "setdefault", "keys", "values", "items", "copy"),
)


class _WatchedState(defaultdict[Any, Any]):
    """An optimizer's state that calls `on_use` before each use."""

    def __init__(self, on_use: Callable[[], None], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self.on_use = on_use

    def __reduce__(self) -> Any:  # a copy is not watched
        return defaultdict, (dict, dict(self.items()))


class _WatchedGroup(dict[str, Any]):
    """A parameter group that calls `on_use` before each use of a value that the optimizer's own steps write."""

    def __init__(self, on_use: Callable[[], None], written: Collection[str], group: Mapping[str, Any]) -> None:
        super().__init__(group)
        self.on_use, self.written = on_use, written

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)


def _watch(cls: Any, name: str, *, keyed: bool = False) -> None:
    """Make a method call `on_use`; if `keyed`, only if the first argument is a key that the optimizer's steps write."""
    method = getattr(cls.__base__, name)

    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not keyed or (args and args[0] in self.written):
            self.on_use()
        return method(self, *args, **kwargs)

    setattr(cls, name, use)


for _name in _READS:
    _watch(_WatchedState, _name)
for _name in ("__getitem__", "__setitem__", "__delitem__", "get", "pop", "setdefault"):
    _watch(_WatchedGroup, _name, keyed=True)
for _name in ("__iter__", "__eq__", "__or__", "__ror__", "__ior__", "__repr__", "values", "items", "copy"):
    _watch(_WatchedGroup, _name)
for _name in ("popitem", "clear", "update"):
    _watch(_WatchedGroup, _name)


class OptimizerAccess:
    """Gathers the state of the lead's optimizer when user code reads it."""

    def __init__(
        self,
        trainer: Trainer,
        access: ModuleAccess,
        gather: Callable[[], Mapping[str, dict[str, Any]]],
        version: Callable[[], int],
        written: Collection[str],
    ) -> None:
        self._trainer, self._access = trainer, access
        self._gather = gather  # returns the newest state, by parameter name
        self._newest_version = version  # returns the version of the newest state
        self._optimizer: Optimizer = trainer.optimizers[0]
        self._thread = threading.get_ident()
        self._hooks = self._current_hooks()
        self._watches = type(vars(self._optimizer).get("state")) in (dict, defaultdict)
        self._written = set(written)  # keys of parameter groups that the optimizer's own steps write
        self._groups: list[tuple[_WatchedGroup, dict[str, Any]]] = []  # each with the expected values of written keys
        self.note_current()

    def note_current(self) -> None:
        """Record that the optimizer holds the newest state, which was just loaded and sent to the servers."""
        self._version = self._newest_version()
        self._before: dict[Any, Any] | None = None  # the state before user code first used it
        if self._watches:
            with self._access.paused():
                self._state = _WatchedState(self._use, self._optimizer.state)
            self._optimizer.state = self._state
        self._groups.clear()
        self._watch_groups()

    def close(self) -> None:
        """Stop watching the state and the groups."""
        if self._watches and self._optimizer.state is self._state:
            with self._access.paused():
                self._optimizer.state = defaultdict(dict, self._state)
        self._replace_groups(lambda group: dict(group) if isinstance(group, _WatchedGroup) else group)

    def check(self) -> None:
        """Refuse an optimizer that user code replaced, or whose hooks, state or written group values it changed."""
        if self._trainer.optimizers[0] is not self._optimizer:
            raise _changed("another optimizer took its place", "Change hyperparameters in `param_groups`")
        if self._current_hooks() != self._hooks:
            raise _changed("a hook was registered or removed", "Register hooks in `configure_optimizers`")
        with self._access.paused():
            is_kept = not self._watches or self._optimizer.state is self._state
            if not is_kept or (self._before is not None and _differs(_filled(self._state), _filled(self._before))):
                raise _changed("its `state` was changed", "Begin another `fit` to start from a changed state")
            for group, expected in self._groups:
                if changed := sorted(key for key, value in expected.items() if group.get(key) != value):
                    change = f"`{changed[0]}` of a parameter group was set, which the optimizer's own steps write"
                    raise _changed(change, "Set it before `fit`")
        self._watch_groups()

    def _watch_groups(self) -> None:
        """Watch all groups of the optimizer that are not watched yet."""

        def watched(group: dict[str, Any]) -> dict[str, Any]:
            return group if isinstance(group, _WatchedGroup) else _WatchedGroup(self._use, self._written, group)

        if self._written:
            self._replace_groups(watched)
        known = {id(group) for group, _ in self._groups}
        self._groups += [
            (group, self._written_values(group))
            for group in self._optimizer.param_groups
            if isinstance(group, _WatchedGroup) and id(group) not in known
        ]

    def _replace_groups(self, replaced: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Replace the groups of the optimizer, and of optimizers that it wraps, which may share the groups."""
        with self._access.paused():
            made: dict[int, tuple[Any, dict[str, Any]]] = {}  # id of a group -> the group, and its replacement
            for optimizer in optimizers_in(self._optimizer):
                groups = vars(optimizer).get("param_groups", [])
                groups[:] = [made.setdefault(id(group), (group, replaced(group)))[1] for group in groups]

    def _written_values(self, group: _WatchedGroup) -> dict[str, Any]:
        """Return a group's current values of the keys that the optimizer's steps write."""
        with self._access.paused():
            return {key: group[key] for key in self._written if key in group}

    def _current_hooks(self) -> list[Any]:
        """Return the `step` that user code assigned to the optimizer (or None), followed by the optimizer's hooks."""
        own = vars(self._optimizer)
        return [instance_step(self._optimizer), *(dict(own.get(name, {})) for name in HOOKS)]

    def _use(self) -> None:
        """Load the newest values before user code uses state or groups, and copy the state to find changes later."""
        if self._access.is_paused or threading.get_ident() != self._thread:
            return
        if self._version != self._newest_version():
            self.check()
            gathered = self._gather()
            names = parameter_names(self._trainer.lightning_module)
            named = [(parameter, names[id(parameter)]) for parameter in parameters_of(self._optimizer)]
            states = {parameter: gathered[name] for parameter, name in named if name in gathered}
            with self._access.paused():
                if self._watches:
                    self._state.clear()
                    self._state.update({parameter: _on(parameter.device, state) for parameter, state in states.items()})
                self._update_groups({id(parameter): state.get(GROUP, {}) for parameter, state in states.items()})
            self._version, self._before = self._newest_version(), None
        if self._before is None and self._watches:
            with self._access.paused():
                self._before = {
                    parameter: copied_state(state) if isinstance(state, dict) else state
                    for parameter, state in self._state.items()
                }

    def _update_groups(self, written: Mapping[int, Mapping[str, Any]]) -> None:
        """Update the groups with the values that the servers' steps wrote: id of a parameter -> values of its group."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                values = written.get(id(parameter), {})
                self._written.update(values)
                group.update(values)
        self._groups = [(group, self._written_values(group)) for group, _ in self._groups]


def _changed(change: str, remedy: str) -> ConfigError:
    return ConfigError(
        "servers have copies of the optimizer from the beginning of `fit`, so only its hyperparameters may change "
        f"during `fit`: {change}. {remedy}, or train without the swarm."
    )


def _on(device: torch.device, state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter's state to a device, except scalars. A server in this process may use the original."""
    values = {name: value for name, value in copied_state(dict(state)).items() if name != GROUP}
    return {
        name: value.to(device) if isinstance(value, Tensor) and value.ndim else value for name, value in values.items()
    }


def _filled(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Leave out empty states, which a look-up of a parameter's state before its first step creates."""
    return {key: value for key, value in state.items() if not isinstance(value, dict) or value}


def _differs(state: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Return whether two states differ. Objects other than tensors and plain values are compared only by their type."""
    if state.keys() != before.keys():
        return True
    for key, value in state.items():
        former = before[key]
        if isinstance(value, dict) and isinstance(former, dict):
            if _differs(value, former):
                return True
        elif isinstance(value, Tensor) and isinstance(former, Tensor):
            if not same(value, former):
                return True
        elif type(value) is not type(former) or (isinstance(value, (bool, int, float, str)) and value != former):
            return True
    return False
