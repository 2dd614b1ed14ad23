"""A trainer's journal of its batches, from which a new coordinator rebuilds its step state. Pure.

It covers the open steps and the one before them: until the record of step ``k`` is known, the lead may not have been
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

        Returns:
            Batches of the step that are through and do not count; and batches of earlier steps whose records this
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
