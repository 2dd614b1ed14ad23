"""The state of an optimizer over a whole model, as it has it and as it saves it: by the names of its parameters."""

from __future__ import annotations

import collections
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer


def kind_of(optimizer: Optimizer) -> str:
    """The class of an optimizer and the names of its hyperparameters: those of one name may be of several packages.

    What the hyperparameters are does not count: each record brings the lead's.
    """
    return f"{type(optimizer).__qualname__}({', '.join(sorted(optimizer.defaults))})"


def set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a parameter group those of a record."""
    # The wire knows no tuples, but optimizers compare and unpack them.
    group.update({key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in values.items()})


GROUP: Final = "__group__"
"""In a parameter's state: what the optimizer itself has written into the group of the parameter."""


def by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """The state of an optimizer over the whole model, by full parameter name.

    Args:
        optimizer: Whose state.
        names: Full parameter names by `id` of the optimizer's parameters.
    """
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items()}


def loaded(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """The state that `optimizer` would have after loading what was saved, by parameter name.

    Args:
        optimizer: Over the whole model, of which it needs no values; it stays as it is.
        saved: As its `state_dict` gave it.
        names: Full parameter names by `id` of the optimizer's parameters.
    """
    # By the optimizer itself, over parameters of the same kind that take no memory.
    twin: Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    like = {
        one: nn.Parameter(torch.zeros((), dtype=one.dtype).expand(one.shape), one.requires_grad)
        for one in _all(optimizer)
    }
    twin.param_groups = [
        {**group, "params": [like[one] for one in group["params"]]} for group in optimizer.param_groups
    ]
    twin.state = collections.defaultdict(dict)
    twin.load_state_dict(dict(saved))
    return {names[id(one)]: twin.state[like[one]] for one in like if like[one] in twin.state}


def _all(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def renumbered(
    optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, dict[str, Any]], *, shared: bool = False
) -> dict[str, Any]:
    """A state dict as `optimizer.state_dict()` of one process would give it.

    Args:
        optimizer: Over the whole model. Its own state is not read, and there again afterwards.
        names: Full parameter names by `id` of the optimizer's parameters.
        state: Optimizer state by parameter name.
        shared: Whether the result may share memory with `state`.
    """
    take = dict if shared else _copied
    given = {one: take(state[names[id(one)]]) for one in _all(optimizer) if names[id(one)] in state}
    written = {one: values.pop(GROUP) for one, values in given.items() if GROUP in values}
    own = dict(optimizer.state)
    try:
        # By the optimizer itself: some, like those of bitsandbytes, do not save their state as they have it.
        _replace(optimizer.state, {one: values for one, values in given.items() if values or one not in written})
        found = optimizer.state_dict()
    finally:
        _replace(optimizer.state, own)
    for group, saved in zip(optimizer.param_groups, found["param_groups"], strict=True):
        for one in group["params"]:
            saved.update(written.get(one, {}))
    return found


def _replace(state: MutableMapping[Any, Any], by: Mapping[Any, Any]) -> None:
    state.clear()
    state.update(by)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Nothing in a checkpoint may share memory with what goes on training."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def as_saved(
    optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The state of parameters as `optimizer` saves it, by name; it shares memory. Arguments as in `renumbered`."""
    saved = renumbered(optimizer, names, state, shared=True)["state"]
    found = {names[id(one)]: saved[number] for number, one in enumerate(_all(optimizer)) if number in saved}
    written = {name: {GROUP: one[GROUP]} for name, one in state.items() if GROUP in one}
    return {name: {**found.get(name, {}), **written.get(name, {})} for name in {**found, **written}}


def by_names(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of `optimizer` with names in the place of numbers."""
    order = [names[id(one)] for one in _all(optimizer)]
    groups = [{**one, "params": [order[number] for number in one["params"]]} for one in saved["param_groups"]]
    return {"state": {order[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def by_numbers(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The other way. What an optimizer wrote into groups is there again."""
    order = [name for group in saved["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(order)}
    groups = []
    for group in saved["param_groups"]:
        written = [saved["state"][name].get(GROUP, {}) for name in group["params"] if name in saved["state"]]
        merged = {key: value for one in written for key, value in one.items()}
        groups.append({**group, **merged, "params": [numbers[name] for name in group["params"]]})
    state = {name: {key: one for key, one in own.items() if key != GROUP} for name, own in saved["state"].items()}
    kept = {
        numbers[name]: own
        for name, own in state.items()
        if name in numbers and (own or GROUP not in saved["state"][name])
    }
    return {"state": kept, "param_groups": groups}
