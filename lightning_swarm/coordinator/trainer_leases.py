"""Completes or strikes the batches of a trainer that is gone.

Trainers that hold a place in the open step are asked now and then whether they are there. A batch whose backward
calls were all accepted is *armed*: its servers have all that they need, so it is only waited for. Any other batch is
struck and its samples are free for others; the servers add nothing of it any more, and its trainer, if it comes back,
runs it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import PeerError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import first_trained
from lightning_swarm.protocol.messages.step import FenceRequest, ReceiptsReply, ReceiptsRequest
from lightning_swarm.protocol.messages.wire import decode, encode, from_bitmap
from lightning_swarm.protocol.methods import FENCE, RECEIPTS

_log = logging.getLogger(__name__)

_FIRST_LOOK_S: Final = 0.1
_LONGEST_LOOK_S: Final = 2.0


class LeaseExpiry:
    """Looks after batches that are under way, and does without those of trainers that are gone."""

    def __init__(
        self,
        context: CoordinatorContext,
        *,
        on_change: Callable[[OpenStep], Awaitable[None]],  # after a batch was struck, or completed without its trainer
        owes: Callable[[PeerId], bool],  # whether others wait for a batch that a trainer would bring
    ) -> None:
        self._transport, self._run, self._books = context.transport, context.run, context.step_state
        self._events = context.events
        self._spawn = context.spawn
        self._on_change = on_change
        self._owes = owes
        self._interval_s = context.limits.silence_timeout / 5  # for which a trainer that has a place is left alone
        self._timeout = context.limits.call_timeout  # for which servers may take to complete a batch
        self._watched: set[PeerId] = set()
        self.gone: set[PeerId] = set()  # trainers that did not answer, and were not heard of since
        self._completing: set[tuple[int, int]] = set()  # steps and places of armed batches

    def enter_generation(self) -> None:
        """Begin with the next run generation; the tasks of the old one are over."""
        self._watched.clear()
        self.gone.clear()
        self._completing.clear()

    def watch(self, trainer: PeerId) -> None:
        """Watch over a trainer that has a place in the open step, or should have one."""
        if trainer not in self._watched:
            self._watched.add(trainer)
            self._spawn(self._watch(trainer))

    async def _watch(self, trainer: PeerId) -> None:
        there = True
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                if not self._books.open.under_way(trainer) and not self._owes(trainer):
                    return
                if len(self._run.trainers) < 2:
                    continue  # nobody would take its places, so everything waits for it
                try:
                    await self._transport.ping(trainer)
                except PeerError as error:
                    if there:  # else it is gone still, while servers complete what it left behind
                        self._events.note("gone", peer=trainer, step=self._books.open.step, reason=str(error))
                    there = False
                    self.gone.add(trainer)
                    await self.give_up(self._books.open, trainer, str(error))
                    await self._on_change(self._books.open)  # others may bring what it owes
                else:
                    there = True
                    self.gone.discard(trainer)
        finally:
            self._watched.discard(trainer)

    async def _is_whole(self) -> bool:
        """Return whether a server of every stage answers: else batches wait for that, and not for their trainers."""
        there = await alive_among(self._transport, self._run.servers)
        return all(any(member.peer_id in there for member in roster) for roster in self._run.rosters)

    async def check_overdue(self, step: OpenStep) -> None:
        """Do without batches that a closing step waits for for too long."""
        since_s, timeout = self._books.closing_s, self._timeout
        if step.closing and not step.ready and since_s is not None and now_s() >= since_s + timeout:
            self._books.closing_s = now_s()
            for trainer in step.missing() if await self._is_whole() else ():
                await self.give_up(
                    step,
                    trainer,
                    f"it was not through {timeout:g} s after its step was full. Raise `Limits.call_timeout` if "
                    "batches take longer.",
                )

    async def give_up(self, step: OpenStep, trainer: PeerId, reason: str) -> None:
        """Wait no more for a trainer: its armed batches are completed without it, the others struck."""
        under_way = step.under_way(trainer)
        for first, receipts in under_way.items():
            if receipts is not None and (step.step, first) not in self._completing:
                self._completing.add((step.step, first))
                self._spawn(self._complete(step, first, receipts, trainer))
        await self.strike(step, [first for first, receipts in under_way.items() if receipts is None], reason)

    async def strike(self, step: OpenStep, batches: Collection[int], reason: str) -> None:
        """Let a step's batches, by their places, count nowhere."""
        struck = step.strike(batches)
        for first, trainer in struck.items():
            self._events.note("strike", peer=trainer, step=step.step, reason=f"its batch at {first}: {reason}")
        if struck:
            self.fence(step, list(struck))
            await self._on_change(step)

    def fence(self, step: OpenStep, batches: Sequence[int]) -> None:
        """Have servers give up what is under way of batches that were struck. Nothing waits for it."""
        self._spawn(self._fence(step, batches))

    async def _fence(self, step: OpenStep, batches: Sequence[int]) -> None:
        generation = self._run.manifest.generation
        request = encode(FenceRequest(generation=generation, step=step.step, attempt=0, batches=list(batches)))

        async def fence(peer: PeerId) -> None:
            try:
                await self._transport.call(peer, FENCE, request, timeout=self._timeout)
            except SwarmError as error:  # what it adds no closing will name
                _log.info("%s does not give up the batches at %s: %s", peer, batches, error)

        await gather(fence(peer) for peer in self._run.servers)

    async def _complete(self, step: OpenStep, first: int, receipts: Sequence[Receipt], trainer: PeerId) -> None:
        try:
            missing = await self._await_receipts(step, first, receipts, trainer)
            if missing is not None:
                await self.strike(step, [first], f"{trainer} is gone, and {missing}")
            elif step.complete_armed(first):
                await self._on_change(step)
        finally:
            self._completing.discard((step.step, first))

    async def _await_receipts(
        self, step: OpenStep, first: int, receipts: Sequence[Receipt], trainer: PeerId
    ) -> str | None:
        """Wait until all stages have the receipts, or the trainer came back: None. Else return what is missing."""
        pause_s = _FIRST_LOOK_S
        deadline = now_s() + self._timeout
        while first in step.under_way(trainer):
            held, pending = await self._look(step, receipts)
            first_stage = first_trained(self._books.selection(self._run), self._run.manifest.stages)
            missing = {
                (index, receipt)
                for index, stage in enumerate(self._run.manifest.stages)
                for receipt in receipts
                if index >= first_stage and not stage.on_trainers
            } - held
            if not missing:
                return None
            if missing - pending:
                return f"{len(missing - pending)} gradients of what it left behind are nowhere"
            if now_s() >= deadline:
                return f"what it left behind was not completed in {self._timeout:g} s"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        return None

    async def _look(
        self, step: OpenStep, receipts: Sequence[Receipt]
    ) -> tuple[set[tuple[int, Receipt]], set[tuple[int, Receipt]]]:
        """Ask, by stage, which microbatches are in a sum, and of which the backward is under way."""
        generation = self._run.manifest.generation
        request = encode(ReceiptsRequest(generation=generation, step=step.step, attempt=0, receipts=list(receipts)))
        held, pending = set[tuple[int, Receipt]](), set[tuple[int, Receipt]]()

        async def look(peer: PeerId) -> None:
            try:
                reply = decode(
                    await self._transport.call(peer, RECEIPTS, request, timeout=self._timeout), ReceiptsReply
                )
                for stage in reply.stages:
                    for found, bitmap in ((held, stage.held), (pending, stage.pending)):
                        flags = from_bitmap(bitmap, len(receipts))
                        found |= {(stage.stage_index, one) for one, flag in zip(receipts, flags, strict=True) if flag}
            except SwarmError as error:
                _log.info("%s does not say what it holds of step %d: %s", peer, step.step, error)

        await gather(look(peer) for peer in self._run.servers)
        return held, pending
