"""Extracts the states of torchmetrics objects, packs them, and combines them by their own reductions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.protocol.messages.batches import MetricState

_TENSOR_REDUCTIONS = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_LIST_REDUCTIONS = (dim_zero_cat, None)
_REMEDY = (
    "Log the metric's value for the batch, with its `batch_size`, or leave `sync_dist` out to get the lead's own value."
)


@dataclass(frozen=True)
class MetricContents:
    """The states of a metric, by the names that it declares."""

    num_updates: int
    states: dict[str, Tensor | list[Tensor]]

    @property
    def shapes(self) -> str:
        """Return the dtypes and shapes of the tensors, by state, as text."""
        states = {name: state if isinstance(state, list) else [state] for name, state in self.states.items()}
        return repr({name: [(tensor.dtype, *tensor.shape) for tensor in state] for name, state in states.items()})

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        states = [state if isinstance(state, list) else [state] for state in self.states.values()]
        return sum(tensor.nbytes for state in states for tensor in state)


def check_metric(name: str, metric: Metric) -> None:
    """Refuse a metric whose states cannot be combined; `name` is its name in the module."""
    class_name = type(metric).__name__
    if any(isinstance(child, Metric) for child in metric.children()) or not metric._defaults:
        raise ConfigError(
            "a metric logged with `sync_dist=True` must have states, and no other metrics in it: got a "
            f"{class_name} as {name!r}. Log the metrics in it."
        )
    for state, default in metric._defaults.items():
        if metric._reductions[state] not in (_LIST_REDUCTIONS if isinstance(default, list) else _TENSOR_REDUCTIONS):
            raise ConfigError(
                "`sync_dist=True` combines a metric's states by their `dist_reduce_fx`, which must be 'sum', 'mean', "
                f"'max', 'min' or 'cat' (None for a list): state {state!r} of the {class_name} {name!r} has another "
                f"reduction. {_REMEDY}"
            )


def copied(metric: Metric) -> dict[str, Any]:
    """Copy all attributes that `update`, `forward` and `reset` change in a metric, for `restore`."""
    return {name: _copied(value) for name, value in vars(metric).items() if name not in _MODULE_ATTRIBUTES}


def restore(metric: Metric, contents: dict[str, Any]) -> None:
    """Restore a metric's attributes from a copy made by `copied`."""
    vars(metric).update({name: _copied(value) for name, value in contents.items()})


def _copied(value: Any) -> Any:
    # `update` and `reset` change tensors and lists in place. A list's entries never change, so they need no copy.
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def has_value(metric: Metric) -> bool:
    """Return whether the metric's last update was by `forward`, which computes the batch's own value."""
    value: object = metric._forward_cache
    return value is not None


def take(metric: Metric) -> MetricContents:
    """Move the states out of a metric, which is then as if new, except for the value of its last `forward`."""
    contents = MetricContents(metric._update_count, {name: getattr(metric, name) for name in metric._defaults})
    put(metric, MetricContents(0, {}))
    return contents


def put(metric: Metric, contents: MetricContents) -> None:
    """Replace the contents of a metric."""
    for name, default in metric._defaults.items():
        # Copy states, because `update` and `reset` change them in place.
        state = contents.states.get(name, default)
        setattr(metric, name, list(state) if isinstance(state, list) else state.detach().clone().to(metric.device))
    metric._update_count, metric._computed = contents.num_updates, None


def combine(metric: Metric, first: MetricContents, second: MetricContents) -> MetricContents:
    """Return the contents that a metric would have after the updates of `first` and then of `second`."""
    if not first.num_updates or not second.num_updates:
        return first if first.num_updates else second
    num_updates = first.num_updates + second.num_updates
    share = second.num_updates / num_updates
    states = {
        name: _reduced(metric._reductions[name], state, second.states[name], share)
        for name, state in first.states.items()
    }
    return MetricContents(num_updates, states)


def _reduced(
    reduction: object, first: Tensor | list[Tensor], second: Tensor | list[Tensor], share: float
) -> Tensor | list[Tensor]:
    """Combine two values of one state; `share` is the second value's share of all updates, for a mean."""
    if isinstance(first, list) or isinstance(second, list):
        return [*first, *second]
    first, second = first.detach(), second.detach()
    if reduction == dim_zero_sum:
        return first + second
    if reduction == dim_zero_mean:
        return first + (second - first) * share
    if reduction == dim_zero_max:
        return torch.maximum(first, second)
    if reduction == dim_zero_min:
        return torch.minimum(first, second)
    return torch.cat([first, second])


def computed_of(metric: Metric, contents: MetricContents) -> object:
    """Compute a metric's value from the given contents. The metric keeps its own."""
    kept = take(metric)
    put(metric, contents)
    try:
        return metric.compute()
    finally:
        put(metric, kept)


def check_alike(metric: Metric, own: MetricContents, other: MetricContents) -> None:
    """Raise `ProtocolError` if another trainer's contents cannot be combined with the contents from an own batch."""
    has_growing_state = False
    for name, own_state in own.states.items():
        reduction = metric._reductions[name]
        has_growing_state |= isinstance(own_state, list) or reduction == dim_zero_cat
        expected, received = _descriptions(own_state, reduction), _descriptions(other.states[name], reduction)
        if expected and not received <= expected:
            raise ProtocolError(f"tensors of state {name!r} must be {sorted(expected)}, got {sorted(received)}")
    # Only the metric itself can check, for example, which states must have equal lengths. If no state grows, equal
    # shapes are enough.
    if has_growing_state and _can_compute(metric, own) and not _can_compute(metric, combine(metric, own, other)):
        raise ProtocolError("the metric cannot be computed from them together with a batch of this trainer")


def _descriptions(state: Tensor | list[Tensor], reduction: object) -> set[str]:
    """Describe the tensors of a state by the properties that must agree in all batches."""
    if not isinstance(state, list):
        return {f"{state.dtype} {list(state.shape[reduction == dim_zero_cat :])}"}
    if reduction != dim_zero_cat:  # tensors that are not concatenated may have any shapes
        return {str(tensor.dtype) for tensor in state}
    return {f"{tensor.dtype} {list(tensor.shape[1:])}" for tensor in state}


def _can_compute(metric: Metric, contents: MetricContents) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            computed_of(metric, contents)
        except Exception:  # noqa: BLE001 - a user's metric may raise anything
            return False
    return True


def pack(name: str, contents: MetricContents) -> tuple[MetricState, list[Tensor]]:
    """Pack a metric's contents for a message."""
    lists = [state if isinstance(state, list) else [state] for state in contents.states.values()]
    tensors = [tensor.detach().cpu() for state in lists for tensor in state]
    return MetricState(name=name, num_updates=contents.num_updates, lengths=[len(state) for state in lists]), tensors


def unpack(metric: Metric, sent: MetricState, tensors: Sequence[Tensor]) -> MetricContents:
    """Unpack the contents of another trainer's metric. Raises ProtocolError if its states differ from `metric`'s."""
    rest = iter(tensors)
    states: dict[str, Tensor | list[Tensor]] = {}
    if len(sent.lengths) != len(metric._defaults):
        raise ProtocolError(f"metric {sent.name!r} must have {len(metric._defaults)} states, got {len(sent.lengths)}")
    for (name, default), length in zip(metric._defaults.items(), sent.lengths, strict=True):
        parts = [tensor.to(metric.device) for tensor in islice(rest, length)]
        if isinstance(default, list):
            states[name] = parts
            continue
        own = getattr(metric, name)
        # A state that begins as a scalar may get its shape with the first update.
        first = 1 if metric._reductions[name] == dim_zero_cat else 0  # dimension 0 of a concatenation grows
        is_sized = length == 1 and (not default.dim() or parts[0].shape[first:] == default.shape[first:])
        if not is_sized or parts[0].dtype != own.dtype:
            received = [(str(part.dtype), list(part.shape)) for part in parts]
            raise ProtocolError(
                f"state {name!r} of metric {sent.name!r} must be a {own.dtype} {list(own.shape)}, got {received}"
            )
        states[name] = parts[0]
    return MetricContents(sent.num_updates, states)
