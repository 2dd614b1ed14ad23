"""Sends modes and plain attributes of a stage's modules from the trainer to servers, with each call.

User code on the trainer may put blocks into eval mode, anneal a temperature or change a dropout rate. Servers must
compute with the same values. All peers build the same first values by the same script, so only differences travel.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.model.fidelity.attribute_values import (
    Comparison,
    copy_containers,
    fits,
    is_plain,
    pack,
    same,
    unpack,
)
from lightning_swarm.model.fidelity.leftovers import TORCH_ATTRIBUTES
from lightning_swarm.model.fidelity.module_contents import Contents
from lightning_swarm.model.fidelity.outside_values import OutsideValues
from lightning_swarm.model.partition import StageModule
from lightning_swarm.protocol.messages.calls import ComputeMode, ModuleStates

_MISSING: Final = object()


# ---------------------------------------------------------------------- first values


@dataclass
class _FirstValues:
    """A module's plain attributes as every peer builds them, and the attributes that forwards set."""

    plain: dict[str, Any]  # name -> value
    of_class: dict[str, Any]  # plain attributes of its class and their values
    exempt: set[str] = field(default_factory=set)  # not compared, because a forward or the swarm sets them
    changed_by_forward: set[str] = field(default_factory=set)  # names in `plain`, by forwards on this peer


# Keyed by `id`, because some modules have a hash that changes or raises an error. Dropped when a module is freed.
_first_values: dict[int, _FirstValues] = {}


def _first_of(module: nn.Module) -> _FirstValues:
    """Return a module's first values; if it has none yet, record its present attributes."""
    if (key := id(module)) not in _first_values:
        plain = {name: copy_containers(value) for name, value in _attributes(vars(module)) if is_plain(value)}
        _first_values[key] = _FirstValues(plain, _class_values(type(module)))
        weakref.finalize(module, _first_values.pop, key).atexit = False
    return _first_values[key]


def _class_values(kind: type) -> dict[str, Any]:
    attributes = (item for base in reversed(_classes(kind)) for item in _attributes(vars(base)))
    return {name: copy_containers(value) for name, value in attributes if is_plain(value)}


def _classes(kind: type) -> list[type]:
    """Return a class and its bases, without torch's."""
    return [base for base in kind.__mro__ if not is_in_packages(("torch", "builtins"), base.__module__)]


def _attributes(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the attributes in `own` that are neither torch's nor Python's."""
    return ((name, value) for name, value in own.items() if name not in TORCH_ATTRIBUTES and name[:2] != "__")


def record_first_values(model: nn.Module) -> None:
    """Record the present attributes of newly built modules as their first values."""
    # Called before Lightning's hooks that only trainers run, because these hooks may set attributes.
    for module in model.modules():
        _first_of(module)


def copy_first_values(copy: nn.Module, original: nn.Module) -> None:
    """Copy the first values of the original's modules to a copy's modules."""
    for copied_module, module in zip(copy.modules(), original.modules(), strict=True):
        first, source = _first_of(copied_module), _first_of(module)
        first.plain = {name: copy_containers(value) for name, value in source.plain.items()}
        first.exempt, first.changed_by_forward = set(source.exempt), set(source.changed_by_forward)
        first.of_class = source.of_class


def exempt(module: nn.Module, name: str) -> None:
    """Stop comparing a module's attribute with its first value, because the swarm or a forward sets it."""
    first = _first_of(module)
    first.plain.pop(name, None)
    first.exempt.add(name)


def is_exempt(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is exempt from comparisons; see `exempt`."""
    return id(module) in _first_values and name in _first_values[id(module)].exempt


def built_values(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that a module was built with, without attributes that forwards have set since."""
    first = _first_of(module)
    return {name: value for name, value in first.plain.items() if name not in first.exempt | first.changed_by_forward}


def plain_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the modes and plain attributes of a model's modules, by their names."""
    states: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        states[name] = {"training": module.training}
        for key, value in _attributes(vars(module)):
            is_lightnings = not name and key[:1] == "_"  # Lightning keeps private state on the root module
            if is_plain(value) and not is_lightnings:
                states[name][key] = copy_containers(value)
    return states


def restore_attributes(model: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore modules' modes and plain attributes; attributes whose present values are not plain stay as they are."""
    for name, module in model.named_modules():
        own = vars(module)
        for key, value in states.get(name, {}).items():
            if is_plain(value) and key in own and is_plain(own[key]) and fits(value, own[key]):
                own[key] = copy_containers(value)


# ---------------------------------------------------------------------- a stage's modules


class _WatchedModule:
    """A module in a block, with its attributes at the last comparison."""

    def __init__(self, name: str, title: str, parent: int | None, module: nn.Module) -> None:
        self.name = name  # the module's name in the stage
        self.title = title  # the module's name in messages
        self.parent = parent  # index among the stage's modules; None for a block
        self.module = module
        self.attributes = vars(module)
        self.first = _first_of(module)
        # If `setup` or `configure_model` replaced a plain value by another kind of value, compare with `at_cut`.
        for key in [key for key in self.first.plain if not is_plain(self.attributes.get(key, _MISSING))]:
            del self.first.plain[key]
        self.seen: dict[str, Any] = {}
        self.record()
        self.at_cut = self.seen  # attributes when the stage was cut

    def record(self) -> None:
        """Record the module's present attributes."""
        self.seen = {name: copy_containers(value) for name, value in _attributes(self.attributes)}
        if "training" in self.attributes:
            self.seen["training"] = self.attributes["training"]
        self.seen["_modules"] = self.attributes["_modules"].copy()
        self.size = len(self.attributes)

    def is_as_seen(self) -> bool:
        """Return whether no attribute was set since `record`."""
        return len(self.attributes) == self.size and Comparison([self.attributes], [self.seen]).holds()

    def class_default(self, name: str) -> Any:
        """Return the plain value that the class gives an attribute, or `_MISSING`."""
        value = getattr(type(self.module), name, _MISSING)
        return value if is_plain(value) else _MISSING


class _ChangeFinder:
    """Finds the modules of a stage on which attributes were set."""

    def __init__(self, modules: Sequence[_WatchedModule]) -> None:
        self._modules = modules
        self._dicts = [watched.attributes for watched in modules]
        self._prepare()

    def find(self) -> list[_WatchedModule]:
        """Return the modules on which attributes were set since the last `record`."""
        if list(map(len, self._dicts)) == self._sizes and self._comparison.holds():
            return []
        return [watched for watched in self._modules if not watched.is_as_seen()]

    def record(self, changed: Iterable[_WatchedModule]) -> None:
        """Record the present attributes of these modules."""
        for watched in changed:
            watched.record()
        self._prepare()

    def _prepare(self) -> None:
        self._sizes = [watched.size for watched in self._modules]
        self._comparison = Comparison(self._dicts, [watched.seen for watched in self._modules])


def _watched_modules(stage: StageModule) -> list[_WatchedModule]:
    """Return the modules in a stage's blocks, each once, in the same order on every peer."""
    watched: list[_WatchedModule] = []
    known: set[nn.Module] = set()
    for number, (title, block) in enumerate(zip(stage.block_names, stage.blocks, strict=True)):
        if title is None:  # half of a boundary layer, which has no modes
            continue
        indices: dict[str, int] = {}
        for name, module in block.named_modules(known, prefix=str(number)):
            indices[name] = len(watched)
            outer = indices.get(name.rpartition(".")[0])
            watched.append(_WatchedModule(name, title + name[len(str(number)) :], outer, module))
    return watched


# ---------------------------------------------------------------------- at the trainer


class TrainerStates:
    """Reads the modes and attributes that the trainer's code has set on a stage's modules; fast if it has set none."""

    def __init__(self, stage: StageModule) -> None:
        self._modules = _watched_modules(stage)
        self._changes = _ChangeFinder(self._modules)
        self._by_title = {watched.title: watched for watched in self._modules}
        self._contents = Contents(
            (watched.title, *item) for watched in self._modules for item in _attributes(watched.attributes)
        )
        self._outside = OutsideValues((watched.title, watched.module) for watched in self._modules)
        kinds = {kind for watched in self._modules for kind in _classes(type(watched.module))}
        plain = {kind: {k: v for k, v in _attributes(vars(kind)) if is_plain(v)} for kind in kinds}
        values = {kind: own for kind, own in plain.items() if own}
        self._classes = Comparison(map(vars, values), values.values())
        self._classes_equal = True
        self._attributes: dict[str, dict[str, Any]] = {}
        self._read = self._collect()

    def read(self) -> tuple[bool, ModuleStates | None]:
        """Return whether any part of the stage trains, and the changed states; refuse values that cannot be sent."""
        self._outside.check()
        for title, name, value in self._contents.changed():
            watched, attribute = self._by_title[title], name.partition(".")[0]
            # Below, `find` compares attributes that were set to another object.
            is_same_object = watched.attributes.get(attribute) is watched.at_cut.get(attribute)
            if is_same_object and attribute not in watched.first.exempt:
                _refuse(watched, name, value, "was changed in place, and is")
        # Compare all modules while class attributes differ, and once more after they were restored.
        was_equal, self._classes_equal = self._classes_equal, self._classes.holds()
        changed = self._changes.find() if was_equal and self._classes_equal else self._modules
        if changed:
            self._attributes.update({watched.name: _changed_attributes(watched) for watched in changed})
            self._changes.record(changed)
            self._read = self._collect()
        return self._read

    def _collect(self) -> tuple[bool, ModuleStates | None]:
        """Return the result of `read`, from the present modes and the attributes found before."""
        training = any(watched.attributes.get("training", False) for watched in self._modules)
        flags: list[bool] = []
        modes: dict[str, bool] = {}
        for watched in self._modules:
            outer_mode = training if watched.parent is None else flags[watched.parent]
            flags.append(bool(watched.attributes.get("training", outer_mode)))
            if flags[-1] != outer_mode:
                modes[watched.name] = flags[-1]
        attributes = {name: values for name, values in self._attributes.items() if values}
        return training, ModuleStates(modes=modes, attributes=attributes) if modes or attributes else None


def _changed_attributes(watched: _WatchedModule) -> dict[str, Any]:
    """Return a module's attributes that differ from their first values, packed; refuse values that cannot be sent."""
    changed = {}
    for name, value in _attributes(watched.attributes):
        first = watched.first.plain.get(name, _MISSING)
        if name in watched.first.exempt or same(value, first):
            continue
        if first is _MISSING:
            if name in watched.at_cut and same(value, watched.at_cut[name]):
                continue  # a value that is not plain has not changed since the stage was cut
            if isinstance(getattr(type(watched.module), name, None), functools.cached_property):
                continue  # each peer computes it at the first access
            if name[:1] == "_" and not isinstance(watched.at_cut.get(name), Tensor):
                continue  # private state of libraries, which is compared only if it was a tensor at first
            first = watched.class_default(name)
        if first is _MISSING or not is_plain(value) or not fits(value, first):
            _refuse(watched, name, value)
        changed[name] = pack(value)
    for name in watched.first.of_class.keys() - watched.attributes.keys():
        value = watched.class_default(name)
        if not same(value, watched.first.of_class[name]):
            if not is_plain(value) or not fits(value, watched.first.of_class[name]):
                _refuse(watched, name, value)
            changed[name] = pack(value)
    gone = [name for name in watched.first.plain if name not in watched.attributes and name not in watched.first.exempt]
    if gone:
        _refuse(watched, gone[0], _MISSING)
    # This package marks its own replacements of `forward` by `of_swarm`.
    now = watched.attributes.get("forward", _MISSING)
    if now is not watched.at_cut.get("forward", _MISSING) and not getattr(now, "of_swarm", False):
        _refuse(watched, "forward", now)
    modules, at_cut = watched.attributes["_modules"], watched.at_cut["_modules"]
    for name in {**modules, **at_cut}:
        if (now := modules.get(name, _MISSING)) is not at_cut.get(name, _MISSING):
            _refuse(watched, name, now)
    return changed


def _refuse(watched: _WatchedModule, name: str, value: object, became: str = "became") -> None:
    """Raise the error of an attribute that cannot be sent; `value` is `_MISSING` if it was deleted."""
    event = "was deleted" if value is _MISSING else f"{became} a {type(value).__name__}"
    raise ConfigError(
        "only attributes that blocks have from the start may change during a run, and only to plain values (a number, "
        f"a text, None, or a short list of these), because they are sent with each call: `{name}` of {watched.title!r} "
        f"{event}. Set it in `__init__`, `setup` or `configure_model`, which every peer runs, pass it to the blocks as "
        "an argument, or choose between prepared modules by a plain attribute."
    )


# ---------------------------------------------------------------------- at a server


@dataclass(frozen=True)
class _Required:
    """The attributes that a call requires of a module."""

    watched: _WatchedModule
    values: dict[str, Any]
    sent: frozenset[str]  # names of the attributes in the call; the other values are first values


class _StageRequired:
    """The attributes that a call requires of all modules of a stage."""

    def __init__(self, targets: Iterable[_Required]) -> None:
        self.targets = [target for target in targets if target.values]
        self._comparison = Comparison(
            [target.watched.attributes for target in self.targets], [target.values for target in self.targets]
        )

    def set(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """Set the attributes that differ, and return the changes, for restoring them."""
        changed = list[tuple[dict[str, Any], str, Any, Any]]()  # attributes, name, old value, new value
        for target in [] if self._comparison.holds() else self.targets:
            present = target.watched.attributes
            for name, value in target.values.items():
                before = present.get(name, _MISSING)
                if not same(before, value):
                    present[name] = copy_containers(value)  # the forward may change a list in place
                    changed.append((present, name, before, present[name]))
        return changed


class ServerStates:
    """Sets a stage's modules to the trainer's modes and attributes, for one call at a time."""

    def __init__(self, stage: StageModule) -> None:
        self._index = stage.spec.index
        self._modules = _watched_modules(stage)
        self._by_name = {watched.name: watched for watched in self._modules}
        self._changes = _ChangeFinder(self._modules)
        self._recent: list[tuple[tuple[bool, ModuleStates | None], _StageRequired]] = []  # of the latest calls

    @contextlib.contextmanager
    def entered(self, mode: ComputeMode, *, backward: bool = False) -> Iterator[None]:
        """Set modes and attributes inside, and restore them afterwards, except attributes that a forward itself set."""
        required = self._required(mode)
        changed = required.set()
        try:
            yield
        finally:
            if not backward:
                self._adopt_forward_writes(required)
            for own, name, before, value in reversed(changed):
                if own.get(name, _MISSING) is value:  # the forward itself has not set it since
                    own[name] = before
                    if before is _MISSING:
                        del own[name]

    def _required(self, mode: ComputeMode) -> _StageRequired:
        """Return the attributes that a call requires; the latest few are cached."""
        key = (mode.training, mode.modules)
        for recent, required in self._recent:
            if recent == key:
                return required
        required = _StageRequired(self._targets(mode.training, mode.modules or ModuleStates()))
        self._recent = [(key, required), *self._recent[:3]]
        return required

    def _targets(self, training: bool, states: ModuleStates) -> Iterable[_Required]:
        """Yield each module's required attributes from the states of a call; raise `ProtocolError` if invalid."""
        for name in {**states.modes, **states.attributes}:
            if name not in self._by_name:
                raise ProtocolError(f"stage {self._index} has no module {name[:100]!r}")
        flags: list[bool] = []
        for watched in self._modules:
            outer_mode = training if watched.parent is None else flags[watched.parent]
            flags.append(states.modes.get(watched.name, outer_mode))
            sent = _checked(watched, states.attributes.get(watched.name, {}))
            values = {**watched.first.plain, **sent}
            if "training" in watched.attributes:
                values["training"] = flags[-1]
            yield _Required(watched, values, frozenset(sent))

    def _adopt_forward_writes(self, required: _StageRequired) -> None:
        """Find the attributes that the forward itself has set, so that later calls do not reset them."""
        changed = self._changes.find()
        if not changed:
            return
        wanted = {target.watched.name: target for target in required.targets}
        for watched in changed:
            if _adopt_module_writes(watched, wanted.get(watched.name, _Required(watched, {}, frozenset()))):
                self._recent = []
        self._changes.record(changed)


def _adopt_module_writes(watched: _WatchedModule, target: _Required) -> bool:
    """Make later calls keep the attributes that a module's forward has set; return whether first values changed.

    A plain value replaces the first value of its attribute. Attributes with other values become exempt.
    """
    first, before = watched.first, watched.first.plain.copy()
    for name, value in _attributes(watched.attributes):
        if name in first.exempt or name in target.sent or same(value, target.values.get(name, _MISSING)):
            continue
        if name in first.plain and is_plain(value):
            first.plain[name] = copy_containers(value)
            first.changed_by_forward.add(name)
        elif name in first.plain or not same(value, watched.seen.get(name, _MISSING)):
            exempt(watched.module, name)
    return before != first.plain


def _checked(watched: _WatchedModule, sent: Mapping[str, Any]) -> dict[str, Any]:
    """Decode a call's attributes of a module; raise `ProtocolError` if a call must not set one of them."""
    values = {}
    for name, encoded in sent.items():
        first = watched.first.plain.get(name, _MISSING)
        if first is _MISSING:
            first = watched.class_default(name)
        value = unpack(encoded)
        if name[:2] == "__" or name in TORCH_ATTRIBUTES or first is _MISSING or not fits(value, first):
            raise ProtocolError(f"a call must not set {name[:100]!r} of {watched.title!r} to a {type(value).__name__}")
        values[name] = value
    return values
