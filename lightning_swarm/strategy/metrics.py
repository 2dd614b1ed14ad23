"""Shares logged values among trainers: ``self.log(..., sync_dist=True)`` averages over the samples of all trainers.

No trainer waits for another. The values that a batch logged travel with it, and the lead adds them once a record
counts the batch.
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
LOG_OPTIONS: Final = ("on_step", "on_epoch", "prog_bar", "logger")  # options of `self.log` that travel
REDUCTIONS: Final[Mapping[Reduction, Callable[[Tensor], Tensor]]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
}

_NOTHING: Final = MetricContents(0, {})
_MAX_HELD_BYTES: Final = 64 << 20
_RESERVED: Final = ("step", "epoch")  # loggers use these names for the positions of their lines

PendingMetrics: TypeAlias = tuple[Mapping[str, bool], Mapping[int, Sequence[tuple[str, MetricContents]]]]
"""Name of each shared metric -> whether it has a value for each batch; and the contents that the lead's own batches in
the open step added, by lease."""

Pending: TypeAlias = tuple[Mapping[int, Sequence[LoggedValue]], PendingMetrics]
"""The values that a trainer's batches in the open step logged, by lease; and the contents they added to metrics."""


class SharedMetrics:
    """Shares metric objects that are logged with `sync_dist`, by their names in the module."""

    # During a batch, a shared metric holds this batch only; afterwards it is combined with its earlier contents. So the
    # batch's own contents travel alone, and a batch that does not count leaves nothing behind.

    def __init__(self, module: nn.Module, results: Any, *, max_bytes: int | None) -> None:
        self._module = module
        self._results = results  # Lightning's `_ResultCollection` of the training epoch loop
        self._max_bytes = max_bytes  # limit for a batch's contents; None at the lead, whose batches do not travel
        self._metrics: dict[str, Metric] = {}
        self._with_values: set[str] = set()  # metrics whose `forward` computes a value for each batch
        self._before: dict[str, MetricContents] | None = None  # contents before the current batch
        self._lease = 0  # the current batch's
        self._step: dict[int, list[tuple[str, MetricContents]]] = {}  # lease -> contents from the lead's own batch
        # Contents from other trainers are added only if they can be combined with contents from an own batch.
        self._samples: dict[str, MetricContents] = {}  # metric -> contents from the newest own batch that updated it
        self._fitting: set[tuple[str, str]] = set()  # metrics, and shapes of contents that can be added to them
        self._held: list[tuple[str, MetricContents]] = []  # received for metrics that the lead has not logged yet
        self._others: list[tuple[str, MetricContents]] = []  # received, and added at the next `replay`
        self._decided: list[tuple[str, MetricContents]] = []  # contents from all batches of the newest step
        self._warned: set[str] = set()

    def follow(self, metric: Metric) -> None:
        """Share a metric that was logged, and all metrics that share its states."""
        known = next((name for name, followed in self._metrics.items() if followed is metric), None)
        if known is not None:
            self._with_values |= {known} if metric_states.has_value(metric) else set()
            return
        names = {id(found): name for name, found in self._module.named_modules() if isinstance(found, Metric)}
        if id(metric) not in names:
            raise ConfigError(
                "`sync_dist=True` finds a metric in the other trainers by its place in the LightningModule, where this "
                f"{type(metric).__name__} has none. Make it an attribute, or an entry of a ModuleDict or ModuleList."
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
                f"`sync_dist=True` takes at most {MAX_LOGS} metrics, got {len(self._metrics)}. Log fewer with it."
            )

    def _group(self, metric: Metric) -> Iterator[Metric]:
        yield metric
        for collection in self._module.modules():
            # A collection may update only one metric of a compute group, whose states the whole group shares.
            if isinstance(collection, MetricCollection) and any(member is metric for member in collection.modules()):
                yield from collection.values(copy_state=False)

    @property
    def is_empty(self) -> bool:
        """True if no metric was logged so far."""
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
            self._samples |= added
            self._step[self._lease] = added
            return [], []
        packed = [metric_states.pack(name, contents) for name, contents in added]
        tensors = [tensor for _, part in packed for tensor in part]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes > self._max_bytes:
            raise ConfigError(
                "what a batch adds to the metrics that are logged with `sync_dist=True` must be at most "
                f"`Limits.max_metric_bytes` = {self._max_bytes} bytes, got {num_bytes}. Raise it, log metrics with "
                "smaller states (binned ones, with `thresholds`, say), or leave `sync_dist` out."
            )
        return [state for state, _ in packed], tensors

    def discard_batch(self, lease: int) -> None:
        """Forget the contents from a complete batch that counts in no step. Leaves them in the metrics."""
        self._step.pop(lease, None)

    @property
    def pending(self) -> PendingMetrics:
        """Return the shared metrics, and their contents that no record counts yet. Call it between two batches."""
        return {name: name in self._with_values for name in self._metrics}, dict(self._step)

    def recall(self, pending: PendingMetrics) -> None:
        """Restore the `pending` state of a former run's loop. The caller restores the metrics."""
        names, self._step = pending[0], {lease: list(added) for lease, added in pending[1].items()}
        modules = dict(self._module.named_modules())
        self._metrics = {name: metric for name in names if isinstance(metric := modules.get(name), Metric)}
        self._with_values = {name for name, has_values in names.items() if has_values}
        self._samples, self._held, self._fitting = {}, [], set()

    def decide(self, others: Sequence[Metrics]) -> None:
        """Receive, at the lead, the contents that other trainers' batches in a record added."""
        own = [contents for added in self._step.values() for contents in added]
        self._decided, self._step = own, {}
        self._take_in([contents for sent in others for contents in self._unpack(*sent)])

    def _unpack(self, states: Sequence[MetricState], tensors: Sequence[Tensor]) -> Iterator[tuple[str, MetricContents]]:
        begin = 0
        for sent in states:
            end = begin + sum(sent.lengths)
            try:
                yield sent.name, metric_states.unpack(self._metric(sent.name), sent, tensors[begin:end])
            except (ProtocolError, ConfigError) as error:
                self._leave_out(sent.name, error)
            begin = end

    def _metric(self, name: str) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:  # another trainer has logged it, this one not yet
            metric = dict(self._module.named_modules()).get(name)
            if not isinstance(metric, Metric):
                raise ProtocolError("there is no metric of that name here")
            metric_states.check_metric(name, metric)
        return metric

    def _take_in(self, received: Sequence[tuple[str, MetricContents]]) -> None:
        """Accept contents that can be combined with an own batch's; hold them until the lead has logged the metric."""
        for name, contents in received:
            if name not in self._samples:
                self._held.append((name, contents))
                continue
            # Check contents of the same shapes once, because the metric may take long to compute.
            if (name, contents.shapes) not in self._fitting:
                try:
                    metric_states.check_alike(self._metrics[name], self._samples[name], contents)
                except ProtocolError as error:
                    self._leave_out(name, error)
                    continue
                self._fitting.add((name, contents.shapes))
            self._others.append((name, contents))
            self._decided.append((name, contents))
        # A trainer may name metrics that the lead never logs, step after step.
        while sum(contents.num_bytes for _, contents in self._held) > _MAX_HELD_BYTES:
            name, _ = self._held.pop(0)
            self._leave_out(name, ProtocolError(f"{_MAX_HELD_BYTES} bytes wait for the lead to log such metrics, too"))

    def _leave_out(self, name: str, error: Exception) -> None:
        if len(self._warned) < MAX_LOGS and name not in self._warned:
            self._warned.add(name)
            _log.warning("What another trainer's batch added to the metric %r is left out: %s", name, error)

    def replay(self) -> None:
        """Add other trainers' contents to the lead's metrics after its own batch, before Lightning logs the step."""
        if self._before is not None:  # the current batch failed
            self.finish_batch(counts=False)
        held, self._held = self._held, []
        self._take_in(held)
        others, self._others = self._others, []
        for name, contents in others:
            metric = self._metrics[name]
            metric_states.put(metric, metric_states.combine(metric, metric_states.take(metric), contents))
        names = {id(self._metrics[name]) for name, _ in others}
        for key, entry in self._results.items():
            if not entry.is_tensor and id(entry.value) in names:
                self._results.update_metrics(key, entry.value, 1)
        for entry, value in self._step_values():
            entry._forward_cache, entry.has_reset = value, False  # Lightning logs no result that was reset
        self._decided = []

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
            parts = [contents for name, contents in self._decided if name == names.get(id(entry.value))]
            if parts:
                whole = reduce(partial(metric_states.combine, entry.value), parts)
                yield entry, metric_states.computed_of(entry.value, whole)


class SharedLogs:
    """Shares all values logged with `sync_dist`, by intercepting the `log` method of the training loop's results."""

    def __init__(
        self,
        module: nn.Module,
        results: Any,
        metrics: SharedMetrics,
        is_one_of_several: Callable[[], bool] = lambda: False,  # whether this lead trains beside other trainers
    ) -> None:
        self._module = module
        self._results = results
        self._metrics = metrics
        self._is_one_of_several = is_one_of_several
        self._own_names: set[str] = set()  # names logged without `sync_dist` that a warning has mentioned
        # Restores results and metrics as they were before the newest batch, whose shared values stay.
        self.restore: Callable[[], None] = lambda: None
        self._lease = 0  # the current batch's
        self._num_samples: int | None = None  # the current batch's; None between batches
        self._batch: list[LoggedValue] = []
        self._step: dict[int, list[LoggedValue]] = {}  # lease -> values of this trainer's batch in the open step
        self._others: list[LoggedValue] = []  # received, and added at the next `replay`
        self._decided: list[LoggedValue] = []  # values of all batches of the newest step
        self._made: set[str] = set()  # keys of results that only other trainers have logged so far
        self._own_log = Override(results, "log", self._log)

    def release(self) -> None:
        """Restore the results' own `log` method."""
        self._own_log.remove()

    def begin_batch(self, num_samples: int, lease: int) -> None:
        """Copy the results and metrics, to restore them if the batch does not count."""
        self._num_samples, self._lease, self._batch = num_samples, lease, []
        self.restore = _remember_logs(self._module, self._results)
        self._metrics.begin_batch(lease)

    @property
    def so_far(self) -> list[LoggedValue] | None:
        """Return the current batch's values, one for each name; None if they are too many or metrics are shared."""
        logs = fold(self._batch)
        return logs if self._metrics.is_empty and len(logs) <= MAX_LOGS else None

    def revoke(self) -> None:
        """Remove a batch that counts in no step from results and metrics; it will run again."""
        if self._num_samples is not None:
            self.finish_batch(counts=False)
        self.discard_batch(self._lease)
        self.restore()

    def discard_batch(self, lease: int) -> None:
        """Do not share the values of a complete batch that counts in no step. Leaves them in results and metrics."""
        self._step.pop(lease, None)
        self._metrics.discard_batch(lease)

    @property
    def pending(self) -> Pending:
        """Return this trainer's values and metrics that no record counts yet. Call it between two batches."""
        return dict(self._step), self._metrics.pending

    def recall(self, pending: Pending) -> None:
        """Restore the `pending` state of a former run's loop."""
        self._step = {lease: list(logs) for lease, logs in pending[0].items()}
        self._metrics.recall(pending[1])

    def finish_batch(self, *, counts: bool = True) -> tuple[list[LoggedValue], Metrics]:
        """Close the current batch. Returns its logged values, one for each name, and its packed metric contents."""
        self._num_samples = None
        metrics = self._metrics.finish_batch(counts=counts)
        logs = fold(self._batch)
        if len(logs) > MAX_LOGS:
            raise ConfigError(
                f"`sync_dist=True` takes at most {MAX_LOGS} names for a batch, got {len(logs)}. Log fewer with it."
            )
        if counts:
            self._step[self._lease] = logs
        return logs, metrics

    def decide(self, others: Sequence[LoggedValue], metrics: Sequence[Metrics]) -> None:
        """Receive, at the lead, the logged values and metric contents of other trainers' batches in a record."""
        self._metrics.decide(metrics)
        self._others += others
        own = [logged for logs in self._step.values() for logged in logs]
        self._decided, self._step = fold([*own, *others]), {}

    @property
    def of_step(self) -> dict[str, Any]:
        """Return the values over all batches of the newest step, at the lead, by their names in a logger's line."""
        logs = {
            f"{logged.name}_step" if logged.on_epoch else logged.name: logged.value  # Lightning's naming
            for logged in self._decided
            if logged.on_step and logged.logger
        }
        return logs | self._metrics.of_step

    def replay(self) -> None:
        """Add other trainers' values to the lead's results, after its own batch and before Lightning logs the step."""
        self._metrics.replay()
        others, self._others = self._others, []
        decided, self._decided = self._decided, []
        for logged in others:
            metric = self._entry(logged)
            if metric is not None and logged.on_epoch:
                self._results.update_metrics(f"{_HOOK}.{logged.name}", _tensor(logged.value, metric), logged.batch_size)
        for logged in decided:
            metric = self._entry(logged)
            if metric is not None and logged.on_step:
                metric._forward_cache = _tensor(logged.value, metric)
                metric.has_reset = False  # see `SharedMetrics.replay`
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
                "`sync_dist=True` counts what `training_step` logs of its batch, for trainers do not wait for each "
                f"other anywhere else; got {name!r} in `{fx}`. Log it in `training_step`, or leave `sync_dist` out to "
                "get the lead's own value."
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
        """Warn once, as Lightning does in `ddp`, that an epoch's value covers only a part of its batches."""
        if not on_epoch or name in self._own_names or len(self._own_names) >= MAX_LOGS or not self._is_one_of_several():
            return
        self._own_names.add(name)
        _log.warning(
            "%r is logged without `sync_dist=True`: each trainer logs batches of its own, so the epoch's value is that "
            "of the lead's batches. Use `self.log(%r, ..., sync_dist=True)` for all batches.",
            name,
            name,
        )

    def _log_own(self, fx: str, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Log in the results. This trainer's options take precedence over other trainers' under the same name."""
        # With equal options, keep the entry that holds the other trainers' values, and log into it.
        key = f"{fx}.{name}"
        made = self._results.pop(key, None) if key in self._made else None
        self._made.discard(key)
        self._own_log.replaced(fx, name, value, sync_dist=False, **options)
        if made is not None and made.meta == self._results[key].meta and isinstance(value, torch.Tensor):
            self._results[key] = made
            self._own_log.replaced(fx, name, value, sync_dist=False, **options)

    def _entry(self, logged: LoggedValue) -> Any:
        """Return the lead's result of this name, created with these options if missing; None if it can be no number."""
        key = f"{_HOOK}.{logged.name}"
        if key not in self._results:
            if logged.name in _RESERVED:
                return None
            reduce_fx = REDUCTIONS[logged.reduce]
            options = {name: getattr(logged, name) for name in LOG_OPTIONS}
            nothing = torch.tensor(float("nan"))
            type(self._results).log(
                self._results, _HOOK, logged.name, nothing, reduce_fx=reduce_fx, batch_size=0, **options
            )
            self._results[key].reset()
            self._made.add(key)
        metric = self._results[key]
        if not metric.is_tensor:
            _log.warning("Another trainer logged %r as a number; here it is a metric object.", logged.name)
            return None
        return metric


def _remember_logs(module: nn.Module, results: Any) -> Callable[[], None]:
    """Copy the logged results and the module's metrics; the returned function restores both."""
    # Each result is itself a metric, of a class of Lightning's.
    entries = {key: metric_states.copied(entry) for key, entry in results.items()}
    metrics = [(metric, metric_states.copied(metric)) for metric in module.modules() if isinstance(metric, Metric)]

    def put_back() -> None:
        for key in results.keys() - entries.keys():
            del results[key]
        for key, contents in entries.items():
            metric_states.restore(results[key], contents)
        for metric, contents in metrics:
            metric_states.restore(metric, contents)

    return put_back


def _tensor(value: float, metric: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=metric.value.dtype, device=metric.value.device)
