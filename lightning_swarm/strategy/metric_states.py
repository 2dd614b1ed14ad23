"""What a torchmetrics object has taken in: taken out of it, sent, and put together by its own reductions."""

from __future__ import annotations

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

_OF_TENSORS = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat)
_PARTS_OF_MODULES = frozenset(vars(nn.Module()))
_OF_LISTS = (dim_zero_cat, None)
_INSTEAD = (
    "Log what it computes for the batch, with its `batch_size`, or leave `sync_dist` out to get the lead's own value."
)


@dataclass(frozen=True)
class MetricContents:
    """The states of a metric, by the names under which it declares them."""

    num_updates: int
    states: dict[str, Tensor | list[Tensor]]


def check_metric(name: str, metric: Metric) -> None:
    """Refuse a metric whose states cannot be put together.

    Raises:
        ConfigError: It is made of other metrics, or a state has a reduction of its own.
    """
    kind = type(metric).__name__
    if any(isinstance(child, Metric) for child in metric.children()) or not metric._defaults:
        raise ConfigError(
            "`sync_dist=True` takes a metric that has states, and no other metrics in it: got a "
            f"{kind} as {name!r}. Log the metrics that it is made of."
        )
    for state, default in metric._defaults.items():
        if metric._reductions[state] not in (_OF_LISTS if isinstance(default, list) else _OF_TENSORS):
            raise ConfigError(
                "`sync_dist=True` puts a metric's states together by their `dist_reduce_fx`, one of 'sum', 'mean', "
                f"'max', 'min' and 'cat' (None for a list): state {state!r} of the {kind} {name!r} has another. "
                f"{_INSTEAD}"
            )


def copied(metric: Metric) -> dict[str, Any]:
    """All that `update`, `forward` and `reset` change in a metric; `restore` puts it back."""
    return {name: _copied(value) for name, value in vars(metric).items() if name not in _PARTS_OF_MODULES}


def restore(metric: Metric, contents: dict[str, Any]) -> None:
    """Let a metric be as it was when it was `copied`."""
    vars(metric).update({name: _copied(value) for name, value in contents.items()})


def _copied(value: Any) -> Any:
    # `update` and `reset` change tensors and lists in place; what is in a list is only ever added to it.
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def has_value(metric: Metric) -> bool:
    """Whether its last batch was taken in by `forward`, which computes that batch's own value."""
    value: object = metric._forward_cache
    return value is not None


def take(metric: Metric) -> MetricContents:
    """Take out what is in `metric`, and leave it as if it were new, but for the value of its last `forward`."""
    contents = MetricContents(metric._update_count, {name: getattr(metric, name) for name in metric._defaults})
    put(metric, MetricContents(0, {}))
    return contents


def put(metric: Metric, contents: MetricContents) -> None:
    """Let `metric` hold `contents` and nothing else."""
    for name, default in metric._defaults.items():
        # Copies, because `update` and `reset` change states in place.
        state = contents.states.get(name, default)
        setattr(metric, name, list(state) if isinstance(state, list) else state.detach().clone().to(metric.device))
    metric._update_count, metric._computed = contents.num_updates, None


def together(metric: Metric, one: MetricContents, other: MetricContents) -> MetricContents:
    """As if `metric` had taken in first the one, then the other."""
    if not one.num_updates or not other.num_updates:
        return one if one.num_updates else other
    num_updates = one.num_updates + other.num_updates
    share = other.num_updates / num_updates
    states = {
        name: _reduced(metric._reductions[name], one.states[name], other.states[name], share) for name in one.states
    }
    return MetricContents(num_updates, states)


def _reduced(
    reduction: object, one: Tensor | list[Tensor], other: Tensor | list[Tensor], share: float
) -> Tensor | list[Tensor]:
    if isinstance(one, list) or isinstance(other, list):
        return [*one, *other]
    one, other = one.detach(), other.detach()
    if reduction == dim_zero_sum:
        return one + other
    if reduction == dim_zero_mean:
        return one + (other - one) * share
    if reduction == dim_zero_max:
        return torch.maximum(one, other)
    if reduction == dim_zero_min:
        return torch.minimum(one, other)
    return torch.cat([one, other])


def computed_of(metric: Metric, contents: MetricContents) -> object:
    """What `metric` would compute if it held `contents`."""
    own = take(metric)
    put(metric, contents)
    try:
        return metric.compute()
    finally:
        put(metric, own)


def pack(name: str, contents: MetricContents) -> tuple[MetricState, list[Tensor]]:
    """As it travels."""
    lists = [state if isinstance(state, list) else [state] for state in contents.states.values()]
    tensors = [tensor.detach().cpu() for one in lists for tensor in one]
    return MetricState(name=name, num_updates=contents.num_updates, lengths=[len(one) for one in lists]), tensors


def unpack(metric: Metric, sent: MetricState, tensors: Sequence[Tensor]) -> MetricContents:
    """What another trainer's `metric` has taken in.

    Raises:
        ProtocolError: It is not the same metric.
    """
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
        # One that begins as a number may find its shape as it goes.
        if length != 1 or parts[0].dtype != own.dtype or (default.dim() and not _fits(metric, name, parts[0], default)):
            found = [(str(part.dtype), list(part.shape)) for part in parts]
            raise ProtocolError(
                f"state {name!r} of metric {sent.name!r} is a {own.dtype} {list(own.shape)}, got {found}"
            )
        states[name] = parts[0]
    return MetricContents(sent.num_updates, states)


def _fits(metric: Metric, name: str, tensor: Tensor, default: Tensor) -> bool:
    same = 1 if metric._reductions[name] == dim_zero_cat else 0  # whose first dimension grows
    return tensor.shape[same:] == default.shape[same:]
