"""Converts the state of an optimizer over a whole model between parameter names, numbers and its saved form."""

from __future__ import annotations

import collections
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import boundary_layers
from lightning_swarm.protocol.messages.run import Selection

_Key = TypeVar("_Key")
_NamesById: TypeAlias = Mapping[int, str]  # id of a parameter -> its full name


def kind_of(optimizer: Optimizer) -> str:
    """Return an optimizer's class and hyperparameters' names, because several packages may use one class name."""
    # Values are left out, because each record sets them to the lead's values.
    return f"{type(optimizer).__qualname__}({', '.join(sorted(optimizer.defaults))})"


def read_selection(module: nn.Module, optimizer: Optimizer) -> Selection:
    """Return which parameters an optimizer over the whole model trains, by group, and which are frozen."""
    names = parameter_names(module)
    for index, group in enumerate(optimizer.param_groups):
        shapes = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if shapes:
            raise ConfigError(
                "an optimizer must hold parameters of the LightningModule only, because other parameters are on no "
                f"server: parameter group {index} has others, of the shapes {shapes[:5]}. Make their module an "
                "attribute of the LightningModule, in a block of the pipeline. If it was replaced, make the optimizer "
                "afterwards, in `configure_optimizers`."
            )
    held = set(map(id, parameters_of(optimizer)))
    for after, layer in boundary_layers(module).items():
        if any(parameter.requires_grad and id(parameter) not in held for parameter in layer.parameters()):
            raise ConfigError(
                f"`configure_optimizers` must train the boundary layers, got an optimizer without the layer after "
                f"{after!r}. Pass it `self.parameters()`, which includes them, or freeze them by "
                "`requires_grad_(False)`."
            )
    return Selection(
        num_groups=len(optimizer.param_groups),
        groups={
            names[id(parameter)]: index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        },
        frozen=[name for name, parameter in module.named_parameters() if not parameter.requires_grad],
    )


def set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set a parameter group's hyperparameters to the values of a record."""
    group.update({key: _with_tuples(group.get(key), value) for key, value in values.items()})


def _with_tuples(present: Any, value: Any) -> Any:
    """Convert lists to tuples where the present value has tuples, because the wire has only lists."""
    if not isinstance(value, (list, tuple)) or not isinstance(present, (list, tuple)):
        return value
    olds = [present[min(index, len(present) - 1)] if present else None for index in range(len(value))]
    items = [_with_tuples(old, new) for old, new in zip(olds, value, strict=True)]
    return tuple(items) if isinstance(present, tuple) else items


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the full names of a module's parameters, by `id`."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


GROUP: Final = "__group__"
"""Key in a parameter's state for the values that the optimizer itself wrote into the parameter's group.

Examples are `k` of schedule-free optimizers and `d` of Prodigy. Servers add the key; see `server.optimizer`.
"""


def _split_group_values(states: Mapping[_Key, Any]) -> tuple[dict[_Key, dict[str, Any]], dict[_Key, Any]]:
    """Return parameters' states without the values of `GROUP`, and these values; omit a state that has only them."""
    group_values = {key: state[GROUP] for key, state in states.items() if GROUP in state}
    rest = {key: {name: value for name, value in state.items() if name != GROUP} for key, state in states.items()}
    return {key: state for key, state in rest.items() if state or key not in group_values}, group_values


def state_by_name(optimizer: Optimizer, names: _NamesById) -> dict[str, dict[str, Any]]:
    """Return the present state of an optimizer over the whole model, by full parameter name. Not a state dict."""
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items() if id(parameter) in names}


def loaded_state(optimizer: Optimizer, saved: Mapping[str, Any], names: _NamesById) -> dict[str, dict[str, Any]]:
    """Return the state, by parameter name, that an optimizer over the whole model has after loading a state dict."""
    # The optimizer's own code loads it, over copies of the parameters that take no memory.
    twin: Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    like = {
        parameter: nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), parameter.requires_grad)
        for parameter in parameters_of(optimizer)
    }
    twin.param_groups = [
        {**group, "params": [like[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    twin.state = collections.defaultdict(dict)
    twin.load_state_dict(dict(saved))
    return {names[id(parameter)]: twin.state[copy] for parameter, copy in like.items() if copy in twin.state}


def as_state_dict(
    optimizer: Optimizer, names: _NamesById, state: Mapping[str, dict[str, Any]], *, shared: bool = False
) -> dict[str, Any]:
    """Convert state by parameter name to the state dict that `optimizer.state_dict()` returns in one process."""
    by_parameter = {p: state[names[id(p)]] for p in parameters_of(optimizer) if names[id(p)] in state}
    if not shared:
        by_parameter = {parameter: copied_state(values) for parameter, values in by_parameter.items()}
    states, group_values = _split_group_values(by_parameter)
    before = dict(optimizer.state)  # restored below
    try:
        # The optimizer's own code saves it, because some, such as bitsandbytes, save their state in another form.
        _replace(optimizer.state, states)
        state_dict = optimizer.state_dict()
    finally:
        _replace(optimizer.state, before)
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter in group["params"]:
            saved.update(group_values.get(parameter, {}))
    return state_dict


def _replace(state: MutableMapping[Any, Any], by: Mapping[Any, Any]) -> None:
    state.clear()
    state.update(by)


def copied_state(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a parameter's state, because a checkpoint must not share memory with state in training."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def as_saved(optimizer: Optimizer, names: _NamesById, state: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Convert each parameter's state, still by name, to the form in which the optimizer saves it. Shares memory."""
    saved = as_state_dict(optimizer, names, state, shared=True)["state"]
    by_name = {names[id(p)]: saved[number] for number, p in enumerate(parameters_of(optimizer)) if number in saved}
    group_values = {name: {GROUP: values[GROUP]} for name, values in state.items() if GROUP in values}
    return {name: {**by_name.get(name, {}), **group_values.get(name, {})} for name in {**by_name, **group_values}}


def number_to_name(optimizer: Optimizer, names: _NamesById, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the parameters' numbers in a state dict of an optimizer by their names; `name_to_number` undoes this."""
    order = [names[id(parameter)] for parameter in parameters_of(optimizer)]
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {"state": {order[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def name_to_number(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `number_to_name`. Also move values of `GROUP`, which servers add to states, into the parameter groups."""
    order = [name for group in saved["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(order)}
    states, group_values = _split_group_values(saved["state"])
    groups = []
    for group in saved["param_groups"]:
        merged = {key: value for name in group["params"] for key, value in group_values.get(name, {}).items()}
        groups.append({**group, **merged, "params": [numbers[name] for name in group["params"]]})
    by_number = {numbers[name]: state for name, state in states.items() if name in numbers}
    return {"state": by_number, "param_groups": groups}
