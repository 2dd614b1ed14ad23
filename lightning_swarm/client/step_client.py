"""A trainer's side of the steps: ask for a place, report what is through, wait for records.

A new coordinator asks trainers for their part of its books; from then on nothing that an older one answers counts, for
the new one may give the same place to another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec.structs import replace as replaced
from torch import Tensor

from lightning_swarm.client import coordinator_client
from lightning_swarm.client.coordinator_client import CoordinatorCalls
from lightning_swarm.client.journal import BatchJournal, JournalEntry
from lightning_swarm.core.errors import LeaseRevoked, ProtocolError, RunOver
from lightning_swarm.network import MAX_STREAM_BYTES, Message, PeerId, Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.batches import (
    BatchArmed,
    BatchBegins,
    BatchDone,
    BatchDoneReply,
    BatchMetrics,
    Grant,
    GrantReply,
    GrantRequest,
    LeaseMetricsRequest,
    LoggedValue,
    MetricsRequest,
    MetricState,
    Quit,
    RecordReply,
    RecordRequest,
    ReportRequest,
    SelectRequest,
)
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import (
    BatchNumber,
    EpochPlan,
    Member,
    PlanRequest,
    RestartRequest,
    Selection,
    TakePlanReply,
    TakePlanRequest,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import (
    ARMED,
    BEGIN,
    DONE,
    GRANT,
    METRICS,
    PLAN,
    QUIT,
    RECORD,
    RENEW,
    REPORT,
    REPORT_METRICS,
    SELECT,
    TAKE_METRICS,
    TAKE_PLAN,
)
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)

Metrics: TypeAlias = tuple[Sequence[MetricState], Sequence[Tensor]]
"""What a batch added to metrics: each one's states, and the tensors of all of them."""

OnRecord: TypeAlias = Callable[[Record, Sequence[Sequence[Member]]], Awaitable[None]]
"""Takes note of a record and of the rosters after it."""


@dataclass(frozen=True)
class DecidedRecord:
    """A record, and what comes with it for the lead.

    Args:
        record: That this trainer waited for.
        logs: What other trainers logged of the batches that it counts.
        metrics: Likewise, what these added to torchmetrics objects.
    """

    record: Record
    logs: Sequence[LoggedValue]
    metrics: Sequence[Metrics]


@dataclass(frozen=True)
class NextGrant:
    """What a trainer that trains alone says with the end of a batch, and asks: for a round trip less each.

    Args:
        ends: The batch closes its step, as far as this trainer knows, and it waits for that as by `closed`.
        num_samples: Of a next batch that is to come; None: there may be none.
        gradient_scale: What that one's loss will be multiplied by.
    """

    ends: bool = False
    num_samples: int | None = None
    gradient_scale: float = 1.0


class StepClient:
    """Talks to the coordinator.

    Args:
        transport: This trainer's network.
        run: The run as this trainer knows it.
        timeout: Seconds for the coordinator to answer.
        patience_s: Seconds to look for one that answers.
        on_record: Takes note of a record and of the rosters after it, before anything is sent for the next step.
        events: Of this trainer. Who coordinates is told how many; the lead is told here of all peers'.
        alone_s: Seconds without an answer of any other peer, when the others have ended the run; None: it goes on
            without this trainer.
        first_number: Of its batches: another one in each life of a trainer that may come back.

    Attributes:
        events: Of this trainer, and at the lead what it was told of others'.
        open: The step that grants places, as far as this trainer knows.
        imminent: At the lead: the step whose record it finds decided when it asks, though it waited for none.
        newest: The newest record that this trainer waited for.
        ended: What `closed` says of the step of the batch that was done last, if it was asked for with that.
        heard: Those that came since these were taken, the oldest first.
        lost: Leases of batches that were through, and that their steps do not count all the same. Whoever runs them
            again takes them from here.
        hyperparameters: At the lead: tells with which ones to step.
        epoch: At the lead: tells which one its loop is in.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunState,
        *,
        timeout: float,
        patience_s: float,
        on_record: OnRecord,
        events: EventLog,
        alone_s: float | None = None,
        first_number: int = 1,
    ) -> None:
        self._coordinator = CoordinatorCalls(
            transport,
            run,
            lambda: self._journal.report(),  # noqa: PLW0108 - of the generation that it is in then
            timeout=timeout,
            patience_s=patience_s,
            alone_s=alone_s,
        )
        self._enlisted = coordinator_client.EnlistedCalls(self._coordinator, run, transport.peer_id)
        self._journal = BatchJournal()
        self._numbers = itertools.count(first_number)  # of batches
        self._kept: tuple[Grant, GrantRequest] | None = None  # the place of a batch that is to come
        self.ended: bool | None = None
        self._on_record = on_record
        self.events = events
        self.own = transport.peer_id
        self.run = run
        self.open = run.version
        self.imminent: int | None = None
        self._stepped_with: dict[int, list[dict[str, Any]]] = {}  # hyperparameters, by step
        self.newest: Record | None = None
        self.heard: list[DecidedRecord] = []
        self.lost: list[int] = []
        self.hyperparameters: Callable[[], list[dict[str, Any]]] | None = None
        self.epoch: Callable[[], int] = int
        transport.handle_call(REPORT, self._handle_report)
        transport.handle_stream(REPORT_METRICS, self._handle_report_metrics, max_bytes=0)

    @property
    def version(self) -> int:
        """Of the newest weights that this trainer knows of."""
        return self.run.version

    @property
    def through(self) -> list[int]:
        """The places of the batches that are through since the newest record, and count as far as it is known here."""
        return [entry.grant.first for entry in self._journal.through_from(self.version)]

    def go_back(self, request: RestartRequest) -> None:
        """Take part in the run's next generation."""
        self.run.go_back(request)
        self.open, self.imminent, self._stepped_with = self.run.version, None, {}
        self.newest, self.heard, self.lost = None, [], []
        self._kept, self.ended = None, None
        self._journal = BatchJournal()

    async def select(self, selection: Selection) -> None:
        """Train what `selection` says, from the open step on; nothing may be granted in it yet."""
        await self.give_back()
        await self._coordinator.call(
            SELECT,
            encode(SelectRequest(generation=self.run.manifest.generation, step=self.open, selection=selection)),
        )

    async def plan(self, plan: EpochPlan, position: BatchNumber) -> None:
        """At the lead: tell the order of an epoch, and where the run begins or goes on."""
        self._journal.planned(plan, position, self.run.position)
        generation = self.run.manifest.generation
        await self._coordinator.call(PLAN, encode(PlanRequest(generation=generation, plan=plan, position=position)))

    async def take_plan(self, epoch: int) -> EpochPlan | None:
        """The order of an epoch, when the lead has told it. None: all of it is through by now."""
        while True:
            request = TakePlanRequest(generation=self.run.manifest.generation, epoch=epoch)
            reply = decode(await self._enlisted.call(TAKE_PLAN, encode(request)), TakePlanReply)
            if reply.plan is not None or reply.passed:
                return reply.plan

    async def grant(self, num_samples: int, gradient_scale: float = 1.0) -> Grant:
        """A place in the open step; waits for the next step when this one is full.

        Raises:
            RunOver: The run's last step is decided.
        """
        number = self.number_batch()
        while True:
            found = await self.request_grant(number, num_samples, gradient_scale)
            if isinstance(found, Grant):
                return found
            assert found is not None, "batches that have no numbers are in nobody else's hands"
            await self.closed(found)

    def number_batch(self) -> int:
        """For one more batch."""
        return next(self._numbers)

    async def give_back(self) -> None:
        """The place that is kept for a batch that is to come is for no batch any more."""
        if self._kept is not None:
            (grant, _), self._kept = self._kept, None
            with contextlib.suppress(LeaseRevoked):
                await self._done(replaced(self._said_of(grant), withdrawn=True))

    async def _take_kept(self, num_samples: int, gradient_scale: float) -> Grant | None:
        """The place that is kept, if it is for such a batch."""
        if self._kept is None:
            return None
        grant, request = self._kept
        if (grant.step, request.num_samples, request.gradient_scale) == (self.open, num_samples, gradient_scale):
            self._kept = None
            return grant
        await self.give_back()
        return None

    async def begin_batch(self, grant: Grant) -> None:
        """At the lead: while this batch is in hand, a record that is late may come."""
        request = BatchBegins(generation=grant.generation, step=grant.step, first=grant.first)
        await self._coordinator.call(BEGIN, encode(request))

    async def request_grant(
        self, number: int, num_samples: int, gradient_scale: float = 1.0, batch: BatchNumber | None = None
    ) -> Grant | int | None:
        """A place in the open step, perhaps one that is kept, or the step that has to be over first.

        None: nothing is to be done for this batch.

        Args:
            number: Of the batch, by `number_batch`.
            num_samples: Of it.
            gradient_scale: What its loss will be multiplied by.
            batch: Which it is, where that is for all to know. Then the place may be for another one.

        Raises:
            RunOver: The run's last step is decided.
        """
        kept = await self._take_kept(num_samples, gradient_scale)
        if kept is not None:
            return kept
        while True:
            request = self._grant_request(number, num_samples, gradient_scale, batch)
            reply = decode(await self._enlisted.call(GRANT, encode(request)), GrantReply)
            if reply.grant is not None:
                request = replaced(request, num_samples=reply.grant.samples or num_samples)
                self._journal.granted(reply.grant, request)
                return reply.grant
            if reply.passed:
                return None
            if reply.over:
                raise RunOver(f"the run's last step is {self.open - 1}: there is no place for another batch")
            if reply.wait is None:
                raise ProtocolError("a coordinator grants, says wait, passed or over; it said none of it")
            if reply.wait.step is not None:
                return reply.wait.step

    def _grant_request(
        self, number: int, num_samples: int, gradient_scale: float, batch: BatchNumber | None = None
    ) -> GrantRequest:
        return GrantRequest(
            step=self.open,
            num_samples=num_samples,
            generation=self.run.manifest.generation,
            gradient_scale=gradient_scale,
            number=number,
            batch=batch,
        )

    async def send_metrics(self, lease: int, metrics: Metrics) -> None:
        """Leave what a batch added to metrics where the lead finds it if the batch counts. Before `done`."""
        states, tensors = metrics
        generation = self.run.manifest.generation
        head = BatchMetrics(generation=generation, step=self.open, lease=lease, metrics=list(states))
        message = Message(encode(head), tuple(tensors))
        self._journal.measured(self.open, lease, message)
        await self._enlisted.stream(METRICS, message, max_bytes=0)

    async def _take_metrics(self, step: int, first: int) -> list[Metrics]:
        """What one batch added, if who coordinates has it: it may have come to do so since that was said."""
        request = Message(encode(MetricsRequest(generation=self.run.manifest.generation, step=step, first=first)))
        message = await self._coordinator.stream(TAKE_METRICS, request, max_bytes=MAX_STREAM_BYTES)
        if not message.body:
            _log.warning("What the batch at position %d of step %d added to metrics is lost.", first, step)
            return []
        return [(decode(message.body, BatchMetrics).metrics, message.tensors)]

    async def armed(self, lease: int, receipts: Sequence[Receipt], logs: Sequence[LoggedValue] = ()) -> None:
        """From now on the batch counts without this trainer, too. See `BatchArmed` for the arguments.

        Raises:
            LeaseRevoked: As in `done`.
        """
        request = BatchArmed(
            generation=self.run.manifest.generation,
            step=self.open,
            lease=lease,
            receipts=list(receipts),
            logs=list(logs),
        )
        self._journal.armed(self.open, lease, receipts, logs)
        await self._enlisted.call(ARMED, encode(request))

    async def done(
        self,
        lease: int,
        completed: Sequence[Receipt],
        *,
        close: bool = False,
        total_weight: float | None = None,
        logs: Sequence[LoggedValue] = (),
        ahead: NextGrant | None = None,
    ) -> bool:
        """Report a finished batch; True when its step closes now. `BatchDone` and `NextGrant` explain the arguments.

        Raises:
            LeaseRevoked: It was struck from its step, for nothing was heard of this trainer. It may run again.
        """
        ends = self._record_request(self.open, decided=False) if ahead is not None and ahead.ends else None
        following = self._following(ahead)
        said = self._said(lease, completed, logs)
        return await self._done(replaced(said, close=close, total_weight=total_weight, ends=ends, following=following))

    async def withdraw(self, lease: int, *, begun: bool = False, dropped: bool = False) -> bool:
        """Report a batch that is not to count; as `done`."""
        return await self._done(replaced(self._said(lease), withdrawn=True, begun=begun, dropped=dropped))

    async def close(self, *, total_weight: float | None = None) -> bool:
        """Ask to close the open step with what it has; as `done`."""
        return await self._done(replaced(self._said(), close=True, total_weight=total_weight))

    def _said(
        self, lease: int | None = None, completed: Sequence[Receipt] = (), logs: Sequence[LoggedValue] = ()
    ) -> BatchDone:
        """Of the open step, and of a batch of it if there is a lease."""
        return BatchDone(
            step=self.open,
            lease=lease,
            completed=list(completed),
            withdrawn=False,
            close=False,
            total_weight=None,
            generation=self.run.manifest.generation,
            first=self._journal.place(self.open, lease) if lease is not None else 0,
            logs=list(logs),
            noted=self.events.report(),
            version=self.version,
        )

    def _said_of(self, grant: Grant, completed: Sequence[Receipt] = (), logs: Sequence[LoggedValue] = ()) -> BatchDone:
        """Of a batch that may be of another step."""
        said = self._said(grant.lease, completed, logs)
        return replaced(said, step=grant.step, first=grant.first, generation=grant.generation)

    def _following(self, ahead: NextGrant | None) -> GrantRequest | None:
        if ahead is None or ahead.num_samples is None:
            return None
        return self._grant_request(self.number_batch(), ahead.num_samples, ahead.gradient_scale)

    async def _done(self, request: BatchDone) -> bool:
        self._journal.done(request)
        self.ended = None
        return await self._say_done(request)

    async def _say_done(self, request: BatchDone) -> bool:
        try:
            reply = decode(await self._enlisted.call(DONE, encode(request)), BatchDoneReply)
        except LeaseRevoked:
            if request.lease is not None:
                self._journal.withdrawn(request.step, request.lease)
            raise
        self.imminent = self.imminent if reply.imminent is None else reply.imminent
        if reply.ended is not None and reply.closing:
            over = await self._hear(request.step, reply.ended, decided=False)
            self.ended = await self._until(request.step, decided=False) if over is None else over
        elif reply.ended is not None and reply.imminent is not None:
            over = await self._hear(reply.imminent, reply.ended, decided=True)
            self.imminent = reply.imminent if over is None else None
        if reply.grant is not None and request.following is not None:
            self._journal.granted(reply.grant, request.following)
            self._kept = reply.grant, request.following
        return reply.closing

    async def revoked(self, lease: int) -> None:
        """A batch counts nowhere, as a server or the coordinator says: before it runs again, in a place of its own.

        Who granted it may coordinate no more, and not know that; who does may wait for it.
        """
        await self._coordinator.find_coordinator()
        with contextlib.suppress(LeaseRevoked):
            await self.withdraw(lease, begun=True)

    async def record(self, step: int) -> Record | None:
        """The record of `step` or a newer one, when it is decided and applied; None: the step takes batches again.

        What is through may be struck yet: what servers had added of it was lost with them, and could not be computed
        again, or a new coordinator never heard of it. So with each answer `lost` is brought up to date.

        Raises:
            StepError: It could not be decided.
        """
        return self.newest if await self._until(step, decided=True) else None

    async def closed(self, step: int) -> bool:
        """Wait until the step after `step` is open, at the latest with its record; False: it takes batches again.

        Records that came are learnt, as by `record`.

        Raises:
            StepError: What is waited for could not be decided.
        """
        return await self._until(step, decided=False)

    async def _until(self, step: int, *, decided: bool) -> bool:
        while True:
            # Each poll is answered in time; how long they go on is the coordinator's to bound.
            answer = await self._enlisted.call(RECORD, encode(self._record_request(step, decided=decided)))
            over = await self._hear(step, decode(answer, RecordReply), decided=decided)
            if over is not None:
                return over

    async def _hear(self, step: int, reply: RecordReply, *, decided: bool) -> bool | None:
        """Whether a step is over, or takes batches again; None: neither yet."""
        if reply.record is not None:
            self.newest = reply.record
            if reply.record.step >= self.version:
                await self._learn(reply.record, reply)
        self.open, self.imminent = max(reply.open, self.version), None
        if self.version > step or (self.open > step and not decided):
            return True
        if not reply.closing:
            self._journal.reopened(step)
            self._stepped_with.pop(step, None)  # it may be taken otherwise by then
            await self._confirm(self._journal.through(step))
            return False
        return None

    def _record_request(self, step: int, *, decided: bool) -> RecordRequest:
        """What the lead says with it, says how to take the step that ends, and the one before if that is open still."""
        if self.hyperparameters is not None and step == self.open and step not in self._stepped_with:
            self._stepped_with[step] = self.hyperparameters()
        return RecordRequest(
            step=step,
            generation=self.run.manifest.generation,
            version=self.version,
            hyperparameters=self._stepped_with.get(step),
            before=self._stepped_with.get(step - 1),
            decided=decided,
            epoch=self.epoch(),
        )

    async def _learn(self, record: Record, reply: RecordReply) -> None:
        """Take a record in, and what came with it."""
        if reply.seats is None and record.step != self.version:
            raise ProtocolError(f"record {record.step} came without who is in the run, and {self.version} is open here")
        seats = reply.seats or self.run.after(record)
        self.run.check(record, seats)
        await self._on_record(record, seats.rosters)
        self.run.apply(record, seats)
        self._stepped_with = {of: values for of, values in self._stepped_with.items() if of > record.step}
        self.events.learn(reply.noted)  # once: it is not told again to who knows of the record
        metrics: list[Metrics] = []
        self.heard.append(DecidedRecord(record, reply.logs, metrics))  # whatever becomes of the rest
        counted = {entry.grant.first for entry in self._journal.through(record.step)}
        counted = {first for first in counted if record.closing.counts(first)}
        lost, unknown = self._journal.decided(record.step, counted)
        for entry in lost:
            self._journal.withdrawn(record.step, entry.grant.lease)
            self.lost.append(entry.grant.lease)
        await self._confirm(unknown)
        for first in reply.measured:
            metrics += await self._take_metrics(record.step, first)

    async def _confirm(self, entries: Sequence[JournalEntry]) -> None:
        """Ask whether batches that are through count still, by saying so again."""
        for entry in entries:
            try:
                await self._say_done(self._said_of(entry.grant, entry.completed or (), entry.logs))
            except LeaseRevoked:
                self.lost.append(entry.grant.lease)

    async def renew(self) -> None:
        """A sign of life. While the lead validates or saves, the record goes on waiting for it.

        Raises:
            StepError: What the open step failed with, if it did.
        """
        await self._enlisted.call(RENEW, b"")

    async def quit(self, reason: str) -> None:
        """This trainer's loop ended by an error."""
        await self._coordinator.call(QUIT, encode(Quit(reason=reason[:2000])))

    async def retire(self, reason: str) -> None:
        """Not at the lead: this trainer brings no more batches. Returns when a record has let it go."""
        await coordinator_client.retire(self._coordinator, reason)

    async def lead_epoch(self) -> int:
        """Not at the lead: which epoch its loop is in, once it is in one."""
        return await self._enlisted.enlist()

    async def _handle_report(self, caller: PeerId, body: bytes) -> bytes:
        """A new coordinator asks for this trainer's part of its books."""
        request = decode(body, ReportRequest)
        self.run.check_generation(request.generation)
        await self._coordinator.accept(caller, request.term)
        return encode(self._journal.report())

    async def _handle_report_metrics(self, caller: PeerId, message: Message) -> Message:
        request = decode(message.body, LeaseMetricsRequest)
        self.run.check_coordinator(caller)
        return self._journal.metrics(request.step, request.lease)
