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
from lightning_swarm.model.fidelity.attribute_values import Comparison, fits, is_plain, kept, packed, same, unpacked
from lightning_swarm.model.fidelity.leftovers import TORCH_ATTRIBUTES
from lightning_swarm.model.fidelity.module_contents import Contents
from lightning_swarm.model.fidelity.outside_values import OutsideValues
from lightning_swarm.model.partition import StageModule
from lightning_swarm.protocol.messages.calls import ComputeMode, ModuleStates

_NOTHING: Final = object()


# ---------------------------------------------------------------------- first values


@dataclass
class _FirstValues:
    """A module's plain attributes as every peer builds them, and the attributes that forwards set."""

    plain: dict[str, Any]  # name -> value
    of_class: dict[str, Any]  # plain attributes of its class and their values
    exempt: set[str] = field(default_factory=set)  # not compared, because a forward or the swarm sets them
    changed_by_forward: set[str] = field(default_factory=set)  # names in `plain`, by forwards on this peer


# Keyed by `id`, because some modules have a hash that changes or raises an error. Dropped when a module is freed.
_known: dict[int, _FirstValues] = {}


def _first_of(module: nn.Module) -> _FirstValues:
    """Return a module's first values; if it has none yet, record its present attributes."""
    if (key := id(module)) not in _known:
        plain = {name: kept(value) for name, value in _attributes(vars(module)) if is_plain(value)}
        _known[key] = _FirstValues(plain, _class_values(type(module)))
        weakref.finalize(module, _known.pop, key).atexit = False
    return _known[key]


def _class_values(kind: type) -> dict[str, Any]:
    own = (item for one in reversed(_classes(kind)) for item in _attributes(vars(one)))
    return {name: kept(value) for name, value in own if is_plain(value)}


def _classes(kind: type) -> list[type]:
    """Return a class and its bases, without torch's."""
    return [one for one in kind.__mro__ if not is_in_packages(("torch", "builtins"), one.__module__)]


def _attributes(own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the attributes in `own` that are neither torch's nor Python's."""
    return ((name, value) for name, value in own.items() if name not in TORCH_ATTRIBUTES and name[:2] != "__")


def remember(model: nn.Module) -> None:
    """Record the present attributes of newly built modules as their first values."""
    # Called before the trainer runs Lightning's hooks that servers do not run, because these may set attributes.
    for module in model.modules():
        _first_of(module)


def remember_copy(copy: nn.Module, original: nn.Module) -> None:
    """Give a copy's modules the first values of the original's modules."""
    for own, other in zip(copy.modules(), original.modules(), strict=True):
        first, there = _first_of(own), _first_of(other)
        first.plain = {name: kept(value) for name, value in there.plain.items()}
        first.exempt, first.changed_by_forward = set(there.exempt), set(there.changed_by_forward)
        first.of_class = there.of_class


def exempt(module: nn.Module, name: str) -> None:
    """Stop comparing a module's attribute with its first value, because the swarm or a forward sets it."""
    first = _first_of(module)
    first.plain.pop(name, None)
    first.exempt.add(name)


def is_exempt(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is exempt from comparisons, because a forward or the swarm itself has set it."""
    return id(module) in _known and name in _known[id(module)].exempt


def built_values(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that a module was built with, without attributes that forwards have set since."""
    first = _first_of(module)
    return {name: value for name, value in first.plain.items() if name not in first.exempt | first.changed_by_forward}


def plain_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the modes and plain attributes of a model's modules, by their names."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        found[name] = {"training": module.training}
        for key, value in _attributes(vars(module)):
            is_of_lightning = not name and key[:1] == "_"  # Lightning keeps private state on the root module
            if is_plain(value) and not is_of_lightning:
                found[name][key] = kept(value)
    return found


def restore_attributes(model: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore modules' modes and plain attributes; attributes whose present values are not plain stay as they are."""
    for name, module in model.named_modules():
        own = vars(module)
        for key, value in states.get(name, {}).items():
            if is_plain(value) and key in own and is_plain(own[key]) and fits(value, own[key]):
                own[key] = kept(value)


# ---------------------------------------------------------------------- a stage's modules


class _WatchedModule:
    """A module in a block, with its attributes when it was last compared."""

    def __init__(self, name: str, title: str, parent: int | None, module: nn.Module) -> None:
        self.name = name  # the module's name in the stage
        self.title = title  # the module's name in messages
        self.parent = parent  # index among the stage's modules; None for a block
        self.module = module
        self.own = vars(module)
        self.first = _first_of(module)
        # If `setup` or `configure_model` replaced a plain value by one that is not plain, compare with `at_first`.
        for key in [key for key in self.first.plain if not is_plain(self.own.get(key, _NOTHING))]:
            del self.first.plain[key]
        self.seen: dict[str, Any] = {}
        self.record()
        self.at_first = self.seen  # attributes when the stage was cut

    def record(self) -> None:
        """Record the module's present attributes."""
        self.seen = {name: kept(value) for name, value in _attributes(self.own)}
        if "training" in self.own:
            self.seen["training"] = self.own["training"]
        self.seen["_modules"] = self.own["_modules"].copy()
        self.size = len(self.own)

    def is_as_seen(self) -> bool:
        """Return whether no attribute was set since `record`."""
        return len(self.own) == self.size and Comparison([self.own], [self.seen]).holds()

    def class_default(self, name: str) -> Any:
        """Return the plain value that the class gives an attribute, or `_NOTHING`."""
        value = getattr(type(self.module), name, _NOTHING)
        return value if is_plain(value) else _NOTHING


class _Changes:
    """Finds the modules of a stage on which attributes were set."""

    def __init__(self, modules: Sequence[_WatchedModule]) -> None:
        self._modules = modules
        self._owns = [one.own for one in modules]
        self._compare()

    def find(self) -> list[_WatchedModule]:
        """Return the modules on which attributes were set since the last `record`."""
        if list(map(len, self._owns)) == self._sizes and self._comparison.holds():
            return []
        return [one for one in self._modules if not one.is_as_seen()]

    def record(self, changed: Iterable[_WatchedModule]) -> None:
        """Record the present attributes of these modules."""
        for one in changed:
            one.record()
        self._compare()

    def _compare(self) -> None:
        self._sizes = [one.size for one in self._modules]
        self._comparison = Comparison(self._owns, [one.seen for one in self._modules])


def _watched(stage: StageModule) -> list[_WatchedModule]:
    """Return the modules in a stage's blocks, each once, in the same order on every peer."""
    found: list[_WatchedModule] = []
    known: set[nn.Module] = set()
    for number, (title, block) in enumerate(zip(stage.block_names, stage.blocks, strict=True)):
        if title is None:  # half of a boundary layer, which has no modes
            continue
        indices: dict[str, int] = {}
        for name, module in block.named_modules(known, prefix=str(number)):
            indices[name] = len(found)
            outer = indices.get(name.rpartition(".")[0])
            found.append(_WatchedModule(name, title + name[len(str(number)) :], outer, module))
    return found


# ---------------------------------------------------------------------- at the trainer


class TrainerStates:
    """Reads the modes and attributes that the trainer's code has set on a stage's modules; cheap if it has set none."""

    def __init__(self, stage: StageModule) -> None:
        self._modules = _watched(stage)
        self._changes = _Changes(self._modules)
        self._titles = {one.title: one for one in self._modules}
        self._contents = Contents((one.title, *item) for one in self._modules for item in _attributes(one.own))
        self._outside = OutsideValues((one.title, one.module) for one in self._modules)
        kinds = {one for watched in self._modules for one in _classes(type(watched.module))}
        plain = {kind: {k: v for k, v in _attributes(vars(kind)) if is_plain(v)} for kind in kinds}
        values = {kind: own for kind, own in plain.items() if own}
        self._classes = Comparison(map(vars, values), values.values())
        self._class_holds = True
        self._attributes: dict[str, dict[str, Any]] = {}
        self._read = self._collected()

    def read(self) -> tuple[bool, ModuleStates | None]:
        """Return whether any part of the stage trains, and the changed states; refuse values that cannot be sent."""
        self._outside.check()
        for title, name, value in self._contents.changed():
            one, attribute = self._titles[title], name.partition(".")[0]
            # Attributes that were set to another object are compared below.
            if attribute not in one.first.exempt and one.own.get(attribute) is one.at_first.get(attribute):
                _refuse(one, name, value, "was changed in place, and is")
        # Look at all modules while class attributes differ, and once more after they were set back.
        held, self._class_holds = self._class_holds, self._classes.holds()
        changed = self._changes.find() if held and self._class_holds else self._modules
        if changed:
            self._attributes.update({one.name: _changed_attributes(one) for one in changed})
            self._changes.record(changed)
            self._read = self._collected()
        return self._read

    def _collected(self) -> tuple[bool, ModuleStates | None]:
        """Return the result of `read`, from the present modes and the attributes found before."""
        training = any(one.own.get("training", False) for one in self._modules)
        flags: list[bool] = []
        modes: dict[str, bool] = {}
        for one in self._modules:
            outer_mode = training if one.parent is None else flags[one.parent]
            flags.append(bool(one.own.get("training", outer_mode)))
            if flags[-1] != outer_mode:
                modes[one.name] = flags[-1]
        attributes = {name: values for name, values in self._attributes.items() if values}
        return training, ModuleStates(modes=modes, attributes=attributes) if modes or attributes else None


def _changed_attributes(one: _WatchedModule) -> dict[str, Any]:
    """Return a module's attributes that differ from their first values, packed; refuse values that cannot be sent."""
    changed = {}
    for name, value in _attributes(one.own):
        first = one.first.plain.get(name, _NOTHING)
        if name in one.first.exempt or same(value, first):
            continue
        if first is _NOTHING:
            if name in one.at_first and same(value, one.at_first[name]):
                continue  # not plain, and unchanged since the stage was cut
            if isinstance(getattr(type(one.module), name, None), functools.cached_property):
                continue  # each peer computes it at the first access
            if name[:1] == "_" and not isinstance(one.at_first.get(name), Tensor):
                continue  # private state of libraries, which is not compared unless it began as a tensor
            first = one.class_default(name)
        if first is _NOTHING or not is_plain(value) or not fits(value, first):
            _refuse(one, name, value)
        changed[name] = packed(value)
    for name in one.first.of_class.keys() - one.own.keys():
        value = one.class_default(name)
        if not same(value, one.first.of_class[name]):
            if not is_plain(value) or not fits(value, one.first.of_class[name]):
                _refuse(one, name, value)
            changed[name] = packed(value)
    gone = [name for name in one.first.plain if name not in one.own and name not in one.first.exempt]
    if gone:
        _refuse(one, gone[0], _NOTHING)
    # The swarm's own replacements of `forward` are marked by `of_swarm`.
    now = one.own.get("forward", _NOTHING)
    if now is not one.at_first.get("forward", _NOTHING) and not getattr(now, "of_swarm", False):
        _refuse(one, "forward", now)
    for name in {**one.own["_modules"], **one.at_first["_modules"]}:
        now, then = (modules.get(name, _NOTHING) for modules in (one.own["_modules"], one.at_first["_modules"]))
        if now is not then:
            _refuse(one, name, now)
    return changed


def _refuse(one: _WatchedModule, name: str, value: object, became: str = "became") -> None:
    """Raise the error of an attribute that cannot be sent; `value` is `_NOTHING` if it was deleted."""
    found = "was deleted" if value is _NOTHING else f"{became} a {type(value).__name__}"
    raise ConfigError(
        "only attributes that blocks have from the start may change during a run, and only to plain values (a number, "
        f"a text, None, or a short list of these), because they are sent with each call: `{name}` of {one.title!r} "
        f"{found}. Set it where every peer does, in `__init__`, `setup` or `configure_model`, give it to the blocks as "
        "an argument, or choose between prepared modules by a plain attribute."
    )


# ---------------------------------------------------------------------- at a server


@dataclass(frozen=True)
class _Required:
    """The attributes that a call requires of a module."""

    watched: _WatchedModule
    values: dict[str, Any]
    named: frozenset[str]  # the attributes that the call itself names


class _AllRequired:
    """The attributes that a call requires of a stage's modules."""

    def __init__(self, targets: Iterable[_Required]) -> None:
        self.targets = [target for target in targets if target.values]
        self._comparison = Comparison([one.watched.own for one in self.targets], [one.values for one in self.targets])

    def set(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """Set the attributes that differ, and return the changes, for restoring them."""
        changed = list[tuple[dict[str, Any], str, Any, Any]]()  # attributes, name, old value, new value
        for target in [] if self._comparison.holds() else self.targets:
            own = target.watched.own
            for name, value in target.values.items():
                before = own.get(name, _NOTHING)
                if not same(before, value):
                    own[name] = kept(value)  # the forward may change a list in place
                    changed.append((own, name, before, own[name]))
        return changed


class ServerStates:
    """Gives a stage's modules the trainer's modes and attributes, for one call at a time."""

    def __init__(self, stage: StageModule) -> None:
        self._index = stage.spec.index
        self._modules = _watched(stage)
        self._names = {one.name: one for one in self._modules}
        self._changes = _Changes(self._modules)
        self._known: list[tuple[tuple[bool, ModuleStates | None], _AllRequired]] = []  # for the latest calls

    @contextlib.contextmanager
    def entered(self, mode: ComputeMode, *, backward: bool = False) -> Iterator[None]:
        """Set modes and attributes inside. Attributes that a forward itself sets stay, and belong to this peer."""
        required = self._all_required(mode)
        changed = required.set()
        try:
            yield
        finally:
            if not backward:
                self._adopt_forward_writes(required)
            for own, name, before, value in reversed(changed):
                if own.get(name, _NOTHING) is value:
                    own[name] = before
                    if before is _NOTHING:
                        del own[name]

    def _all_required(self, mode: ComputeMode) -> _AllRequired:
        """Return the attributes that a call requires; the latest few are cached."""
        key = (mode.training, mode.modules)
        for known, required in self._known:
            if known == key:
                return required
        required = _AllRequired(self._made(mode.training, mode.modules or ModuleStates()))
        self._known = [(key, required), *self._known[:3]]
        return required

    def _made(self, training: bool, states: ModuleStates) -> Iterable[_Required]:
        """Make each module's target from the states of a call; raise `ProtocolError` if these are invalid."""
        for name in {**states.modes, **states.attributes}:
            if name not in self._names:
                raise ProtocolError(f"stage {self._index} has no module {name[:100]!r}")
        flags: list[bool] = []
        for one in self._modules:
            outer_mode = training if one.parent is None else flags[one.parent]
            flags.append(states.modes.get(one.name, outer_mode))
            given = _checked(one, states.attributes.get(one.name, {}))
            values = {**one.first.plain, **given}
            if "training" in one.own:
                values["training"] = flags[-1]
            yield _Required(one, values, frozenset(given))

    def _adopt_forward_writes(self, required: _AllRequired) -> None:
        """Find the attributes that the forward itself has set, so that later calls do not reset them."""
        changed = self._changes.find()
        if not changed:
            return
        wanted = {target.watched.name: target for target in required.targets}
        for one in changed:
            if _adopt_module_writes(one, wanted.get(one.name, _Required(one, {}, frozenset()))):
                self._known = []
        self._changes.record(changed)


def _adopt_module_writes(one: _WatchedModule, target: _Required) -> bool:
    """Let later calls keep the attributes that a module's forward has set; return whether first values changed.

    A plain value replaces the first value of its attribute. Any other attribute is exempt from now on.
    """
    first, before = one.first, one.first.plain.copy()
    for name, value in _attributes(one.own):
        if name in first.exempt or name in target.named or same(value, target.values.get(name, _NOTHING)):
            continue
        if name in first.plain and is_plain(value):
            first.plain[name] = kept(value)
            first.changed_by_forward.add(name)
        elif name in first.plain or not same(value, one.seen.get(name, _NOTHING)):
            exempt(one.module, name)
    return before != first.plain


def _checked(one: _WatchedModule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Decode a call's attributes of a module; raise `ProtocolError` if a call must not set one of them."""
    values = {}
    for name, wired in given.items():
        first = one.first.plain.get(name, _NOTHING)
        if first is _NOTHING:
            first = one.class_default(name)
        value = unpacked(wired)
        if name[:2] == "__" or name in TORCH_ATTRIBUTES or first is _NOTHING or not fits(value, first):
            raise ProtocolError(f"a call must not set {name[:100]!r} of {one.title!r} to a {type(value).__name__}")
        values[name] = value
    return values
