"""Answers the trainers' calls to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.lead_liveness import LeadLiveness
from lightning_swarm.coordinator.long_poll import StepEnds, check_hyperparameters
from lightning_swarm.coordinator.membership.trainers import LeaseExpiry, TrainerMembership
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.leases import LeaseTable, first_lease
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.takeover import fetch_metrics
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, LeaseRevoked, ProtocolError, StepError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import rpc
from lightning_swarm.protocol.messages.batches import (
    BatchArmed,
    BatchBegins,
    BatchDone,
    BatchDoneReply,
    BatchMetrics,
    ChangeRequest,
    Grant,
    GrantReply,
    GrantRequest,
    MetricsRequest,
    RecordReply,
    RecordRequest,
    RegisterRequest,
    WaitForRecord,
)
from lightning_swarm.protocol.messages.run import PlanRequest, TakePlanReply, TakePlanRequest, check_change
from lightning_swarm.protocol.messages.step import SettleRequest


class TrainerHandlers:
    """Answers the calls of the run's trainers."""

    def __init__(
        self,
        context: CoordinatorContext,
        servers: ServerCalls,
        lease_expiry: LeaseExpiry,
        *,
        on_change: Callable[[OpenStep], Awaitable[None]],  # called after a batch of a step is complete or withdrawn
    ) -> None:
        self._transport, self._run, self._step_state = context.transport, context.run, context.step_state
        self._events, self._limits, self._changes = context.events, context.limits, context.changes
        self._servers, self._lease_expiry, self._on_change = servers, lease_expiry, on_change
        self._check_honest, self._is_excluded = context.check_honest, context.is_excluded
        self._allow_change = context.oversight.allow_change
        self._first_lease = first_lease(context.proposer.term)
        self._settling = asyncio.Lock()  # no place is granted while servers get the change with which the step begins
        self.lead = LeadLiveness(context)
        self.leases = LeaseTable(context.run, context.leases, self._on_grant, lease_expiry.gone)
        self._ends = StepEnds(context, self.leases, self.lead, lease_expiry)
        self.membership = TrainerMembership(context, lease_expiry, epoch=lambda: self.lead.epoch)

    def answer(self) -> None:
        """Begin to answer. The context's task owner must already run, because trainers' calls start tasks."""
        transport, max_bytes = self._transport, self._limits.max_metric_bytes
        self.lead.note_alive()
        rpc.CHANGE.serve(transport, self._handle_change)
        rpc.PLAN.serve(transport, self._handle_plan)
        rpc.TAKE_PLAN.serve(transport, self._handle_take_plan, admit=self._note_alive)
        rpc.GRANT.serve(transport, self._handle_grant, admit=self._note_alive)
        rpc.METRICS.serve(transport, self._handle_metrics, max_bytes=max_bytes, admit=self._run.check_trainer)
        rpc.ARMED.serve(transport, self._handle_armed, admit=self._note_alive)
        rpc.BEGIN.serve(transport, self._handle_begin, admit=self._note_alive)
        rpc.REGISTER.serve(transport, self._handle_register, admit=self._note_alive)
        rpc.DONE.serve(transport, self._handle_done, admit=self._note_alive)
        rpc.RECORD.serve(transport, self._handle_record, admit=self._note_alive)
        rpc.TAKE_METRICS.serve(transport, self._handle_take_metrics)
        rpc.RENEW.serve(transport, self._handle_renew)
        self.membership.answer()

    # ------------------------------------------------------------------ changes, order and places of the open step

    async def _handle_change(self, caller: PeerId, request: ChangeRequest) -> None:
        """Have the servers begin the open step with the lead's change, before any place is granted."""
        manifest = self._run.manifest
        if caller != manifest.lead:
            raise ProtocolError(f"only the lead {manifest.lead} may send the change of a step, not {caller}")
        self._run.check_generation(request.generation)
        check_change(request.change, manifest.stages)
        self._allow_change(request.change, manifest.stages)
        async with self._settling:
            self._run.check_generation(request.generation)  # it may have changed meanwhile
            step = self._step_state.open
            if request.step != step.step or step.begun or self._step_state.late_step is not None:
                raise ProtocolError(
                    f"a change must come before the first grant of its step, got one of step {request.step}, while "
                    f"step {step.step} is open{' and has granted places' if step.begun else ''}"
                )
            change = self._step_state.change.then(request.change)
            await self._servers.settle(SettleRequest(request.generation, step.step, change=change))
            self._run.check_generation(request.generation)  # the run may have been rolled back meanwhile
            self._step_state.change = change

    async def _handle_plan(self, caller: PeerId, request: PlanRequest) -> None:
        if caller != self._run.manifest.lead:
            raise ProtocolError(f"only the lead {self._run.manifest.lead} sends the order of batches, not {caller}")
        self._note_alive(caller)
        self._run.check_generation(request.generation)
        self._step_state.plan(request.plan, request.position)
        await self._changes.notify()

    async def _handle_take_plan(self, caller: PeerId, request: TakePlanRequest) -> TakePlanReply:
        """Hold a trainer's call until the lead has sent the order of an epoch, or the open step is past the epoch."""
        self._run.check_generation(request.generation)
        state = self._step_state

        def passed() -> bool:
            return state.open.window is not None and request.epoch < state.open.window.begin[0]

        await self._changes.until(lambda: state.order.plan(request.epoch) is not None or passed())
        self._run.check_generation(request.generation)  # it may have changed meanwhile
        if not state.begun:
            self.lead.check()
        plan = state.order.plan(request.epoch)
        return TakePlanReply(plan=plan, passed=plan is None and passed())

    async def _handle_grant(self, caller: PeerId, request: GrantRequest) -> GrantReply:
        """Answer a trainer's request for places in the open step, once the lead has begun and servers are ready."""
        self._run.check_generation(request.generation)
        self._check_honest(caller)
        state = self._step_state
        is_lead = caller == self._run.manifest.lead
        if self._is_beyond(request.step, "a request for a place"):  # a former coordinator opened the step
            return GrantReply(wait=WaitForRecord(step=state.open.step))
        if caller in state.open.without_server:
            # Its own server is excluded. If it is the lead, its next request, for the record, has the hyperparameters.
            return GrantReply(wait=WaitForRecord(step=state.open.step))
        if not await self._changes.until(lambda: not self._run.lacks_model(caller)):
            return GrantReply(wait=WaitForRecord(step=None))
        if is_lead and not state.begun:
            state.begun = True
            await self._changes.notify()
        elif not state.begun and not await self._changes.until(lambda: state.begun):
            self.lead.check()
            return GrantReply(wait=WaitForRecord(step=None))
        if request.batch is not None and not await self._changes.until(lambda: state.open.window is not None):
            return GrantReply(wait=WaitForRecord(step=None))  # the coordinator does not have the order yet
        async with self._settling:  # all servers must first know which parameters this step trains
            self._run.check_generation(request.generation)  # it may have changed meanwhile
            reply = self.leases.grant(state.open, caller, request)
            if reply.wait is not None:  # trainers that owe a batch may be gone
                for trainer in self.leases.owed_by(state.open):
                    self._lease_expiry.watch(trainer)
        if reply.wait is not None and self.leases.leaves_own(caller):
            await self._changes.notify()  # another waiting trainer may take over its batch
        if is_lead and reply.grant is not None and state.late_step is not None:
            late = state.late_step.step
            await self.lead.permit(late, version=late)  # the lead trains, so it does not validate
        return reply

    def _on_grant(self, step: OpenStep, trainer: PeerId) -> None:
        if step.closing:
            self._step_state.closing_s = now_s()
        self._lease_expiry.watch(trainer)

    async def _grant_ahead(self, caller: PeerId, request: BatchDone, reply: BatchDoneReply) -> Grant | None:
        """Grant a place for a trainer's next batch, unless the trainer does not know of the open step yet."""
        # The lead may validate before it uses this place, so the grant permits no record.
        if request.following is None or self._is_excluded(caller):
            return None
        async with self._settling:
            self._run.check_generation(request.generation)  # it may have changed meanwhile
            step = self._step_state.open
            known = request.step if reply.ended is None else reply.ended.open
            if step.step != known or known != request.step + reply.closing:
                return None  # the request is old, or the trainer first has to learn that its step ended
            return self.leases.grant_ahead(step, caller, replaced(request.following, step=known))

    async def _handle_begin(self, caller: PeerId, request: BatchBegins) -> None:
        """Permit the late step's record, because the lead begins to train a batch that was granted earlier."""
        self._run.check_generation(request.generation)
        if caller != self._run.manifest.lead:
            raise ProtocolError(f"only the lead {self._run.manifest.lead} reports that it begins a batch, not {caller}")
        step, late_step = self._step_state.open, self._step_state.late_step
        if late_step is not None and request.step == step.step and request.first in step.under_way(caller):
            await self.lead.permit(late_step.step, version=late_step.step)

    # ------------------------------------------------------------------ granted batches

    async def _handle_metrics(self, caller: PeerId, request: BatchMetrics, message: Message) -> None:
        self._note_alive(caller)
        self._run.check_generation(request.generation)
        step = self._undecided(request.step, "metrics of a batch")
        request.check_tensors(len(message.tensors))
        num_senders = len(self._run.trainers) - 1  # all but the lead, which keeps its own
        max_bytes = self._limits.max_metric_bytes
        step.keep_metrics(request.lease, caller, message, max_bytes=max_bytes, num_senders=num_senders)

    async def _handle_armed(self, caller: PeerId, request: BatchArmed) -> None:
        self._run.check_generation(request.generation)
        self._undecided(request.step, "an armed batch").arm(request.lease, caller, request.receipts, request.logs)

    async def _handle_register(self, caller: PeerId, request: RegisterRequest) -> None:
        """Register the batches of a trainer that missed the takeover. They still count if their step is open."""
        self._run.check_generation(request.generation)
        for lease in request.report.leases:
            if not 1 <= lease.grant.lease < self._first_lease:
                raise ProtocolError(f"a trainer registers only leases of former coordinators, got {lease.grant}")
        step = self._step_state.open
        if caller == self._run.manifest.lead and request.report.position is not None:
            for plan in request.report.plans:  # even if the lead missed a record, because it sends plans only once
                self._step_state.plan(plan, self._run.position or request.report.position)
            await self._changes.notify()
        if request.step != step.step or self._step_state.finishing:
            return  # a step that is being decided does not include the trainer's batches
        metrics = await fetch_metrics(
            self._transport,
            {caller: request.report},
            timeout=self._limits.call_timeout,
            max_bytes=self._limits.max_metric_bytes,
        )
        self._run.check_generation(request.generation)  # it may have changed meanwhile
        if step is not self._step_state.open or self._step_state.finishing:
            return
        for lease in request.report.leases:
            if lease.grant.step == step.step:
                step.restore(caller, lease, metrics.get((lease.grant.step, lease.grant.lease)))
                self._lease_expiry.watch(caller)
        step.strike_others()
        closed = dict(request.report.closed)
        # If the new coordinator struck batches of the lead, the lead brings them again before it asks to close.
        lost = step.has_struck(lease.grant.lease for lease in request.report.leases)
        if step.step in closed and caller == self._run.manifest.lead and not lost:
            self._close(step, closed[step.step])
        await self._on_change(step)

    async def _handle_done(self, caller: PeerId, request: BatchDone) -> BatchDoneReply:
        """Record the end of a batch, and answer the requests that came with it."""
        self._run.check_generation(request.generation)
        self._check_ahead(caller, request)
        reply = await self._record_done(caller, request)
        if request.ends is not None and reply.closing:
            reply = replaced(reply, ended=await self._handle_record(caller, request.ends))
        elif request.following is not None and reply.imminent is not None:
            news = RecordRequest(step=reply.imminent, generation=request.generation, version=request.version)
            reply = replaced(reply, ended=await self._ends.hold(caller, news))
        return replaced(reply, grant=await self._grant_ahead(caller, request, reply))

    def _check_ahead(self, caller: PeerId, request: BatchDone) -> None:
        """Refuse a batch's end that comes with requests about another step, before it is recorded."""
        for other in (request.ends, request.following):
            if other is not None and (other.generation, other.step) != (request.generation, request.step):
                raise ProtocolError(
                    f"the end of a batch of step {request.step} came with a request about step {other.step}"
                )
        if request.ends is not None and caller == self._run.manifest.lead:
            check_hyperparameters(request.ends)

    async def _record_done(self, caller: PeerId, request: BatchDone) -> BatchDoneReply:
        """Record the end of a batch, which may be a repeated or a late report; return whether its step closes."""
        if self._is_beyond(request.step, "the end of a batch"):
            if request.lease is not None and not request.withdrawn:
                raise LeaseRevoked(f"the new coordinator knows of no batch in step {request.step}")
            return BatchDoneReply(closing=False)
        step, late_step = self._step_state.open, self._step_state.late_step
        if late_step is not None and request.step == late_step.step:  # reported again, because the answer was lost
            self._record_end(late_step, caller, request)
            return BatchDoneReply(closing=True)
        newest = step.step - 1 - self._run.manifest.settings.delay_optimizer_step
        if request.step < step.step and (not request.close or request.step >= newest):
            if request.lease is not None and not request.withdrawn:  # the report is late, or the answer was lost
                self._run.check_counted(request.step, request.first)
            self._events.learn({caller: request.noted})
            return BatchDoneReply(closing=True)
        if request.step != step.step:
            raise ProtocolError(f"step {step.step} is open, got the end of a batch of step {request.step}")
        if request.close and caller != self._run.manifest.lead:
            raise ProtocolError(f"the lead {self._run.manifest.lead} closes steps, not {caller}")
        self._record_end(step, caller, request)
        self._events.learn({caller: request.noted})
        if request.close:
            self._close(step, request.total_weight)
        await self._on_change(step)
        return BatchDoneReply(closing=step.closing, imminent=self._release_lead(caller, request.version))

    def _release_lead(self, trainer: PeerId, version: int) -> int | None:
        """Withdraw the lead's permit; if a permitted record is there or being decided, return its step instead."""
        if trainer != self._run.manifest.lead or not self._run.manifest.settings.delay_optimizer_step:
            return None
        self.lead.known_version = max(self.lead.known_version, version)
        if self.lead.deciding_step is not None:
            return self.lead.deciding_step
        if self._step_state.outcome.step >= self.lead.known_version:
            return self._step_state.outcome.step
        self.lead.withdraw_permit()
        return None

    def _record_end(self, step: OpenStep, trainer: PeerId, request: BatchDone) -> None:
        """Record in a step that a batch is complete or withdrawn."""
        if request.lease is None:  # the request only closes the step
            return
        self.leases.batch_ended(trainer)
        if not request.withdrawn:
            step.complete(request.lease, trainer, request.completed, request.logs)
            return
        first = step.withdraw(request.lease, trainer, dropped=request.dropped)
        if request.begun:
            self._lease_expiry.fence(step, [first])

    def _close(self, step: OpenStep, total_weight: float | None) -> None:
        if not step.close_asked:
            step.ask_to_close(total_weight)
            self._step_state.closing_s = now_s()

    # ------------------------------------------------------------------ the record

    async def _handle_record(self, caller: PeerId, request: RecordRequest) -> RecordReply:
        self._run.check_generation(request.generation)
        self._is_beyond(request.step, "a request for the record")
        return await self._ends.answer(caller, request)

    async def _handle_take_metrics(self, caller: PeerId, request: MetricsRequest) -> Message:
        if caller != self._run.manifest.lead:
            raise ProtocolError(f"metrics are for the lead {self._run.manifest.lead}, not for {caller}")
        self._note_alive(caller)
        self._run.check_generation(request.generation)
        return self._ends.metrics(request)

    # ------------------------------------------------------------------ signs of life, and the end

    async def _handle_renew(self, caller: PeerId, _: None) -> None:
        self._note_alive(caller)

    async def fail(self, reason: str, error: type[StepError] = StepError) -> None:
        """Fail all calls because the open step cannot be decided; the first reason stays."""
        await self._changes.fail(error(f"step {self._step_state.open.step} could not be decided: {reason}"))

    def _note_alive(self, caller: PeerId) -> None:
        """Record a trainer's call as a sign of life; raise the coordinator's failure, if there is one."""
        self._run.check_trainer(caller)
        if self._run.is_rolling_back:
            raise Busy(f"{self._run.manifest.lead} leads the run now, and is about to roll it back")
        self._lease_expiry.gone.discard(caller)
        self.membership.note_alive(caller)
        if caller == self._run.manifest.lead:
            self.lead.note_alive()
        self._changes.check()

    def _undecided(self, step: int, what: str) -> OpenStep:
        """Return the state of a step that a trainer reports on; the step must not be decided yet."""
        undecided = self._step_state.find(step)
        if undecided is not None:
            return undecided
        if self._is_beyond(step, what):
            raise LeaseRevoked(f"the new coordinator knows of no batch in step {step}")
        raise LeaseRevoked(f"the batch was struck from step {step}, which is decided")

    def _is_beyond(self, step: int, what: str) -> bool:
        """Return whether only a former coordinator can have opened a step; raise ProtocolError if none can have."""
        number = self._step_state.open.step
        if step > number + self._run.manifest.settings.delay_optimizer_step:
            raise ProtocolError(f"step {number} is open, got {what} of step {step}")
        return step > number
