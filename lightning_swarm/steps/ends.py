"""Trainers that wait for the end of a step: how long they are held, and what they are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.run_state import RunState
from lightning_swarm.steps.books import Books
from lightning_swarm.steps.patience import Changes, LeadWatch
from lightning_swarm.steps.places import Places
from lightning_swarm.steps.told import Told
from lightning_swarm.steps.watch import TrainerWatch
from lightning_swarm.types.batches import MetricsRequest, RecordReply, RecordRequest
from lightning_swarm.types.events import Noted


class Ends:
    """Of the steps of one coordinator.

    Args:
        run: As its own server knows it.
        books: Its own.
        places: In the open step.
        lead: The trainer that asks for the records.
        changes: What calls are held for.
        watch: Of batches that are under way.
        learnt: What is known of the peers' counts of events.
    """

    def __init__(
        self,
        run: RunState,
        books: Books,
        places: Places,
        lead: LeadWatch,
        changes: Changes,
        watch: TrainerWatch,
        learnt: Callable[[], Mapping[PeerId, Noted]],
    ) -> None:
        self._run = run
        self._books = books
        self._places = places
        self._lead = lead
        self._changes = changes
        self._watch = watch
        self._learnt = learnt
        self._told = Told()  # to the lead

    async def asked(self, caller: PeerId, request: RecordRequest) -> RecordReply:
        """A trainer asks for a record. What the lead says with it comes first."""
        if caller == self._run.manifest.lead and request.step >= self._run.version:
            await self._hear_lead(request)
        return await self.until_over(caller, request)

    async def until_over(self, caller: PeerId, request: RecordRequest) -> RecordReply:
        """Hold the answer until the record is decided and applied everywhere, for a while."""
        books = self._books
        is_lead = caller == self._run.manifest.lead
        if request.step > books.open.step and not await self._changes.until(lambda: books.open.step >= request.step):
            return RecordReply(record=None, closing=True, open=self._open_for(caller))
        step = books.open

        def is_over() -> bool:
            if is_lead and books.outcome.step >= request.version:
                return True  # before it has heard of this record, the next one does not come
            return (books.outcome.step if request.decided else books.open.step - 1) >= request.step

        def takes_batches() -> bool:
            if request.step != books.open.step:
                return False
            if self._places.is_idle(caller):
                return self._places.would_answer(books.open, caller)
            return not books.open.closing

        patience_s = self._places.patience_s(caller)
        await self._changes.until(lambda: is_over() or takes_batches(), look_again_s=patience_s)
        self._run.check_generation(request.generation)  # it may have changed meanwhile
        if is_over():
            if is_lead and not await self._let_record_come():
                return RecordReply(record=None, closing=True, open=request.step)
            return self._outcome_for(caller, request.version)
        await self._watch.check_overdue(step)
        if is_lead and takes_batches():
            self._lead.go_on()
        return RecordReply(record=None, closing=not takes_batches(), open=self._open_for(caller))

    async def _hear_lead(self, request: RecordRequest) -> None:
        """Of a step that is not decided."""
        stepped_with = {request.step: check_stepped_with(request)}
        if request.before:
            stepped_with[request.step - 1] = request.before
        await self._lead.ask(request.step, stepped_with, version=request.version, epoch=request.epoch)

    async def _let_record_come(self) -> bool:
        """The lead goes on with what it is told now: so a record that it was ready for is among that, or it asks on."""
        if not self._run.manifest.delay_optimizer_step:
            return True
        if not await self._changes.until(lambda: self._lead.deciding is None):
            return False
        self._lead.go_on()
        return True

    def _outcome_for(self, trainer: PeerId, version: int) -> RecordReply:
        """What a trainer that knows of `version` is told. All of them are, so little of what others are like."""
        outcome = self._books.outcome
        open_ = self._open_for(trainer)
        follows = outcome.record is None or version == outcome.step
        # The record after it may be applied here already.
        seats = None if follows else self._run.seats_at(outcome.step + 1)
        if trainer != self._run.manifest.lead:
            return RecordReply(record=outcome.record, closing=True, open=open_, seats=seats)
        return RecordReply(
            record=outcome.record,
            closing=True,
            open=open_,
            seats=seats,
            logs=outcome.logs,
            noted=self._told.news(self._learnt(), version=version),
            measured=sorted(outcome.metrics),
        )

    def _open_for(self, trainer: PeerId) -> int:
        """The step that grants places. The lead is told of no step while it has not said how to take the one before."""
        books = self._books
        if trainer == self._run.manifest.lead and books.due is not None and not self._lead.said_how(books.due.step):
            return books.due.step
        return books.open.step

    def metrics(self, request: MetricsRequest) -> Message:
        """For the lead: what a batch of the newest record added to metrics."""
        outcome = self._books.outcome
        if request.step != outcome.step:
            raise ProtocolError(
                f"the newest record is that of step {outcome.step}, got a request for step {request.step}"
            )
        return outcome.metrics.get(request.first, Message())  # whose trainer may be gone, with the one who was told


def check_stepped_with(request: RecordRequest) -> list[dict[str, Any]]:
    """The hyperparameters that the lead says with a request. Raises if it says none."""
    if not request.hyperparameters:
        raise ProtocolError("the lead says with which hyperparameters to step, got none")
    return request.hyperparameters
