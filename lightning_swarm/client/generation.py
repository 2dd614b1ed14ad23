"""A trainer's state of one run generation, built anew at a rollback."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message
from lightning_swarm.protocol.messages.batches import (
    BatchDone,
    Grant,
    GrantRequest,
    Lease,
    LoggedValue,
    MetricState,
    RecordRequest,
    ReportReply,
)
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.reports import EventCounts
from lightning_swarm.protocol.messages.run import BatchNumber, EpochPlan
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState


@dataclass
class JournalEntry:
    """A batch that has its place."""

    grant: Grant
    request: GrantRequest
    completed: list[Receipt] | None = None
    armed: list[Receipt] | None = None
    withdrawn: bool = False
    dropped: bool = False  # by its own `training_step`
    logs: Sequence[LoggedValue] = ()
    metrics: Message | None = None


class BatchJournal:
    """Keeps one trainer's batches in one generation of the run."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], JournalEntry] = {}  # by step and lease
        self._closed: dict[int, float | None] = {}  # the steps that this trainer asked to close, and their windows
        self._begun = False  # a batch was granted
        self._decided = -1  # the newest step whose record is known
        self._plans: dict[int, EpochPlan] = {}  # at the lead, by epoch
        self._position: BatchNumber | None = None  # where the generation began

    def granted(self, grant: Grant, request: GrantRequest) -> None:
        """Note that a batch has its place."""
        self._begun = True
        for entry in self._entries.values():  # a trainer has one batch in hand: what is unfinished was struck
            entry.withdrawn |= entry.completed is None
        self._entries[grant.step, grant.lease] = JournalEntry(grant, request)

    def planned(self, plan: EpochPlan, position: BatchNumber, over: BatchNumber | None) -> None:
        """At the lead: note an epoch's plan, and forget those of epochs that are over.

        The generation began at `position`; `over` is the first batch that the newest record does not count, if a record
        came.
        """
        self._position = position
        first_epoch, _ = over or position
        self._plans = {epoch: kept for epoch, kept in self._plans.items() if epoch >= first_epoch} | {plan.epoch: plan}

    def measured(self, step: int, lease: int, metrics: Message) -> None:
        """Note what the batch in hand added to metrics."""
        if (entry := self._entries.get((step, lease))) and entry.completed is None and not entry.withdrawn:
            entry.metrics = metrics

    def armed(self, step: int, lease: int, receipts: Sequence[Receipt], logs: Sequence[LoggedValue]) -> None:
        """Note that servers can complete the batch without this trainer."""
        if entry := self._entries.get((step, lease)):
            entry.armed, entry.logs = list(receipts), logs

    def done(self, request: BatchDone) -> None:
        """Note that the batch is through or withdrawn, or that this trainer asks to close the step."""
        if request.lease is not None and request.withdrawn:
            self.withdrawn(request.step, request.lease, dropped=request.dropped)
        elif request.lease is not None and (entry := self._entries.get((request.step, request.lease))):
            entry.completed, entry.logs = request.completed, request.logs
        if request.close:
            self._closed[request.step] = request.total_weight

    def withdrawn(self, step: int, lease: int, *, dropped: bool = False) -> None:
        """Note that a batch does not count, and that its place stays empty."""
        if entry := self._entries.get((step, lease)):
            entry.withdrawn, entry.logs, entry.metrics = True, (), None
            entry.dropped |= dropped

    def reopened(self, step: int) -> None:
        """Note that a step which this trainer asked to close takes batches again."""
        self._closed.pop(step, None)

    def place(self, step: int, lease: int) -> int:
        """Return the place at which a batch begins, or 0 if that is not known any more."""
        entry = self._entries.get((step, lease))
        return 0 if entry is None else entry.grant.first

    def finished(self, step: int) -> list[JournalEntry]:
        """Return the batches of an open step that are through and count, as far as this trainer knows."""
        return [entry for (its_step, _), entry in self._entries.items() if its_step == step and _is_finished(entry)]

    def finished_from(self, step: int) -> list[JournalEntry]:
        """Return the batches of a step, and of later ones, that are through and count, as far as this trainer knows."""
        return [entry for (its_step, _), entry in self._entries.items() if its_step >= step and _is_finished(entry)]

    def decided(self, step: int, counted: Collection[int]) -> tuple[list[JournalEntry], list[JournalEntry]]:
        """Note that a step's record is known, which counts the batches at the places `counted`.

        Returns batches of the step that are through and do not count; and batches of earlier steps whose records this
        trainer never saw, so that nothing is known of them here.
        """
        found = [entry for entry in self._entries.values() if _is_finished(entry) and entry.grant.step > self._decided]
        lost = [entry for entry in found if entry.grant.step == step and entry.grant.first not in counted]
        unknown = [entry for entry in found if entry.grant.step < step]
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] >= step}
        self._closed = {later: window for later, window in self._closed.items() if later > step}
        self._decided = step
        return lost, unknown

    def report(self) -> ReportReply:
        """Return what a new coordinator needs to know of this trainer."""
        leases = [
            Lease(
                grant=entry.grant,
                request=entry.request,
                completed=entry.completed,
                armed=entry.armed,
                withdrawn=entry.withdrawn,
                dropped=entry.dropped,
                logs=list(entry.logs),
                has_metrics=entry.metrics is not None,
            )
            for entry in self._entries.values()
        ]
        return ReportReply(
            begun=self._begun,
            leases=leases,
            closed=sorted(self._closed.items()),
            plans=list(self._plans.values()),
            position=self._position,
        )

    def metrics(self, step: int, lease: int) -> Message:
        """Return what a batch added to metrics."""
        entry = self._entries.get((step, lease))
        if entry is None or entry.metrics is None:
            raise ProtocolError(f"this trainer keeps no metrics of lease {lease} of step {step}")
        return entry.metrics


def _is_finished(entry: JournalEntry) -> bool:
    return entry.completed is not None and not entry.withdrawn


Metrics: TypeAlias = tuple[Sequence[MetricState], Sequence[Tensor]]
"""What a batch added to metrics: each one's states, and the tensors of all of them."""


@dataclass(frozen=True)
class DecidedRecord:
    """A record that this trainer waited for, and what comes with it for the lead."""

    record: Record
    logs: Sequence[LoggedValue]  # of the batches that it counts, by other trainers
    metrics: Sequence[Metrics]  # likewise, what these batches added to torchmetrics objects


@dataclass(frozen=True)
class NextGrant:
    """Requests that a lone trainer adds to the end of a batch, to save a round trip for each.

    With `ends` the batch closes its step, as far as this trainer knows, and the trainer waits for that as in `closed`.
    """

    ends: bool = False
    num_samples: int | None = None  # of the next batch; None: there may be none
    gradient_scale: float = 1.0  # of the next batch: what its loss will be multiplied by


@dataclass(eq=False)
class TrainerGeneration:
    """A trainer's steps and batches in one generation of the run.

    A rollback replaces the whole object at once, so a new coordinator is told of no batch of an abandoned step.
    Messages of the old generation that are still on their way carry its number, and their receivers refuse them
    (`RunState.check_generation`). Answers that come after the rollback are refused by `StepClient`.
    """

    run: RunState  # as this trainer knows it
    number: int = field(init=False)
    open: int = field(init=False)  # the step that grants places, as far as this trainer knows
    journal: BatchJournal = field(default_factory=BatchJournal)
    reserved: tuple[Grant, GrantRequest] | None = None  # the place of a batch that is still to come
    # What `StepClient.closed` says of the step of the newest batch, if that was asked together with its end.
    step_ended: bool | None = None
    imminent: int | None = None  # at the lead: a step whose record is decided, though the lead did not wait for it
    hyperparameters: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by step, until it is decided
    newest: Record | None = None  # that this trainer waited for
    records: list[DecidedRecord] = field(default_factory=list)  # those not taken yet, the oldest first
    # Leases of batches that were through, and that their steps do not count all the same: they may run again.
    lost: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.number, self.open = self.run.manifest.generation, self.run.version

    def grant_request(
        self, number: int, num_samples: int, gradient_scale: float, batch: BatchNumber | None = None
    ) -> GrantRequest:
        """Ask for a place in the open step."""
        return GrantRequest(
            step=self.open,
            num_samples=num_samples,
            generation=self.number,
            gradient_scale=gradient_scale,
            number=number,
            batch=batch,
        )

    def report(
        self, lease: int | None, completed: Sequence[Receipt], logs: Sequence[LoggedValue], *, noted: EventCounts
    ) -> BatchDone:
        """Report on the open step, and on a batch of it if there is a lease."""
        return BatchDone(
            step=self.open,
            lease=lease,
            completed=list(completed),
            withdrawn=False,
            close=False,
            total_weight=None,
            generation=self.number,
            first=self.journal.place(self.open, lease) if lease is not None else 0,
            logs=list(logs),
            noted=noted,
            version=self.run.version,
        )

    def record_request(self, step: int, *, decided: bool, epoch: int) -> RecordRequest:
        """Ask for a record. The lead also says what to step with, and with what before if that step is open still."""
        return RecordRequest(
            step=step,
            generation=self.number,
            version=self.run.version,
            hyperparameters=self.hyperparameters.get(step),
            before=self.hyperparameters.get(step - 1),
            decided=decided,
            epoch=epoch,
        )
