"""A trainer's session in a run: batches in, records out. What the Lightning loop drives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_swarm.client.pipeline.local_layers import LocalLayers
from lightning_swarm.client.pipeline.pipeline import GrantedBatch, Pipeline
from lightning_swarm.client.step_client import DecidedRecord, Metrics, NextGrant, StepClient
from lightning_swarm.core.errors import PeerError, StepError
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant, LoggedValue
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.events import EventKind
from lightning_swarm.protocol.messages.run import (
    BatchNumber,
    EpochPlan,
    Manifest,
    RestartRequest,
    Selection,
    first_trained,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState, lanes_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunNews:
    """What a trainer heard of the run while its batch waited for a place.

    Args:
        version: Of the weights in whose step that is.
        heard: The records that came, the oldest first.
        lost: Batches that were through before it, by their leases, and that their steps do not count all the same.
    """

    version: int
    heard: Sequence[DecidedRecord] = ()
    lost: Mapping[int, Any] = field(default_factory=dict)


class Session:
    """One trainer's batches.

    Args:
        runtime: The way to the swarm's loop.
        pipeline: Its data plane.
        steps: Its coordinator.
        manifest: Of the run.
        is_lead: Whether the run follows this trainer's loop.
        around: What it computes itself, if there is anything outside of the pipeline.
    """

    def __init__(
        self,
        runtime: Runtime,
        pipeline: Pipeline,
        steps: StepClient,
        manifest: Manifest,
        *,
        is_lead: bool,
        around: LocalLayers | None,
    ) -> None:
        self._runtime = runtime
        self.pipeline = pipeline
        self.around = around
        self._steps = steps
        self._stages = manifest.stages
        self.selection = manifest.selection
        self.is_lead = is_lead
        pipeline.generation, pipeline.version = manifest.generation, steps.version
        pipeline.first_trained = first_trained(self.selection, self._stages)

    @property
    def version(self) -> int:
        """Records that were applied so far."""
        return self._steps.version

    @property
    def num_trainers(self) -> int:
        """How many train in the run now, as far as this trainer knows; it does before it has a place beside them."""
        return len(self.run.trainers)

    @property
    def is_shared(self) -> bool:
        """Whether others may train in the run, now or later."""
        return self.run.is_shared

    @property
    def delays(self) -> bool:
        """Whether a step's record comes while the next one takes batches."""
        return self.run.manifest.settings.delay_optimizer_step

    @property
    def open_step(self) -> int:
        """The step of the next batch, as far as this trainer knows. Where steps are delayed, records are one behind."""
        return self._steps.open

    def go_back(self, request: RestartRequest) -> None:
        """Train on in the run's next generation, from its first step."""
        self._steps.go_back(request)
        self.pipeline.go_back(request.generation, request.first_step)
        self._runtime.run(self.pipeline.link.go_back())
        if self.around is not None:
            self.around.go_back()

    @property
    def newest_record(self) -> Record | None:
        """The newest one that this trainer waited for."""
        return self._steps.newest

    def step_with(self, hyperparameters: Callable[[], list[dict[str, Any]]], epoch: Callable[[], int]) -> None:
        """At the lead: what to call for the hyperparameters of the step that it waits for, and for its epoch."""
        self._steps.hyperparameters, self._steps.epoch = hyperparameters, epoch

    def select(self, selection: Selection) -> None:
        """Tell the swarm what trains from the open step on. Nothing may be granted in it yet."""
        self._runtime.run(self._steps.select(selection))
        self.selection = selection
        self.pipeline.first_trained = first_trained(selection, self._stages)

    def begin_batch(
        self,
        num_samples: int,
        *,
        gradient_scale: float,
        before_record: Callable[[], None],
        batch: BatchNumber | None = None,
    ) -> Grant | None:
        """Get a place in the open step for the batch in hand. While it waits for one, records may be applied.

        Args:
            num_samples: Of the batch.
            gradient_scale: What its loss will be multiplied by.
            before_record: Called before each record that it waits for.
            batch: Which one it is, or the end of an epoch, where an epoch's order is shared.

        Returns:
            The place. It may be for another batch, which is to be brought first. None: this one is in other hands.

        Raises:
            RunOver: There will be no place.
        """
        try:
            number = self._steps.number_batch()
            grant: Grant | None = None
            while grant is None:
                found = self._runtime.run(self._steps.request_grant(number, num_samples, gradient_scale, batch))
                if found is None:
                    return None
                if isinstance(found, Grant):
                    grant = found
                else:
                    before_record()
                    self._runtime.run(self._steps.closed(found))
        finally:
            self.pipeline.version = self._steps.version
        if self.around is not None:
            self.around.refresh(self.run.computes_on(grant.step), exactly=self.delays)
        self.pipeline.batch = GrantedBatch(grant)
        if not self.is_shared and self._steps.open > self._steps.version:  # who has a place need not train yet
            self.pipeline.batch.begin = partial(self._steps.begin_batch, grant)
        return grant

    def plan(self, plan: EpochPlan, position: BatchNumber) -> None:
        """At the lead: say in which order an epoch's batches come, and with which one the run begins or goes on."""
        self._runtime.run(self._steps.plan(plan, position))

    def take_plan(self, epoch: int) -> EpochPlan | None:
        """Wait for the lead's plan of an epoch. None: all of it is through."""
        return self._runtime.run(self._steps.take_plan(epoch))

    @property
    def lanes(self) -> Sequence[PeerId]:
        """Who reads which part of an epoch ahead."""
        return lanes_of(self.run.trainers, self.run.manifest.lead)

    @property
    def own(self) -> PeerId:
        """This trainer."""
        return self._steps.own

    def lead_epoch(self) -> int:
        """Not at the lead: wait until its loop is in an epoch, and say in which."""
        return self._runtime.run(self._steps.lead_epoch())

    def give_back(self) -> None:
        """No batch will be there for the place that is kept for the next one."""
        self._runtime.run(self._steps.give_back())

    def begin_backward(self, logs: Sequence[LoggedValue]) -> None:
        """Nothing but the backward of the batch in hand is to come: with it, servers have all that they need of it.

        Args:
            logs: As in `finish_batch`.
        """
        batch = self.pipeline.batch
        if batch is not None and self.num_trainers > 1 and self.around is None:
            batch.arm = partial(self._arm, batch, logs)

    async def _arm(self, batch: GrantedBatch, logs: Sequence[LoggedValue], receipts: list[Receipt]) -> None:
        async def confirm() -> None:
            await self._steps.done(batch.grant.lease, receipts, logs=logs)
            batch.completed = list(receipts)

        batch.confirm = confirm  # before it is said, for it may be heard though no answer comes
        try:
            await self._steps.armed(batch.grant.lease, receipts, logs)
        except PeerError as error:
            _log.info("Perhaps nobody knows that the batch in hand can do without this trainer: %s", error)

    def withdraw_batch(self) -> None:
        """The batch will not be trained on: nothing of it counts, and what was added of it is discarded."""
        batch = self._taken()
        self._runtime.run(self._steps.withdraw(batch.grant.lease, begun=batch.backward_begun, dropped=True))

    def revoke_batch(self) -> None:
        """The batch was struck: nothing of it counts, and it may run again in another place."""
        if self.pipeline.batch is not None:  # else it was through, and who coordinates knows
            self._runtime.run(self._steps.revoked(self._taken().grant.lease))

    def finish_batch(
        self,
        logs: Sequence[LoggedValue],
        metrics: Metrics,
        *,
        close: bool = False,
        window: float | None = None,
        ahead: NextGrant | None = None,
    ) -> bool:
        """The batch is through. True when its step closes now: then `end_step`.

        Args:
            logs: What its `training_step` logged for all trainers.
            metrics: What it added to metrics that are logged for all trainers.
            close: Also ask to close the step.
            window: As in `close_step`.
            ahead: What is waited for at once. If that is the step's end, `end_step` tells what was heard.

        Raises:
            LeaseRevoked: It counts nowhere, for nothing was heard of this trainer. It stays in hand.
        """
        batch = self._in_hand()
        if self.around is not None:
            self.around.add(self.pipeline.key(batch, 0, 0), batch.grant.weight)
        if metrics[0]:
            self._runtime.run(self._steps.send_metrics(batch.grant.lease, metrics))
        closing = self._runtime.run(
            self._steps.done(
                batch.grant.lease, batch.completed, close=close, total_weight=window, logs=logs, ahead=ahead
            )
        )
        self.pipeline.batch = None
        return closing

    def hear_imminent(self) -> None:
        """Where steps are late: between two batches, have heard of the record that came within the one before."""
        if self._steps.imminent is not None:
            self._runtime.run(self._steps.record(self._steps.imminent))
        if self.delays:
            self._learnt()

    def close_step(self, *, window: float | None) -> None:
        """Ask to close the open step with what it has; its total weight is `window`, or what adds up."""
        self._runtime.run(self._steps.close(total_weight=window))

    def end_step(self) -> bool:
        """Wait until the next step is open: with the record of the closing one, or of the one before if late.

        Returns:
            False: a batch was withdrawn, and it takes others.
        """
        closed, self._steps.ended = self._steps.ended, None
        if closed is None:
            closed = self._runtime.run(self._steps.closed(self._steps.open))
        self._learnt()
        return closed

    @property
    def has_ended(self) -> bool:
        """Whether `end_step` needs to wait for nothing."""
        return self._steps.ended is not None

    def catch_up(self) -> None:
        """Wait for the records of all steps that are closed."""
        if self._steps.open > self._steps.version:
            self._runtime.run(self._steps.record(self._steps.open - 1))
            self._learnt()

    def hold_still(self) -> None:
        """Let no record come while weights are read: within a batch one may, where steps are late."""
        if self.pipeline.batch is not None:
            self.catch_up()
        else:
            self.hear_imminent()

    def _learnt(self) -> None:
        """Records may have come."""
        self.pipeline.version = self._steps.version
        if self.around is not None:
            self.around.refresh(self._steps.version)

    @property
    def through(self) -> Sequence[int]:
        """The places of this trainer's batches in the open step, as far as they are through."""
        return self._steps.through

    @property
    def news(self) -> RunNews:
        """Of records that were not taken."""
        return RunNews(self._steps.version, list(self._steps.heard))

    def recall(self, news: RunNews) -> None:
        """Have heard of this already when the run goes on."""
        self._steps.heard = list(news.heard)
        self._steps.newest = news.heard[-1].record if news.heard else None

    def take_lost(self) -> list[int]:
        """Leases of batches that were through, and that their steps do not count: they may run again."""
        lost, self._steps.lost = self._steps.lost, []
        return lost

    def receive_record(self, step: int) -> DecidedRecord | None:
        """A step's record; None: this trainer was busy elsewhere when it came, and has heard of a later one only.

        The lead hears of each.
        """
        steps = self._steps
        found = next((one for one in steps.heard if one.record.step == step), None)
        steps.heard = [one for one in steps.heard if one.record.step > step]
        return found

    def take_events(self) -> dict[EventKind, int]:
        """At the lead: what the swarm's peers noted since this was asked last, and how often."""
        return dict(self.pipeline.link.events.drain())

    @property
    def run(self) -> RunState:
        """Who is in it, as this trainer knows it."""
        return self._steps.run

    @property
    def num_servers(self) -> int:
        """Peers that hold a stage."""
        return len(self._steps.run.servers)

    def renew(self) -> None:
        """At the lead: the others go on waiting while this trainer validates or saves."""
        if self.is_lead and self.is_shared:
            self._runtime.run(self._steps.renew())

    def check(self, error: PeerError | StepError) -> None:
        """Raise what the open step failed with, if it has: that may be why a peer is gone."""
        if self.num_trainers > 1 and self.is_lead:
            try:
                self._runtime.run(self._steps.renew())
            except StepError as failure:
                raise failure from error

    def quit(self, reason: str) -> None:
        """Not at the lead: tell that this trainer's loop ended by an error."""
        self._runtime.run(self._steps.quit(reason))

    def retire(self, reason: str) -> None:
        """Not at the lead: bring no more batches; returns when a record has let this trainer go.

        Raises:
            RunOver: The run ended meanwhile.
        """
        self._runtime.run(self._steps.retire(reason))

    def _taken(self) -> GrantedBatch:
        batch, self.pipeline.batch = self._in_hand(), None
        if self.around is not None:
            self.around.clear()
        return batch

    def _in_hand(self) -> GrantedBatch:
        if self.pipeline.batch is None:
            raise StepError("no batch is in hand")
        return self.pipeline.batch
