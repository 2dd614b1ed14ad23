"""Manages trainers that join, leave or fall silent: their membership from the next record on, and their batches.

A peer that sends `ENLIST` is a trainer once a record names it, and then gets its first place. After `RETIRE` or a
silence, the next record removes the trainer. A trainer that was only silent enlists again once its calls are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from msgspec import UNSET

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.membership.rosters import trainer_changes
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ConfigError, PeerError, ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.bans import banned_among
from lightning_swarm.protocol.messages.batches import RetireRequest
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.membership import EnlistReply, EnlistRequest, RetireReply
from lightning_swarm.protocol.messages.run import MAX_TRAINERS, first_trained
from lightning_swarm.protocol.messages.step import FenceRequest, ReceiptsReply, ReceiptsRequest, Record
from lightning_swarm.protocol.messages.wire import from_bitmap
from lightning_swarm.protocol.queries import ask_each
from lightning_swarm.protocol.rpc import ENLIST, FENCE, RECEIPTS, RETIRE
from lightning_swarm.protocol.run_state import check_open, check_protocol_version

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1  # pause between the first two requests for a batch's receipts; doubles each time
_LONGEST_PAUSE_S: Final = 2.0

_SILENT: Final = "it does not answer"
_EXCLUDED: Final = (
    "its gradients did not have the weights of their leases, or it reported batches whose gradients no server had added"
)
_BANNED: Final = "the run's owner banned it"
_CONVICTED: Final = "it was convicted of false work"
_RESTARTED: Final = "it was restarted"


class LeaseExpiry:
    """Watches batches that are under way, and completes or strikes the batches of trainers that are gone."""

    # Servers have accepted all backward calls of an armed batch, so they can complete it. They abandon other batches,
    # whose samples are granted again. A trainer that comes back runs these batches again.
    def __init__(
        self,
        context: CoordinatorContext,
        *,
        on_change: Callable[[OpenStep], Awaitable[None]],  # after a strike, or a completion without the trainer
        owes: Callable[[PeerId], bool],  # whether other trainers wait for its batch
    ) -> None:
        self._transport, self._run, self._step_state = context.transport, context.run, context.step_state
        self._events, self._spawn, self._generation = context.events, context.spawn, context.generation
        self._on_change, self._owes = on_change, owes
        self._interval_s = context.limits.silence_timeout / 5  # seconds between checks of a trainer
        self._timeout = context.limits.call_timeout  # seconds that servers may take to complete a batch
        self._watched: set[PeerId] = set()
        self.gone: set[PeerId] = set()  # trainers that did not answer, and were not heard of since
        self._completing: set[tuple[int, int]] = set()  # (step, place) of armed batches that servers are completing

    def watch(self, trainer: PeerId) -> None:
        """Watch a trainer that has a place in the open step, or whose batch other trainers wait for."""
        if trainer not in self._watched:
            self._watched.add(trainer)
            self._spawn(self._watch(trainer))

    async def _watch(self, trainer: PeerId) -> None:
        """Ping a trainer while it has a place, and give up its batches if it does not answer."""
        is_alive = True
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                if not self._step_state.open.under_way(trainer) and not self._owes(trainer):
                    return
                if len(self._run.trainers) < 2:
                    continue  # no other trainer could take its places, so the run waits for it
                try:
                    await self._transport.ping(trainer)
                except PeerError as error:
                    if is_alive:  # noted once, although pings go on while servers complete its batches
                        self._events.note("gone", peer=trainer, step=self._step_state.open.step, reason=str(error))
                    is_alive = False
                    self.gone.add(trainer)
                    await self.give_up(self._step_state.open, trainer, str(error))
                    await self._on_change(self._step_state.open)  # other trainers may bring its batches
                else:
                    is_alive = True
                    self.gone.discard(trainer)
        finally:
            self._watched.discard(trainer)

    async def check_overdue(self, step: OpenStep) -> None:
        """Give up batches for which a closing step has waited too long."""
        since_s, timeout = self._step_state.closing_s, self._timeout
        if not step.closing or step.ready or since_s is None or now_s() < since_s + timeout:
            return
        self._step_state.closing_s = now_s()  # the wait begins again
        alive = await alive_among(self._transport, self._run.servers)
        if any(all(member.peer_id not in alive for member in roster) for roster in self._run.rosters):
            return  # a stage has no server that answers, so the batches wait for that stage, not for their trainers
        late = f"it was not complete {timeout:g} s after its step was full."
        for trainer in step.missing():
            await self.give_up(step, trainer, f"{late} Raise `Limits.call_timeout` if batches take longer.")

    async def give_up(self, step: OpenStep, trainer: PeerId, reason: str) -> None:
        """Stop waiting for a trainer: have servers complete its armed batches, and strike its other batches."""
        under_way = step.under_way(trainer)
        for place, receipts in under_way.items():
            if receipts is not None and (step.step, place) not in self._completing:
                self._completing.add((step.step, place))
                self._spawn(self._complete(step, place, receipts, trainer))
        await self.strike(step, [place for place, receipts in under_way.items() if receipts is None], reason)

    async def strike(self, step: OpenStep, batches: Collection[int], reason: str) -> None:
        """Strike the step's batches at these places, so that they do not count."""
        struck = step.strike(batches)
        for place, trainer in struck.items():
            self._events.note("strike", peer=trainer, step=step.step, reason=f"its batch at {place}: {reason}")
        if struck:
            self.fence(step, list(struck))
            await self._on_change(step)

    def fence(self, step: OpenStep, batches: Sequence[int]) -> None:
        """Make servers abandon calls of struck batches, without waiting for them."""
        self._spawn(self._fence(step, batches))

    async def _fence(self, step: OpenStep, batches: Sequence[int]) -> None:
        request = FenceRequest(generation=self._generation, step=step.step, batches=list(batches))
        # If a server is not reached and adds such a batch, no closing names the batch, so it does not count.
        await ask_each(self._transport, self._run.servers, FENCE, request, timeout=self._timeout)

    async def _complete(self, step: OpenStep, place: int, receipts: Sequence[Receipt], trainer: PeerId) -> None:
        """Complete a trainer's armed batch once all stages have its gradients; strike it if that fails."""
        try:
            missing = await self._await_receipts(step, place, receipts, trainer)
            if missing is not None:
                await self.strike(step, [place], f"{trainer} is gone, and {missing}")
            elif step.complete_armed(place):
                await self._on_change(step)
        finally:
            self._completing.discard((step.step, place))

    async def _await_receipts(
        self, step: OpenStep, place: int, receipts: Sequence[Receipt], trainer: PeerId
    ) -> str | None:
        """Return None once all stages have the receipts or the batch has ended, else the reason to strike it."""
        pause_s, deadline_s = _FIRST_PAUSE_S, now_s() + self._timeout
        while place in step.under_way(trainer):
            held, pending = await self._ask_receipts(step, receipts, trainer)
            first_stage = first_trained(self._step_state.selection(self._run), self._run.manifest.stages)
            missing = {
                (index, receipt)
                for index, stage in enumerate(self._run.manifest.stages)
                for receipt in receipts
                if index >= first_stage and not stage.on_trainers
            } - held
            if not missing:
                return None
            if missing - pending:
                return f"no server has or computes {len(missing - pending)} gradients of the batch"
            if now_s() >= deadline_s:
                return f"the batch was not completed within {self._timeout:g} s"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    async def _ask_receipts(
        self, step: OpenStep, receipts: Sequence[Receipt], trainer: PeerId
    ) -> tuple[set[tuple[int, Receipt]], set[tuple[int, Receipt]]]:
        """Return the pairs of stage and receipt that are in a sum, and the pairs whose backward is under way."""
        request = ReceiptsRequest(generation=self._generation, step=step.step, trainer=trainer, receipts=list(receipts))
        held, pending = set[tuple[int, Receipt]](), set[tuple[int, Receipt]]()

        def read(reply: ReceiptsReply) -> None:
            for stage in reply.stages:
                for pairs, bitmap in ((held, stage.held), (pending, stage.pending)):
                    flags = zip(receipts, from_bitmap(bitmap, len(receipts)), strict=True)
                    pairs |= {(stage.stage_index, receipt) for receipt, is_set in flags if is_set}

        await ask_each(self._transport, self._run.servers, RECEIPTS, request, timeout=self._timeout, check=read)
        return held, pending


class TrainerMembership:
    """Decides which trainers take part from the next record on."""

    def __init__(
        self,
        context: CoordinatorContext,
        lease_expiry: LeaseExpiry,
        *,
        epoch: Callable[[], int | None],  # epoch of the lead's loop; None: not known yet
    ) -> None:
        self._transport, self._run, self._step_state = context.transport, context.run, context.step_state
        self._changes, self._events = context.changes, context.events
        self._is_excluded, self._check_honest = context.is_excluded, context.check_honest
        self._invitations = context.invitations
        self._invitations.waiting_lists.append(self)
        self._lease_expiry, self._epoch = lease_expiry, epoch
        self._hold_s = context.limits.call_timeout  # seconds for which a request to enlist stays valid
        self._silence_s = context.limits.silence_timeout
        self._asked_s: dict[PeerId, float] = {}  # peer -> time of its last request to enlist
        self._going: dict[PeerId, str] = {}  # trainer that the next record removes -> reason
        self._alive_s: dict[PeerId, float] = {}  # trainer -> time of its last sign of life

    def answer(self) -> None:
        """Begin to answer trainers."""
        ENLIST.serve(self._transport, self._handle_enlist)
        RETIRE.serve(self._transport, self._handle_retire)

    def note_alive(self, trainer: PeerId) -> None:
        """Record a sign of life of a trainer."""
        self._alive_s[trainer] = now_s()
        if self._going.get(trainer) == _SILENT:
            del self._going[trainer]

    @property
    def waiting(self) -> list[PeerId]:
        """The peers that asked to train, and are not trainers yet."""
        since_s = now_s() - self._hold_s
        return [peer for peer, at_s in self._asked_s.items() if at_s >= since_s and peer not in self._run.trainers]

    def forget(self, peer: PeerId) -> None:
        """Drop the request of a peer that asked to train and is gone."""
        self._asked_s.pop(peer, None)

    def next_record_changes(self, convicted: Collection[PeerId] = ()) -> tuple[list[PeerId], list[PeerId]]:
        """Return the trainers that the next record adds, and the trainers that it removes, such as the `convicted`."""
        run = self._run
        if not run.manifest.open_to_trainers:
            return [], []
        leaving = {trainer for trainer in run.trainers if trainer in self._going or self._is_excluded(trainer)}
        leaving |= self._banned(run.trainers) | {trainer for trainer in run.trainers if trainer in convicted}
        joining = [peer for peer in self.waiting if peer not in convicted]
        return trainer_changes(run.trainers, lead=run.manifest.lead, leaving=leaving, joining=joining)

    def _banned(self, peers: Collection[PeerId]) -> set[PeerId]:
        return banned_among(peers, self._transport.bans or UNSET, self._run.invitations)

    def record_applied(self, record: Record) -> None:
        """Record the trainers that an applied record has added and removed."""
        for peer in record.enlisted:
            self._asked_s.pop(peer, None)
            self._alive_s[peer] = now_s()
            self._events.note("joined", peer=peer, step=self._run.version, reason="it trains")
        banned, convicted = self._banned(record.retired), self._run.electorate.convicted
        for peer in record.retired:
            self._alive_s.pop(peer, None)
            reason = _EXCLUDED if self._is_excluded(peer) else _SILENT
            reason = _CONVICTED if peer in convicted else reason
            reason = self._going.pop(peer, _BANNED if peer in banned else reason)
            self._events.note("left", peer=peer, step=self._run.version, reason=f"it no longer trains: {reason}")

    async def check_liveness(self) -> None:
        """Find trainers that are gone, even without a batch under way, so that the next record removes them."""
        exempt = {self._transport.peer_id, self._run.manifest.lead}
        while self._run.manifest.open_to_trainers:
            await asyncio.sleep(self._silence_s)
            since_s = now_s() - self._silence_s
            trainers = [trainer for trainer in self._run.trainers if trainer not in exempt]
            silent = [trainer for trainer in trainers if self._alive_s.get(trainer, 0.0) <= since_s]
            alive = await alive_among(self._transport, silent, timeout=self._silence_s)
            for trainer in silent:
                if trainer in alive:
                    self.note_alive(trainer)
                elif trainer in self._run.trainers and self._alive_s.get(trainer, 0.0) <= since_s:
                    self._going.setdefault(trainer, _SILENT)

    # ------------------------------------------------------------------ the trainers' calls

    async def _handle_enlist(self, caller: PeerId, request: EnlistRequest) -> EnlistReply:
        if caller not in self._run.trainers:
            await self._invitations.free_lost_uses(caller)
        self._changes.check()
        self._check_may_train(caller, request)
        if request.generation is not None:
            self._run.check_generation(request.generation)
        if caller in self._run.trainers:
            self._going.pop(caller, None)
            self.note_alive(caller)
            if request.generation is None:
                await self._lease_expiry.give_up(self._step_state.open, caller, _RESTARTED)
        else:
            self._invitations.reserve(caller)
            self._asked_s[caller] = now_s()
        trains = await self._changes.until(lambda: caller in self._run.trainers and self._epoch() is not None)
        epoch = self._epoch()
        if not trains or epoch is None:
            return EnlistReply()
        return EnlistReply(view=self._run.view(), epoch=epoch)

    def _check_may_train(self, caller: PeerId, request: EnlistRequest) -> None:
        manifest = self._run.manifest
        check_protocol_version(request.protocol_version)
        check_open(manifest)
        self._run.electorate.check_not_convicted(caller)
        self._check_honest(caller)
        if caller not in self._run.trainers and len({*self._run.trainers, *self.waiting} - {caller}) >= MAX_TRAINERS:
            raise ConfigError(
                f"a run has at most {MAX_TRAINERS} trainers, and {manifest.run_id!r} has as many. Start this peer with "
                "`role='server'`, or again when a trainer has left."
            )

    async def _handle_retire(self, caller: PeerId, request: RetireRequest) -> RetireReply:
        manifest = self._run.manifest
        if caller == manifest.lead:
            raise ProtocolError("the lead cannot retire: it ends the run by dismissing all other peers")
        self._run.check_trainer(caller)
        # Any reason is accepted, because it concerns only the trainer's own batches.
        self._going[caller] = request.reason
        await self._lease_expiry.give_up(self._step_state.open, caller, f"it no longer trains: {request.reason}")
        if not manifest.open_to_trainers:  # no record changes the trainers of such a run
            return RetireReply(retired=True)
        retired = await self._changes.until(lambda: caller not in self._run.trainers)
        return RetireReply(retired=retired)
