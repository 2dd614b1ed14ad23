"""What all passages of a trainer share: the network, the routers, what went wrong lately, the copies."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from lightning_swarm.client.pipeline.replay_buffer import ReplayBuffer
from lightning_swarm.client.pipeline.router import PeerCharge, StageRouter, deadline_s
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import NotEnlisted, PeerError, SwarmError, Unreachable
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol.events import EventLog, OutageWait
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Candidate, Record
from lightning_swarm.protocol.messages.wire import WireMessage, encode
from lightning_swarm.protocol.tickets import TicketStore

_log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_CONNECT_AGAIN_S = 300.0  # rarely: a record may be held up by it
_ACCEPT_TIMEOUT_S = 10.0
_CHECK_TIMEOUT_S = 10.0
_SLOWEST_BYTES_PER_S = 100e3
_DEFAULT_COPIES_BYTES = 4 << 30


async def _nothing() -> None:
    """Nobody knows of a run."""


@dataclass
class PipelineContext:
    """What passages share: the network and the routers, one for each stage.

    Args:
        transport: The trainer's network.
        tickets: Likewise.
        routers: Of each stage.
        timeout: Most seconds for a call, its input included; and for how long a passage tries to get through.
        events: Of the trainer.
        copies: Of what went through in the open step.
        stage_timeout: Seconds that passages wait for a stage of which nobody is there, if that is longer.
        check: Asked now and then meanwhile; raises what the run broke off with, if it did.

    Attributes:
        count: What went another way than straight on.
        unreached: Servers that no microbatch goes to from here while others of their stage are reached; when each was
            tried last.
        num_under_way: Passages.
    """

    transport: Transport
    tickets: TicketStore
    routers: Sequence[StageRouter]
    timeout: float
    events: EventLog
    copies: ReplayBuffer = field(default_factory=lambda: ReplayBuffer(_DEFAULT_COPIES_BYTES))
    stage_timeout: float = 0.0
    check: Callable[[], Awaitable[None]] = _nothing
    count: Counter[str] = field(default_factory=Counter)
    unreached: dict[PeerId, tuple[Candidate, float]] = field(default_factory=dict)
    num_under_way: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)  # some passage
    _silent: dict[PeerId, PeerError] = field(default_factory=dict)  # who could not be reached the last time, and why

    def __post_init__(self) -> None:
        self._vigil = OutageWait(self.events, stage_timeout=self.stage_timeout)

    async def follow(self, record: Record, members: Sequence[Sequence[Member]]) -> None:
        """From now on route as the record's roster says. Who joined is tried next, if it can be reached from here.

        A trainer that passes over records finds in the roster who joined by them. The lead passes over none; one that
        serves, too, met all of them before they came in; of others `TrainerRole` sees to it.
        """
        await self.copies.release(record.step)
        rosters = [[member.peer_id for member in roster] for roster in members]
        self._hear(rosters, step=record.step + 1)
        again = self._due_again(rosters)
        await gather(
            self._meet(one)
            for peer, one in (again | {one.member.peer_id: one for one in record.newcomers}).items()
            if peer != self.transport.peer_id
        )
        present = {peer for roster in rosters for peer in roster}
        self._silent = {peer: error for peer, error in self._silent.items() if peer in present}
        for router, roster in zip(self.routers, rosters, strict=False):  # none leads to a stage on trainers
            router.set_peers([peer for peer in roster if peer not in self.unreached] or roster)
        self._ended.set()

    def _hear(self, rosters: Sequence[Sequence[PeerId]], *, step: int) -> None:
        """Who joined and who is there no more. The coordinator notes it, which may be another peer."""
        before = {*self.unreached, *(peer for router in self.routers for peer in router.peers)}
        held = list(zip(range(len(self.routers)), rosters, strict=False))
        for stage, roster in held:
            for peer in sorted(set(roster) - before):
                self.events.hear("joined", peer=peer, stage=stage, step=step)
        for peer in sorted(before.difference(*(roster for _, roster in held))):
            self.events.hear("left", peer=peer, step=step)

    def _due_again(self, rosters: Sequence[Sequence[PeerId]]) -> dict[PeerId, Candidate]:
        """Whom to try to reach again: now and then each of them, and at once those whose stage has nobody else."""
        present = {peer for roster in rosters for peer in roster}
        self.unreached = {peer: tried for peer, tried in self.unreached.items() if peer in present}
        needed = {peer for roster in rosters if self.unreached.keys() >= set(roster) for peer in roster}
        return {
            peer: candidate
            for peer, (candidate, tried_s) in self.unreached.items()
            if peer in needed or now_s() >= tried_s + _CONNECT_AGAIN_S
        }

    async def _meet(self, newcomer: Candidate) -> None:
        peer = newcomer.member.peer_id
        self.unreached.pop(peer, None)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.transport.connect(newcomer.addresses)
        except (SwarmError, TimeoutError) as error:
            self.unreached[peer] = newcomer, now_s()
            _log.warning(
                "Server %s joined and cannot be reached: no microbatch goes there from here while others of its stage "
                "can be: %r",
                peer,
                error,
            )

    async def send(self, peer: PeerId, method: str, request: WireMessage, tensors: Sequence[Tensor]) -> bytes:
        """A small call where there are no tensors, a stream where there are.

        Peers answer as soon as they have it. Who lives and does not answer did not get it.

        Raises:
            SwarmError: The peer did not take it.
        """
        message = Message(encode(request), tuple(tensors))
        timeout = min(self.timeout, _ACCEPT_TIMEOUT_S + message.num_tensor_bytes / _SLOWEST_BYTES_PER_S)
        try:
            return await self._send(peer, method, message, timeout=timeout)
        except NotEnlisted:  # the run went on without this trainer, or the peer has not heard that it came (back)
            await self.check()
            return await self._send(peer, method, message, timeout=timeout)

    async def _send(self, peer: PeerId, method: str, message: Message, *, timeout: float) -> bytes:
        if not message.tensors:
            return await self.transport.call(peer, method, message.body, timeout=timeout)
        return (await self.transport.stream(peer, method, message, timeout=timeout, max_bytes=0)).body

    async def room(self) -> None:
        """Wait while forwards are under way that will tell where to send more."""
        while any(router.is_full for router in self.routers):
            self._ended.clear()
            await self._ended.wait()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Meanwhile a passage is under way, and others may have to wait for it."""
        self.num_under_way += 1
        try:
            yield
        finally:
            self.num_under_way -= 1
            self._ended.set()

    def patience_s(self, stage: int, charge: PeerCharge) -> float:
        """How long a stage's peer may take, from when its input is there. An only peer is waited for to the end."""
        load = self.routers[stage].peers.get(charge.peer)
        if load is None or load.samples_per_s is None or not self.others(stage, charge.peer):
            return self.timeout
        return deadline_s(charge.expected_s, self.num_under_way + load.queued, longest_s=self.timeout)

    def others(self, stage: int, peer: PeerId) -> bool:
        """Whether another peer may take the place of `peer`."""
        return self.routers[stage].others(peer, now_s=now_s())

    def is_banned(self, stage: int, peer: PeerId) -> bool:
        """Whether `peer` failed a moment ago."""
        return self.routers[stage].is_banned(peer, now_s=now_s())

    def heard(self, peer: PeerId, *, step: int) -> None:
        """It did what it was asked for."""
        if self._silent.pop(peer, None) is not None:
            self._vigil.stage_found(step=step)

    async def check_reachable(self, peer: PeerId) -> None:
        """It did not answer in time: find out whether it is there."""
        try:
            await self.transport.ping(peer)
        except Unreachable as error:
            self._silent[peer] = error

    def is_empty(self, stage: int) -> bool:
        """Whether there is reason to wait for a stage of which nobody can be reached."""
        return self.stage_timeout > self.timeout and self.routers[stage].peers.keys() <= self._silent.keys()

    async def wait_for(self, stage: int, *, step: int) -> None:
        """Before somebody of an empty stage is asked again.

        Raises:
            StageLost: It is empty for too long.
            StepError: The run broke off meanwhile.
        """
        gone = {peer: self._silent[peer] for peer in self.routers[stage].peers}
        address = (await self.transport.addresses())[0]
        self._vigil.keep(stage, gone, step=step, address=address, now_s=now_s())
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await self.check()
        except (PeerError, TimeoutError) as error:
            _log.info("Nobody says whether the run goes on: %r", error)

    def ban(self, stage: int, peer: PeerId, step: int, error: PeerError) -> None:
        """Send nothing to a peer for a while, in whatever stage."""
        if isinstance(error, Unreachable):
            self._silent[peer] = error
        banned = [router.ban(peer, now_s=now_s()) for router in self.routers]
        if any(banned):
            self.events.note("ban", peer=peer, stage=stage, step=step, reason=str(error))
