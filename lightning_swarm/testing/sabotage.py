"""Does what a `FaultPlan` says: to messages here, to peers by way of `Victims`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from lightning_swarm.core.errors import Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.network.rpc import Responder
from lightning_swarm.testing.faults import Fault, FaultPlan, Kind, MessagePoint, Side, read_passing

_log = logging.getLogger(__name__)

_TO_PEERS: Final[Sequence[Kind]] = ("kill", "freeze", "partition")
_TO_MESSAGES: Final[Sequence[Kind]] = ("delay", "drop", "duplicate")
_TO_BYTES: Final[Sequence[Kind]] = ("corrupt",)


class Victims(Protocol):
    """The peers that faults strike."""

    def is_live(self, peer: PeerId) -> bool:
        """Whether it was not killed."""
        ...

    def hit(self, fault: Fault, peer: PeerId) -> None:
        """Kill it, freeze it, or part it from others."""
        ...


class Saboteur:
    """Sits at exchanges, so that a plan's faults happen to them. See `Tap`.

    Args:
        plan: What shall happen.
        victims: To whom.
        struck: Told of each fault that strikes, before it does.
    """

    def __init__(
        self, plan: FaultPlan, victims: Victims, *, struck: Callable[[Fault, MessagePoint], None] = lambda *_: None
    ) -> None:
        self._plan = plan
        self._victims = victims
        self._struck = struck
        self._again: set[asyncio.Task[Message]] = set()  # requests that come once more

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder) -> Responder:
        """See `Tap`."""

        async def tapped(message: Message) -> Message:
            def passing(side: Side, answer: bytes | None = None) -> MessagePoint:
                return self._read(caller, peer, head.method, message.body, side=side, answer=answer)

            duplicates = await self._strike(passing("request"))
            answer = await respond(message)
            for fault in duplicates:
                self._come_again(fault, peer, respond, message)
            await self._strike(passing("answer", answer.body))
            return answer

        return tapped

    async def arrived(self, caller: PeerId, peer: PeerId, method: str, request: bytes, answer: bytes) -> None:
        """See `Tap`."""
        passing = self._read(caller, peer, method, request, side="arrived", answer=answer)
        if passing.phases:
            await self._strike(passing, has_come=True)

    def damages(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, *, answer: bytes | None, is_answer: bool
    ) -> bool:
        """See `WireTap`."""
        side: Side = "answer" if is_answer else "request"
        passing = self._read(caller, peer, method, request, side=side, answer=answer)
        return bool(self._note(self._plan.strike(passing, _TO_BYTES), passing))

    def _read(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, *, side: Side, answer: bytes | None
    ) -> MessagePoint:
        return read_passing(caller, peer, method, request, side=side, answer=answer)

    async def _strike(self, passing: MessagePoint, *, has_come: bool = False) -> list[Fault]:
        """Do what is planned for a message; returns the faults that have its request come again.

        Args:
            passing: The message.
            has_come: The answer is there: who gave it may die, and it counts.
        """
        if hits := self._note(self._plan.strike(passing, _TO_PEERS), passing):
            for fault in hits:
                self._victims.hit(fault, fault.peer or passing.peer)
            await asyncio.sleep(0)  # what is done in a killed peer has been cancelled
            if not self._victims.is_live(here := passing.caller if has_come else passing.peer):
                raise Unreachable(f"{here} was killed")
        if passing.caller == passing.peer:
            return []  # on no wire
        duplicates = []
        for fault in self._note(self._plan.strike(passing, _TO_MESSAGES), passing):
            if fault.kind == "delay":
                await asyncio.sleep(fault.for_s)
            elif fault.kind == "drop":
                await asyncio.get_running_loop().create_future()  # until who asked hangs up
            else:
                duplicates.append(fault)
        return duplicates

    def _come_again(self, fault: Fault, peer: PeerId, respond: Responder, message: Message) -> None:
        async def again() -> Message:
            await asyncio.sleep(fault.for_s)
            return await respond(message) if self._victims.is_live(peer) else Message()

        task = asyncio.get_running_loop().create_task(again())
        self._again.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Message]) -> None:
        self._again.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("A request that came once more was refused: %s", error)

    def _note(self, faults: Sequence[Fault], passing: MessagePoint) -> Sequence[Fault]:
        for fault in faults:
            _log.info("%s: %s", fault, passing)
            self._struck(fault, passing)
        return faults


class InMemoryVictims:
    """The peers of an in-memory network.

    Args:
        network: Of them.
        killed: Told of each that was killed.
    """

    def __init__(self, network: MemoryNetwork, killed: Callable[[PeerId], None]) -> None:
        self._network = network
        self._killed = killed

    def is_live(self, peer: PeerId) -> bool:
        """See `Victims`."""
        return self._network.is_live(peer)

    def hit(self, fault: Fault, peer: PeerId) -> None:
        """See `Victims`."""
        later = asyncio.get_running_loop().call_later
        if fault.kind == "partition":
            for one, other in itertools.combinations(fault.groups, 2):
                for pair in itertools.product(sorted(one), sorted(other)):
                    self._network.cut(*pair)
                    later(fault.for_s, self._network.mend, *pair)
        elif fault.kind == "freeze":
            self._network.freeze(peer)
            later(fault.for_s, self._network.thaw, peer)
        elif self._network.is_live(peer):
            self._network.kill(peer)
            self._killed(peer)


def sabotage(
    network: MemoryNetwork,
    plan: FaultPlan,
    *,
    killed: Callable[[PeerId], None] = lambda _: None,
    struck: Callable[[Fault, MessagePoint], None] = lambda *_: None,
) -> None:
    """Have a plan's faults happen on an in-memory network.

    Args:
        network: Which.
        plan: What shall happen.
        killed: Told of each peer that was killed: the tasks of what was its process are still to be ended.
        struck: Told of each fault that strikes, before it does.
    """
    network.be_tapped(Saboteur(plan, InMemoryVictims(network, killed), struck=struck))
