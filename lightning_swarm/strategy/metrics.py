"""Shares logged values among trainers: ``self.log(..., sync_dist=True)`` averages over the samples of all trainers.

No trainer waits for another. A trainer sends the values that a batch logged with its report of the batch. The lead
receives them with the record that counts the batch (`receive`), and adds them to its own results after its next batch
(`add_received`). Until a record counts a batch of the lead itself, the batch's values are kept by its lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_swarm.client.run_generation import Metrics
from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.override import Override
from lightning_swarm.protocol.messages.batches import MAX_LOGS, LoggedValue, MetricState, Reduction, fold
from lightning_swarm.strategy import metric_states
from lightning_swarm.strategy.metric_states import MetricContents

_log = logging.getLogger(__name__)
_HOOK: Final = "training_step"
LOG_OPTIONS: Final = ("on_step", "on_epoch", "prog_bar", "logger")  # options of `self.log` that are sent
REDUCTIONS: Final[Mapping[Reduction, Callable[[Tensor], Tensor]]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
}

_NOTHING: Final = MetricContents(0, {})
_MAX_WAITING_BYTES: Final = 64 << 20
_RESERVED: Final = ("step", "epoch")  # loggers use these names for the positions of their lines

PendingMetrics: TypeAlias = tuple[Mapping[str, bool], Mapping[int, Sequence[tuple[str, MetricContents]]]]
"""Name of each shared metric -> whether it has a value for each batch; and, by lease, the contents that the lead's own
batches in the open step added to the metrics."""

Pending: TypeAlias = tuple[Mapping[int, Sequence[LoggedValue]], PendingMetrics]
"""The values that a trainer's batches in the open step logged, by lease; and what they added to metrics."""


class SharedMetrics:
    """Shares metric objects that are logged with `sync_dist`, by their names in the module."""

    # During a batch, a shared metric holds only the contents from this batch; afterwards its earlier contents are added
    # again. So the batch's contents can be sent alone, and dropped if the batch does not count.

    def __init__(self, module: nn.Module, results: Any, *, max_bytes: int | None) -> None:
        self._module = module
        self._results = results  # Lightning's `_ResultCollection` of the training epoch loop
        self._max_bytes = max_bytes  # limit for a batch's contents; None at the lead, which sends none
        self._metrics: dict[str, Metric] = {}
        self._with_values: set[str] = set()  # metrics whose `forward` computes a value for each batch
        self._before: dict[str, MetricContents] | None = None  # contents before the current batch
        self._lease = 0  # lease of the current batch
        self._uncounted: dict[int, list[tuple[str, MetricContents]]] = {}  # lease -> contents from the lead's own batch
        # Contents from other trainers are added only if they can be combined with contents from the lead's batches.
        self._examples: dict[str, MetricContents] = {}  # metric -> contents from the lead's newest batch that logged it
        self._checked: set[tuple[str, str]] = set()  # metrics, and shapes of contents that can be added to them
        self._waiting: list[tuple[str, MetricContents]] = []  # received for metrics that the lead has not logged yet
        self._accepted: list[tuple[str, MetricContents]] = []  # received, and added at the next `add_received`
        self._newest_step: list[tuple[str, MetricContents]] = []  # contents from all batches of the newest step
        self._warned: set[str] = set()  # metrics that a warning has named

    def follow(self, metric: Metric) -> None:
        """Share a metric that was logged, and all metrics that share its states."""
        known = next((name for name, shared in self._metrics.items() if shared is metric), None)
        if known is not None:
            self._with_values |= {known} if metric_states.has_value(metric) else set()
            return
        names = {id(module): name for name, module in self._module.named_modules() if isinstance(module, Metric)}
        if id(metric) not in names:
            raise ConfigError(
                "a metric logged with `sync_dist=True` must be in the LightningModule, where its name identifies it to "
                f"other trainers; this {type(metric).__name__} is not. Make it an attribute, or an entry of a "
                "ModuleDict or ModuleList."
            )
        for member in self._group(metric):
            name = names[id(member)]
            if name not in self._metrics:
                metric_states.check_metric(name, member)
                self._metrics[name] = member
            if metric_states.has_value(member):
                self._with_values.add(name)
        if len(self._metrics) > MAX_LOGS:
            raise ConfigError(
                f"at most {MAX_LOGS} metrics may be logged with `sync_dist=True`, got {len(self._metrics)}. Log fewer."
            )

    def _group(self, metric: Metric) -> Iterator[Metric]:
        yield metric
        for collection in self._module.modules():
            # A collection may update only one metric of a compute group, whose states the whole group shares.
            if isinstance(collection, MetricCollection) and any(member is metric for member in collection.modules()):
                yield from collection.values(copy_state=False)

    @property
    def is_empty(self) -> bool:
        """Return whether no metric was logged so far."""
        return not self._metrics

    def begin_batch(self, lease: int) -> None:
        """Empty the metrics for the batch that begins."""
        self._lease = lease
        self._before = {name: metric_states.take(metric) for name, metric in self._metrics.items()}

    def finish_batch(self, *, counts: bool) -> Metrics:
        """Combine the metrics with their earlier contents. Returns the packed contents of the batch, if it counts."""
        assert self._before is not None
        before, self._before = self._before, None
        added = [(name, metric_states.take(metric)) for name, metric in self._metrics.items()]
        for name, contents in added:
            metric, earlier = self._metrics[name], before.get(name, _NOTHING)
            metric_states.put(metric, metric_states.combine(metric, earlier, contents) if counts else earlier)
        added = [(name, contents) for name, contents in added if counts and contents.num_updates]
        if self._max_bytes is None:
            self._examples |= added
            self._uncounted[self._lease] = added
            return [], []
        packed = [metric_states.pack(name, contents) for name, contents in added]
        tensors = [tensor for _, part in packed for tensor in part]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes > self._max_bytes:
            raise ConfigError(
                "the contents that a batch adds to metrics logged with `sync_dist=True` must have at most "
                f"`Limits.max_metric_bytes` = {self._max_bytes} bytes, got {num_bytes}. Raise the limit, log metrics "
                "with smaller states (for example binned metrics, by `thresholds`), or leave `sync_dist` out."
            )
        return [state for state, _ in packed], tensors

    def discard_batch(self, lease: int) -> None:
        """Do not count the contents from a complete batch that counts in no step. They stay in the metrics."""
        self._uncounted.pop(lease, None)

    @property
    def pending(self) -> PendingMetrics:
        """Return the shared metrics, and their contents that no record counts yet. May be read between two batches."""
        return {name: name in self._with_values for name in self._metrics}, dict(self._uncounted)

    def restore_pending(self, pending: PendingMetrics) -> None:
        """Restore the `pending` state of a former run's loop. The caller restores the metrics."""
        has_values_by_name, self._uncounted = pending[0], {lease: list(added) for lease, added in pending[1].items()}
        modules = dict(self._module.named_modules())
        metrics = {name: modules.get(name) for name in has_values_by_name}
        self._metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}
        self._with_values = {name for name, has_values in has_values_by_name.items() if has_values}
        self._examples, self._waiting, self._checked = {}, [], set()

    def receive(self, others: Sequence[Metrics]) -> None:
        """Receive, at the lead, the contents from other trainers' batches in a record, which also counts the lead's."""
        own = [contents for added in self._uncounted.values() for contents in added]
        self._newest_step, self._uncounted = own, {}
        self._accept([contents for sent in others for contents in self._unpack(*sent)])

    def _unpack(self, states: Sequence[MetricState], tensors: Sequence[Tensor]) -> Iterator[tuple[str, MetricContents]]:
        begin = 0
        for sent in states:
            end = begin + sum(sent.lengths)
            try:
                yield sent.name, metric_states.unpack(self._metric(sent.name), sent, tensors[begin:end])
            except (ProtocolError, ConfigError) as error:
                self._reject(sent.name, error)
            begin = end

    def _metric(self, name: str) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:  # another trainer has logged it before the lead
            metric = dict(self._module.named_modules()).get(name)
            if not isinstance(metric, Metric):
                raise ProtocolError("the lead's module has no metric of that name")
            metric_states.check_metric(name, metric)
        return metric

    def _accept(self, received: Sequence[tuple[str, MetricContents]]) -> None:
        """Accept contents that can be combined with a batch of the lead; keep them until the lead has such a batch."""
        for name, contents in received:
            if name not in self._examples:
                self._waiting.append((name, contents))
                continue
            # Check contents of the same shapes once, because computing the metric may take long.
            if (name, contents.shapes) not in self._checked:
                try:
                    metric_states.check_alike(self._metrics[name], self._examples[name], contents)
                except ProtocolError as error:
                    self._reject(name, error)
                    continue
                self._checked.add((name, contents.shapes))
            self._accepted.append((name, contents))
            self._newest_step.append((name, contents))
        # A trainer may name metrics that the lead never logs, step after step.
        while sum(contents.num_bytes for _, contents in self._waiting) > _MAX_WAITING_BYTES:
            name, _ = self._waiting.pop(0)
            self._reject(name, ProtocolError(f"over {_MAX_WAITING_BYTES} bytes wait for the lead to log such metrics"))

    def _reject(self, name: str, error: Exception) -> None:
        if len(self._warned) < MAX_LOGS and name not in self._warned:
            self._warned.add(name)
            _log.warning("The metric %r does not count contents from another trainer's batch: %s", name, error)

    def add_received(self) -> None:
        """Add other trainers' contents to the lead's metrics after its own batch, before Lightning logs the step."""
        if self._before is not None:  # the current batch failed
            self.finish_batch(counts=False)
        waiting, self._waiting = self._waiting, []
        self._accept(waiting)
        accepted, self._accepted = self._accepted, []
        for name, contents in accepted:
            metric = self._metrics[name]
            metric_states.put(metric, metric_states.combine(metric, metric_states.take(metric), contents))
        changed_ids = {id(self._metrics[name]) for name, _ in accepted}
        for key, entry in self._results.items():
            if not entry.is_tensor and id(entry.value) in changed_ids:
                self._results.update_metrics(key, entry.value, 1)
        for entry, value in self._step_values():
            entry._forward_cache, entry.has_reset = value, False  # Lightning logs no result that was reset
        self._newest_step = []

    @property
    def of_step(self) -> dict[str, Any]:
        """Return the values over all batches of the newest step, at the lead, by their names in a logger's line."""
        return {
            entry.meta.forked_name(on_step=True): value for entry, value in self._step_values() if entry.meta.logger
        }

    def _step_values(self) -> Iterator[tuple[Any, Any]]:
        """Yield Lightning's entries that have a value for each step, with the newest step's value."""
        names = {id(metric): name for name, metric in self._metrics.items() if name in self._with_values}
        for entry in self._results.values():
            if entry.is_tensor or not entry.meta.on_step:
                continue
            parts = [contents for name, contents in self._newest_step if name == names.get(id(entry.value))]
            if parts:
                whole = reduce(partial(metric_states.combine, entry.value), parts)
                yield entry, metric_states.computed_of(entry.value, whole)


class SharedLogs:
    """Shares all values logged with `sync_dist`. It intercepts the `log` method of the training loop's results."""

    def __init__(
        self,
        module: nn.Module,
        results: Any,
        metrics: SharedMetrics,
        has_other_trainers: Callable[[], bool] = lambda: False,  # whether this is a lead with other trainers
    ) -> None:
        self._module = module
        self._results = results
        self._metrics = metrics
        self._has_other_trainers = has_other_trainers
        self._warned_names: set[str] = set()  # names logged without `sync_dist` that a warning has mentioned
        # Restores results and metrics as they were before the newest batch, whose shared values stay.
        self.restore: Callable[[], None] = lambda: None
        self._lease = 0  # lease of the current batch
        self._num_samples: int | None = None  # samples of the current batch; None between batches
        self._batch: list[LoggedValue] = []  # values of the current batch
        self._uncounted: dict[int, list[LoggedValue]] = {}  # lease -> values of this trainer's batch in the open step
        self._received: list[LoggedValue] = []  # from other trainers; added at the next `add_received`
        self._newest_step: list[LoggedValue] = []  # values of all batches of the newest step
        self._added_keys: set[str] = set()  # keys of results that only other trainers have logged so far
        self._log_override = Override(results, "log", self._log)

    def release(self) -> None:
        """Restore the results' own `log` method."""
        self._log_override.remove()

    def begin_batch(self, num_samples: int, lease: int) -> None:
        """Copy the results and metrics, to restore them if the batch does not count."""
        self._num_samples, self._lease, self._batch = num_samples, lease, []
        self.restore = _remember_logs(self._module, self._results)
        self._metrics.begin_batch(lease)

    @property
    def values_so_far(self) -> list[LoggedValue] | None:
        """The current batch's values, combined by name; None if there are too many, or if metrics are shared."""
        logs = fold(self._batch)
        return logs if self._metrics.is_empty and len(logs) <= MAX_LOGS else None

    def revoke(self) -> None:
        """Remove a batch that counts in no step from results and metrics; it will run again."""
        if self._num_samples is not None:
            self.finish_batch(counts=False)
        self.discard_batch(self._lease)
        self.restore()

    def discard_batch(self, lease: int) -> None:
        """Do not share the values of a complete batch that counts in no step. They stay in results and metrics."""
        self._uncounted.pop(lease, None)
        self._metrics.discard_batch(lease)

    @property
    def pending(self) -> Pending:
        """Return this trainer's values and metrics that no record counts yet. May be read between two batches."""
        return dict(self._uncounted), self._metrics.pending

    def restore_pending(self, pending: Pending) -> None:
        """Restore the `pending` state of a former run's loop."""
        self._uncounted = {lease: list(logs) for lease, logs in pending[0].items()}
        self._metrics.restore_pending(pending[1])

    def finish_batch(self, *, counts: bool = True) -> tuple[list[LoggedValue], Metrics]:
        """Close the current batch. Returns its logged values, combined by name, and its packed metric contents."""
        self._num_samples = None
        metrics = self._metrics.finish_batch(counts=counts)
        logs = fold(self._batch)
        if len(logs) > MAX_LOGS:
            raise ConfigError(
                f"a batch may log at most {MAX_LOGS} names with `sync_dist=True`, got {len(logs)}. Log fewer with it."
            )
        if counts:
            self._uncounted[self._lease] = logs
        return logs, metrics

    def receive(self, others: Sequence[LoggedValue], metrics: Sequence[Metrics]) -> None:
        """Receive, at the lead, the logged values and metric contents of other trainers' batches in a record."""
        self._metrics.receive(metrics)
        self._received += others
        own = [logged for logs in self._uncounted.values() for logged in logs]
        self._newest_step, self._uncounted = fold([*own, *others]), {}

    @property
    def of_step(self) -> dict[str, Any]:
        """Return the values over all batches of the newest step, at the lead, by their names in a logger's line."""
        logs = {
            f"{logged.name}_step" if logged.on_epoch else logged.name: logged.value  # Lightning's naming
            for logged in self._newest_step
            if logged.on_step and logged.logger
        }
        return logs | self._metrics.of_step

    def add_received(self) -> None:
        """Add other trainers' values to the lead's results, after its own batch and before Lightning logs the step."""
        self._metrics.add_received()
        received, self._received = self._received, []
        newest_step, self._newest_step = self._newest_step, []
        for logged in received:
            metric = self._entry(logged)
            if metric is not None and logged.on_epoch:
                self._results.update_metrics(f"{_HOOK}.{logged.name}", _tensor(logged.value, metric), logged.batch_size)
        for logged in newest_step:
            metric = self._entry(logged)
            if metric is not None and logged.on_step:
                metric._forward_cache = _tensor(logged.value, metric)
                metric.has_reset = False  # see `SharedMetrics.add_received`
                if not logged.on_epoch:
                    metric.value = metric._forward_cache

    def _log(self, fx: str, name: str, value: Any, *, sync_dist: bool = False, **options: Any) -> None:
        """Replace `_ResultCollection.log`, because Lightning must not reduce the values itself."""
        self._log_own(fx, name, value, options)
        if not sync_dist:
            self._warn_of_own(name, on_epoch=fx == _HOOK and options.get("on_epoch", True))
            return
        if self._num_samples is None or fx != _HOOK:
            raise ConfigError(
                "`sync_dist=True` may be used only in `training_step`, because logged values are sent with the batch; "
                f"got {name!r} in `{fx}`. Log it in `training_step`, or leave `sync_dist` out to get the lead's own "
                "value."
            )
        if not isinstance(value, torch.Tensor):
            self._metrics.follow(value)
            return
        meta = self._results[f"{fx}.{name}"].meta
        batch_size = options.get("batch_size")
        self._batch.append(
            LoggedValue(
                name=name,
                reduce=next(reduction for reduction in REDUCTIONS if getattr(meta, f"is_{reduction}_reduction")),
                value=float(value),
                batch_size=self._num_samples if batch_size is None else int(batch_size),
                **{name: getattr(meta, name) for name in LOG_OPTIONS},
            )
        )

    def _warn_of_own(self, name: str, *, on_epoch: bool) -> None:
        """Warn once, as Lightning does in `ddp`, that an epoch's value covers only some of the epoch's batches."""
        if not on_epoch or name in self._warned_names or len(self._warned_names) >= MAX_LOGS:
            return
        if not self._has_other_trainers():
            return
        self._warned_names.add(name)
        _log.warning(
            "%r is logged without `sync_dist=True`: each trainer logs only its own batches, so the epoch's value "
            "covers only the lead's batches. For all batches, use `self.log(%r, ..., sync_dist=True)`.",
            name,
            name,
        )

    def _log_own(self, fx: str, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Log in the results. If other trainers logged the same name, this trainer's options take precedence."""
        # If the options are equal, log into the entry that holds the other trainers' values.
        key = f"{fx}.{name}"
        added = self._results.pop(key, None) if key in self._added_keys else None
        self._added_keys.discard(key)
        self._log_override.replaced(fx, name, value, sync_dist=False, **options)
        if added is not None and added.meta == self._results[key].meta and isinstance(value, torch.Tensor):
            self._results[key] = added
            self._log_override.replaced(fx, name, value, sync_dist=False, **options)

    def _entry(self, logged: LoggedValue) -> Any:
        """Return the lead's result of this name, created if missing; None if the name cannot be used for a number."""
        key = f"{_HOOK}.{logged.name}"
        if key not in self._results:
            if logged.name in _RESERVED:
                return None
            reduce_fx = REDUCTIONS[logged.reduce]
            options = {name: getattr(logged, name) for name in LOG_OPTIONS}
            no_value = torch.tensor(float("nan"))
            type(self._results).log(
                self._results, _HOOK, logged.name, no_value, reduce_fx=reduce_fx, batch_size=0, **options
            )
            self._results[key].reset()
            self._added_keys.add(key)
        metric = self._results[key]
        if not metric.is_tensor:
            _log.warning("A number that another trainer logged is dropped: %r is a metric on the lead.", logged.name)
            return None
        return metric


def _remember_logs(module: nn.Module, results: Any) -> Callable[[], None]:
    """Copy the logged results and the module's metrics; the returned function restores both."""
    # Each result is itself a metric, of one of Lightning's classes.
    entries = {key: metric_states.copied(entry) for key, entry in results.items()}
    metrics = [(metric, metric_states.copied(metric)) for metric in module.modules() if isinstance(metric, Metric)]

    def restore() -> None:
        for key in results.keys() - entries.keys():
            del results[key]
        for key, contents in entries.items():
            metric_states.restore(results[key], contents)
        for metric, contents in metrics:
            metric_states.restore(metric, contents)

    return restore


def _tensor(value: float, metric: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=metric.value.dtype, device=metric.value.device)
