"""Long polls of the coordinator: holds trainers until a step ends, or they can ask for a place again."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.event_deltas import EventDeltas
from lightning_swarm.coordinator.lead_liveness import LeadLiveness
from lightning_swarm.coordinator.membership.trainers import LeaseExpiry
from lightning_swarm.coordinator.step.leases import LeaseTable
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.batches import MetricsRequest, RecordReply, RecordRequest


class StepEnds:
    """Holds trainers until a step's record was sent to all servers, or they can ask for a place again."""

    def __init__(
        self, context: CoordinatorContext, leases: LeaseTable, lead: LeadLiveness, lease_expiry: LeaseExpiry
    ) -> None:
        self._run, self._step_state, self._changes = context.run, context.step_state, context.changes
        self._leases, self._lead, self._lease_expiry = leases, lead, lease_expiry
        # Returns the event counts that this coordinator knows.
        self._known_counts = partial(context.events.known_counts, context.transport.peer_id)
        self._event_deltas = EventDeltas()  # event counts for the lead

    async def answer(self, caller: PeerId, request: RecordRequest) -> RecordReply:
        """Answer a trainer that asks for a record; first record the hyperparameters in a request of the lead."""
        if caller == self._run.manifest.lead and request.step >= self._run.version:
            self._lead.hyperparameters[request.step] = check_hyperparameters(request)
            if request.before:
                self._lead.hyperparameters[request.step - 1] = request.before
            self._lead.epoch, self._lead.resumable = request.epoch, request.resumable
            await self._lead.permit(request.step, version=request.version)
        return await self.hold(caller, request)

    async def hold(self, caller: PeerId, request: RecordRequest) -> RecordReply:
        """Hold the answer until the record was sent to all servers, the caller may get a place, or the time is over."""
        state = self._step_state
        is_lead = caller == self._run.manifest.lead
        # A former coordinator may have opened the step that the trainer knows.
        if request.step > state.open.step and not await self._changes.until(lambda: state.open.step >= request.step):
            return RecordReply(record=None, closing=True, open=self._open_for(caller))
        step = state.open

        def has_answer() -> bool:
            if is_lead and state.outcome.step >= request.version:
                return True  # the next record does not come before the lead knows this one
            # With `decided`, the caller waits for the record itself, otherwise only for the next step to open.
            return (state.outcome.step if request.decided else state.open.step - 1) >= request.step

        def takes_batches() -> bool:
            return request.step == state.open.step and self._leases.would_answer(state.open, caller)

        patience_s = self._leases.patience_s(caller)
        await self._changes.until(lambda: has_answer() or takes_batches(), recheck_s=patience_s)
        self._run.check_generation(request.generation)  # it may have changed meanwhile
        if has_answer():
            if is_lead and self._run.manifest.settings.delay_optimizer_step:
                # The lead may have permitted another record, which is being decided. If that takes long, it asks again.
                if not await self._changes.until(lambda: self._lead.deciding_step is None):
                    return RecordReply(record=None, closing=True, open=request.step)
                self._lead.withdraw_permit()  # the permit may also cover the next record
            return self._outcome_for(caller, request.version)
        await self._lease_expiry.check_overdue(step)
        if is_lead and takes_batches():
            self._lead.withdraw_permit()  # the lead trains on; if it got no place, it would ask for the record again
        return RecordReply(record=None, closing=not takes_batches(), open=self._open_for(caller))

    def _outcome_for(self, trainer: PeerId, version: int) -> RecordReply:
        """Make the answer to a trainer that knows `version`; only the lead's has logs, metrics and event counts."""
        outcome = self._step_state.outcome
        has_record_before = outcome.record is None or version == outcome.step
        # A trainer that missed a record needs the members (`seats`) after this record; this server may have applied a
        # newer one. `has_record_before`: this record follows the version that the trainer knows.
        seats = None if has_record_before else self._run.seats_at(outcome.step + 1)
        reply = RecordReply(record=outcome.record, closing=True, open=self._open_for(trainer), seats=seats)
        if trainer != self._run.manifest.lead:
            return reply
        news = self._event_deltas.news(self._known_counts(), version=version)
        return replaced(reply, logs=outcome.logs, noted=news, measured=sorted(outcome.metrics))

    def _open_for(self, trainer: PeerId) -> int:
        """Return the step in which a trainer may ask for places. The lead first sends a late step's hyperparameters."""
        state = self._step_state
        is_lead, late_step = trainer == self._run.manifest.lead, state.late_step
        if is_lead and late_step is not None and late_step.step not in self._lead.hyperparameters:
            return late_step.step
        return state.open.step

    def metrics(self, request: MetricsRequest) -> Message:
        """Return the metrics of a batch of the newest record to the lead."""
        outcome = self._step_state.outcome
        if request.step != outcome.step:
            raise ProtocolError(
                f"the newest record is of step {outcome.step}, got a request for metrics of step {request.step}"
            )
        return outcome.metrics.get(request.first, Message())  # lost if its trainer and a coordinator died


def check_hyperparameters(request: RecordRequest) -> list[dict[str, Any]]:
    """Return the hyperparameters in a request of the lead; raise ProtocolError if it has none."""
    if not request.hyperparameters:
        raise ProtocolError("the lead must send the hyperparameters of the step whose record it asks for, got none")
    return request.hyperparameters
