"""A trainer's state of one run generation, built anew at a rollback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace as replaced
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
    ReportReply,
)
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import BatchNumber, EpochPlan
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState


class BatchJournal:
    """Keeps one trainer's batches in one generation of the run."""

    def __init__(self) -> None:
        self._leases: dict[tuple[int, int], Lease] = {}  # by step and lease
        self._metrics: dict[tuple[int, int], Message] = {}  # what batches added to metrics, likewise
        self._closed: dict[int, float | None] = {}  # the steps that this trainer asked to close, and their windows
        self._begun = False  # a batch was granted
        self._decided = -1  # the newest step whose record is known
        self._plans: dict[int, EpochPlan] = {}  # at the lead, by epoch
        self._position: BatchNumber | None = None  # where the generation began

    def granted(self, grant: Grant, request: GrantRequest) -> None:
        """Note that a batch has its place."""
        self._begun = True
        for key, lease in self._leases.items():  # a trainer has one batch in hand: what is unfinished was struck
            self._leases[key] = replaced(lease, withdrawn=lease.withdrawn or lease.completed is None)
        self._leases[grant.step, grant.lease] = Lease(grant=grant, request=request)
        self._metrics.pop((grant.step, grant.lease), None)

    def planned(self, plan: EpochPlan, position: BatchNumber, over: BatchNumber | None) -> None:
        """At the lead: note an epoch's plan, and where the generation began; forget plans of epochs that are `over`."""
        self._position = position
        first_epoch, _ = over or position  # the first batch that no record counts
        self._plans = {epoch: kept for epoch, kept in self._plans.items() if epoch >= first_epoch} | {plan.epoch: plan}

    def measured(self, step: int, lease: int, metrics: Message) -> None:
        """Note what the batch in hand added to metrics."""
        if (entry := self._leases.get((step, lease))) and entry.completed is None and not entry.withdrawn:
            self._metrics[step, lease] = metrics

    def note_armed(self, step: int, lease: int, receipts: Sequence[Receipt], logs: Sequence[LoggedValue]) -> None:
        """Note that servers can complete the batch without this trainer."""
        if entry := self._leases.get((step, lease)):
            self._leases[step, lease] = replaced(entry, armed=list(receipts), logs=list(logs))

    def done(self, request: BatchDone) -> None:
        """Note that the batch is through or withdrawn, or that this trainer asks to close the step."""
        if request.lease is not None and request.withdrawn:
            self.withdrawn(request.step, request.lease, dropped=request.dropped)
        elif request.lease is not None and (entry := self._leases.get((request.step, request.lease))):
            completed, logs = request.completed, request.logs
            self._leases[request.step, request.lease] = replaced(entry, completed=completed, logs=logs)
        if request.close:
            self._closed[request.step] = request.total_weight

    def withdrawn(self, step: int, lease: int, *, dropped: bool = False) -> None:
        """Note that a batch does not count, and that its place stays empty."""
        self._metrics.pop((step, lease), None)
        if entry := self._leases.get((step, lease)):
            self._leases[step, lease] = replaced(entry, withdrawn=True, logs=[], dropped=entry.dropped or dropped)

    def reopened(self, step: int) -> None:
        """Note that a step which this trainer asked to close takes batches again."""
        self._closed.pop(step, None)

    def place(self, step: int, lease: int | None) -> int:
        """Return the place at which a batch begins, or 0 if that is not known any more."""
        entry = self._leases.get((step, lease)) if lease is not None else None
        return 0 if entry is None else entry.grant.first

    def finished(self, step: int) -> list[Lease]:
        """Return the batches from a step on that are through and count, as far as this trainer knows."""
        return [
            entry
            for entry in self._leases.values()
            if entry.grant.step >= step and entry.completed is not None and not entry.withdrawn
        ]

    def decided(self, record: Record) -> tuple[list[Lease], list[Lease]]:
        """Note a record; return batches that it does not count, and those of earlier steps whose records never came."""
        step, found = record.step, self.finished(self._decided + 1)
        lost = [entry for entry in found if entry.grant.step == step and not record.closing.counts(entry.grant.first)]
        unknown = [entry for entry in found if entry.grant.step < step]
        self._leases = {key: entry for key, entry in self._leases.items() if key[0] >= step}
        self._metrics = {key: metrics for key, metrics in self._metrics.items() if key[0] >= step}
        self._closed = {later: window for later, window in self._closed.items() if later > step}
        self._decided = step
        return lost, unknown

    def report(self) -> ReportReply:
        """Return what a new coordinator needs to know of this trainer."""
        return ReportReply(
            begun=self._begun,
            leases=[replaced(entry, has_metrics=key in self._metrics) for key, entry in self._leases.items()],
            closed=sorted(self._closed.items()),
            plans=list(self._plans.values()),
            position=self._position,
        )

    def metrics(self, step: int, lease: int) -> Message:
        """Return what a batch added to metrics."""
        if (step, lease) not in self._metrics:
            raise ProtocolError(f"this trainer keeps no metrics of lease {lease} of step {step}")
        return self._metrics[step, lease]


# What a batch added to metrics: each one's states, and the tensors of all of them.
Metrics: TypeAlias = tuple[Sequence[MetricState], Sequence[Tensor]]


@dataclass(frozen=True)
class DecidedRecord:
    """A record that this trainer waited for, and what comes with it for the lead."""

    record: Record
    logs: Sequence[LoggedValue]  # of the batches that it counts, by other trainers
    metrics: Sequence[Metrics]  # likewise, what these batches added to torchmetrics objects


@dataclass(frozen=True)
class NextGrant:
    """Requests that a lone trainer adds to the end of a batch, to save a round trip for each."""

    ends: bool = False  # the batch closes its step, as far as is known here, and the trainer waits as in `wait_closed`
    num_samples: int | None = None  # of the next batch; None: there may be none
    gradient_scale: float = 1.0  # of the next batch: what its loss will be multiplied by


# A rollback replaces the whole object at once, so a new coordinator is told of no batch of an abandoned step. Messages
# of the old generation that are still on their way carry its number, and their receivers refuse them
# (`RunState.check_generation`). Answers that come after the rollback are refused by `StepClient`.
@dataclass(eq=False)
class TrainerGeneration:
    """A trainer's steps and batches in one generation of the run."""

    run: RunState  # as this trainer knows it
    number: int = field(init=False)
    open: int = field(init=False)  # the step that grants places, as far as this trainer knows
    journal: BatchJournal = field(default_factory=BatchJournal)
    reserved: tuple[Grant, GrantRequest] | None = None  # the place of a batch that is still to come
    # What `StepClient.wait_closed` says of the step of the newest batch, if that was asked together with its end.
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
