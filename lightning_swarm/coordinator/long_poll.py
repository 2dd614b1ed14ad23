"""Long polls of the coordinator: holds trainers until a step ends, and the record until the lead is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.membership.trainers import LeaseExpiry
from lightning_swarm.coordinator.step.leases import LeaseTable
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.takeover import appoint
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ProtocolError, StepError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.batches import MetricsRequest, RecordReply, RecordRequest
from lightning_swarm.protocol.messages.reports import EventCounts

MAX_NEWS: Final = 1000  # peers in one answer, at most 400 kB with all kinds of events


class EventDeltas:
    """Event counts that the lead lacks."""

    def __init__(self) -> None:
        self._version = -1  # version of the lead's last request; a later version confirms the last answer
        self._known: dict[PeerId, EventCounts] = {}  # confirmed counts, in the order in which the peers were last sent
        self._sent: dict[PeerId, EventCounts] = {}  # counts in the last answer, which may have been lost

    def news(self, noted: Mapping[PeerId, EventCounts], *, version: int) -> dict[PeerId, EventCounts]:
        """Choose the counts to send to the lead, which knows `version`. Counts only grow, so delays do no harm."""
        if version != self._version:
            sent_before = {peer: one for peer, one in self._known.items() if peer not in self._sent}
            self._known = {peer: one for peer, one in (sent_before | self._sent).items() if peer in noted}
            self._version, self._sent = version, {}
        places = {peer: place for place, peer in enumerate(self._known)}
        new = [peer for peer, one in noted.items() if one.counts and self._known.get(peer) != one]
        new.sort(key=lambda peer: places.get(peer, -1))
        self._sent = {peer: noted[peer] for peer in new[:MAX_NEWS]}
        return dict(self._sent)


class LeadLiveness:
    """Watches the lead: whether it is alive, and for which record its loop is ready. Stores its hyperparameters."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._transport, self._run, self._changes = context.transport, context.run, context.changes
        limits = context.limits
        self._timeout, self._silence_s = limits.lead_timeout, limits.silence_timeout  # seconds
        self._appoint_after_s = min(limits.revive_timeout, limits.lead_timeout)  # seconds of silence until an attempt
        self._alive_s = 0.0  # time of the newest sign of life
        self._restarted = False  # the lead's process is new, and knows nothing of the run
        self._appointed: PeerId | None = None  # the next lead, once it has confirmed to this coordinator
        self._permits: int | None = None  # the newest step whose record its loop is ready for
        self.stepped_with: dict[int, list[dict[str, Any]]] = {}  # undecided step -> hyperparameters
        self.knows = 0  # the newest version that the lead knows
        self.epoch: int | None = None  # epoch of the lead's loop, once it is known
        self.resumable: Collection[int] | None = None  # snapshots from which its loop could continue, if reported
        self.deciding: int | None = None  # the step whose record was permitted, and is not applied yet

    def note_alive(self) -> None:
        """Record a sign of life."""
        self._alive_s = now_s()

    def check(self) -> None:
        """Raise StepError if the lead was silent for too long."""
        if now_s() >= self._alive_s + self._timeout:
            raise StepError(
                f"the lead {self._run.manifest.lead} was not heard of for {self._timeout:g} s. Raise "
                "`Limits.lead_timeout` if what it does between two batches takes longer."
            )

    async def until_gone(self) -> str:
        """Appoint another lead after too long a silence, and return ""; or return why the run must end instead."""
        silence_s = self._silence_s  # between two checks, and for an answer
        # `silent_s`: seconds of silence so far. `tried_s`: `silent_s` at the last attempt to appoint a lead.
        lead, silent_s, tried_s, why = self._run.manifest.lead, 0.0, 0.0, ""
        while True:
            asked_s = now_s()
            # `is_unconfirmed`: some servers follow a next lead, which has not confirmed to this coordinator yet.
            is_unconfirmed = self._run.is_rolling_back and self._run.manifest.lead != self._appointed
            # The run waits for a lead whose loop is busy, as long as the lead answers pings.
            is_alive = not (self._restarted or is_unconfirmed) and (
                self._alive_s + silence_s > asked_s
                or bool(await alive_among(self._transport, [lead], timeout=silence_s))
            )
            is_over = not is_alive and (self._restarted or silent_s >= self._timeout)
            if is_over or is_unconfirmed or (not is_alive and silent_s >= tried_s + self._appoint_after_s):
                tried_s, why = silent_s, await appoint(self._transport, self._run, timeout=silence_s, is_last=is_over)
                if not why:
                    self._alive_s, self._restarted, self._appointed = 0.0, False, self._run.manifest.lead
                    return ""
            if is_over:
                break
            await asyncio.sleep(silence_s)
            # Time for which this peer itself was frozen does not count.
            silent_s = 0.0 if is_alive else silent_s + min(now_s() - asked_s, 2 * silence_s)
            tried_s = min(tried_s, silent_s)
        gone = "was started again" if self._restarted else f"was not heard of for {self._timeout:g} s"
        return (
            f"the lead {lead} {gone}, and nobody takes it over: {why}. Start the run again with `ckpt_path`. A peer "
            "that was started by a program with data can take a run over. Raise `Limits.lead_timeout` to wait longer "
            "for a lead that may come back."
        )

    def note_restart(self) -> None:
        """Record that the lead was started again, and knows nothing of the run."""
        self._restarted = True

    async def permit(self, step: int, *, version: int) -> None:
        """Record that the lead's loop, which knows `version`, is ready for the records of all steps up to this one."""
        self._permits = step
        self.knows = max(self.knows, version)
        await self._changes.notify()

    def go_on(self) -> None:
        """Record that the lead's loop, which perhaps validates, waits for no record until the lead asks again."""
        self._permits = None

    def decided(self, step: int) -> None:
        """Record that a step's record is applied."""
        self.deciding = None
        self.stepped_with = {of: values for of, values in self.stepped_with.items() if of > step}

    async def wait_until_ready(self, step: OpenStep) -> list[dict[str, Any]]:
        """Wait until the lead's loop is ready for the record; return the hyperparameters of each parameter group."""
        # This way, the lead sees every step, and weights do not change while it validates.
        while self._permits is None or min(self._permits, self.knows) < step.step or step.step not in self.stepped_with:
            self.check()
            await self._changes.next(until_s=self._alive_s + self._timeout)
        self.deciding = step.step
        return self.stepped_with[step.step]


class StepEnds:
    """Holds trainers until a step's record was sent to all servers, or they can ask for a place again."""

    def __init__(
        self, context: CoordinatorContext, leases: LeaseTable, lead: LeadLiveness, lease_expiry: LeaseExpiry
    ) -> None:
        self._run, self._step_state, self._changes = context.run, context.step_state, context.changes
        self._leases, self._lead, self._lease_expiry = leases, lead, lease_expiry
        # Returns the event counts that this coordinator knows.
        self._known_counts = partial(context.events.known_counts, context.transport.peer_id)
        self._event_deltas = EventDeltas()  # event counts for the lead

    async def answer(self, caller: PeerId, request: RecordRequest) -> RecordReply:
        """Answer a trainer that asks for a record; first record the hyperparameters in a request of the lead."""
        if caller == self._run.manifest.lead and request.step >= self._run.version:
            self._lead.stepped_with[request.step] = check_hyperparameters(request)
            if request.before:
                self._lead.stepped_with[request.step - 1] = request.before
            self._lead.epoch, self._lead.resumable = request.epoch, request.resumable
            await self._lead.permit(request.step, version=request.version)
        return await self.hold(caller, request)

    async def hold(self, caller: PeerId, request: RecordRequest) -> RecordReply:
        """Hold the answer for a while: until the record was sent to all servers, or the caller may get a place."""
        state = self._step_state
        is_lead = caller == self._run.manifest.lead
        # A former coordinator may have opened the step that the trainer knows.
        if request.step > state.open.step and not await self._changes.until(lambda: state.open.step >= request.step):
            return RecordReply(record=None, closing=True, open=self._open_for(caller))
        step = state.open

        def is_over() -> bool:
            if is_lead and state.outcome.step >= request.version:
                return True  # the next record does not come before the lead knows this one
            # With `decided`, the caller waits for the record itself, otherwise only for the next step to open.
            return (state.outcome.step if request.decided else state.open.step - 1) >= request.step

        def takes_batches() -> bool:
            return request.step == state.open.step and self._leases.would_answer(state.open, caller)

        patience_s = self._leases.patience_s(caller)
        await self._changes.until(lambda: is_over() or takes_batches(), look_again_s=patience_s)
        self._run.check_generation(request.generation)  # it may have changed meanwhile
        if is_over():
            if is_lead and self._run.manifest.settings.delay_optimizer_step:
                # The lead may have permitted a record that is on its way. If it does not come, the lead asks again.
                if not await self._changes.until(lambda: self._lead.deciding is None):
                    return RecordReply(record=None, closing=True, open=request.step)
                self._lead.go_on()
            return self._outcome_for(caller, request.version)
        await self._lease_expiry.check_overdue(step)
        if is_lead and takes_batches():
            self._lead.go_on()
        return RecordReply(record=None, closing=not takes_batches(), open=self._open_for(caller))

    def _outcome_for(self, trainer: PeerId, version: int) -> RecordReply:
        """Make the answer to a trainer that knows `version`; only the lead's has logs, metrics and event counts."""
        outcome = self._step_state.outcome
        has_record_before = outcome.record is None or version == outcome.step
        # A trainer that skipped a record needs the members (`seats`) as of this record, because this server may have
        # applied a newer one. `has_record_before`: this record follows the version that the trainer knows.
        seats = None if has_record_before else self._run.seats_at(outcome.step + 1)
        reply = RecordReply(record=outcome.record, closing=True, open=self._open_for(trainer), seats=seats)
        if trainer != self._run.manifest.lead:
            return reply
        news = self._event_deltas.news(self._known_counts(), version=version)
        return replaced(reply, logs=outcome.logs, noted=news, measured=sorted(outcome.metrics))

    def _open_for(self, trainer: PeerId) -> int:
        """Return the step that grants places. The lead first has to send the hyperparameters of the step before."""
        state = self._step_state
        is_lead, due = trainer == self._run.manifest.lead, state.due
        if is_lead and due is not None and due.step not in self._lead.stepped_with:
            return due.step
        return state.open.step

    def metrics(self, request: MetricsRequest) -> Message:
        """Return the metrics of a batch of the newest record to the lead."""
        outcome = self._step_state.outcome
        if request.step != outcome.step:
            raise ProtocolError(
                f"the newest record is that of step {outcome.step}, got a request for step {request.step}"
            )
        return outcome.metrics.get(request.first, Message())  # lost if its trainer and a coordinator died


def check_hyperparameters(request: RecordRequest) -> list[dict[str, Any]]:
    """Return the hyperparameters in a request of the lead; raise ProtocolError if it has none."""
    if not request.hyperparameters:
        raise ProtocolError("the lead says with which hyperparameters to step, got none")
    return request.hyperparameters
