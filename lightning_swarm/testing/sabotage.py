"""Carries out a `FaultPlan`: on messages directly, on peers by way of `Victims`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from lightning_swarm.core.errors import Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.network.rpc import Responder
from lightning_swarm.testing.faults import Fault, FaultPlan, Kind, MessagePoint, Side, read_message

_log = logging.getLogger(__name__)

_PEER_FAULTS: Final[Sequence[Kind]] = ("kill", "freeze", "partition")
_MESSAGE_FAULTS: Final[Sequence[Kind]] = ("delay", "drop", "duplicate")
_BYTE_FAULTS: Final[Sequence[Kind]] = ("corrupt",)


class Victims(Protocol):
    """The peers that faults strike."""

    def is_live(self, peer: PeerId) -> bool:
        """Return False once the peer was killed."""
        ...

    def hit(self, fault: Fault, peer: PeerId) -> None:
        """Kill a peer, freeze it, or cut it off from others."""
        ...


class Saboteur:
    """Taps exchanges and has a plan's faults happen to them. See `Tap`."""

    def __init__(
        self,
        plan: FaultPlan,
        victims: Victims,
        *,
        struck: Callable[[Fault, MessagePoint], None] = lambda *_: None,  # called before a fault strikes
        names: Mapping[PeerId, PeerId] = MappingProxyType({}),  # of peers in the plan, if not their ids
    ) -> None:
        self._plan = plan
        self._victims = victims
        self._struck = struck
        self._names = names
        self._duplicates: set[asyncio.Task[Message]] = set()

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder) -> Responder:
        """See `Tap`."""

        async def tapped(message: Message) -> Message:
            def point(side: Side, answer: bytes | None = None) -> MessagePoint:
                return self._read(caller, peer, head.method, message.body, side=side, answer=answer)

            duplicates = await self._strike(point("request"))
            answer = await respond(message)
            for fault in duplicates:
                self._repeat(fault, peer, respond, message)
            await self._strike(point("answer", answer.body))
            return answer

        return tapped

    async def arrived(self, caller: PeerId, peer: PeerId, method: str, request: bytes, answer: bytes) -> None:
        """See `Tap`."""
        message = self._read(caller, peer, method, request, side="arrived", answer=answer)
        if message.phases:
            await self._strike(message, has_come=True)

    def damages(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, *, answer: bytes | None, is_answer: bool
    ) -> bool:
        """See `WireTap`."""
        side: Side = "answer" if is_answer else "request"
        message = self._read(caller, peer, method, request, side=side, answer=answer)
        return bool(self._announced(self._plan.strike(message, _BYTE_FAULTS), message))

    def _read(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, *, side: Side, answer: bytes | None
    ) -> MessagePoint:
        caller, peer = self._names.get(caller, caller), self._names.get(peer, peer)
        return read_message(caller, peer, method, request, side=side, answer=answer)

    async def _strike(self, message: MessagePoint, *, has_come: bool = False) -> list[Fault]:
        """Carry out what is planned for a message, and return the faults that deliver its request again.

        With `has_come` the answer has arrived: the peer that gave it may die, and the answer still counts.
        """
        if hits := self._announced(self._plan.strike(message, _PEER_FAULTS), message):
            for fault in hits:
                self._victims.hit(fault, fault.peer or message.peer)
            await asyncio.sleep(0)  # a killed peer's tasks have been cancelled
            if not self._victims.is_live(here := message.caller if has_come else message.peer):
                raise Unreachable(f"{here} was killed")
        if message.caller == message.peer:
            return []  # on no wire
        duplicates = []
        for fault in self._announced(self._plan.strike(message, _MESSAGE_FAULTS), message):
            if fault.kind == "delay":
                await asyncio.sleep(fault.for_s)
            elif fault.kind == "drop":
                await asyncio.get_running_loop().create_future()  # until the caller hangs up
            else:
                duplicates.append(fault)
        return duplicates

    def _repeat(self, fault: Fault, peer: PeerId, respond: Responder, message: Message) -> None:
        async def deliver() -> Message:
            await asyncio.sleep(fault.for_s)
            return await respond(message) if self._victims.is_live(peer) else Message()

        task = asyncio.get_running_loop().create_task(deliver())
        self._duplicates.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Message]) -> None:
        self._duplicates.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("A request that came once more was refused: %s", error)

    def _announced(self, faults: Sequence[Fault], message: MessagePoint) -> Sequence[Fault]:
        for fault in faults:
            _log.info("%s: %s", fault, message)
            self._struck(fault, message)
        return faults


@dataclass(frozen=True)
class InMemoryVictims:
    """The peers of an in-memory network."""

    network: MemoryNetwork
    killed: Callable[[PeerId], None]  # called after a peer was killed

    def is_live(self, peer: PeerId) -> bool:
        """See `Victims`."""
        return self.network.is_live(peer)

    def hit(self, fault: Fault, peer: PeerId) -> None:
        """See `Victims`."""
        later = asyncio.get_running_loop().call_later
        if fault.kind == "partition":
            for group, other in itertools.combinations(fault.groups, 2):
                for pair in itertools.product(sorted(group), sorted(other)):
                    self.network.cut(*pair)
                    later(fault.for_s, self.network.mend, *pair)
        elif fault.kind == "freeze":
            self.network.freeze(peer)
            later(fault.for_s, self.network.thaw, peer)
        elif self.network.is_live(peer):
            self.network.kill(peer)
            self.killed(peer)


def sabotage(
    network: MemoryNetwork,
    plan: FaultPlan,
    *,
    killed: Callable[[PeerId], None] = lambda _: None,
    struck: Callable[[Fault, MessagePoint], None] = lambda *_: None,
) -> None:
    """Carry out a plan's faults on an in-memory network.

    `killed` is called for each peer that was killed: the tasks of what was its process are still to be ended. `struck`
    is called for each fault before it strikes.
    """
    network.attach_tap(Saboteur(plan, InMemoryVictims(network, killed), struck=struck))
