"""torchmetrics objects that `training_step` logs with ``sync_dist=True``: each batch's part of them, for the lead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_swarm.errors import ConfigError, ProtocolError
from lightning_swarm.metric_states import (
    Contents,
    check_metric,
    computed_of,
    has_value,
    pack,
    put,
    take,
    together,
    unpack,
)
from lightning_swarm.steps.client import Metrics
from lightning_swarm.types.batches import MAX_LOGS, MetricState

_NOTHING = Contents(0, {})

PendingMetrics: TypeAlias = tuple[Mapping[str, bool], Mapping[int, Sequence[tuple[str, Contents]]]]
"""Which metrics are followed, and whether they have a value for each batch; and what the lead's own batches in the open
step added, by their leases."""


class SharedMetrics:
    """While a batch is in hand, such a metric holds this batch only; then it is put together again.

    So what travels is what the batch has added, and a batch that does not count leaves nothing behind.

    Args:
        module: Has the metrics. They are named by their places in it, as in all trainers' modules.
        results: Lightning's `_ResultCollection` of the training epoch loop.
        max_bytes: Of what a batch adds to all of them; None: this is the lead, from where it does not travel.
    """

    def __init__(self, module: nn.Module, results: Any, *, max_bytes: int | None) -> None:
        self._module = module
        self._results = results
        self._max_bytes = max_bytes
        self._metrics: dict[str, Metric] = {}
        self._with_values: set[str] = set()  # those that have one for each batch, by their `forward`
        self._before: dict[str, Contents] | None = None  # what they held before the batch in hand
        self._lease = 0  # of the batch in hand
        self._step: dict[int, list[tuple[str, Contents]]] = {}  # of the lead's own batches in the open step
        self._others: list[tuple[str, Contents]] = []
        self._decided: list[tuple[str, Contents]] = []  # of all batches of the newest step

    def follow(self, metric: Metric) -> None:
        """It was logged. With it go those that share its states."""
        known = next((name for name, one in self._metrics.items() if one is metric), None)
        if known is not None:
            self._with_values |= {known} if has_value(metric) else set()
            return
        names = {id(one): name for name, one in self._module.named_modules() if isinstance(one, Metric)}
        if id(metric) not in names:
            raise ConfigError(
                "`sync_dist=True` finds a metric in the other trainers by its place in the LightningModule, where this "
                f"{type(metric).__name__} has none. Make it an attribute, or an entry of a ModuleDict or ModuleList."
            )
        for one in self._group(metric):
            name = names[id(one)]
            if name not in self._metrics:
                check_metric(name, one)
                self._metrics[name] = one
            if has_value(one):
                self._with_values.add(name)
        if len(self._metrics) > MAX_LOGS:
            raise ConfigError(
                f"`sync_dist=True` takes at most {MAX_LOGS} metrics, got {len(self._metrics)}. Log fewer with it."
            )

    def _group(self, metric: Metric) -> Iterator[Metric]:
        yield metric
        for collection in self._module.modules():
            # One of its metrics may be updated for several.
            if isinstance(collection, MetricCollection) and any(one is metric for one in collection.modules()):
                yield from collection.values(copy_state=False)

    @property
    def is_empty(self) -> bool:
        """Whether no metric was logged so far."""
        return not self._metrics

    def begin(self, lease: int) -> None:
        """A batch is in hand."""
        self._lease = lease
        self._before = {name: take(metric) for name, metric in self._metrics.items()}

    def end(self, *, counts: bool) -> Metrics:
        """The batch is through, or will not count. What it added, as it travels."""
        assert self._before is not None
        before, self._before = self._before, None
        added = [(name, take(metric)) for name, metric in self._metrics.items()]
        for name, contents in added:
            metric, earlier = self._metrics[name], before.get(name, _NOTHING)
            put(metric, together(metric, earlier, contents) if counts else earlier)
        added = [(name, contents) for name, contents in added if counts and contents.num_updates]
        if self._max_bytes is None:
            self._step[self._lease] = added
            return [], []
        packed = [pack(name, contents) for name, contents in added]
        tensors = [tensor for _, part in packed for tensor in part]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes > self._max_bytes:
            raise ConfigError(
                "what a batch adds to the metrics that are logged with `sync_dist=True` must be at most "
                f"`Limits.max_metric_bytes` = {self._max_bytes} bytes, got {num_bytes}. Raise it, log metrics with "
                "smaller states (binned ones, with `thresholds`, say), or leave `sync_dist` out."
            )
        return [state for state, _ in packed], tensors

    def forget(self, lease: int) -> None:
        """A batch that came to its end counts nowhere. What the metrics hold is somebody else's to restore."""
        self._step.pop(lease, None)

    @property
    def pending(self) -> PendingMetrics:
        """Between two batches."""
        return {name: name in self._with_values for name in self._metrics}, dict(self._step)

    def recall(self, pending: PendingMetrics) -> None:
        """Be as it was then; what the metrics hold is somebody else's to restore."""
        names, self._step = pending[0], {lease: list(added) for lease, added in pending[1].items()}
        modules = dict(self._module.named_modules())
        self._metrics = {name: one for name in names if isinstance(one := modules.get(name), Metric)}
        self._with_values = {name for name, has_values in names.items() if has_values}

    def decide(self, others: Sequence[Metrics]) -> None:
        """At the lead: a record came, with what others' batches in it added."""
        came = [one for sent in others for one in self._unpacked(*sent)]
        self._others += came
        own = [one for added in self._step.values() for one in added]
        self._decided, self._step = [*own, *came], {}

    def _unpacked(self, states: Sequence[MetricState], tensors: Sequence[Tensor]) -> Iterator[tuple[str, Contents]]:
        begin = 0
        for sent in states:
            metric = self._metrics.get(sent.name)
            if metric is None:  # logged there, and not here as yet
                metric = dict(self._module.named_modules()).get(sent.name)
                if not isinstance(metric, Metric):
                    raise ProtocolError(f"another trainer logged the metric {sent.name!r}, and there is none here")
                self.follow(metric)
            end = begin + sum(sent.lengths)
            yield sent.name, unpack(metric, sent, tensors[begin:end])
            begin = end

    def replay(self) -> None:
        """At the lead, after its own batch and before Lightning logs the step: take in what others' batches added."""
        if self._before is not None:  # the batch in hand failed
            self.end(counts=False)
        others, self._others = self._others, []
        for name, contents in others:
            metric = self._metrics[name]
            put(metric, together(metric, take(metric), contents))
        names = {id(self._metrics[name]) for name, _ in others}
        for key, entry in self._results.items():
            if not entry.is_tensor and id(entry.value) in names:
                self._results.update_metrics(key, entry.value, 1)
        for entry, value in self._of_step():
            entry._forward_cache, entry.has_reset = value, False
        self._decided = []

    @property
    def of_step(self) -> dict[str, Any]:
        """At the lead, what all batches of the newest step make, by the names of a logger's line."""
        return {entry.meta.forked_name(on_step=True): value for entry, value in self._of_step() if entry.meta.logger}

    def _of_step(self) -> Iterator[tuple[Any, Any]]:
        """Lightning's entries that have a value for each step, with that of the newest one."""
        names = {id(metric): name for name, metric in self._metrics.items() if name in self._with_values}
        for entry in self._results.values():
            if entry.is_tensor or not entry.meta.on_step:
                continue
            parts = [contents for name, contents in self._decided if name == names.get(id(entry.value))]
            if parts:
                yield entry, computed_of(entry.value, reduce(partial(together, entry.value), parts))
