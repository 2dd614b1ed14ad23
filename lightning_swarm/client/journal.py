"""What a trainer remembers of its batches, so that a new coordinator can rebuild its books. Pure.

Of the steps that are open and the one before them: until the record of step ``k`` is known, the lead may not have been
given what was logged of step ``k - 1``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message
from lightning_swarm.protocol.messages.batches import BatchDone, Grant, GrantRequest, Lease, LoggedValue, ReportReply
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import BatchNumber, EpochPlan


@dataclass
class JournalEntry:
    """A batch that was granted its place."""

    grant: Grant
    request: GrantRequest
    completed: list[Receipt] | None = None
    armed: list[Receipt] | None = None
    withdrawn: bool = False
    dropped: bool = False  # by its own `training_step`
    logs: Sequence[LoggedValue] = ()
    metrics: Message | None = None


class BatchJournal:
    """One trainer's, in one generation of the run."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], JournalEntry] = {}  # by step and lease
        self._closed: dict[int, float | None] = {}  # the steps that this trainer asked to close, and their windows
        self._begun = False
        self._decided = -1  # the newest step whose record is known
        self._plans: dict[int, EpochPlan] = {}  # of the lead, by epoch
        self._position: BatchNumber | None = None  # where the generation began

    def granted(self, grant: Grant, request: GrantRequest) -> None:
        """A batch has its place."""
        self._begun = True
        for entry in self._entries.values():  # a trainer has one batch in hand: what is unfinished was struck
            entry.withdrawn |= entry.completed is None
        self._entries[grant.step, grant.lease] = JournalEntry(grant, request)

    def planned(self, plan: EpochPlan, position: BatchNumber, over: BatchNumber | None) -> None:
        """At the lead: an epoch has its order.

        Args:
            plan: Of the epoch.
            position: Where the generation began.
            over: The first batch that the newest record does not count, if one came.
        """
        self._position = position
        begin = over or position
        self._plans = {epoch: one for epoch, one in self._plans.items() if epoch >= begin[0]} | {plan.epoch: plan}

    def measured(self, step: int, lease: int, metrics: Message) -> None:
        """What the batch added to metrics."""
        if (entry := self._entries.get((step, lease))) and entry.completed is None and not entry.withdrawn:
            entry.metrics = metrics

    def armed(self, step: int, lease: int, receipts: Sequence[Receipt], logs: Sequence[LoggedValue]) -> None:
        """Servers can complete the batch by themselves."""
        if entry := self._entries.get((step, lease)):
            entry.armed, entry.logs = list(receipts), logs

    def done(self, request: BatchDone) -> None:
        """The batch is through or withdrawn, or this trainer asks to close the step."""
        if request.lease is not None and request.withdrawn:
            self.withdrawn(request.step, request.lease, dropped=request.dropped)
        elif request.lease is not None and (entry := self._entries.get((request.step, request.lease))):
            entry.completed, entry.logs = request.completed, request.logs
        if request.close:
            self._closed[request.step] = request.total_weight

    def withdrawn(self, step: int, lease: int, *, dropped: bool = False) -> None:
        """It does not count, and its place stays empty."""
        if entry := self._entries.get((step, lease)):
            entry.withdrawn, entry.logs, entry.metrics = True, (), None
            entry.dropped |= dropped

    def reopened(self, step: int) -> None:
        """A step that this trainer asked to close takes batches again."""
        self._closed.pop(step, None)

    def place(self, step: int, lease: int) -> int:
        """Where a batch begins; 0: that is not known any more."""
        entry = self._entries.get((step, lease))
        return 0 if entry is None else entry.grant.first

    def through(self, step: int) -> list[JournalEntry]:
        """The batches of an open step that are through and count, as far as this trainer knows."""
        return [entry for (of, _), entry in self._entries.items() if of == step and _is_through(entry)]

    def through_from(self, step: int) -> list[JournalEntry]:
        """Likewise, of a step and of those after it."""
        return [entry for (of, _), entry in self._entries.items() if of >= step and _is_through(entry)]

    def decided(self, step: int, counted: Collection[int]) -> tuple[list[JournalEntry], list[JournalEntry]]:
        """The record of a step is known.

        Args:
            step: It.
            counted: The places of its batches.

        Returns:
            The batches that are through and that it does not count; and those of steps before it whose records were
            passed over, of which nothing is known here.
        """
        found = [entry for entry in self._entries.values() if _is_through(entry) and entry.grant.step > self._decided]
        lost = [entry for entry in found if entry.grant.step == step and entry.grant.first not in counted]
        unknown = [entry for entry in found if entry.grant.step < step]
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] >= step}
        self._closed = {of: window for of, window in self._closed.items() if of > step}
        self._decided = step
        return lost, unknown

    def report(self) -> ReportReply:
        """For a coordinator."""
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
        """What `measured` was told."""
        entry = self._entries.get((step, lease))
        if entry is None or entry.metrics is None:
            raise ProtocolError(f"this trainer keeps no metrics of lease {lease} of step {step}")
        return entry.metrics


def _is_through(entry: JournalEntry) -> bool:
    return entry.completed is not None and not entry.withdrawn
