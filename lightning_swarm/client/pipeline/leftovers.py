"""Combines the values that microbatches' forwards left on servers' modules, and sets them on the trainer's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_swarm.client.pipeline.left_values import Unavailable, UnavailableObject
from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model.fidelity.hooks import OBSERVED, call_observing
from lightning_swarm.model.fidelity.leftovers import TORCH_ATTRIBUTES, Left, Values, is_close
from lightning_swarm.model.fidelity.module_states import exempt
from lightning_swarm.model.fidelity.written_inputs import WRITTEN, text_of
from lightning_swarm.protocol import serialization

Rule: TypeAlias = Literal["rows", "mean", "sum", "same"]
"""How the tensors of microbatches combine into the batch's tensor."""

Site: TypeAlias = tuple[str, str]
"""The names of a module and of an attribute."""

LeftTensor: TypeAlias = tuple[str, str, int]
"""A site, and the index of a tensor in the value at the site, or `_STRUCTURE`."""

_STRUCTURE: Final = -1  # in place of an index: the structure of the value, with its constants

Trial: TypeAlias = Callable[[bool], tuple[Sequence[Left], Sequence[int]]]
"""Computes two microbatches; the argument is whether in train mode. Returns the values that the first, the second and
both as one leave, and the sizes of the two."""

_CANNOT_SEND: Final = "a {} cannot be sent between peers. Store tensors there, or return them from the block."
_REMEDY: Final = (
    "Store one value for each sample and reduce it in training_step, return it from the block, or set "
    "`microbatch_size` to the rows of a whole batch, so that each batch is one microbatch."
)


@dataclass(frozen=True)
class Collected:
    """The combined values that the forwards of one call left on modules."""

    tensors: dict[LeftTensor, Tensor]
    structures: dict[Site, serialization.Structure]
    refused: dict[Site, str]  # site -> reason why it has no value
    objects: set[Site]  # refused sites whose values hold objects that cannot be sent
    rules: dict[LeftTensor, Rule]
    differentiable: list[list[LeftTensor]]  # for each microbatch, in the order in which servers expect gradients
    sizes: Sequence[int]  # rows of each microbatch

    def flags(self) -> list[bool]:
        """Return which tensors have a gradient."""
        differentiable = {key for keys in self.differentiable for key in keys}
        return [key in differentiable for key in self.tensors]

    def gradients(self, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Split the gradients of the combined tensors into the gradients of each microbatch's tensors."""
        by_key = dict(zip(self.tensors, gradients, strict=True))
        return [[self._part(by_key.get(key), key, i) for key in keys] for i, keys in enumerate(self.differentiable)]

    def _part(self, gradient: Tensor | None, key: LeftTensor, index: int) -> Tensor | None:
        """Return a microbatch's gradient of a tensor, by the tensor's rule."""
        if gradient is None or len(self.sizes) < 2:
            return gradient
        rule, rows = self.rules[key], sum(self.sizes)
        if rule == "rows":
            factor = len(gradient) // rows
            return torch.split(gradient, [factor * size for size in self.sizes])[index]
        return gradient * (self.sizes[index] / rows) if rule == "mean" else gradient


@dataclass
class Leftovers:
    """Combines values of microbatches by rules, learned from two microbatches that are computed apart and as one."""

    modules: Mapping[str, nn.Module]  # name -> module, in all blocks
    sites: set[Site] = field(default_factory=set)  # sites of all values so far
    _rules: dict[LeftTensor, Rule | None] = field(default_factory=dict)  # None: no rule fits
    _num_collected: int = 0  # calls with several microbatches

    def collect(self, parts: Sequence[Left], sizes: Sequence[int], trial: Trial) -> Collected | None:
        """Combine the values that microbatches of these sizes left; None if they left none."""
        if not any(parts):
            return None
        refused = {site: _CANNOT_SEND.format(kind) for left in parts for site, kind in _sites(left.refused)}
        objects = {*refused}
        values = [{**dict(_sites(left.others)), **dict(_sites(left.differentiable))} for left in parts]
        self._check_sites([*refused, *(site for by_site in values for site in by_site)])
        structures: dict[Site, serialization.Structure] = {}
        columns: dict[LeftTensor, list[Tensor]] = {}
        for site in {site: None for by_site in values for site in by_site if site not in refused}:
            flat = [serialization.flatten(by_site[site]) for by_site in values if site in by_site]
            if len(flat) == len(parts) and all(structure == flat[0][0] for structure, _ in flat):
                structures[site] = flat[0][0]
                by_index = zip(*(tensors for _, tensors in flat), strict=True)
                columns |= {(*site, index): list(column) for index, column in enumerate(by_index)}
            else:
                refused[site] = "the microbatches of a batch leave values of different structures. " + _REMEDY
        rules = self._rules_for(columns, structures, refused, sizes, trial)
        return Collected(
            tensors={key: _join(column, sizes, rules[key]) for key, column in columns.items() if key in rules},
            structures={site: structure for site, structure in structures.items() if site not in refused},
            refused=refused,
            objects=objects,
            rules=rules,
            differentiable=[
                [key for key, _ in _left_tensors(left.differentiable) if key[2] != _STRUCTURE] for left in parts
            ],
            sizes=sizes,
        )

    def set_on_modules(self, collected: Collected, tensors: Sequence[Tensor]) -> list[tuple[str, serialization.Tree]]:
        """Set the values on the trainer's modules, with `tensors` in place of the collected tensors, and call hooks.

        Returns (argument name, value) pairs for the values that blocks wrote into the call's arguments.
        """
        written, observed = [], []  # `observed`: values for the user's forward hooks
        by_site: dict[Site, list[Tensor]] = {}
        for (module, name, _), tensor in zip(collected.tensors, tensors, strict=True):
            by_site.setdefault((module, name), []).append(tensor)
        for site, structure in collected.structures.items():
            value = serialization.unflatten(structure, by_site.get(site, []))
            if site[1] == OBSERVED:
                observed.append((site[0], self.modules[site[0]], value))
            elif site[1].startswith(WRITTEN):
                written.append((site[1].removeprefix(WRITTEN), value))
            else:
                self._set(site, value)
        for site, reason in collected.refused.items():
            if site[1] == OBSERVED:
                raise ConfigError(f"the values of {site[0]!r}, which has a forward hook, are not available: {reason}")
            if site[1].startswith(WRITTEN):
                argument = text_of(site[1].removeprefix(WRITTEN))
                raise ConfigError(
                    f"the values that {site[0]!r} or a later block wrote into {argument} are not available: {reason}"
                )
            text = f"`{site[1]}` of block {site[0]!r} cannot be read: {reason}"
            self._set(site, UnavailableObject(text) if site in collected.objects else Unavailable.because(text))
        call_observing(observed)
        return written

    def _set(self, site: Site, value: object) -> None:
        """Set an attribute of a trainer's module, exempt from the check for changes by user code."""
        self.sites.add(site)
        exempt(self.modules[site[0]], site[1])
        vars(self.modules[site[0]])[site[1]] = value

    def _check_sites(self, sites: Sequence[Site]) -> None:
        """Raise `ProtocolError` for sites at which no forward can leave a value."""
        for module, name in sites:
            if (name == OBSERVED or name.startswith(WRITTEN)) and module in self.modules:
                continue
            if module not in self.modules or not name.isidentifier() or name in TORCH_ATTRIBUTES:
                raise ProtocolError(f"a server left a value at {name[:80]!r} of {module[:80]!r}, which no forward can")

    def _rules_for(
        self,
        columns: Mapping[LeftTensor, Sequence[Tensor]],
        structures: Mapping[Site, serialization.Structure],
        refused: dict[Site, str],
        sizes: Sequence[int],
        trial: Trial,
    ) -> dict[LeftTensor, Rule]:
        """Return the rules of the tensors in `columns`; move sites without a rule to `refused`."""
        if len(sizes) < 2:
            return dict.fromkeys(columns, "same")
        self._learn(columns, structures, sizes, trial)
        for key, column in columns.items():
            rule = self._rules.get(key)
            if rule is None or not _fits(rule, column, sizes):
                refused[key[:2]] = (
                    "microbatches of a batch leave values that are neither one for each sample nor a mean or a sum "
                    "over the samples, so the batch's value cannot be computed from them. " + _REMEDY
                )
        for site in structures:
            if self._rules.get((*site, _STRUCTURE), "same") is None:
                refused[site] = f"numbers in it depend on the size of the microbatch. {_REMEDY}"
        return {key: rule for key in columns if key[:2] not in refused and (rule := self._rules[key])}

    def _learn(
        self,
        columns: Mapping[LeftTensor, Sequence[Tensor]],
        structures: Mapping[Site, serialization.Structure],
        sizes: Sequence[int],
        trial: Trial,
    ) -> None:
        """Learn the unknown rules, and check the known rules again at ever longer intervals."""
        self._num_collected += 1
        keys = {*columns, *((*site, _STRUCTURE) for site in structures)}
        new = {key for key in keys if key not in self._rules}
        is_due = self._num_collected & (self._num_collected - 1) == 0  # a power of two
        # `rows` depends on shapes alone, which `_fits` checks in each call.
        todo = new | {key for key in keys if is_due and self._rules.get(key) not in (None, "rows")}
        # Eval mode first, because it draws fewer random numbers; some blocks leave values only in train mode.
        for training in (False, True):
            if not todo:
                break
            lefts, trial_sizes = trial(training)
            first, second, together = (
                {**dict(_left_tensors(left.others)), **dict(_left_tensors(left.differentiable))} for left in lefts
            )
            for key in todo & first.keys() & second.keys() & together.keys():
                agreeing = _agreeing_rules([first[key], second[key]], together[key], trial_sizes)
                if key[1].startswith(WRITTEN):  # a sum would count the argument's former contents several times
                    agreeing = [rule for rule in agreeing if rule in ("rows", "same")]
                known = self._rules.get(key)
                if known is None:  # a new tensor has the first rule that agrees
                    self._rules[key] = agreeing[0] if agreeing else None
                elif known not in agreeing:  # use no other rule, which may agree only by chance, as this rule did
                    self._rules[key] = None
                todo.discard(key)
        self._rules.update(dict.fromkeys(todo & new))  # no rule, because no trial left them


def _sites(values: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[Site, object]]:
    for module, attributes in values.items():
        for name, value in attributes.items():
            yield (module, name), value


def _left_tensors(values: Values) -> Iterator[tuple[LeftTensor, Tensor | serialization.Structure]]:
    """Yield all tensors, and the structure of each value under the index `_STRUCTURE`."""
    for site, value in _sites(values):
        structure, tensors = serialization.flatten(value)
        yield (*site, _STRUCTURE), structure
        yield from (((*site, index), tensor) for index, tensor in enumerate(tensors))


def _agreeing_rules(apart: Sequence[object], together: object, sizes: Sequence[int]) -> list[Rule]:
    """Return the rules that combine the values of two microbatches into the value of both computed as one."""
    if not isinstance(together, Tensor):
        return ["same"] if all(value == together for value in apart) else []
    tensors = [value for value in apart if isinstance(value, Tensor)]

    def agrees(rule: Rule) -> bool:
        joined = _join(tensors, sizes, rule)
        if rule == "rows" and len(together) == sum(sizes):  # values need not agree, because random draws may differ
            return joined.shape == together.shape
        return is_close(joined, together)

    rules: tuple[Rule, ...] = ("rows", "mean", "sum", "same")
    return [rule for rule in rules if _fits(rule, tensors, sizes) and agrees(rule)]


def _fits(rule: Rule, column: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether tensors have the shapes, and for `same` the values, that a rule requires."""
    first = column[0]
    if any(tensor.dtype != first.dtype or tensor.ndim != first.ndim for tensor in column):
        return False
    if rule == "rows":
        factor = len(first) // sizes[0] if first.ndim else 0
        return factor > 0 and all(
            len(tensor) == factor * size and tensor.shape[1:] == first.shape[1:]
            for tensor, size in zip(column, sizes, strict=True)
        )
    if any(tensor.shape != first.shape for tensor in column):
        return False
    if rule == "same":
        return all(torch.equal(tensor, first) for tensor in column)
    return first.dtype != torch.bool and (rule == "sum" or first.is_floating_point() or first.is_complex())


def _join(column: Sequence[Tensor], sizes: Sequence[int], rule: Rule) -> Tensor:
    if len(column) == 1 or rule == "same":
        return column[0]
    if rule == "rows":
        return torch.cat(tuple(column))
    weights = [size / sum(sizes) if rule == "mean" else 1 for size in sizes]
    return torch.stack([tensor * weight for tensor, weight in zip(column, weights, strict=True)]).sum(0)
