"""The coordinator's side of trainers that come and go: who trains from the next record on.

``ENLIST -> the next record names the trainer -> its first place``. It changes nothing before that, and waits for no
step in particular: the open one ends without it. ``RETIRE``, or a silence, and the next record names it no more. One
that was only silent enlists again by itself when it is told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.long_poll import ChangeNotifier
from lightning_swarm.coordinator.membership.rosters import trainer_changes
from lightning_swarm.coordinator.trainer_leases import LeaseExpiry
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.batches import Quit
from lightning_swarm.protocol.messages.membership import EnlistReply, EnlistRequest, RetireReply
from lightning_swarm.protocol.messages.run import MAX_TRAINERS
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.methods import ENLIST, RETIRE
from lightning_swarm.protocol.run_state import check_open

_SILENT: Final = "it does not answer"
_ANEW: Final = "it was started again"


class TrainerMembership:
    """Decides which trainers take part from the next record on."""

    def __init__(
        self,
        context: CoordinatorContext,
        lease_expiry: LeaseExpiry,
        changes: ChangeNotifier,
        *,
        epoch: Callable[[], int | None],  # of the lead's loop; None: it is not known yet
    ) -> None:
        self._transport, self._run, self._books = context.transport, context.run, context.step_state
        self._lease_expiry = lease_expiry
        self._changes = changes
        self._epoch = epoch
        self._events = context.events
        self._hold_s = context.limits.call_timeout  # for which a trainer that asked is taken to be there
        self._silence_s = context.limits.silence_timeout
        self._asked_s: dict[PeerId, float] = {}
        self._going: dict[PeerId, str] = {}  # why
        self._heard_s: dict[PeerId, float] = {}

    def answer(self) -> None:
        """Begin to answer trainers."""
        self._transport.handle_call(ENLIST, self._handle_enlist)
        self._transport.handle_call(RETIRE, self._handle_retire)

    def hear(self, trainer: PeerId) -> None:
        """Enter a sign of life of a trainer."""
        self._heard_s[trainer] = now_s()
        if self._going.get(trainer) == _SILENT:
            del self._going[trainer]

    @property
    def waiting(self) -> list[PeerId]:
        """The peers that want to train, and do not yet."""
        since_s = now_s() - self._hold_s
        return [peer for peer, at_s in self._asked_s.items() if at_s >= since_s and peer not in self._run.trainers]

    def changes(self) -> tuple[list[PeerId], list[PeerId]]:
        """Return the peers that begin to train with the next record, and those that end."""
        run = self._run
        if not run.manifest.open_to_trainers:
            return [], []
        return trainer_changes(run.trainers, lead=run.manifest.lead, going=self._going, coming=self.waiting)

    def let_in(self, record: Record) -> None:
        """Enter a record that is decided and applied."""
        for peer in record.enlisted:
            self._asked_s.pop(peer, None)
            self._heard_s[peer] = now_s()
            self._events.note("joined", peer=peer, step=self._run.version, reason="it trains")
        for peer in record.retired:
            self._heard_s.pop(peer, None)
            reason = self._going.pop(peer, _SILENT)
            self._events.note("left", peer=peer, step=self._run.version, reason=f"it trains no more: {reason}")

    async def look_after(self) -> None:
        """Find trainers that are gone, batch under way or not, so that the others' data are not shared with them."""
        own = {self._transport.peer_id, self._run.manifest.lead}
        while self._run.manifest.open_to_trainers:
            await asyncio.sleep(self._silence_s)
            since_s = now_s() - self._silence_s
            late = [one for one in self._run.trainers if one not in own and self._heard_s.get(one, 0.0) <= since_s]
            there = await alive_among(self._transport, late, timeout=self._silence_s)
            for trainer in late:
                if trainer in there:
                    self.hear(trainer)
                elif trainer in self._run.trainers and self._heard_s.get(trainer, 0.0) <= since_s:
                    self._going.setdefault(trainer, _SILENT)

    # ------------------------------------------------------------------ the trainers' calls

    async def _handle_enlist(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, EnlistRequest)
        self._changes.check()
        self._check_may_train(caller, request)
        if request.generation is not None:
            self._run.check_generation(request.generation)
        if caller in self._run.trainers:
            self._going.pop(caller, None)
            self.hear(caller)
            if request.generation is None:
                await self._lease_expiry.give_up(self._books.open, caller, _ANEW)
        else:
            self._asked_s[caller] = now_s()
        trains = await self._changes.until(lambda: caller in self._run.trainers and self._epoch() is not None)
        epoch = self._epoch()
        return encode(
            EnlistReply(view=self._run.view(), epoch=epoch) if trains and epoch is not None else EnlistReply()
        )

    def _check_may_train(self, caller: PeerId, request: EnlistRequest) -> None:
        manifest = self._run.manifest
        if request.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"`protocol_version` is {request.protocol_version} there and {PROTOCOL_VERSION} in the run. "
                "Install the same version of lightning_swarm on all peers."
            )
        check_open(manifest)
        if caller not in self._run.trainers and len({*self._run.trainers, *self.waiting} - {caller}) >= MAX_TRAINERS:
            raise ConfigError(
                f"a run has at most {MAX_TRAINERS} trainers, and {manifest.run_id!r} has as many. Serve it, with "
                "`role='server'`, or come back when one has left."
            )

    async def _handle_retire(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, Quit)
        manifest = self._run.manifest
        if caller == manifest.lead:
            raise ProtocolError("the lead does not retire: it ends the run by dismissing the others")
        check_open(manifest)
        self._run.check_trainer(caller)
        self._going[caller] = request.reason
        await self._lease_expiry.give_up(self._books.open, caller, "it retires")
        retired = await self._changes.until(lambda: caller not in self._run.trainers)
        return encode(RetireReply(retired=retired))
