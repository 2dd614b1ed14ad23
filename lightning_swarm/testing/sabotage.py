"""Does what a `FaultPlan` says: to the peers and messages of an in-memory network."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

from lightning_swarm.errors import Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.exchange import Responder
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.testing.faults import Fault, FaultPlan, Kind
from lightning_swarm.testing.phases import Event, Side, read_event

_log = logging.getLogger(__name__)

_TO_PEERS: Final[Sequence[Kind]] = ("kill", "freeze", "partition")
_TO_MESSAGES: Final[Sequence[Kind]] = ("delay", "drop", "duplicate")
_TO_BYTES: Final[Sequence[Kind]] = ("corrupt",)


class Saboteur:
    """The tap of a network on which a plan's faults happen.

    Args:
        network: Gets it as its tap.
        plan: What shall happen.
        killed: Told of each peer that was killed.
    """

    def __init__(
        self, network: MemoryNetwork, plan: FaultPlan, *, killed: Callable[[PeerId], None] = lambda _: None
    ) -> None:
        self._network = network
        self._plan = plan
        self._killed = killed
        self._again: set[asyncio.Task[Message]] = set()  # requests that come once more
        network.tap = self

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder) -> Responder:
        """See `Tap`."""

        async def tapped(message: Message) -> Message:
            def event(side: Side, answer: bytes | None = None) -> Event:
                return read_event(caller, peer, head.method, message.body, side=side, answer=answer)

            duplicates = await self._strike(event("request"))
            answer = await respond(message)
            for fault in duplicates:
                self._come_again(fault, peer, respond, message)
            await self._strike(event("answer", answer.body))
            return answer

        return tapped

    async def arrived(self, caller: PeerId, peer: PeerId, method: str, request: bytes, answer: bytes) -> None:
        """See `Tap`."""
        event = read_event(caller, peer, method, request, side="arrived", answer=answer)
        if event.phase is not None:
            await self._strike(event)

    def damages(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, *, answer: bytes | None, is_answer: bool
    ) -> bool:
        """See `Tap`."""
        event = read_event(caller, peer, method, request, side="answer" if is_answer else "request", answer=answer)
        return bool(self._note(self._plan.strike(event, _TO_BYTES), event))

    async def _strike(self, event: Event) -> list[Fault]:
        """Do what is planned for an event; returns the faults that have its request come again."""
        if hits := self._note(self._plan.strike(event, _TO_PEERS), event):
            for fault in hits:
                self._hit(fault, event)
            await asyncio.sleep(0)  # what is done in a killed peer has been cancelled
            if not self._network.is_live(event.peer):
                raise Unreachable(f"{event.peer} was killed")
        if event.caller == event.peer:
            return []  # on no wire
        duplicates = []
        for fault in self._note(self._plan.strike(event, _TO_MESSAGES), event):
            if fault.kind == "delay":
                await asyncio.sleep(fault.for_s)
            elif fault.kind == "drop":
                await asyncio.get_running_loop().create_future()  # until who asked hangs up
            else:
                duplicates.append(fault)
        return duplicates

    def _hit(self, fault: Fault, event: Event) -> None:
        loop = asyncio.get_running_loop()
        peer = fault.peer or event.peer
        if fault.kind == "partition":
            pairs = [
                pair
                for one, other in itertools.combinations(fault.groups, 2)
                for pair in itertools.product(sorted(one), sorted(other))
            ]
            for pair in pairs:
                self._network.cut(*pair)
                loop.call_later(fault.for_s, self._network.mend, *pair)
        elif fault.kind == "freeze":
            self._network.freeze(peer)
            loop.call_later(fault.for_s, self._network.thaw, peer)
        elif self._network.is_live(peer):
            self._network.kill(peer)
            self._killed(peer)

    def _come_again(self, fault: Fault, peer: PeerId, respond: Responder, message: Message) -> None:
        async def again() -> Message:
            await asyncio.sleep(fault.for_s)
            return await respond(message) if self._network.is_live(peer) else Message()

        task = asyncio.get_running_loop().create_task(again())
        self._again.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Message]) -> None:
        self._again.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("A request that came once more was refused: %s", error)

    def _note(self, faults: Sequence[Fault], event: Event) -> Sequence[Fault]:
        for fault in faults:
            _log.info("%s: %s", fault, event)
        return faults
