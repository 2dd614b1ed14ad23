"""A trainer's state of one run generation, created anew at a rollback: its batches, leases and new records."""

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
    """Keeps one trainer's batches in one generation of the run, to report them to a new coordinator."""

    def __init__(self) -> None:
        self._leases: dict[tuple[int, int], Lease] = {}  # (step, lease) -> lease
        self._metrics: dict[tuple[int, int], Message] = {}  # (step, lease) -> metric updates of the batch
        self._close_requests: dict[int, float | None] = {}  # step that this trainer asked to close -> total weight
        self._begun = False  # a batch was granted
        self._newest_recorded = -1  # the newest step whose record is known
        self._plans: dict[int, EpochPlan] = {}  # only at the lead: epoch -> plan
        self._position: BatchNumber | None = None  # the generation's first batch

    def note_granted(self, grant: Grant, request: GrantRequest) -> None:
        """Record a batch's grant."""
        self._begun = True
        for key, lease in self._leases.items():  # a trainer runs one batch at a time, so an unfinished batch was struck
            self._leases[key] = replaced(lease, withdrawn=lease.withdrawn or lease.completed is None)
        self._leases[grant.step, grant.lease] = Lease(grant=grant, request=request)
        self._metrics.pop((grant.step, grant.lease), None)

    def note_plan(self, plan: EpochPlan, position: BatchNumber, first_uncounted: BatchNumber | None) -> None:
        """At the lead: record an epoch's plan and the generation's first batch; drop plans of completed epochs."""
        # `first_uncounted` is the first batch that no record counts; None: no record names it.
        self._position = position
        first_epoch, _ = first_uncounted or position
        self._plans = {epoch: old for epoch, old in self._plans.items() if epoch >= first_epoch} | {plan.epoch: plan}

    def note_metrics(self, step: int, lease: int, metrics: Message) -> None:
        """Record the current batch's metric updates."""
        if (entry := self._leases.get((step, lease))) and entry.completed is None and not entry.withdrawn:
            self._metrics[step, lease] = metrics

    def note_armed(self, step: int, lease: int, receipts: Sequence[Receipt], logs: Sequence[LoggedValue]) -> None:
        """Record that servers can complete the batch without this trainer."""
        if entry := self._leases.get((step, lease)):
            self._leases[step, lease] = replaced(entry, armed=list(receipts), logs=list(logs))

    def note_done(self, request: BatchDone) -> None:
        """Record a report: the batch is finished or withdrawn, or this trainer asks to close the step."""
        if request.lease is not None and request.withdrawn:
            self.note_withdrawn(request.step, request.lease, dropped=request.dropped)
        elif request.lease is not None and (entry := self._leases.get((request.step, request.lease))):
            completed, logs = request.completed, request.logs
            self._leases[request.step, request.lease] = replaced(entry, completed=completed, logs=logs)
        if request.close:
            self._close_requests[request.step] = request.total_weight

    def note_withdrawn(self, step: int, lease: int, *, dropped: bool = False) -> None:
        """Record that a batch does not count, and that its place stays empty."""
        self._metrics.pop((step, lease), None)
        if entry := self._leases.get((step, lease)):
            self._leases[step, lease] = replaced(entry, withdrawn=True, logs=[], dropped=entry.dropped or dropped)

    def note_reopened(self, step: int) -> None:
        """Record that a step that this trainer asked to close takes batches again."""
        self._close_requests.pop(step, None)

    def first_place(self, step: int, lease: int | None) -> int:
        """Return the first place of a batch, or 0 if it is no longer known."""
        entry = self._leases.get((step, lease)) if lease is not None else None
        return 0 if entry is None else entry.grant.first

    def finished_batches(self, step: int) -> list[Lease]:
        """Return the finished batches of this step and later steps that count, as far as this trainer knows."""
        return [
            entry
            for entry in self._leases.values()
            if entry.grant.step >= step and entry.completed is not None and not entry.withdrawn
        ]

    def apply_record(self, record: Record) -> tuple[list[Lease], list[Lease]]:
        """Apply a record; return finished batches that it does not count, and batches of steps with missed records."""
        step, batches = record.step, self.finished_batches(self._newest_recorded + 1)
        lost = [entry for entry in batches if entry.grant.step == step and not record.closing.counts(entry.grant.first)]
        unknown = [entry for entry in batches if entry.grant.step < step]
        self._leases = {key: entry for key, entry in self._leases.items() if key[0] >= step}
        self._metrics = {key: metrics for key, metrics in self._metrics.items() if key[0] >= step}
        self._close_requests = {later: weight for later, weight in self._close_requests.items() if later > step}
        self._newest_recorded = step
        return lost, unknown

    def report(self) -> ReportReply:
        """Return this trainer's part in the open steps, for a new coordinator."""
        return ReportReply(
            begun=self._begun,
            leases=[replaced(entry, has_metrics=key in self._metrics) for key, entry in self._leases.items()],
            closed=sorted(self._close_requests.items()),
            plans=list(self._plans.values()),
            position=self._position,
        )

    def metrics_of(self, step: int, lease: int) -> Message:
        """Return a batch's metric updates."""
        if (step, lease) not in self._metrics:
            raise ProtocolError(f"this trainer has no metrics for lease {lease} of step {step}")
        return self._metrics[step, lease]


# Metric updates of batches: the states of each metric, and the tensors of all states.
Metrics: TypeAlias = tuple[Sequence[MetricState], Sequence[Tensor]]


@dataclass(frozen=True)
class DecidedRecord:
    """A decided step's record, with the values that the lead logs for it."""

    record: Record
    logs: Sequence[LoggedValue]  # values that other trainers logged for batches that the record counts
    metrics: Sequence[Metrics]  # updates of torchmetrics objects by the same batches


@dataclass(frozen=True)
class PiggybackedRequests:
    """Requests that a lone trainer sends with a batch's report, which saves a round trip for each."""

    wait_for_step_end: bool = False  # also wait as `wait_closed` does; set if the batch probably closes its step
    num_samples: int | None = None  # size of the next batch; None: request no place
    gradient_scale: float = 1.0  # multiplies the loss of the next batch


# A rollback replaces the whole object, so reports to a new coordinator name no batch of an abandoned step. Messages of
# the old generation that are in transit carry its number, and receivers refuse them (`RunState.check_generation`).
# `StepClient` refuses answers that arrive after the rollback.
@dataclass(eq=False)
class TrainerGeneration:
    """A trainer's steps and batches in one generation of the run."""

    run: RunState  # the run, as this trainer knows it
    number: int = field(init=False)
    open_step: int = field(init=False)  # the step that grants places, as far as this trainer knows
    journal: BatchJournal = field(default_factory=BatchJournal)
    reserved: tuple[Grant, GrantRequest] | None = None  # granted in advance for the next batch
    # Result of `StepClient.wait_closed` for the newest batch's step, if the batch's report included that request.
    step_ended: bool | None = None
    # Only at the lead: a late step whose record is decided or about to be decided, and has not arrived yet.
    imminent_step: int | None = None
    hyperparameters: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # step -> values, until decided
    newest_record: Record | None = None  # newest received record; stays when the loop collects `records`
    records: list[DecidedRecord] = field(default_factory=list)  # records that the loop has not collected, oldest first
    lost: list[int] = field(default_factory=list)  # leases of finished batches that do not count and may run again

    def __post_init__(self) -> None:
        self.number, self.open_step = self.run.manifest.generation, self.run.version

    def grant_request(
        self, serial: int, num_samples: int, gradient_scale: float, batch: BatchNumber | None = None
    ) -> GrantRequest:
        """Return a request for a place in the open step."""
        return GrantRequest(
            step=self.open_step,
            num_samples=num_samples,
            generation=self.number,
            gradient_scale=gradient_scale,
            number=serial,
            batch=batch,
        )
