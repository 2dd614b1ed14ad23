"""Replaces Lightning's automatic optimization: one swarm step is one ``global_step``.

For each batch, the trainer waits for a lease (a place in a step), runs Lightning's closure, and reports the batch as
complete. If the batch ends its step, the trainer waits for the step's record. Records that came meanwhile, also of
steps that other trainers filled, are then counted in Lightning's counters, schedulers and logs. A batch that no record
counts, because it was struck or its gradients were lost, runs again.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lightning_swarm.client.run_generation import Metrics, PiggybackedRequests
from lightning_swarm.client.run_session import RunNews, Session
from lightning_swarm.core.errors import LeaseRevoked, PeerError, RunOver, StepError, SwarmError
from lightning_swarm.core.override import Override
from lightning_swarm.model.optimizer_state import set_hyperparameters
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.protocol.messages.batches import Grant, LoggedValue
from lightning_swarm.protocol.messages.run import BatchNumber, StepChange
from lightning_swarm.strategy import checks, optimizer_checks, stopping
from lightning_swarm.strategy.data.shared import SharedData
from lightning_swarm.strategy.framework import tree_of
from lightning_swarm.strategy.loop_counters import (
    CompletedBatches,
    LoopBatch,
    LoopCounters,
    LossScale,
    TrainerSchedulers,
)
from lightning_swarm.strategy.metrics import Pending, SharedLogs, SharedMetrics
from lightning_swarm.strategy.module_access import ModuleAccess
from lightning_swarm.strategy.own_values import OwnValues
from lightning_swarm.strategy.rate_hooks import RateHooks
from lightning_swarm.strategy.run_log import RunLog
from lightning_swarm.strategy.skip_divergence import skipped_batches

_log = logging.getLogger(__name__)
_MAX_ATTEMPTS = 8  # attempts to train on one batch


def _untrained() -> dict[str, Any]:
    """Return the outputs of a batch that this trainer read but did not train, because another trainer brings it."""
    # Callbacks may read the loss of every batch, as with the plain Trainer.
    return {"loss": torch.tensor(math.nan)}


class SwarmOptimization:
    """Trains on the loop's batches with Lightning's own closure and counters, while the optimizer steps on servers."""

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        data: SharedData,
        config: SwarmConfig,
        access: ModuleAccess,
        run_log: RunLog | None,  # None at trainers that are not the lead
    ) -> None:
        self.trainer = trainer
        self._data = data
        self._lightning = trainer.fit_loop.epoch_loop.automatic_optimization
        self._framework = tree_of(trainer)
        self._session = session
        self._access = access
        self._counters = LoopCounters(trainer, data, config.settings.target_batch_size, is_lead=session.is_lead)
        self._scale = LossScale(getattr(trainer.precision_plugin, "scaler", None), lambda: session.run.scaling)
        self._run_log = run_log
        self._num_counted = session.version  # number of records that this loop has counted
        # Called when a batch stops waiting for its grant, with the records and lost batches not handled by then.
        self.on_grant: Callable[[RunNews], None] = lambda _: None
        self.stepped = False  # a step was counted in the current batch
        # Step and number of the loop's current batch, once it is complete; None if another trainer brings it.
        self.newest_batch: tuple[int, BatchNumber] | None = None
        self._has_begun = False  # the loop has begun a batch in this run
        self._ready_at_last_batch = 0  # Lightning's count of ready batches when the newest trained batch ended
        self._step_marked_ready = False  # Lightning's counters include the step that the current batch may end
        self._overrides: Sequence[Override] = ()
        self._schedulers = TrainerSchedulers(trainer)
        self._completed = CompletedBatches()
        results = trainer.fit_loop.epoch_loop._results
        max_bytes = None if session.is_lead else config.limits.max_metric_bytes
        module = trainer.lightning_module
        self.logs = SharedLogs(
            module,
            results,
            SharedMetrics(module, results, max_bytes=max_bytes),
            lambda: session.is_lead and session.num_trainers > 1,
        )
        self._own_values = OwnValues(
            trainer, lambda: session.num_trainers, lambda: data.shares, is_lead=session.is_lead
        )
        self._rate_hooks = RateHooks(trainer, session, self._hyperparameters)
        if session.is_lead:
            session.set_step_sources(self._hyperparameters, lambda: trainer.current_epoch)

    def take_over(self) -> None:
        """Replace Lightning's optimizer steps and schedulers."""
        self._ready_at_last_batch = self._num_ready()
        self._schedulers.take_over()
        self._overrides = (
            Override(self._lightning, "run", self.run),
            # Lightning times schedulers, logging and checkpoints by this method.
            Override(self.trainer.fit_loop.epoch_loop, "_accumulated_batches_reached", self._has_stepped),
        )

    def release(self) -> None:
        """Restore Lightning's loop."""
        self._schedulers.release()
        self._own_values.release()
        self._rate_hooks.release()
        self.logs.release()
        for override in self._overrides:
            override.remove()

    def _has_stepped(self) -> bool:
        """Return whether a step has ended in the current batch, or, before the batch is trained, is known to end in it.

        Before a resumed loop's first batch, return whether a step ended in the last batch of the saved loop.
        """
        if self._num_ready() != self._ready_at_last_batch:
            return self._counters.steps_are_windows and self._counters.is_due(0)
        if self._has_begun:
            return self.stepped
        return self.trainer.global_step > self.trainer.fit_loop.epoch_loop._batches_that_stepped

    def _num_ready(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Train on a batch, and wait for the step that it closes, if any. Returns `on_train_batch_end`'s `outputs`."""
        self._has_begun, self.stepped, self.newest_batch = True, False, None
        if self._data.number is None and (self.trainer.current_epoch, batch_idx) in skipped_batches(self.trainer):
            return self._skip()
        self._own_values.begin_batch()
        self._rate_hooks.record_call(kwargs.get("batch"), batch_idx)
        begins_window = self._counters.steps_are_windows and batch_idx % self.trainer.accumulate_grad_batches == 0
        if self.pending_samples and begins_window:
            _log.warning(
                "`on_train_batch_start` ended the epoch in the middle of an accumulation window. The window's %d "
                "samples count in the next step; with the plain Trainer, they would not count.",
                self.pending_samples,
            )
        self._access.send_written(pending_samples=self.pending_samples)
        self.send_selection()
        self._step_marked_ready = self._counters.steps_are_windows and self._counters.is_due(0)
        if self._step_marked_ready:
            self._lightning.optim_progress.optimizer.step.increment_ready()
        try:
            result = self._train(self._loop_batch(batch_idx, kwargs))
            self._train_lost()
            self._end_epoch(batch_idx)
            self._take_back_ready()
            stopping.stop_with_others(self.trainer, self._session)
            self._access.refresh_aliases()
            return _untrained() if result is None else result
        except RunOver:
            # At the lead, `max_steps` is reached, so no further step opens. At another trainer, the lead's loop ended.
            self._take_back_ready()
            if self._session.is_lead:
                return _untrained()
            self._data.run_is_over = self.trainer.should_stop = True
            raise StopIteration from None  # makes Lightning leave the epoch
        finally:
            self._ready_at_last_batch = self._num_ready()
            self.logs.add_received()
            is_last = self.trainer.fit_loop.epoch_loop._num_ready_batches_reached()
            self._session.pipeline.marks.clears_gradients = is_last or self._clears_gradients(batch_idx + 1)

    def _skip(self) -> dict[str, Any]:
        """Pass over a batch that `SkipDivergence` excludes. Where trainers share batches, the coordinator does this."""
        if not self._counters.steps_are_windows:  # the run's last batch closes the last step
            self._end_step(closing=False)
        self._ready_at_last_batch = self._num_ready()
        return _untrained()

    def _clears_gradients(self, batch_idx: int) -> bool:
        """Return whether Lightning clears gradients between the batch's `training_step` and its backward."""
        return batch_idx % self.trainer.accumulate_grad_batches == 0

    def _loop_batch(self, batch_idx: int, kwargs: OrderedDict[str, Any]) -> LoopBatch:
        """Return the loop's current batch, from the arguments of `training_step`."""
        number = self._data.number
        if number is not None:
            if "batch_idx" in kwargs:  # the index in the whole epoch, as in one process
                kwargs["batch_idx"] = number[1]
            return LoopBatch(batch_idx, kwargs, self._data.size(number), number)
        # With a `dataloader_iter`, `training_step` itself reads the batch, so its size is unknown here.
        return LoopBatch(batch_idx, kwargs, self._counters.num_samples(kwargs["batch"]) if "batch" in kwargs else 1)

    def _train(self, batch: LoopBatch) -> dict[str, Any] | None:
        """Train on a batch, again if it is struck. Returns None if another trainer brings the batch."""
        revoked: LeaseRevoked | None = None
        for _ in range(_MAX_ATTEMPTS):
            lease = self._lease_for(batch)
            if lease is None:
                return None
            self.logs.begin_batch(batch.num_samples, lease)
            try:
                return self._train_here(batch, lease)
            except LeaseRevoked as error:
                _log.warning("`training_step` runs again for the current batch, which counts in no step: %s", error)
                self._session.revoke_batch()
                self.logs.revoke()
                revoked = error
        raise StepError(
            f"a batch was struck from its step {_MAX_ATTEMPTS} times in a row: the coordinator does not receive this "
            "trainer's messages, or batches take too long. Check the network between them, or raise "
            "`Limits.call_timeout`."
        ) from revoked

    def _train_lost(self) -> None:
        """Train again on earlier batches that were complete, but that no record counts."""
        while self._completed.lost:
            batch = self._completed.lost.pop(next(iter(self._completed.lost)))
            if self._train(batch) is not None:
                self.logs.restore()  # the logs include this batch from its first run

    def _train_extra(self, batch_idx: int, grant: Grant) -> None:
        """Train on a granted batch in place of another trainer. If the batch is struck, any trainer may get it."""
        assert grant.batch is not None
        batch = self._data.read_batch(grant.batch)
        kwargs = self.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, grant.batch[1])
        self.logs.begin_batch(grant.samples, grant.lease)
        try:
            self._train_here(LoopBatch(batch_idx, kwargs, grant.samples, grant.batch), grant.lease)
        except LeaseRevoked as error:
            _log.warning("A batch that was read for another trainer counts in no step: %s", error)
            self._session.revoke_batch()
            self.logs.revoke()

    def _end_epoch(self, batch_idx: int) -> None:
        """Wait, after this trainer's last batch of the epoch, until all trainers' batches of the epoch are complete."""
        end = self._data.lane_end  # None, except after the last batch of a lane of shared data
        if end is not None:
            try:
                self._lease_for(LoopBatch(batch_idx, OrderedDict(), 1, end))
            except RunOver:
                if not self._session.is_lead:  # at the lead, the current batch was the run's last: no wait is needed
                    raise

    def _train_here(self, batch: LoopBatch, lease: int) -> dict[str, Any]:
        """Run the closure on a leased batch, report the batch, and end its step if it closes. Returns the outputs.

        Raises LeaseRevoked if the batch was struck or lost, so that it must run again.
        """
        closure = self._lightning._make_closure(batch.kwargs, self._optimizer, batch.idx)
        zero_grad = closure._zero_grad_fn
        if zero_grad is not None:
            closure._zero_grad_fn = partial(self._zero_grad, zero_grad)
        self._session.pipeline.marks.expect_backward(clears_gradients=self._clears_gradients(batch.idx))
        try:
            with self._session.collect_batch_statistics(), self._counters.as_one_process(batch.number):
                closure()
            self._session.pipeline.marks.check()
            checks.check_untouched(self.trainer.lightning_module, self._optimizer, self._session.local_layers)
        except LeaseRevoked:  # `_train` repeats the batch
            raise
        except (PeerError, StepError) as error:
            self._session.raise_if_step_failed(error)
            raise
        except Exception:
            try:
                self._session.withdraw_batch(dropped=False)  # another trainer may bring it
            except SwarmError as error:  # the batch's own error matters more
                _log.warning("The batch could not be withdrawn: %s", error)
            raise
        result = closure.consume_result()
        logs, metrics = self.logs.finish_batch(counts=result.loss is not None)
        if result.loss is None:
            self._session.pipeline.norms.batch_without_loss()
            self._session.withdraw_batch(dropped=True)
        closing = result.loss is not None and self._finish_batch(batch, lease, logs, metrics)
        self._end_step(closing=closing)
        if self._completed.lost.pop(lease, None) is not None:
            raise LeaseRevoked("its gradients on the servers were lost, and its step does not count it")
        if not self._session.is_shared and not self._session.delays:
            # A run's only trainer needs complete batches again only after a double fault, and keeping a whole step's
            # batches takes too much device memory.
            self._completed.free_batches()
        return {} if result.loss is None else result.asdict()

    def _zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Clear gradients as Lightning does. Meanwhile, refuse uses of the previous batch's gradients by hooks."""
        with self._session.forbid_grad_after_batch():
            zero_grad()

    def _finish_batch(self, batch: LoopBatch, lease: int, logs: Sequence[LoggedValue], metrics: Metrics) -> bool:
        """Report a complete batch and its logged values to the swarm. Returns whether its step closes now."""
        step = self._session.open_step
        close = self._counters.is_due(batch.num_samples)
        # A run's only trainer knows where a step ends, so it can send its next requests with this report.
        is_alone = not (self._session.is_shared or self._data.shares)
        fills = self._counters.is_full(self.pending_samples + batch.num_samples)
        waits = is_alone and self._waits_for_step(close=close or fills)
        next_requests = self._next_requests(batch, waits=waits) if is_alone else None
        total_weight = self._counters.total_weight
        if waits:
            self._call_step_hooks(has_all=not self.pending_samples)
        with self._profiled() if waits else nullcontext():
            closing = self._session.finish_batch(
                logs, metrics, close=close, total_weight=total_weight, ahead=next_requests
            )
        self._completed.add(lease, batch, step=step, epoch=self.trainer.current_epoch)
        self.newest_batch = step, batch.number or (self.trainer.current_epoch, batch.idx)
        return closing

    def _next_requests(self, batch: LoopBatch, *, waits: bool) -> PiggybackedRequests:
        """Return the requests to send with a batch's report: for the step's end, and for the next batch's place.

        No place is requested if the next batch's size or loss scale may differ.
        """
        epoch_loop = self.trainer.fit_loop.epoch_loop
        is_last = epoch_loop.batch_progress.current.ready + 1 >= self.trainer.num_training_batches
        if is_last or self._scale.adapts:
            return PiggybackedRequests(wait_for_step_end=waits)
        return PiggybackedRequests(
            wait_for_step_end=waits, num_samples=batch.num_samples, gradient_scale=self._scale.current()
        )

    def finish(self) -> None:
        """Wait for the last records when training ends, and count them."""
        self._session.release_place()
        self._session.end_training()
        self._take_lost()
        self._count_others()
        if self._completed.lost:
            _log.warning(
                "Training ended before %d batches could run again. No step counts these batches, because their "
                "gradients on the servers were lost.",
                len(self._completed.lost),
            )

    def begin_backward(self) -> None:
        """Make the next backward pass count for the current batch, with all values that `training_step` has logged."""
        self._session.begin_backward(self.logs.values_so_far)

    @property
    def _optimizer(self) -> Optimizer:
        return self.trainer.optimizers[0]

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return optimizer_checks.hyperparameters(self._optimizer)

    @property
    def pending_samples(self) -> int:
        """Return the samples of this trainer's complete batches in the open step."""
        return self._completed.num_samples(self._session.open_step)

    @property
    def num_late_batches(self) -> int:
        """Return, with delayed steps, the number of this epoch's complete batches that no record counts yet."""
        if not self._session.delays or self._counters.ends_epoch:
            return 0
        return self._completed.num_batches(self.trainer.current_epoch)

    def resume(self, num_counted: int, uncounted: RunNews, pending: Pending) -> None:
        """Continue a former run's loop, which had counted `num_counted` records, and had yet to count `uncounted`.

        `pending` are the values that its batches had logged, and that no record counts yet.
        """
        self._num_counted = num_counted
        self._session.restore_news(uncounted)
        self.logs.restore_pending(pending)
        self._completed.lost = dict(uncounted.lost)
        for lease in uncounted.lost:
            self.logs.discard_batch(lease)

    def restart(self) -> None:
        """Forget the open step, because the run restarts with other weights."""
        self._num_counted = self._session.version
        self._completed = CompletedBatches()
        self.stepped = False
        if self._run_log is not None:
            self._run_log.catch_up()
        self._schedulers.restart()

    def _lease_for(self, batch: LoopBatch) -> int | None:
        """Wait for the batch's lease; meanwhile train on granted batches of other trainers. None: another brings it."""
        # On SIGTERM, a trainer that is not the lead leaves the run, and another trainer brings its batch.
        while self._session.is_lead or not self.trainer.received_sigterm:
            try:
                grant = self._session.begin_batch(
                    batch.num_samples,
                    gradient_scale=self._scale.current,
                    before_record=self._prepare_step,
                    batch=batch.number,
                )
            finally:
                self._take_lost()
                self.on_grant(replace(self._session.news, lost=dict(self._completed.lost)))
                self._count_others()  # steps that other trainers filled before the grant
            if grant is None:
                return None
            self._rate_hooks.call_for_open_step()
            if grant.batch == batch.number:
                return grant.lease
            self._train_extra(batch.idx, grant)
        return None

    def _count_others(self) -> None:
        """Count the records of steps that other trainers filled."""
        while self._num_counted < self._session.version:
            self._lightning.optim_progress.optimizer.step.increment_ready()
            self._count()

    def _end_step(self, *, closing: bool) -> None:
        """Close the step if it ends with this batch, wait for its record, and count all records that came."""
        if not closing and self._counters.is_due(self.pending_samples):
            # The batch was withdrawn, so it sent no report that closes the step.
            self._session.close_step(total_weight=self._counters.total_weight)
            closing = True
        if self._waits_for_step(close=closing):
            self._finish_step()
        else:
            self._session.follow_records()
        if self._counters.ends_epoch:
            self._catch_up()
        self._count_others()
        self._session.follow_records()  # the next hooks must find the weights of all counted steps

    def _waits_for_step(self, *, close: bool) -> bool:
        """Return whether the current batch waits for the step's record; `close`: the step closes with this batch."""
        # Lightning logs and saves once per batch, so the lead waits for a second step in its next batch.
        return close and not (self.stepped and self._session.is_lead and not self._counters.is_last_batch)

    def _catch_up(self) -> None:
        """Wait for the records of all closed steps."""
        self._session.catch_up()
        self._take_lost()

    def _take_lost(self) -> bool:
        """Collect complete batches that no record will count, to run them again. Returns whether there are any."""
        lost = self._session.take_lost()
        for lease in lost:
            self._completed.mark_lost(lease)
            self.logs.discard_batch(lease)
        return bool(lost)

    def _finish_step(self) -> None:
        """Wait for the record of the step that closes, and count it if it came."""
        if not self._session.has_ended:
            self._call_step_hooks(has_all=False)
        if not self._step_marked_ready:
            self._lightning.optim_progress.optimizer.step.increment_ready()
            self._step_marked_ready = True
        with nullcontext() if self._session.has_ended else self._profiled():
            closed = self._session.end_step()
            if not self._take_lost() and not closed and self._counters.is_due(self.pending_samples):
                # Another trainer withdrew its batch, and this trainer has no batch to replace it.
                self._session.close_step(total_weight=self._counters.total_weight)
                closed = self._session.end_step()
                self._take_lost()
        if self._session.version > self._num_counted:
            self._step_marked_ready = False
            self._count()
        else:  # records are late, or a batch was withdrawn and the step takes more batches
            self._take_back_ready()

    def _take_back_ready(self) -> None:
        """Remove from Lightning's counters the step that should have ended in the current batch, if it did not."""
        if self._step_marked_ready:
            self._step_marked_ready = False
            progress = self._lightning.optim_progress.optimizer.step
            progress.current.ready -= 1
            progress.total.ready -= 1

    def _call_step_hooks(self, *, has_all: bool) -> None:
        """Call `on_before_optimizer_step`. `has_all`: this trainer's own layers hold the whole gradient of the step."""
        self._prepare_step()
        call = self._framework.call
        with nullcontext() if has_all else self._session.forbid_grad_at_step_end():
            call._call_callback_hooks(self.trainer, "on_before_optimizer_step", self._optimizer)
            call._call_lightning_module_hook(self.trainer, "on_before_optimizer_step", self._optimizer)
        self._session.pipeline.marks.check()

    def _profiled(self) -> AbstractContextManager[None]:
        """Profile the time from the last backward to the new weights, as the plain Trainer does."""
        profiler = self.trainer.profiler  # type: ignore[attr-defined]  # Lightning sets it later
        name = f"[SwarmOptimization]{type(self._optimizer).__name__}.optimizer_step"
        profiling: AbstractContextManager[None] = profiler.profile(name)
        return profiling

    def _count(self) -> None:
        """Count an applied record in Lightning's counters, schedulers and logs."""
        if self.stepped:
            self._log_step()
        self._schedulers.count(is_first=not self.stepped)
        self._lightning.optim_progress.optimizer.step.increment_completed()
        decided = self._session.receive_record(self._num_counted)
        self._completed.count(self._num_counted)
        self._num_counted += 1
        self.stepped = True
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check this; the servers stepped
        self.logs.receive(decided.logs if decided else (), decided.metrics if decided else ())
        if self._run_log is not None:
            self._run_log.log_record(None if decided is None else decided.record)
        if decided is None:  # this trainer has only later records, which it counts next
            return
        record = decided.record
        if not self._session.is_lead:
            for group, values in zip(self._optimizer.param_groups, record.hyperparameters, strict=True):
                set_hyperparameters(group, values)
        skipped = record.outcome == "skip"
        if skipped:
            # Scaled gradients overflow now and then, because the scale grows until they overflow.
            level = logging.INFO if self._scale.adapts else logging.WARNING
            _log.log(level, "Step %d was skipped in all stages: its gradient was not finite.", record.step)
        if record.closing.batches:
            self._scale.update(skipped=skipped)

    def _log_step(self) -> None:
        """Log the batch's previous step before another step is counted, because Lightning logs once per batch."""
        connector = self.trainer._logger_connector
        if self._session.is_lead and connector.should_update_logs:
            connector.log_metrics(self.logs.of_step)
        self.trainer.fit_loop.epoch_loop._batches_that_stepped += 1

    def _prepare_step(self) -> None:
        """Move the schedulers to the open step, ahead of records that are not counted yet."""
        # If a step was counted in this batch, Lightning moves the schedulers for it only when the batch ends.
        self._schedulers.move(int(self.stepped) + self._session.open_step - self._num_counted)
        self._rate_hooks.call_for_open_step()

    def send_selection(self) -> None:
        """Send the module's and optimizer's selection of trained parameters to the servers, for the next step."""
        selection = optimizer_checks.new_selection(
            self._session, self.trainer.lightning_module, self._optimizer, self.pending_samples
        )
        if selection is not None:
            self._catch_up()
            self._count_others()
            self._session.change(StepChange(selection=selection))
