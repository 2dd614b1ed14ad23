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
    "Log what it computes for the batch, with its `batch_size`, or leave `sync_dist` out to get the lead's own value."
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
        return repr({name: [(one.dtype, *one.shape) for one in state] for name, state in states.items()})

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        states = self.states.values()
        return sum(one.nbytes for state in states for one in (state if isinstance(state, list) else [state]))


def check_metric(name: str, metric: Metric) -> None:
    """Refuse a metric whose states cannot be combined; `name` is its name in the module."""
    kind = type(metric).__name__
    if any(isinstance(child, Metric) for child in metric.children()) or not metric._defaults:
        raise ConfigError(
            "`sync_dist=True` takes a metric that has states, and no other metrics in it: got a "
            f"{kind} as {name!r}. Log the metrics that it is made of."
        )
    for state, default in metric._defaults.items():
        if metric._reductions[state] not in (_LIST_REDUCTIONS if isinstance(default, list) else _TENSOR_REDUCTIONS):
            raise ConfigError(
                "`sync_dist=True` puts a metric's states together by their `dist_reduce_fx`, one of 'sum', 'mean', "
                f"'max', 'min' and 'cat' (None for a list): state {state!r} of the {kind} {name!r} has another. "
                f"{_REMEDY}"
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
    """Move the states out of a metric: it is then as if new, except for the value of its last `forward`."""
    contents = MetricContents(metric._update_count, {name: getattr(metric, name) for name in metric._defaults})
    put(metric, MetricContents(0, {}))
    return contents


def put(metric: Metric, contents: MetricContents) -> None:
    """Replace the contents of a metric."""
    for name, default in metric._defaults.items():
        # Copies, because `update` and `reset` change states in place.
        state = contents.states.get(name, default)
        setattr(metric, name, list(state) if isinstance(state, list) else state.detach().clone().to(metric.device))
    metric._update_count, metric._computed = contents.num_updates, None


def combine(metric: Metric, first: MetricContents, other: MetricContents) -> MetricContents:
    """Return the contents of a metric that received the updates of both, one after the other."""
    if not first.num_updates or not other.num_updates:
        return first if first.num_updates else other
    num_updates = first.num_updates + other.num_updates
    share = other.num_updates / num_updates
    states = {
        name: _reduced(metric._reductions[name], first.states[name], other.states[name], share) for name in first.states
    }
    return MetricContents(num_updates, states)


def _reduced(
    reduction: object, first: Tensor | list[Tensor], other: Tensor | list[Tensor], share: float
) -> Tensor | list[Tensor]:
    """Combine two contents of one state; `share` is the other contents' share of all updates, for a mean."""
    if isinstance(first, list) or isinstance(other, list):
        return [*first, *other]
    first, other = first.detach(), other.detach()
    if reduction == dim_zero_sum:
        return first + other
    if reduction == dim_zero_mean:
        return first + (other - first) * share
    if reduction == dim_zero_max:
        return torch.maximum(first, other)
    if reduction == dim_zero_min:
        return torch.minimum(first, other)
    return torch.cat([first, other])


def computed_of(metric: Metric, contents: MetricContents) -> object:
    """Compute a metric's value from these contents."""
    own = take(metric)
    put(metric, contents)
    try:
        return metric.compute()
    finally:
        put(metric, own)


def check_alike(metric: Metric, own: MetricContents, other: MetricContents) -> None:
    """Raise `ProtocolError` if another trainer's contents cannot be combined with those of an own batch."""
    grows = False
    for name, here in own.states.items():
        grows |= isinstance(here, list) or metric._reductions[name] == dim_zero_cat
        expected, found = (_kinds(state, metric._reductions[name]) for state in (here, other.states[name]))
        if expected and not found <= expected:
            raise ProtocolError(f"state {name!r} is made of {sorted(expected)}, got {sorted(found)}")
    # Only the metric knows, say, which states must have equal lengths. If no state grows, the shapes are enough.
    if grows and _computes(metric, own) and not _computes(metric, combine(metric, own, other)):
        raise ProtocolError("the metric computes nothing of it together with a batch of this trainer")


def _kinds(state: Tensor | list[Tensor], reduction: object) -> set[str]:
    """Describe the tensors of a state by the properties that must agree in all batches."""
    if not isinstance(state, list):
        return {f"{state.dtype} {list(state.shape[reduction == dim_zero_cat :])}"}
    if reduction != dim_zero_cat:  # tensors that are not concatenated may have any shapes
        return {str(one.dtype) for one in state}
    return {f"{one.dtype} {list(one.shape[1:])}" for one in state}


def _computes(metric: Metric, contents: MetricContents) -> bool:
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
    """Unpack the contents of another trainer's metric. Raises ProtocolError if it is not the same metric."""
    rest = iter(tensors)
    states: dict[str, Tensor | list[Tensor]] = {}
    if len(sent.lengths) != len(metric._defaults):
        raise ProtocolError(f"metric {sent.name!r} has {len(metric._defaults)} states, got {len(sent.lengths)}")
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
            found = [(str(part.dtype), list(part.shape)) for part in parts]
            raise ProtocolError(
                f"state {name!r} of metric {sent.name!r} is a {own.dtype} {list(own.shape)}, got {found}"
            )
        states[name] = parts[0]
    return MetricContents(sent.num_updates, states)
