"""Carries out a `FaultPlan`: applies faults of messages, and strikes peers.

Peers of an in-memory network are struck through `InMemoryVictims`. A real process strikes itself, by signals, through
`_OwnProcess`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import lightning.pytorch as pl
from typing_extensions import override

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import ConfigError, Unreachable
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.network.rpc import Responder
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.strategy.strategy import SwarmStrategy
from lightning_swarm.testing.faults import Fault, FaultPlan, Kind, MessagePoint, Side, read_message

_log = logging.getLogger(__name__)

_PEER_FAULTS: Final[Sequence[Kind]] = ("kill", "freeze", "partition")
_MESSAGE_FAULTS: Final[Sequence[Kind]] = ("delay", "drop", "duplicate")
_BYTE_FAULTS: Final[Sequence[Kind]] = ("corrupt",)


class Saboteur:
    """Taps exchanges and applies a plan's faults to them. Implements `network.rpc.Tap` and `network.memory.WireTap`."""

    def __init__(
        self,
        plan: FaultPlan,
        victims: InMemoryVictims | _OwnProcess,  # the peers that faults strike
        *,
        before_strike: Callable[[Fault, MessagePoint], None] = lambda *_: None,
        names: Mapping[PeerId, PeerId] = MappingProxyType({}),  # peer id -> name in the plan, where they differ
    ) -> None:
        self._plan = plan
        self._victims = victims
        self._before_strike = before_strike
        self._names = names
        self._duplicates: set[asyncio.Task[Message]] = set()  # tasks that deliver requests once more

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder) -> Responder:
        """Return a function that answers a request as `respond` does, and applies the faults planned for it."""

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
        """Apply the faults planned for an answer that has arrived at `caller`."""
        message = self._read(caller, peer, method, request, side="arrived", answer=answer)
        if message.phases:
            await self._strike(message, has_arrived=True)

    @property
    def may_damage(self) -> bool:
        """Return whether a fault may still damage a message's bytes."""
        return any(fault.kind in _BYTE_FAULTS and not fault.is_over for fault in self._plan.faults)

    def damages(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, *, answer: bytes | None, is_answer: bool
    ) -> bool:
        """Return whether a planned fault flips one bit of this message, and count its strike."""
        side: Side = "answer" if is_answer else "request"
        message = self._read(caller, peer, method, request, side=side, answer=answer)
        return bool(self._report(self._plan.strike(message, _BYTE_FAULTS), message))

    def _read(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, *, side: Side, answer: bytes | None
    ) -> MessagePoint:
        caller, peer = self._names.get(caller, caller), self._names.get(peer, peer)
        return read_message(caller, peer, method, request, side=side, answer=answer)

    async def _strike(self, message: MessagePoint, *, has_arrived: bool = False) -> list[Fault]:
        """Apply the faults planned for a message, and return its `duplicate` faults.

        With `has_arrived` the answer is at the caller already, so it counts even if the answering peer is killed now.
        """
        if faults := self._report(self._plan.strike(message, _PEER_FAULTS), message):
            for fault in faults:
                self._victims.strike(fault, fault.peer or message.peer)
            await asyncio.sleep(0)  # let the cancelled tasks of a killed peer end
            running = message.caller if has_arrived else message.peer  # the peer whose task this is
            if not self._victims.is_live(running):
                raise Unreachable(f"{running} was killed")
        if message.caller == message.peer:
            return []  # a peer's message to itself is not sent over a wire
        duplicates = []
        for fault in self._report(self._plan.strike(message, _MESSAGE_FAULTS), message):
            if fault.kind == "delay":
                await asyncio.sleep(fault.for_s)
            elif fault.kind == "drop":
                await asyncio.get_running_loop().create_future()  # never done: waits until the caller gives up
            else:
                duplicates.append(fault)
        return duplicates

    def _repeat(self, fault: Fault, peer: PeerId, respond: Responder, message: Message) -> None:
        """Deliver a request once more, after the fault's delay, unless the peer is dead by then."""

        async def deliver() -> Message:
            await asyncio.sleep(fault.for_s)
            return await respond(message) if self._victims.is_live(peer) else Message()

        task = asyncio.get_running_loop().create_task(deliver())
        self._duplicates.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Message]) -> None:
        self._duplicates.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("A repeated request was refused: %s", error)

    def _report(self, faults: Sequence[Fault], message: MessagePoint) -> Sequence[Fault]:
        """Log and report faults that are about to strike, and return them."""
        for fault in faults:
            _log.info("%s: %s", fault, message)
            self._before_strike(fault, message)
        return faults


# ------------------------------------------------------------------ an in-memory network


@dataclass(frozen=True)
class InMemoryVictims:
    """The peers of an in-memory network."""

    network: MemoryNetwork
    killed: Callable[[PeerId], None]  # called after a peer was killed

    def is_live(self, peer: PeerId) -> bool:
        """Return False once the peer was killed."""
        return self.network.is_live(peer)

    def strike(self, fault: Fault, peer: PeerId) -> None:
        """Kill or freeze a peer, or partition the network."""
        later = asyncio.get_running_loop().call_later
        if fault.kind == "partition":
            for group_a, group_b in itertools.combinations(fault.groups, 2):
                for pair in itertools.product(sorted(group_a), sorted(group_b)):
                    self.network.cut(*pair)
                    later(fault.for_s, self.network.mend, *pair)
        elif fault.kind == "freeze":
            self.network.freeze(peer)
            later(fault.for_s, self.network.thaw, peer)
        elif self.network.is_live(peer):
            self.network.kill(peer)
            self.killed(peer)


def sabotage(network: MemoryNetwork, plan: FaultPlan, *, killed: Callable[[PeerId], None] = lambda _: None) -> None:
    """Carry out a plan's faults on an in-memory network; `killed` must end the tasks of a killed peer."""
    network.attach_tap(Saboteur(plan, InMemoryVictims(network, killed)))


# ------------------------------------------------------------------ real processes


class _OwnProcess:
    """The peer of this process."""

    def is_live(self, peer: PeerId) -> bool:
        return True

    def strike(self, fault: Fault, peer: PeerId) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            return
        # A stopped process cannot wake itself, so another process sends it SIGCONT.
        subprocess.Popen(["sh", "-c", f"sleep {fault.for_s}; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def strike_in_process(transport: Transport, plan: FaultPlan, name: str, fired: Path) -> None:
    """Carry out the faults of a swarm's plan that strike this process, which the plan calls `name`.

    Each fault appends a line to the file `fired` before it strikes, because a killed process cannot report it.
    """
    for fault in plan.faults:
        if (
            fault.peer is None
            or fault.kind in ("corrupt", "partition")
            or fault.when.get("of", fault.peer) != fault.peer
        ):
            raise ConfigError(
                "in real processes, a fault must name the peer that it strikes, in a phase of that peer (`of`), and "
                f"be kill, freeze, delay, drop or duplicate; got {fault}. Use the in-memory network for other faults."
            )

    def write(fault: Fault, _: MessagePoint) -> None:
        with fired.open("a") as file:
            print(fault, file=file)

    own_plan = FaultPlan()
    own_plan.faults = [fault for fault in plan.faults if fault.peer == name]
    assert isinstance(transport, BaseTransport)
    transport.tap = Saboteur(own_plan, _OwnProcess(), before_strike=write, names={transport.peer_id: PeerId(name)})


class FaultySwarmStrategy(SwarmStrategy):
    """`SwarmStrategy` whose processes are struck by planned faults.

    Every process runs the script, and so makes this strategy with the same plan.

    Args:
        faults: Faults for the peers that the launcher starts, ``peer-0`` (the trainer's) to ``peer-<devices - 1>``.
        fired: A file to which each process appends a line before a fault strikes, because a killed process cannot
            report it.
        name: This process's name in the plan, if no launcher numbers it.
        modify_peer: Changes this process's peer before it serves; called with the peer and its name in the plan. The
            attributes of a peer are private and may change in any version.
        kwargs: Arguments of `SwarmStrategy`.
    """

    def __init__(
        self,
        *,
        faults: FaultPlan,
        fired: Path,
        name: str | None = None,
        modify_peer: Callable[[Peer, PeerId], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._faults = faults
        self._fired = fired
        self._name = name
        self._modify_peer = modify_peer

    @override
    def serve(
        self,
        trainer: pl.Trainer,
        datamodule: pl.LightningDataModule | None,
        call_arguments: Mapping[str, Any] | None = None,
    ) -> str | None:
        self._strike()
        return super().serve(trainer, datamodule, call_arguments)

    @override
    def start_run(self, trainer: pl.Trainer, model: PeerModel, selection: Selection | None) -> Session:
        self._strike()
        return super().start_run(trainer, model, selection)

    def _strike(self) -> None:
        assert self.peer is not None
        name = self._name or f"peer-{self.local_rank}"
        strike_in_process(self.peer.transport, self._faults, name, self._fired)
        if self._modify_peer is not None:
            self._modify_peer(self.peer, PeerId(name))
            self._modify_peer = None  # after a rollback, the run starts with the same peer
