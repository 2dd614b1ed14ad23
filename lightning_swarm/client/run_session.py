"""A trainer's session in a run: Lightning's loop passes it batches, and collects the records of decided steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_swarm.client.pipeline.call_factory import GrantedBatch
from lightning_swarm.client.pipeline.local_layers import LocalLayers
from lightning_swarm.client.pipeline.pipeline import Pipeline
from lightning_swarm.client.run_generation import DecidedRecord, Metrics, PiggybackedRequests
from lightning_swarm.client.step_client import StepClient
from lightning_swarm.core.errors import PeerError, StepError
from lightning_swarm.core.event_loop import Runtime, TimedRuntime
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant, LoggedValue
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.reports import EventKind
from lightning_swarm.protocol.messages.run import (
    BatchNumber,
    EpochPlan,
    Manifest,
    RestartRequest,
    Selection,
    StepChange,
    first_trained,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState, lanes_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunNews:
    """Records that a trainer has received, but its loop has not counted yet."""

    version: int  # newest version of the weights that the trainer knows
    records: Sequence[DecidedRecord] = ()  # oldest first
    # lease -> finished batch that its step does not count. `Session.news` leaves it empty; the loop, which knows the
    # batches of the leases, fills it.
    lost: Mapping[int, Any] = field(default_factory=dict)


# `Session` sets functions of the current `GrantedBatch`, and `PipelineCall` calls them: `begin` with the batch's first
# microbatches, `arm` after its last accepted backward, and `confirm` if servers refuse a backward after that.
class Session:
    """Runs one trainer's batches through the swarm. The main thread calls it, and the event loop does the work."""

    def __init__(
        self,
        runtime: Runtime,
        pipeline: Pipeline,
        steps: StepClient,
        manifest: Manifest,
        *,
        is_lead: bool,
        local_layers: LocalLayers | None,  # layers outside of the pipeline, which this trainer computes itself
    ) -> None:
        self._runtime = TimedRuntime(runtime)
        self.pipeline = pipeline
        self.local_layers = local_layers
        if not is_lead:
            pipeline.factory.number_evaluations(steps.peer_id)
        self._steps = steps
        self._stages = manifest.stages
        self._select(manifest.selection)
        self.is_lead = is_lead
        pipeline.enter_generation(manifest.generation, steps.version)

    def _select(self, selection: Selection | None) -> None:
        """Record which parameters the optimizer has now."""
        self.selection = selection
        self.pipeline.factory.first_trained = first_trained(selection, self._stages)
        if self.local_layers is not None:
            self.local_layers.selection = selection

    # ------------------------------------------------------------------ the run

    @property
    def run(self) -> RunState:
        """The run as this trainer knows it."""
        return self._steps.run

    @property
    def version(self) -> int:
        """The version of the newest weights that this trainer knows, equal to the number of applied records."""
        return self._steps.version

    @property
    def newest_record(self) -> Record | None:
        """The newest record that this trainer waited for."""
        return self._steps.generation.newest_record

    @property
    def open_step(self) -> int:
        """The step of the next batch, as far as this trainer knows. Delayed records are one step behind."""
        return self._steps.open_step

    @property
    def peer_id(self) -> PeerId:
        """The id of this trainer's peer."""
        return self._steps.peer_id

    @property
    def num_trainers(self) -> int:
        """The number of trainers in the run. A newcomer counts before this trainer gets a place in its first step."""
        return len(self.run.trainers)

    @property
    def is_shared(self) -> bool:
        """Whether the run has other trainers, or may get some."""
        return self.run.is_shared

    @property
    def delays(self) -> bool:
        """Whether a step's record may arrive while the next step takes batches."""
        return self.run.manifest.settings.delay_optimizer_step

    @property
    def num_servers(self) -> int:
        """The number of peers that hold a stage."""
        return len(self._steps.run.servers)

    @property
    def num_samples(self) -> int:
        """The samples of all trainers in the steps decided so far."""
        return self._steps.num_samples

    @property
    def waited_s(self) -> float:
        """The seconds that this trainer has waited for places and for the ends of steps."""
        return self._runtime.waited_s

    def enter_generation(self, request: RestartRequest) -> None:
        """Continue in the run's next generation, from its first step."""
        self._steps.enter_generation(request)
        self.pipeline.enter_generation(request.generation, request.first_step)
        # Copies are void: the open step will not be decided, and some decided steps open again.
        self._runtime.run(self.pipeline.context.replay_buffer.clear())
        if self.local_layers is not None:
            self.local_layers.enter_generation()

    def enlist(self) -> int:
        """Not at the lead: enlist this trainer unless it is in the run; return the epoch of the lead's loop."""
        return self._runtime.run(self._steps.enlist())

    def retire(self, reason: str) -> None:
        """Not at the lead: leave the run; wait until a record removes this trainer, or raise `RunOver`."""
        self._runtime.run(self._steps.retire(reason))

    def ask_to_stop(self) -> None:
        """At a trainer that began the run with the lead: ask the lead to end the run, because user code wants it."""
        step = self._steps.open_step
        self.pipeline.context.events.note(
            "stopped", peer=self.peer_id, step=step, reason="`trainer.should_stop` is set"
        )
        self._runtime.run(self._steps.report_events())

    # ------------------------------------------------------------------ a batch

    @property
    def lanes(self) -> Sequence[PeerId]:
        """The trainers, in the order of their lanes, the parts of an epoch that they read."""
        return lanes_of(self.run.trainers, self.run.manifest.lead)

    def take_plan(self, epoch: int) -> EpochPlan | None:
        """Wait for the lead's plan of an epoch; None if the whole epoch is complete."""
        return self._runtime.run(self._steps.take_plan(epoch))

    def begin_batch(
        self,
        num_samples: int,
        *,
        gradient_scale: Callable[[], float],  # returns the factor of the batch's loss; a record may change it
        before_record: Callable[[], None],
        batch: BatchNumber | None = None,
    ) -> Grant | None:
        """Return a place in the open step for the current batch; call `before_record` before waiting for a record."""
        # If trainers share an epoch, `batch` is the batch's number, or the number after the epoch's last batch. The
        # place may be for another batch, which this trainer must compute first. None: another trainer has the batch.
        try:
            serial = self._steps.next_serial()
            grant: Grant | None = None
            while grant is None:
                answer = self._runtime.run(self._steps.request_grant(serial, num_samples, gradient_scale(), batch))
                if answer is None:
                    self._follow_version()  # a validation may follow, with the weights of the newest record
                    return None
                if isinstance(answer, Grant):
                    grant = answer
                else:
                    before_record()
                    awaited_step = answer
                    self._runtime.run(self._steps.wait_closed(awaited_step))
        finally:
            self.pipeline.factory.version = self._steps.version
        if self.local_layers is not None:
            self.local_layers.refresh(self.run.weights_version(grant.step), exactly=self.delays)
        granted_batch = self.pipeline.begin_batch(grant)
        self._set_pipeline_version()
        # A lone trainer announces the batch, so that the record of a late step may arrive during the batch.
        # `num_trainers` does not show that it is alone, because a newcomer may have a place before it is a trainer.
        if not self.is_shared and self._steps.open_step > self._steps.version:
            granted_batch.begin = partial(self._steps.begin_batch, grant)
        return grant

    def release_place(self) -> None:
        """Release the place reserved for the next batch, because there is no next batch."""
        self._runtime.run(self._steps.release_place())

    def collect_batch_statistics(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, collect the current batch's batch statistics in the trainer's own layers."""
        return contextlib.nullcontext() if self.local_layers is None else self.local_layers.collect_batch_statistics()

    def begin_backward(self, logs: Sequence[LoggedValue] | None) -> None:
        """Let backwards add to the current batch's gradients from now on."""
        # With `logs`, if there are other trainers and no local layers, the batch is armed once all its backwards are
        # accepted: from then on it counts, with these logs, even if this trainer dies.
        batch = self.pipeline.batch
        if batch is None:
            return
        batch.counts = True
        # Within an accumulation window, plain Lightning would also count changes that user code made to gradients.
        if not self.pipeline.marks.clears_gradients:
            self.pipeline.marks.check()
            if self.local_layers is not None:
                self.local_layers.check_no_stray_gradients()
        self.pipeline.marks.clear()
        self.pipeline.marks.clears_gradients = False
        if logs is not None and self.num_trainers > 1 and self.local_layers is None:
            batch.arm = partial(self._arm, batch, logs)

    def end_backward(self) -> None:
        """Let no further backward add to the current batch's gradients."""
        if self.pipeline.batch is not None:
            self.pipeline.batch.counts = False

    async def _arm(self, batch: GrantedBatch, logs: Sequence[LoggedValue], receipts: list[Receipt]) -> None:
        """Report that servers can complete the batch without this trainer; `batch.confirm` asks later if it counts."""

        async def confirm() -> None:
            await self._steps.done(batch.grant.lease, receipts, logs=logs)
            batch.completed = list(receipts)

        batch.confirm = confirm  # set before the call, which may arrive even if its answer is lost
        try:
            await self._steps.report_armed(batch.grant.lease, receipts, logs)
        except PeerError as error:
            _log.info("The coordinator may not know that the current batch is armed: %s", error)

    def withdraw_batch(self, *, dropped: bool) -> None:
        """Withdraw the current batch; servers discard its gradients. If `dropped`, no trainer computes it again."""
        batch = self._give_up_batch()
        self._runtime.run(self._steps.withdraw(batch.grant.lease, begun=batch.backward_begun, dropped=dropped))

    def revoke_batch(self) -> None:
        """Give up the current batch, because it was struck. It counts nowhere, and may run again in another place."""
        if self.pipeline.batch is not None:  # unless the batch has ended, which the coordinator knows
            self._runtime.run(self._steps.report_revoked(self._give_up_batch().grant.lease))

    def finish_batch(
        self,
        logs: Sequence[LoggedValue],
        metrics: Metrics,
        *,
        close: bool = False,
        total_weight: float | None = None,
        ahead: PiggybackedRequests | None = None,  # requests that travel with the report
    ) -> bool:
        """Report the current batch as finished; return True if its step closes now, so that `end_step` must follow."""
        # At the lead, `close` asks to close the step, with `total_weight` as in `close_step`.
        batch = self._current_batch()  # it stays current if `LeaseRevoked` is raised
        self.pipeline.count_statistics()
        if self.local_layers is not None:
            self.local_layers.add(self.pipeline.factory.key(batch, 0, 0), batch.grant.weight)
        if metrics[0]:
            self._runtime.run(self._steps.send_metrics(batch.grant.lease, metrics))
        closes = self._runtime.run(
            self._steps.done(
                batch.grant.lease, batch.completed, close=close, total_weight=total_weight, logs=logs, ahead=ahead
            )
        )
        self.pipeline.end_batch()
        return closes

    def _give_up_batch(self) -> GrantedBatch:
        """End the current batch without its gradients, and return it."""
        batch = self._current_batch()
        self.pipeline.end_batch()
        if self.local_layers is not None:
            self.local_layers.clear()
        return batch

    def _current_batch(self) -> GrantedBatch:
        """Return the current batch; raise StepError if there is none."""
        if self.pipeline.batch is None:
            raise StepError("there is no current batch")
        return self.pipeline.batch

    @property
    def completed_places(self) -> Sequence[int]:
        """The places of this trainer's finished batches in all steps that have no record yet."""
        return [lease.grant.first for lease in self._steps.generation.journal.finished_batches(self.version)]

    def take_lost(self) -> list[int]:
        """Return and forget the leases of finished batches that their steps do not count; the batches may run again."""
        generation = self._steps.generation
        lost, generation.lost = generation.lost, []
        return lost

    # ------------------------------------------------------------------ a step and its record

    def forbid_grad_at_step_end(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, refuse uses of gradients of the trainer's own layers, because `grad` has only a part."""
        return contextlib.nullcontext() if self.local_layers is None else self.local_layers.forbid_grad_at_step_end()

    def forbid_grad_after_batch(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, refuse uses of the previous batch's gradients of the trainer's own layers."""
        return contextlib.nullcontext() if self.local_layers is None else self.local_layers.forbid_grad_after_batch()

    def end_step(self) -> bool:
        """Wait until the next step is open; return False if a batch was withdrawn, so that the step reopened."""
        generation = self._steps.generation
        has_ended, generation.step_ended = generation.step_ended, None
        if has_ended is None:
            has_ended = self._runtime.run(self._steps.wait_closed(self._steps.open_step))
        self._follow_version()
        return has_ended

    @property
    def has_ended(self) -> bool:
        """Whether `end_step` need not wait, because the answer to `finish_batch` included the end of the step."""
        return self._steps.generation.step_ended is not None

    def follow_records(self) -> None:
        """Between two batches: wait for a record that is about to arrive, if any, and switch to the newest weights."""
        imminent = self._steps.generation.imminent_step
        if imminent is not None:
            self._runtime.run(self._steps.wait_for_record(imminent))
        self._follow_version()

    def catch_up(self) -> None:
        """Wait for the records of all closed steps."""
        if self._steps.open_step > self._steps.version:
            self._runtime.run(self._steps.wait_for_record(self._steps.open_step - 1))
            self._follow_version()

    def settle_weights(self) -> None:
        """Before weights are read, receive all records that could arrive meanwhile."""
        if self.pipeline.batch is not None:
            self.catch_up()
        else:
            self.follow_records()

    def end_training(self) -> None:
        """Set the module to the weights of the last record, without this trainer's batches of the open step."""
        self.catch_up()
        if self.local_layers is not None and self.is_shared:
            self.local_layers.drop_uncounted(self._steps.version)

    @property
    def news(self) -> RunNews:
        """The newest version, and the records that the loop has not collected yet."""
        return RunNews(self._steps.version, list(self._steps.generation.records))

    def restore_news(self, news: RunNews) -> None:
        """When a saved loop resumes, restore the records that it had not collected yet."""
        generation = self._steps.generation
        generation.records = list(news.records)
        generation.newest_record = news.records[-1].record if news.records else None

    def receive_record(self, step: int) -> DecidedRecord | None:
        """Collect a step's record. Not at the lead: None if this trainer missed it, and knows only a later record."""
        generation = self._steps.generation
        collected = next((decided for decided in generation.records if decided.record.step == step), None)
        generation.records = [decided for decided in generation.records if decided.record.step > step]
        return collected

    def _follow_version(self) -> None:
        """Switch to the newest weights, because records may have arrived."""
        self._set_pipeline_version()
        if self.local_layers is not None:
            self.local_layers.refresh(self._steps.version)

    def _set_pipeline_version(self) -> None:
        """Set the weights of evaluations: the newest, but within a batch with delayed steps the batch's own weights."""
        batch = self.pipeline.batch
        self.pipeline.factory.version = self._steps.version
        if batch is not None and self.delays:
            self.pipeline.factory.version = self.run.weights_version(batch.grant.step)

    # ------------------------------------------------------------------ only the lead

    def set_can_go_back(self, can_go_back: Callable[[], Awaitable[bool]]) -> None:
        """At the lead: set the function that returns whether the run can roll back after false work counted."""
        self._steps.can_go_back = can_go_back

    def set_resumable_versions(self, versions: Callable[[], Collection[int]]) -> None:
        """At the lead: set the thread-safe function that returns snapshot versions from which its loop can resume."""
        self._steps.resumable = versions

    def set_step_sources(self, hyperparameters: Callable[[], list[dict[str, Any]]], epoch: Callable[[], int]) -> None:
        """At the lead: set the functions that return the hyperparameters of the open step, and the loop's epoch."""
        self._steps.hyperparameters, self._steps.epoch = hyperparameters, epoch

    def change(self, change: StepChange) -> None:
        """Send the change with which the open step begins. No place may be granted in it yet."""
        self._runtime.run(self._steps.change(change))
        if change.selection is not None:
            self._select(change.selection)

    def plan(self, plan: EpochPlan, position: BatchNumber) -> None:
        """At the lead: send the order of an epoch's batches, and the batch with which the run begins or resumes."""
        self._runtime.run(self._steps.plan(plan, position))

    def close_step(self, *, total_weight: float | None) -> None:
        """At the lead: ask to close the open step; `total_weight` None stands for the sum of its batches' weights."""
        self._runtime.run(self._steps.close(total_weight=total_weight))

    def take_events(self) -> dict[EventKind, int]:
        """At the lead: return the counts of the peers' events since the last call."""
        return dict(self.pipeline.context.events.drain())

    @property
    def stopped_by(self) -> Sequence[PeerId]:
        """At the lead: the trainers that asked it to stop, of those that began the run with it."""
        return self.pipeline.context.events.noted_by("stopped", self.run.manifest.trainers)

    def renew(self) -> None:
        """At the lead: keep the other trainers waiting while this trainer validates or saves."""
        if self.is_lead and self.is_shared:
            self._runtime.run(self._steps.renew())

    def raise_if_step_failed(self, error: PeerError | StepError) -> None:
        """At the lead: raise the open step's error if the step failed, because that may be why a peer is gone."""
        if self.num_trainers > 1 and self.is_lead:
            try:
                self._runtime.run(self._steps.renew())
            except StepError as failure:
                raise failure from error
