"""What takes the place of Lightning's automatic optimization: one swarm step is one ``global_step``.

It runs batches and waits for records. `loop_counters.py` says where a step ends by Lightning's own counters, knows the
batches that no record counts yet, and moves schedulers once for each record.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lightning_swarm.client.generation import Metrics, NextGrant
from lightning_swarm.client.session import RunNews, Session
from lightning_swarm.core.errors import ConfigError, LeaseRevoked, PeerError, RunOver, StepError, SwarmError
from lightning_swarm.model.optimizer_state import set_hyperparameters
from lightning_swarm.model.selection import read_selection
from lightning_swarm.protocol.messages.batches import Grant, LoggedValue
from lightning_swarm.strategy.checks import hyperparameters
from lightning_swarm.strategy.data import SharedData
from lightning_swarm.strategy.framework import framework_of
from lightning_swarm.strategy.loop_counters import (
    CompletedBatches,
    LoopBatch,
    LoopCounters,
    LossScale,
    TrainerSchedulers,
)
from lightning_swarm.strategy.metrics import Pending, SharedLogs, SharedMetrics

_log = logging.getLogger(__name__)
_MAX_RUNS = 8


class SwarmOptimization:
    """Runs one batch; its optimizer step happens on the servers. Closure and counters are Lightning's own.

    Args:
        trainer: Lightning's.
        session: The trainer's session in the run.
        target_batch_size: Samples of a step; None: Lightning's own arithmetic.
        max_metric_bytes: As in `Limits`.
        data: That trainers share, if they do.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        target_batch_size: int | None,
        *,
        max_metric_bytes: int,
        data: SharedData,
    ) -> None:
        self.trainer = trainer
        self._data = data
        self._lightning = trainer.fit_loop.epoch_loop.automatic_optimization
        self._framework = framework_of(trainer)
        self._session = session
        self._counters = LoopCounters(trainer, data, target_batch_size, is_lead=session.is_lead)
        self._scale = LossScale(getattr(trainer.precision_plugin, "scaler", None))
        self._num_servers = session.num_servers
        self._version = session.version  # records that were counted here
        self.on_place: Callable[[RunNews], None] = lambda _: None  # called when a batch got one, or none is left
        self.stepped = False
        self._schedulers = TrainerSchedulers(trainer)
        self._through = CompletedBatches()
        results = trainer.fit_loop.epoch_loop._results
        max_bytes = None if session.is_lead else max_metric_bytes
        module = trainer.lightning_module
        self._logs = SharedLogs(module, results, SharedMetrics(module, results, max_bytes=max_bytes))
        if session.is_lead:
            session.step_with(lambda: hyperparameters(trainer.optimizers[0]), lambda: trainer.current_epoch)

    def take_over(self) -> None:
        """Take the place of the optimizer's steps."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        epoch_loop.automatic_optimization.run = self.run  # type: ignore[method-assign]
        self._schedulers.take_over()
        # Lightning asks this to time schedulers, logging and checkpoints.
        epoch_loop._accumulated_batches_reached = lambda: self.stepped  # type: ignore[method-assign]

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Train on one batch, and wait for the step that it closes. What it returns goes to `on_train_batch_end`."""
        self.stepped = False
        if self.pending_samples and self._counters.by_windows and self._counters.begins_window(batch_idx):
            _log.warning(
                "`on_train_batch_start` ended the epoch in the middle of a step: the %d samples of a window that was "
                "cut off count in the next step; the plain Trainer forgets them.",
                self.pending_samples,
            )
        self.tell_selection(optimizer)
        try:
            result = self._train(optimizer, self._in_hand(batch_idx, kwargs))
            self._train_again(optimizer)
            self._end_epoch(optimizer, batch_idx)
            return result
        except RunOver:
            # The lead was told that no step opens beyond `max_steps`, which it has just reached; the others that the
            # lead's loop has ended.
            if self._session.is_lead:
                return {}
            self.trainer.should_stop = True
            raise StopIteration from None  # how Lightning leaves an epoch
        finally:
            self._logs.replay()

    def _in_hand(self, batch_idx: int, kwargs: OrderedDict[str, Any]) -> LoopBatch:
        number = self._data.number
        if number is not None:
            return LoopBatch(batch_idx, kwargs, self._data.size(number), number)
        return LoopBatch(batch_idx, kwargs, self._num_samples(kwargs["batch"]) if "batch" in kwargs else 1)

    def _train(self, optimizer: Optimizer, batch: LoopBatch) -> dict[str, Any]:
        revoked: LeaseRevoked | None = None
        for _ in range(_MAX_RUNS):
            lease = self._begin(optimizer, batch)
            if lease is None:
                return {}  # it is in other hands
            self._logs.begin_batch(batch.num_samples, lease)
            try:
                return self._train_here(optimizer, batch, lease)
            except LeaseRevoked as error:
                _log.warning("`training_step` runs again for the batch in hand, which counts nowhere: %s", error)
                self._session.revoke_batch()
                self._logs.revoke()
                revoked = error
        raise StepError(
            f"a batch was struck from its step {_MAX_RUNS} times in a row: the coordinator does not hear of this "
            "trainer, or batches take too long. Look at the network between the two, or raise `Limits.call_timeout`."
        ) from revoked

    def _train_again(self, optimizer: Optimizer) -> None:
        """On batches before the one in hand that were through, and count nowhere all the same."""
        while self._through.lost:
            batch = self._through.lost.pop(next(iter(self._through.lost)))
            self._train(optimizer, batch)
            self._logs.restore()  # in what is logged here it has its part since its first run

    def _train_besides(self, optimizer: Optimizer, batch_idx: int, grant: Grant) -> None:
        """On a batch that nobody else brings. If it is struck it is anybody's again."""
        assert grant.batch is not None
        batch = self._data.read_batch(grant.batch)
        kwargs = self.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
        self._logs.begin_batch(grant.samples, grant.lease)
        try:
            self._train_here(optimizer, LoopBatch(batch_idx, kwargs, grant.samples, grant.batch), grant.lease)
        except LeaseRevoked as error:
            _log.warning("A batch that was brought besides counts nowhere: %s", error)
            self._session.revoke_batch()
            self._logs.revoke()

    def _end_epoch(self, optimizer: Optimizer, batch_idx: int) -> None:
        """After the last batch of the own part: all of the epoch is to be through before it is left."""
        end = self._data.lane_end
        if end is not None:
            try:
                self._begin(optimizer, LoopBatch(batch_idx, OrderedDict(), 1, end))
            except RunOver:  # the batch in hand was the lead's last one
                if not self._session.is_lead:
                    raise

    def _train_here(self, optimizer: Optimizer, batch: LoopBatch, lease: int) -> dict[str, Any]:
        """In the place that was got for it."""
        closure = self._lightning._make_closure(batch.kwargs, optimizer, batch.idx)
        try:
            closure()
            self._check_untouched(optimizer)
        except LeaseRevoked:
            raise
        except (PeerError, StepError) as error:
            self._session.check(error)
            raise
        except Exception:
            self._give_back()
            raise
        result = closure.consume_result()
        logs, metrics = self._logs.finish_batch(counts=result.loss is not None)
        if result.loss is None:
            self._session.withdraw_batch()
            closing = False
        else:
            closing = self._finish_batch(optimizer, batch, lease, logs, metrics)
        self._end_step(optimizer, closing=closing)
        if self._through.lost.pop(lease, None) is not None:
            raise LeaseRevoked("what servers had added of it was lost, and its step does not count it")
        if not self._session.is_shared and not self._session.delays:
            # All batches of a step, on its device, are too much to keep for a double fault.
            self._through.keep_no_batches()
        return {} if result.loss is None else result.asdict()

    def _finish_batch(
        self, optimizer: Optimizer, batch: LoopBatch, lease: int, logs: Sequence[LoggedValue], metrics: Metrics
    ) -> bool:
        """Say that it is through, and what else is known by then; True when its step closes now."""
        step = self._session.open_step
        close = self._counters.is_due(batch.num_samples)
        alone = not (self._session.is_shared or self._data.shares)
        fills = self._counters.is_full(self.pending_samples + batch.num_samples)
        ends = alone and self._ends_step(close=close or fills)
        ahead = self._ahead(batch, ends=ends) if alone else None
        window = self._counters.total_weight
        finish = partial(self._session.finish_batch, logs, metrics, close=close, window=window, ahead=ahead)
        if ends:
            self._before_step(optimizer)
            with self._profiled(optimizer):
                closing = finish()
        else:
            closing = finish()
        self._through.add(lease, batch, step=step, epoch=self.trainer.current_epoch)
        return closing

    def _ahead(self, batch: LoopBatch, *, ends: bool) -> NextGrant:
        """A place is kept for the next batch if that is as large as this one, which an epoch's last one may not be."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        comes = epoch_loop.batch_progress.current.ready + 1 < self.trainer.num_training_batches
        if not comes or self._scale.adapts:
            return NextGrant(ends=ends)
        return NextGrant(ends=ends, num_samples=batch.num_samples, gradient_scale=self._scale.value)

    def finish(self) -> None:
        """Training ends: count the records that are still to come."""
        self._session.give_back()
        self._catch_up()
        self._count_others(self.trainer.optimizers[0])
        if self._through.lost:
            _log.warning(
                "Training ended before %d batches could run again, which count nowhere: what servers had added of them "
                "was lost.",
                len(self._through.lost),
            )

    def begin_backward(self) -> None:
        """`training_step` is through, and what it logged is known."""
        logs = self._logs.so_far
        if logs is not None:
            self._session.begin_backward(logs)

    @property
    def pending_samples(self) -> int:
        """Of this trainer's batches that are through in the step that takes the next one."""
        return self._through.num_samples(self._session.open_step)

    @property
    def num_late_batches(self) -> int:
        """Where steps are late: this epoch's batches that are through, and in no record that was counted."""
        if not self._session.delays or self._counters.ends_epoch:
            return 0
        return self._through.num_batches(self.trainer.current_epoch)

    @property
    def pending(self) -> Pending:
        """What is still to be shared of this trainer's batches, between two of them."""
        return self._logs.pending

    def recall(self, num_counted: int, news: RunNews, pending: Pending) -> None:
        """Go on between two batches, as the loop of another run did.

        Args:
            num_counted: Records that it had counted.
            news: What it heard before the next batch.
            pending: What it had to share.
        """
        self._version = num_counted
        self._session.recall(news)
        self._logs.recall(pending)
        self._through.recall(news.lost)
        for lease in news.lost:
            self._logs.discard_batch(lease)

    def go_back(self) -> None:
        """The run goes on from other weights; what the open step had is gone."""
        self._version = self._session.version
        self._through = CompletedBatches()
        self.stepped = False
        self._schedulers.go_back()

    def _begin(self, optimizer: Optimizer, batch: LoopBatch) -> int | None:
        """Get a place, and bring besides what nobody else will. None: nothing is to be done for this batch."""
        while True:
            grant = self._place(optimizer, batch)
            if grant is None or grant.batch == batch.number:
                return None if grant is None else grant.lease
            self._train_besides(optimizer, batch.idx, grant)

    def _place(self, optimizer: Optimizer, batch: LoopBatch) -> Grant | None:
        """Who has to wait for one, or was busy elsewhere, finds that other trainers filled steps."""
        try:
            return self._session.begin_batch(
                batch.num_samples,
                gradient_scale=self._scale.value,
                before_record=lambda: self._prepare(optimizer),
                batch=batch.number,
            )
        finally:
            self._take_lost()
            self.on_place(replace(self._session.news, lost=dict(self._through.lost)))
            self._count_others(optimizer)

    def _count_others(self, optimizer: Optimizer) -> None:
        """Records that came beside this trainer's own steps."""
        while self._version < self._session.version:
            self._lightning.optim_progress.optimizer.step.increment_ready()
            self._count(optimizer)

    def _close(self) -> None:
        """Ask to close the open step with what it has."""
        self._session.close_step(window=self._counters.total_weight)

    def _end_step(self, optimizer: Optimizer, *, closing: bool) -> None:
        """Have the step decided if it ends with this batch."""
        if not closing and self._counters.is_due(self.pending_samples):
            self._close()  # the batch was withdrawn
            closing = True
        if self._ends_step(close=closing):
            self._step(optimizer)
        else:
            self._session.hear_imminent()
        if self._counters.ends_epoch:
            self._catch_up()
        self._count_others(optimizer)

    def _ends_step(self, *, close: bool) -> bool:
        """Whether the end of a step that closes with this batch is waited for in it.

        What happens at every step happens once a batch, so the lead leaves a second step to its next batch.
        """
        return close and not (self.stepped and self._session.is_lead and not self._counters.is_last_batch)

    def _catch_up(self) -> None:
        """Hear of the records of all steps that are closed."""
        self._session.catch_up()
        self._take_lost()

    def _take_lost(self) -> bool:
        """Whether batches that were through count nowhere all the same. They are to run again."""
        lost = self._session.take_lost()
        for lease in lost:
            self._through.lose(lease)
            self._logs.discard_batch(lease)
        return bool(lost)

    def _step(self, optimizer: Optimizer) -> None:
        """Wait for the record and count it."""
        if not self._session.has_ended:
            self._before_step(optimizer)
        progress = self._lightning.optim_progress.optimizer.step
        progress.increment_ready()
        with nullcontext() if self._session.has_ended else self._profiled(optimizer):
            closed = self._session.end_step()
            if not self._take_lost() and not closed and self._counters.is_due(self.pending_samples):
                self._close()  # another trainer withdrew its batch, and this one has no more to put in its place
                closed = self._session.end_step()
                self._take_lost()
        if self._session.version > self._version:
            self._count(optimizer)
        else:  # a batch was withdrawn, and the step takes others in its place; or records are late
            progress.current.ready -= 1
            progress.total.ready -= 1

    def _before_step(self, optimizer: Optimizer) -> None:
        self._prepare(optimizer)
        call = self._framework.call
        call._call_callback_hooks(self.trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(self.trainer, "on_before_optimizer_step", optimizer)

    def _profiled(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """As a profile of the plain Trainer has it: the time from the last backward to the new weights."""
        profiler = self.trainer.profiler  # type: ignore[attr-defined]  # Lightning sets it later
        found: AbstractContextManager[None] = profiler.profile(
            f"[SwarmOptimization]{type(optimizer).__name__}.optimizer_step"
        )
        return found

    def _count(self, optimizer: Optimizer) -> None:
        """A record was applied."""
        if self.stepped:
            self._log_step()
        self._schedulers.count(optimizer, is_first=not self.stepped)
        self._lightning.optim_progress.optimizer.step.increment_completed()
        heard = self._session.receive_record(self._version)
        self._through.count(self._version)
        self._version += 1
        self.stepped = True
        # Schedulers ask whether the optimizer stepped; it did, elsewhere.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        self._logs.decide(heard.logs if heard else (), heard.metrics if heard else ())
        if self._session.is_lead:
            self._log_events()
        if heard is None:  # a later one says as much
            return
        record = heard.record
        if not self._session.is_lead:
            for group, values in zip(optimizer.param_groups, record.hyperparameters, strict=True):
                set_hyperparameters(group, values)
        skipped = record.outcome == "skip"
        if skipped:
            # Scaled gradients are expected to overflow now and then: that is how the scale is found.
            level = logging.INFO if self._scale.adapts else logging.WARNING
            _log.log(level, "Step %d was skipped in all stages: its gradient was not finite.", record.step)
        if record.closing.batches:
            self._scale.update(skipped=skipped)

    def _log_step(self) -> None:
        """Of a step that is not the last one in this batch, what all trainers share: Lightning logs once a batch."""
        connector = self.trainer._logger_connector
        if self._session.is_lead and connector.should_update_logs:
            connector.log_metrics(self._logs.of_step)
        self.trainer.fit_loop.epoch_loop._batches_that_stepped += 1

    def _log_events(self) -> None:
        """In the Trainer's loggers, where there is something to say: a quiet run logs what a plain one does."""
        metrics = {f"swarm/{kind}": float(count) for kind, count in self._session.take_events().items()}
        num_servers = self._session.num_servers
        if metrics or num_servers != self._num_servers:
            metrics["swarm/peers"] = float(num_servers)
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step=step)
        self._num_servers = num_servers

    def _prepare(self, optimizer: Optimizer) -> None:
        """Before the next record, have the hyperparameters of its step: those that came are not all counted."""
        self._schedulers.move(optimizer, self.stepped + self._session.open_step - self._version)

    def tell_selection(self, optimizer: Optimizer) -> None:
        """Have the servers train what module and optimizer say by now, from the next step on."""
        selection = read_selection(self.trainer.lightning_module, optimizer)
        if selection == self._session.selection:
            return
        if self._session.is_shared:
            raise ConfigError(
                "what trains is settled when a run of several trainers begins, for they are not at the same batch: it "
                "has changed. Freeze parameters and add groups before `fit`, or use `role='auto'`."
            )
        if self.pending_samples:
            before = self._session.selection
            assert before is not None
            changed = sorted(set(before.frozen) ^ set(selection.frozen)) or "parameter groups"
            raise ConfigError(
                "which parameters train, and in which group, may change only where a step begins, for its gradients "
                f"are summed on the servers: {changed} changed with {self.pending_samples} samples in the open step. "
                "Change it at the beginning of an accumulation window; with `target_batch_size`, choose one that "
                "divides the samples of an epoch."
            )
        self._catch_up()
        self._count_others(optimizer)
        self._session.select(selection)

    def _check_untouched(self, optimizer: Optimizer) -> None:
        """Weights of other peers' stages are old here, and a gradient that arrives at one is in no step."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if self._session.around is not None:
            stepped -= set(map(id, self._session.around.parameters.values()))
        named = self.trainer.lightning_module.named_parameters()
        touched = [name for name, one in named if id(one) in stepped and one.grad is not None]
        if touched:
            raise ConfigError(
                "a loss may reach the pipeline's weights through its forward only, for they live on the servers: "
                f"it reached {touched[:5]} directly. Use the optimizer's weight decay in place of a penalty, and call "
                "the whole pipelined module in place of one of its blocks."
            )

    def _give_back(self) -> None:
        """`training_step` or its backward raised: the exception goes on, and the batch must not count."""
        try:
            self._session.withdraw_batch()
        except SwarmError as error:  # which is less than what it raised
            _log.warning("The batch could not be withdrawn: %s", error)

    def _num_samples(self, batch: Any) -> int:
        try:
            with warnings.catch_warnings():
                if self._counters.by_windows:  # the number only names places there
                    warnings.simplefilter("ignore")
                return self._framework.extract_batch_size(batch)
        except self._framework.misconfiguration as error:
            if self._counters.by_windows:
                return 1
            raise ConfigError(
                "`target_batch_size` counts samples, and this batch does not show how many it has: "
                f"{type(batch).__name__}. Put a tensor with one row for each sample into it."
            ) from error
