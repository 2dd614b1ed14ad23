"""A thousand servers and trainers in one process: they say what real ones would, and compute nothing.

Who coordinates is real, and so is what trainers ask it. Its server has a stage of its own; all others stand in for the
servers of the other one. What the servers ask whoever coordinates by themselves is left out.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from benchmarks.crowd import HYPERPARAMETERS, LIMITS, NUM_STAGES, Swarm
from lightning_swarm.client.coordinator_client import CoordinatorTimeouts
from lightning_swarm.client.step_client import StepClient
from lightning_swarm.coordinator.consensus import Voter, serve
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import CallKey, Origin, Receipt, pack, pack_origins, unpack
from lightning_swarm.protocol.messages.reports import EVENT_KINDS, EventCounts
from lightning_swarm.protocol.messages.run import Manifest, Member
from lightning_swarm.protocol.messages.step import (
    AverageReply,
    AverageRequest,
    FreezeReply,
    FreezeRequest,
    PartNorm,
    Record,
    StageLedger,
)
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import ADMIT, APPLY, AVERAGE, FREEZE, KEEP, LOAD
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.server import Server

_STAGE, _COORDINATORS = range(NUM_STAGES)


class Standin:
    """For one server.

    Attributes:
        held: What it would have added up.
        origins: Of the batches, by their places.
    """

    def __init__(self, transport: MemoryTransport, member: Member, coordinator: PeerId) -> None:
        self._member = member
        self._num_noted = 0
        self.held: set[Receipt] = set()
        self.origins: dict[int, Origin] = {}
        voter = Voter(member.boot_id)
        may_propose = lambda peer: peer == coordinator  # noqa: E731
        serve(voter, transport, may_propose, self._may_succeed, self._check_slot, self._check_record)
        transport.handle_call(ADMIT.name, self._agree)
        transport.handle_stream(LOAD.name, self._take)
        transport.handle_stream(KEEP.name, self._take)
        transport.handle_call(FREEZE.name, self._freeze)
        transport.handle_call(AVERAGE.name, self._average)
        transport.handle_call(APPLY.name, self._apply)

    def _check_slot(self, generation: int, step: int) -> None:
        """Find nothing wrong."""

    async def _check_record(self, record: Record) -> None:
        """Find nothing wrong."""

    async def _may_succeed(self, _: PeerId) -> bool:
        return True

    async def _agree(self, _: PeerId, __: bytes) -> bytes:
        return b""

    async def _take(self, _: PeerId, __: Message) -> Message:
        return Message()

    async def _freeze(self, _: PeerId, body: bytes) -> bytes:
        decode(body, FreezeRequest)
        ledger = StageLedger(
            stage_index=_STAGE,
            held=pack(self.held),
            origins=pack_origins({first: self.origins[first] for first, _, _ in self.held}),
            touched=b"\x03",
            version_hash=1 << 62,
            samples_per_s=1.5,
            queued=0.5,
            busy_share=0.5,
        )
        self._num_noted += 1  # something of everything in each step, which is the most that there is to say
        noted = EventCounts(log=self._member.boot_id, counts=dict.fromkeys(EVENT_KINDS, self._num_noted))
        return encode(FreezeReply(boot_id=self._member.boot_id, ledgers=[ledger], noted=noted))

    async def _average(self, _: PeerId, body: bytes) -> bytes:
        (named,) = decode(body, AverageRequest).named
        assert (named.stage_index, unpack(named.receipts)) == (_STAGE, self.held)
        return encode(AverageReply(parts=[PartNorm(stage_index=_STAGE, squared_norm=0.1)]))

    async def _apply(self, _: PeerId, body: bytes) -> bytes:
        decode(body, Record)
        self.held.clear()
        self.origins.clear()
        return b""


class BriefTrainer:
    """A coroutine in the place of a trainer that sends no microbatch anywhere: what it would is entered at once."""

    def __init__(self, transport: MemoryTransport, manifest: Manifest, crowd: Crowd) -> None:
        async def follow(*_: object) -> None:
            """There is no way to choose."""

        self._crowd, self._peer_id = crowd, transport.peer_id
        self.steps = StepClient(
            transport,
            RunState(manifest),
            timeouts=CoordinatorTimeouts(answer_s=LIMITS.call_timeout, successor_s=600.0),
            on_record=follow,
            events=EventLog(),
        )
        if transport.peer_id == manifest.lead:
            self.steps.hyperparameters = lambda: HYPERPARAMETERS

    async def step(self) -> None:
        """Bring one batch, and wait for the step's record."""
        grant = await self.steps.grant(self._crowd.num_microbatches)
        receipts = self._crowd.enter(grant, self._peer_id)
        await self.steps.report_armed(grant.lease, receipts)
        await self.steps.done(grant.lease, receipts)
        while self.steps.version == grant.step:
            await self.steps.wait_for_record(grant.step)


class Crowd(Swarm):
    """Who coordinates, those who stand in for other servers, and trainers.

    Args:
        num_servers: With the one that coordinates.
        num_trainers: Each of which brings a batch a step.
        num_microbatches: Of a batch, of one sample each.
    """

    def __init__(self, num_servers: int, num_trainers: int, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.standins: dict[PeerId, Standin] = {}
        super().__init__(num_servers, num_trainers, batch_size=num_microbatches)

    @override
    def _servers(self) -> list[Server]:
        first, *others = self.members
        for transport, member in zip(self.transports[1:], others, strict=False):
            self.standins[member.peer_id] = Standin(transport, member, first.peer_id)
        return [self._server(self.transports[0], first)]

    @override
    def _rosters(self) -> list[list[Member]]:
        return [self.members[1:], self.members[:1]]

    @override
    def _trainer(self, transport: MemoryTransport) -> BriefTrainer:
        return BriefTrainer(transport, self.manifest, self)

    @override
    async def gather(self, lead: RunDirectory) -> None:
        await self.servers[0].start()

    def enter(self, grant: Grant, trainer: PeerId) -> list[Receipt]:
        """What comes of a batch: of each microbatch a receipt of somebody in each stage."""
        (server,) = self.servers
        stage = server.steps.stage(_COORDINATORS)
        gradients = [torch.zeros_like(one) for one in stage.trainable]
        receipts = []
        there = sorted(self.standins)
        for index in range(self.num_microbatches):
            key = CallKey(generation=grant.generation, step=grant.step, first=grant.first, index=index, call=0)
            origin = Origin(grant.weight, trainer)
            server.steps.sums.add(stage, key, gradients, origin)
            standin = self.standins[self._rng.choice(there)]
            standin.held.add(key.receipt)
            standin.origins[grant.first] = origin
            receipts.append(key.receipt)
        return receipts

    def kill(self, number: int) -> None:
        """Of those who stand in for servers, the last ones; with nothing of theirs in the open step."""
        for peer in sorted(self.standins)[-number:]:
            self.network.kill(peer)
            del self.standins[peer]
