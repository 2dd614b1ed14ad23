"""A trainer's state of one run generation, built anew at a rollback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from lightning_swarm.client.journal import BatchJournal
from lightning_swarm.protocol.messages.batches import (
    BatchDone,
    Grant,
    GrantRequest,
    LoggedValue,
    MetricState,
    RecordRequest,
)
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.events import EventCounts
from lightning_swarm.protocol.messages.run import BatchNumber
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState

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


@dataclass
class TrainerGeneration:
    """A trainer's steps and batches in one generation of the run.

    A rollback replaces the whole object at once, so a new coordinator is told of no batch of an abandoned step.
    Messages of the old generation that are still on their way carry its number, and their receivers refuse them
    (`RunState.check_generation`).
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
