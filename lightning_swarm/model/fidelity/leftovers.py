"""Values that a forward leaves on modules, such as a block's loss: finds them, and sends them with the output."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.readable import few
from lightning_swarm.model.fidelity.written_inputs import containers, overlap
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.serialization import Tree

OUTPUT: Final = "output"
_DIFFERENTIABLE: Final = "left with a gradient"
_OTHERS: Final = "left without a gradient"
_REFUSED: Final = "left and not sent"
_ALIASES: Final = "is the output"  # key of the result of `note_aliases`, in place of a module's name
_CONTAINERS_INDEX: Final = -1  # in place of a tensor's index, for lists and dicts
_KEYS: Final = {OUTPUT, _DIFFERENTIABLE, _OTHERS, _REFUSED}

TORCH_ATTRIBUTES: Final = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"})
"""Names of attributes that torch itself sets on modules."""

_CONTAINERS: Final = (list, dict, set)

Values: TypeAlias = dict[str, dict[str, Tree]]  # values by the names of modules and attributes

_ABSENT: Final = object()


@dataclass
class Left:
    """Values that forwards left on modules, which travel with a stage's output."""

    differentiable: Values = field(default_factory=dict)  # with a tensor that requires a gradient
    others: Values = field(default_factory=dict)  # without such a tensor
    refused: dict[str, dict[str, str]] = field(default_factory=dict)  # names of the types of values that cannot travel

    def __bool__(self) -> bool:
        """Return whether any value was left."""
        return bool(self.differentiable or self.others or self.refused)

    def note_aliases(self, output: Tree, held_elsewhere: Iterable[tuple[str, Tensor]]) -> None:
        """Record which parts of the output share memory with other values, because the next stage may write into them.

        Other values are the tensors `held_elsewhere`, each with the name of a holder, values left on modules, and other
        parts of the output.
        """
        tensors = serialization.flatten(output)[1]
        output_containers = {id(container) for _, container in containers(output)}
        holders: dict[int, list[str]] = {
            index: [name for name, other in held_elsewhere if overlap(tensor, other)]
            for index, tensor in enumerate(tensors)
        }
        for (index, tensor), (_, other) in itertools.permutations(enumerate(tensors), 2):
            if overlap(tensor, other):
                holders[index].append("another part of its output")
        for name, value in self._described():
            if any(id(container) in output_containers for _, container in containers(value)):
                holders.setdefault(_CONTAINERS_INDEX, []).append(name)
            for index, tensor in enumerate(tensors):
                if any(overlap(tensor, other) for other in serialization.flatten(value)[1]):
                    holders[index].append(name)
        if any(holders.values()):
            self.others[_ALIASES] = {str(index): names for index, names in holders.items() if names}

    def _described(self) -> Iterator[tuple[str, Tree]]:
        for values in (self.differentiable, self.others):
            for module, own in values.items():
                for attribute, value in own.items():
                    yield f"`{attribute}` of {module!r}", value

    def take_aliases(self) -> dict[int, list[str]]:
        """Remove and return the result of `note_aliases`: names by the tensors' indices; -1 for lists and dicts."""
        aliases = self.others.pop(_ALIASES, {})
        if not all(index.removeprefix("-").isdecimal() and isinstance(names, list) for index, names in aliases.items()):
            raise ProtocolError("the aliases of an output must be lists of names by the indices of its tensors")
        return {int(index): list(map(str, names)) for index, names in aliases.items()}

    def drop(self, module: str, attribute: str) -> None:
        """Remove a value, because a later stage left another value there."""
        for values in (self.differentiable, self.others, self.refused):
            values.get(module, {}).pop(attribute, None)

    def add(self, module: str, attribute: str, value: Any) -> None:
        """Add a value, in place of an earlier value of the attribute."""
        self.drop(module, attribute)
        value = _plain(value)
        try:
            tensors = serialization.flatten(value)[1]
        except ConfigError:
            self.refused.setdefault(module, {})[attribute] = type(value).__name__[:80]
            return
        values = self.differentiable if any(tensor.requires_grad for tensor in tensors) else self.others
        values.setdefault(module, {})[attribute] = value


def join(output: Tree, left: Left) -> Tree:
    """Add the values left on modules to a stage's output, if there are any."""
    if not left:
        return output
    parts = {_DIFFERENTIABLE: left.differentiable, _OTHERS: left.others, _REFUSED: left.refused}
    return {OUTPUT: output, **parts}


def split_left(tree: Tree) -> tuple[Tree, Left]:
    """Invert `join`; refuse malformed values."""
    if type(tree) is not dict or tree.keys() != _KEYS:
        return tree, Left()
    parts = [tree[key] for key in (_DIFFERENTIABLE, _OTHERS, _REFUSED)]
    if not all(isinstance(values, dict) and all(isinstance(own, dict) for own in values.values()) for values in parts):
        raise ProtocolError("values left on modules must be dicts by module and attribute, got something else")
    copies = [{module: dict(own) for module, own in values.items()} for values in parts]
    return tree[OUTPUT], Left(*copies)


def split_inputs(inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Left]:
    """Split a stage's inputs into the output of the stage before and the values left so far."""
    if len(inputs) != 1:
        return inputs, Left()
    output, left = split_left(inputs[0])
    return (output,), left


@dataclass(frozen=True)
class ValueChange:
    """An attribute that a forward set, or a container that it changed."""

    before: Any
    after: Any

    @property
    def in_place(self) -> bool:
        """Return whether the same container has other contents."""
        return self.before is self.after


Changes: TypeAlias = dict[tuple[int, str], ValueChange]
"""Changes by the index of the module and the name of the attribute."""


class ForwardWatch:
    """Finds which attributes of a stage's modules a forward sets."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], around: Iterable[tuple[str, nn.Module]] = ()) -> None:
        """Watch `modules`; snapshots with contents also include the modules `around` the pipeline."""
        inside = list({id(module): (name, module) for name, module in modules}.values())
        self._names = [name for name, _ in inside] + [name for name, _ in around]
        self._modules = [module for _, module in inside] + [module for _, module in around]
        self._num_inside = len(inside)
        self._ignored = [_torch_attributes(module) for module in self._modules]
        self._known: set[tuple[int, str]] = set()  # attributes (module's index, name) that each forward sets anew
        self._constants: set[tuple[int, str]] = set()  # attributes that each forward sets to equal constants
        self._seen_kinds: set[object] = set()  # kinds of forwards

    def note_kind(self, kind: object) -> bool:
        """Record the kind of a forward, and return whether it is the first of its kind."""
        is_first = kind not in self._seen_kinds
        self._seen_kinds.add(kind)
        return is_first

    def snapshot(self, *, with_contents: bool = False) -> _Snapshot:
        """Record the attributes; `with_contents` also those of modules around the stage, and containers' contents."""
        states = [_state(module) for module in (self._modules if with_contents else self._modules[: self._num_inside])]
        if not with_contents:
            return _Snapshot(states, [])
        return _Snapshot(
            states, [{k: _content(v) for k, v in state.items() if type(v) in _CONTAINERS} for state in states]
        )

    def changes(self, before: _Snapshot) -> Changes:
        """Return the changes since a snapshot."""
        changes: Changes = {}
        for index, state in enumerate(before.states):
            module = self._modules[index]
            own = vars(module) if not module._buffers else _state(module)
            if len(own) == len(state) and all(map(operator.is_, own.values(), state.values())) and not before.contents:
                continue
            now = own.copy()
            contents = before.contents[index] if before.contents else {}
            for key, value in now.items():
                old = state.get(key, _ABSENT)
                if key in self._ignored[index] or (old is value and key not in contents):
                    continue
                if old is value:
                    now_in, old_in = _content(value), contents[key]
                    if len(now_in) == len(old_in) and all(map(operator.is_, now_in, old_in)):
                        continue
                if old is value or not _equal_constants(old, value):
                    changes[index, key] = ValueChange(old, value)
        return changes

    def has_new_changes(self, changes: Changes) -> bool:
        """Return whether attributes changed that `learn` has not classified yet."""
        return not changes.keys() <= self._known | self._constants

    def learn(self, first: Changes, second: Changes, *, same_output: bool) -> None:
        """Find, from two successive forwards of the same input, the values that each forward leaves.

        Values that the second forward did not set again are a cache, and stay on the modules. Values that depend on an
        earlier forward are refused.
        """
        both = [key for key in first if key in second and key not in self._known]
        once = [(key, change.after) for key, change in first.items() if key not in second and key[0] < self._num_inside]
        self._constants.update(key for key, value in once if not isinstance(value, Tensor) and _is_constant(value))
        for key in both:
            index, name = key
            if index >= self._num_inside or name in self._modules[index]._buffers or second[key].in_place:
                self._refuse([key], "changed")
            if not same_trees(first[key].after, second[key].after):
                self._refuse([key], "continues from the earlier forward's value of")
        if both and not same_output:
            self._refuse(both, "computes with the earlier forward's value of")
        self._known.update(both)

    def take(self, changes: Changes, left: Left) -> None:
        """Move the values that each forward leaves to `left`, and restore the modules' attributes."""
        for (index, name), change in sorted(changes.items(), key=lambda item: item[0]):
            if (index, name) not in self._known:
                continue
            left.add(self._names[index], name, change.after)
            self._restore(index, name, change.before)
        for index, name in sorted(self._constants - self._known):
            left.add(self._names[index], name, vars(self._modules[index]).get(name))

    def undo(self, changes: Changes) -> None:
        """Restore all attributes that a forward set, except buffers."""
        for (index, name), change in changes.items():
            if name not in self._modules[index]._buffers:
                self._restore(index, name, change.before)

    def _restore(self, index: int, name: str, value: Any) -> None:
        attributes = vars(self._modules[index])
        if value is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = value

    def _refuse(self, keys: Iterable[tuple[int, str]], fault: str) -> None:
        names = [f"`{name}` of {self._names[index] or 'the model'!r}" for index, name in keys]
        raise ConfigError(
            "a forward may store new tensors in attributes of its blocks, but no state for the next forward, which "
            f"may run on another peer; a block {fault} {few(names)} in its forward. Return the value from the block, "
            "or keep it in `training_step`."
        )


@dataclass(frozen=True)
class _Snapshot:
    states: list[dict[str, Any]]
    contents: list[dict[str, Any]]  # attribute -> contents of its container; empty without contents


def _state(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    return {**own, **module._buffers} if module._buffers else own.copy()


def _torch_attributes(module: nn.Module) -> frozenset[str]:
    """Return the names of attributes that torch sets: its own, and weights that its hooks compute."""
    hooks = module._forward_pre_hooks.values()
    names = {getattr(hook, "name", "") for hook in hooks if type(hook).__module__.startswith("torch.nn.utils")}
    names |= {name for name in vars(module) if name.startswith("__")}
    return TORCH_ATTRIBUTES | names


def _content(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for pair in value.items() for item in pair]
    return list(value)


def _is_constant(value: Any) -> bool:
    """Return whether a value can be sent and contains no tensors."""
    try:
        return not serialization.flatten(_plain(value))[1]
    except ConfigError:
        return False


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def _equal_constants(one: Any, other: Any) -> bool:
    """Return whether both are equal and contain no tensors, so that setting the attribute changed nothing."""
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    return _is_constant(one) and _is_constant(other) and bool(one == other)


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative tolerance for results of a dtype that were computed in another order."""
    return float(torch.finfo(dtype).eps) ** 0.6 if dtype.is_floating_point or dtype.is_complex else 0.0


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    near = tolerance(one.dtype)
    one, other = one.detach(), other.detach()
    scale = float(other.abs().max()) if near and other.numel() else 0.0
    return torch.allclose(one, other, rtol=near, atol=near * scale, equal_nan=True)


def same_trees(one: Tree, other: Tree) -> bool:
    """Return whether two trees are equal up to rounding; trees that cannot be sent count as equal."""
    try:
        structure, tensors = serialization.flatten(_plain(one))
        others_structure, others = serialization.flatten(_plain(other))
    except ConfigError:
        return True
    return bool(structure == others_structure) and all(map(is_close, tensors, others))
