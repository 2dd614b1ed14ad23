"""A trainer's requests to the coordinator about steps: places, reports of batches, and records."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from msgspec.structs import replace as replaced

from lightning_swarm.client.coordinator_client import CoordinatorCalls, CoordinatorTimeouts
from lightning_swarm.client.run_generation import (
    BatchJournal,
    DecidedRecord,
    Metrics,
    PiggybackedRequests,
    TrainerGeneration,
)
from lightning_swarm.core.errors import FalseWorkCounted, LeaseRevoked, NotEnlisted, ProtocolError, RunOver, WentBack
from lightning_swarm.network import MAX_STREAM_BYTES, Message, PeerId, Transport
from lightning_swarm.protocol import rpc
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.batches import (
    BatchArmed,
    BatchBegins,
    BatchDone,
    BatchMetrics,
    ChangeRequest,
    Grant,
    Lease,
    LeaseMetricsRequest,
    LoggedValue,
    MetricsRequest,
    RecordReply,
    RecordRequest,
    ReportReply,
    ReportRequest,
    RetireRequest,
)
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import (
    BatchNumber,
    EpochPlan,
    LeadsRequest,
    Member,
    PlanRequest,
    RestartRequest,
    StepChange,
    TakePlanRequest,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import A, Call, Q
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)
_MAX_REASON: Final = 2000  # characters

# Called with a record, and the rosters after it, before anything is sent for the next step.
OnRecord: TypeAlias = Callable[[Record, Sequence[Sequence[Member]]], Awaitable[None]]


class StepClient:
    """Makes one trainer's requests to the coordinator, across generations of the run."""

    def __init__(
        self,
        transport: Transport,
        run: RunState,
        *,
        timeouts: CoordinatorTimeouts,
        on_record: OnRecord,
        events: EventLog,  # this trainer's events, which it reports to the coordinator, and the coordinator to the lead
        first_serial: int = 1,  # serial number of the first batch; differs after each restart of a trainer
    ) -> None:
        report = lambda: self._journal.report()  # noqa: E731, PLW0108 - each generation has another journal
        self._coordinator = CoordinatorCalls(transport, run, report, timeouts)
        self._serials = itertools.count(first_serial)
        self._on_record = on_record
        self.events = events
        self.peer_id = transport.peer_id
        self.run = run
        self.generation = TrainerGeneration(run)
        self.num_samples = 0  # samples in the steps decided so far, from all trainers
        # At the lead: return the hyperparameters of the next step, and the epoch of the loop.
        self.hyperparameters: Callable[[], list[dict[str, Any]]] | None = None
        self.epoch: Callable[[], int] = int
        # At the lead: return whether the run can roll back after false work counted. None: this is not the lead.
        self.can_go_back: Callable[[], Awaitable[bool]] | None = None
        # At the lead: return the versions of snapshots from which the loop can resume.
        self.resumable: Callable[[], Collection[int]] | None = None
        rpc.LEADS.serve(transport, self._handle_leads)
        rpc.REPORT.serve(transport, self._handle_report)
        rpc.REPORT_METRICS.serve(transport, self._handle_report_metrics)

    @property
    def version(self) -> int:
        """The version of the newest weights that this trainer knows."""
        return self.run.version

    @property
    def open_step(self) -> int:
        """The step that grants places, as far as this trainer knows."""
        return self.generation.open_step

    @property
    def _journal(self) -> BatchJournal:
        return self.generation.journal

    def enter_generation(self, request: RestartRequest) -> None:
        """Join the run's next generation, and forget the batches of the last generation."""
        self.run.enter_generation(request)
        self.generation = TrainerGeneration(self.run)

    async def _ask(self, method: Call[Q, A], request: Q) -> A:
        """Call the coordinator; refuse an answer that arrives after a rollback, because its step is abandoned."""
        generation = self.generation
        reply = await self._call(method, request)
        self._check_current(generation)
        return reply

    async def _call(self, method: Call[Q, A], request: Q) -> A:
        """Call the coordinator as a trainer of the run; enlist again if necessary."""
        return await self._coordinator.enlisted(partial(self._coordinator.call, method, request))

    def _check_current(self, generation: TrainerGeneration) -> None:
        if generation is not self.generation:
            raise WentBack(f"the run has rolled back to generation {self.generation.number} since this request")

    async def change(self, change: StepChange) -> None:
        """Send the change with which the open step begins. No place may be granted in it yet."""
        await self.release_place()
        request = ChangeRequest(generation=self.generation.number, step=self.open_step, change=change)
        await self._coordinator.call(rpc.CHANGE, request)

    async def plan(self, plan: EpochPlan, position: BatchNumber) -> None:
        """At the lead: send the order of an epoch's batches, and the batch with which the run begins or resumes."""
        self._journal.note_plan(plan, position, self.run.position)
        request = PlanRequest(generation=self.generation.number, plan=plan, position=position)
        await self._coordinator.call(rpc.PLAN, request)

    async def take_plan(self, epoch: int) -> EpochPlan | None:
        """Wait for the lead's plan of an epoch; None if the whole epoch is already complete."""
        while True:
            request = TakePlanRequest(generation=self.generation.number, epoch=epoch)
            reply = await self._ask(rpc.TAKE_PLAN, request)
            if reply.plan is not None or reply.passed:
                return reply.plan

    async def grant(self, num_samples: int, gradient_scale: float = 1.0) -> Grant:
        """Return a place in the open step, or in the next one if the open step is full."""
        serial = self.next_serial()
        while True:
            answer = await self.request_grant(serial, num_samples, gradient_scale)
            if isinstance(answer, Grant):
                return answer
            assert answer is not None, "only a batch of a shared dataset may need no place"
            await self.wait_closed(answer)

    def next_serial(self) -> int:
        """Return a new serial number, under which this trainer requests a place for a batch."""
        return next(self._serials)

    async def release_place(self) -> None:
        """Release the place reserved for the next batch."""
        if self.generation.reserved is not None:
            (grant, _), self.generation.reserved = self.generation.reserved, None
            with contextlib.suppress(LeaseRevoked):
                await self._journal_and_send(replaced(self._report_for(grant), withdrawn=True))

    async def _take_reserved(self, num_samples: int, gradient_scale: float) -> Grant | None:
        """Return the reserved place if it is in the open step and has this size and scale; otherwise release it."""
        if self.generation.reserved is None:
            return None
        grant, request = self.generation.reserved
        if (grant.step, request.num_samples, request.gradient_scale) == (self.open_step, num_samples, gradient_scale):
            self.generation.reserved = None
            return grant
        await self.release_place()
        return None

    async def begin_batch(self, grant: Grant) -> None:
        """At the lead: report that a batch begins, so that the record of a late step may arrive during the batch."""
        request = BatchBegins(generation=grant.generation, step=grant.step, first=grant.first)
        await self._coordinator.call(rpc.BEGIN, request)

    async def request_grant(
        self, serial: int, num_samples: int, gradient_scale: float = 1.0, batch: BatchNumber | None = None
    ) -> Grant | int | None:
        """Return a place in the open step, or the step that must end first, or None if the batch needs no place."""
        # If trainers share an epoch, `batch` is the batch's number in the data. The coordinator may grant a place for
        # another batch.
        reserved = await self._take_reserved(num_samples, gradient_scale)
        if reserved is not None:
            return reserved
        while True:
            request = self.generation.grant_request(serial, num_samples, gradient_scale, batch)
            reply = await self._ask(rpc.GRANT, request)
            if reply.grant is not None:
                request = replaced(request, num_samples=reply.grant.samples or num_samples)
                self._journal.note_granted(reply.grant, request)
                return reply.grant
            if reply.passed:
                return None
            if reply.over:
                raise RunOver(f"the run's last step is {self.open_step - 1}, so there is no place for another batch")
            if reply.wait is None:
                raise ProtocolError("a coordinator's answer must have a grant, wait, passed or over, got none of these")
            if reply.wait.step is not None:
                return reply.wait.step

    async def send_metrics(self, lease: int, metrics: Metrics) -> None:
        """Send a batch's metric updates to the coordinator, which forwards them to the lead. Call it before `done`."""
        states, tensors = metrics
        head = BatchMetrics(generation=self.generation.number, step=self.open_step, lease=lease, metrics=list(states))
        self._journal.note_metrics(self.open_step, lease, Message(encode(head), tuple(tensors)))
        send = partial(self._coordinator.stream, rpc.METRICS, head, tensors, max_bytes=0)
        await self._coordinator.enlisted(send)

    async def report_armed(self, lease: int, receipts: Sequence[Receipt], logs: Sequence[LoggedValue] = ()) -> None:
        """Report that the batch is armed: it counts even if this trainer dies. `BatchArmed` explains the arguments."""
        request = BatchArmed(
            generation=self.generation.number,
            step=self.open_step,
            lease=lease,
            receipts=list(receipts),
            logs=list(logs),
        )
        self._journal.note_armed(self.open_step, lease, receipts, logs)
        await self._call(rpc.ARMED, request)

    async def done(
        self,
        lease: int,
        completed: Sequence[Receipt],
        *,
        close: bool = False,
        total_weight: float | None = None,
        logs: Sequence[LoggedValue] = (),
        ahead: PiggybackedRequests | None = None,
    ) -> bool:
        """Report a finished batch; return True if its step closes now. `LeaseRevoked`: the batch was struck."""
        # `BatchDone` explains the arguments; only the lead may pass `close` and `total_weight`.
        end_request = (
            self._record_request(self.open_step, decided=False)
            if ahead is not None and ahead.wait_for_step_end
            else None
        )
        following = None
        if ahead is not None and ahead.num_samples is not None:
            serial = self.next_serial()
            following = self.generation.grant_request(serial, ahead.num_samples, ahead.gradient_scale)
        report = self._report(lease, completed, logs)
        return await self._journal_and_send(
            replaced(report, close=close, total_weight=total_weight, ends=end_request, following=following)
        )

    async def withdraw(self, lease: int, *, begun: bool = False, dropped: bool = False) -> bool:
        """Report a batch that must not count; return True if its step closes now. See `BatchDone` for the arguments."""
        return await self._journal_and_send(replaced(self._report(lease), withdrawn=True, begun=begun, dropped=dropped))

    async def close(self, *, total_weight: float | None = None) -> bool:
        """At the lead: ask to close the open step with its present batches; return True if it closes now."""
        return await self._journal_and_send(replaced(self._report(), close=True, total_weight=total_weight))

    async def report_events(self) -> None:
        """Report this trainer's new events to the coordinator, which forwards them to the lead."""
        await self._journal_and_send(self._report())

    def _report(
        self, lease: int | None = None, completed: Sequence[Receipt] = (), logs: Sequence[LoggedValue] = ()
    ) -> BatchDone:
        """Return a report on the open step and, with a lease, on a batch of it."""
        return BatchDone(
            step=self.open_step,
            lease=lease,
            completed=list(completed),
            withdrawn=False,
            close=False,
            total_weight=None,
            generation=self.generation.number,
            first=self._journal.first_place(self.open_step, lease),
            logs=list(logs),
            noted=self.events.report(),
            version=self.version,
        )

    def _report_for(
        self, grant: Grant, completed: Sequence[Receipt] = (), logs: Sequence[LoggedValue] = ()
    ) -> BatchDone:
        """Return a report on a batch that may belong to another step than the open step."""
        report = self._report(grant.lease, completed, logs)
        return replaced(report, step=grant.step, first=grant.first, generation=grant.generation)

    async def _journal_and_send(self, report: BatchDone) -> bool:
        """Enter a report in the journal, and send it; return whether its step closes now."""
        self._journal.note_done(report)
        self.generation.step_ended = None
        return await self._send_report(report)

    async def _send_report(self, report: BatchDone) -> bool:
        """Send a report, and apply the answer's contents; return whether its step closes now."""
        generation = self.generation
        try:
            reply = await self._ask(rpc.DONE, report)
        except LeaseRevoked:
            if report.lease is not None:
                generation.journal.note_withdrawn(report.step, report.lease)
            raise
        generation.imminent_step = generation.imminent_step if reply.imminent is None else reply.imminent
        # If the step closes, `reply.ended` answers `report.ends`, the request to wait for the step's end. If the step
        # stays open, it may bring the record of the late step `reply.imminent`.
        if reply.ended is not None and reply.closing:
            has_ended = await self._apply_reply(report.step, reply.ended, decided=False)
            if has_ended is None:
                has_ended = await self._wait_for_end(report.step, decided=False)
            generation.step_ended = has_ended
        elif reply.ended is not None and reply.imminent is not None:
            has_ended = await self._apply_reply(reply.imminent, reply.ended, decided=True)
            generation.imminent_step = reply.imminent if has_ended is None else None
        if reply.grant is not None and report.following is not None:
            generation.journal.note_granted(reply.grant, report.following)
            generation.reserved = reply.grant, report.following
        return reply.closing

    async def report_revoked(self, lease: int) -> None:
        """Report a batch that a server or the coordinator reported as struck, before it runs again in another place."""
        # The current coordinator may wait for the batch, even if another coordinator granted its place.
        await self._coordinator.find_coordinator()
        with contextlib.suppress(LeaseRevoked):
            await self.withdraw(lease, begun=True)

    async def wait_for_record(self, step: int) -> Record | None:
        """Wait for the record of `step` or a newer record; None if `step` reopened. Raises `StepError` if it failed."""
        return self.generation.newest_record if await self._wait_for_end(step, decided=True) else None

    async def wait_closed(self, step: int) -> bool:
        """Wait until the step after `step` is open; return False if a batch was withdrawn, so that `step` reopened."""
        return await self._wait_for_end(step, decided=False)

    async def _wait_for_end(self, step: int, *, decided: bool) -> bool:
        """Poll until the step has ended; return False if it reopened. If `decided`, also wait for its record."""
        while True:
            # The coordinator limits the duration of each poll, and of the whole wait.
            reply = await self._ask(rpc.RECORD, self._record_request(step, decided=decided))
            has_ended = await self._apply_reply(step, reply, decided=decided)
            if has_ended is not None:
                return has_ended

    async def _apply_reply(self, step: int, reply: RecordReply, *, decided: bool) -> bool | None:
        """Apply a reply's record. Return True if the step has ended, False if it reopened, None if it is closing."""
        generation = self.generation
        if reply.record is not None:
            generation.newest_record = reply.record
            if reply.record.step >= self.version:
                await self._apply_record(reply.record, reply)
        generation.open_step, generation.imminent_step = max(reply.open, self.version), None
        if self.version > step or (self.open_step > step and not decided):
            return True
        if not reply.closing:
            generation.journal.note_reopened(step)
            generation.hyperparameters.pop(step, None)  # they may change before the step closes
            await self._confirm(
                [lease for lease in generation.journal.finished_batches(step) if lease.grant.step == step]
            )
            return False
        return None

    def _record_request(self, step: int, *, decided: bool) -> RecordRequest:
        generation = self.generation
        if self.hyperparameters is not None and step == self.open_step and step not in generation.hyperparameters:
            generation.hyperparameters[step] = self.hyperparameters()
        return RecordRequest(
            step=step,
            generation=generation.number,
            version=self.version,
            hyperparameters=generation.hyperparameters.get(step),
            before=generation.hyperparameters.get(step - 1),
            decided=decided,
            epoch=self.epoch(),
            resumable=None if self.resumable is None else sorted(self.resumable()),
        )

    async def _apply_record(self, record: Record, reply: RecordReply) -> None:
        """Apply a record, and keep the logs and metrics that come with it."""
        if reply.seats is None and record.step != self.version:
            raise ProtocolError(
                f"record {record.step} must come with the run's members, because {self.version} is the open step here"
            )
        generation = self.generation
        seats = reply.seats or self.run.members_after(record)
        self.run.check(record, seats)
        await self._on_record(record, seats.rosters)
        self._check_current(generation)
        self.run.apply(record, seats)
        self.num_samples += record.closing.num_samples
        for step in [step for step in generation.hyperparameters if step <= record.step]:
            del generation.hyperparameters[step]
        self.events.learn(reply.noted)  # once this trainer knows the record, replies omit these counts
        metrics: list[Metrics] = []
        generation.records.append(DecidedRecord(record, reply.logs, metrics))  # kept even if the rest fails
        # A finished batch may still be struck: its gradients were lost and could not be computed again, or a new
        # coordinator never received its report.
        lost, unknown = generation.journal.apply_record(record)
        for lease in lost:
            generation.journal.note_withdrawn(record.step, lease.grant.lease)
            generation.lost.append(lease.grant.lease)
        await self._raise_if_false_work_counted(record)  # after a rollback the rest is void
        await self._confirm(unknown)
        for first in reply.measured:
            metrics += await self._fetch_metrics(record.step, first)

    async def _raise_if_false_work_counted(self, record: Record) -> None:
        """At the lead: raise `FalseWorkCounted` if false work may have counted and the run can roll back."""
        if not record.goes_back or self.can_go_back is None:
            return
        reasons = [f"{conviction.peer} {conviction.reason}" for conviction in record.convicted or ()]
        error = FalseWorkCounted(reasons, self.run.sound_version_after(record.step))
        if await self.can_go_back():
            raise error
        _log.warning("The run continues with the false work, because there is no snapshot for a rollback: %s.", error)

    async def _confirm(self, leases: Sequence[Lease]) -> None:
        """Ask whether finished batches still count, by reporting them again."""
        generation = self.generation
        for lease in leases:
            try:
                await self._send_report(self._report_for(lease.grant, lease.completed or (), lease.logs))
            except LeaseRevoked:
                generation.lost.append(lease.grant.lease)

    async def _fetch_metrics(self, step: int, first: int) -> list[Metrics]:
        """Fetch a batch's metric updates. The coordinator may have lost them since it announced them."""
        request = MetricsRequest(generation=self.generation.number, step=step, first=first)
        head, tensors = await self._coordinator.stream(rpc.TAKE_METRICS, request, max_bytes=MAX_STREAM_BYTES)
        if not head:
            _log.warning("The metric updates of the batch at place %d of step %d are lost.", first, step)
            return []
        return [(decode(head, BatchMetrics).metrics, tensors)]

    async def renew(self) -> None:
        """Report that this trainer is alive, as during a long validation; raise the open step's error if it failed."""
        await self._call(rpc.RENEW, None)

    async def retire(self, reason: str) -> None:
        """Not at the lead: stop training; return once this trainer is no longer a trainer of the run."""
        request = RetireRequest(reason=reason[:_MAX_REASON])
        with contextlib.suppress(NotEnlisted):
            while not (await self._coordinator.call(rpc.RETIRE, request)).retired:
                pass

    async def enlist(self) -> int:
        """Not at the lead: enlist this trainer unless it is a member; return the epoch of the lead's loop."""
        _, epoch = await self._coordinator.enlist(self.run.manifest.generation)
        return epoch

    async def _handle_leads(self, caller: PeerId, request: LeadsRequest) -> None:
        self.run.check_generation(request.generation)
        if self.hyperparameters is None:
            raise ProtocolError(f"{self.peer_id} is not the lead; the lead is {self.run.manifest.lead}")

    async def _handle_report(self, caller: PeerId, request: ReportRequest) -> ReportReply:
        self.run.check_generation(request.generation)
        # From now on refuse answers of older coordinators, because the new coordinator may grant the same place again.
        await self._coordinator.accept(caller, request.term)
        return self._journal.report()

    async def _handle_report_metrics(self, caller: PeerId, request: LeaseMetricsRequest) -> Message:
        self.run.check_coordinator(caller)
        return self._journal.metrics_of(request.step, request.lease)
