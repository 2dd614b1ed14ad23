"""Servers, a coordinator and trainers on the network in memory that take steps, and what these cost beside tensors.

The real ones, with a tiny model and a virtual clock: each trainer brings one batch a step, for which it computes so
many seconds.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.optim import SGD

from benchmarks.counting import OF_TENSORS, Calls, CountedDirectory
from lightning_swarm.client.coordinator_client import CoordinatorTimeouts
from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun
from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ReplayBuffer
from lightning_swarm.client.pipeline.router import StageRouter
from lightning_swarm.client.step_client import StepClient
from lightning_swarm.coordinator.membership.rosters import choose_voters
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.optimizer_state import read_selection
from lightning_swarm.model.partition import find_blocks
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.peer import discovery
from lightning_swarm.peer.discovery import RunDirectory, ServerAnnouncement, WantedServers
from lightning_swarm.peer.oversight import overseer
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.calls import CallKey, ComputeMode
from lightning_swarm.protocol.messages.run import Manifest, Member
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel

NUM_STAGES: Final = 2
NUM_MICROBATCHES: Final = 4  # of a batch; of one sample each
COMPUTING_S: Final = 10.0
NUM_STEPS: Final = 2  # that are counted
WIDTH: Final = 4
RUN: Final = "run"
HYPERPARAMETERS: Final[list[dict[str, Any]]] = [{"lr": 0.1}]
LIMITS: Final = Limits(call_timeout=600.0)


async def anyone(peers: Mapping[PeerId, ServerAnnouncement]) -> dict[PeerId, ServerAnnouncement]:
    """Let all servers take part: the run has no invitations."""
    return dict(peers)


def names_of(number: int) -> list[PeerId]:
    """As long as those that libp2p gives."""
    return [PeerId(f"12D3KooW{index:044d}") for index in range(number)]


class TakesSteps(Protocol):
    """A trainer."""

    steps: StepClient

    async def step(self) -> None:
        """Bring one batch, and wait for the step's record."""
        ...


class Trainer:
    """A coroutine in the place of a Lightning loop."""

    def __init__(self, transport: MemoryTransport, manifest: Manifest, rng: random.Random) -> None:
        run = RunState(manifest)
        routers = [StageRouter(rng) for _ in run.rosters]
        for router, roster in zip(routers, run.rosters, strict=True):
            router.set_peers(member.peer_id for member in roster)
        events = EventLog()
        tickets = TicketStore(transport, max_bytes=1 << 30)
        self._link = PipelineContext(transport, tickets, routers, LIMITS.call_timeout, events, ReplayBuffer(1 << 30))
        self.steps = StepClient(
            transport,
            run,
            timeouts=CoordinatorTimeouts(answer_s=LIMITS.call_timeout, successor_s=600.0),
            on_record=self._link.follow,
            events=events,
        )
        if transport.peer_id == manifest.lead:
            self.steps.hyperparameters = lambda: HYPERPARAMETERS

    async def step(self) -> None:
        """Bring one batch, as `Session` does, and wait for the step's record."""
        grant = await self.steps.grant(NUM_MICROBATCHES)
        passages = []
        for index in range(NUM_MICROBATCHES):
            key = CallKey(generation=grant.generation, step=grant.step, first=grant.first, index=index, call=0)
            microbatch = Microbatch(
                key=key,
                num_rows=1,
                inputs=(torch.ones(1, WIDTH),),
                extras=[{} for _ in range(NUM_STAGES)],
                modes=[ComputeMode(training=True, grad=True)] * NUM_STAGES,
                weight=grant.weight,
            )
            passages.append(MicrobatchRun(self._link, microbatch))
        outputs = await gather(passage.forward() for passage in passages)
        await asyncio.sleep(COMPUTING_S)
        receipts = [passage.microbatch.key.receipt for passage in passages]
        await self.steps.report_armed(grant.lease, receipts)
        await gather(passage.backward([output]) for passage, (output, _) in zip(passages, outputs, strict=True))
        await self.steps.done(grant.lease, receipts)
        while self.steps.version == grant.step:
            await self.steps.wait_for_record(grant.step)


class Swarm:
    """Servers and trainers of a run."""

    def __init__(self, num_servers: int, num_trainers: int, *, batch_size: int = NUM_MICROBATCHES) -> None:
        self._batch_size = batch_size
        self.loop = VirtualLoop()
        self._rng = random.Random(0)
        self.network = MemoryNetwork(latency_s=0.02)
        self.calls = Calls()
        self.directory: Counter[str] = Counter()
        self._directories: dict[PeerId, RunDirectory] = {}
        names = names_of(num_servers + num_trainers)
        self.transports = [self._transport(name) for name in names]
        self.members = [Member(peer_id=name, boot_id=self._rng.getrandbits(62)) for name in names[:num_servers]]
        self.servers = self._servers()
        self.model = self._model()
        self.manifest = self._manifest(self._rosters(), names[num_servers:])
        self.trainers = [self._trainer(transport) for transport in self.transports[num_servers:]]
        self.network.attach_tap(self.calls)

    def _transport(self, name: PeerId) -> MemoryTransport:
        transport = self.network.transport(name)
        counted = CountedDirectory(self.network.directory(transport), self.directory)
        self._directories[name] = RunDirectory(counted, transport, RUN)
        return transport

    def _model(self) -> PeerModel:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)))
        self._module = module
        return PeerModel(
            module,
            find_blocks(module, None),
            lambda _: SGD(module.parameters(), lr=0.1),
            ComputeSettings(torch.device("cpu")),
        )

    def _servers(self) -> list[Server]:
        return [self._server(one, member) for one, member in zip(self.transports, self.members, strict=False)]

    def _rosters(self) -> list[list[Member]]:
        return discovery.assign(NUM_STAGES, self.members)

    def _trainer(self, transport: MemoryTransport) -> TakesSteps:
        return Trainer(transport, self.manifest, self._rng)

    def _server(self, transport: MemoryTransport, member: Member) -> Server:
        directory = self._directories[transport.peer_id]
        context = ServerContext(
            transport,
            TicketStore(transport, max_bytes=1 << 30),
            InlineExecutor(),
            boot_id=member.boot_id,
            limits=LIMITS,
            events=EventLog(),
            connect=directory.connect_all,
            announce=directory.announce_run,
            overseer=overseer,
        )
        return Server(context, self._model())

    def _manifest(self, rosters: Sequence[list[Member]], trainers: Sequence[PeerId]) -> Manifest:
        return Manifest(
            protocol_version=PROTOCOL_VERSION,
            run_id=RUN,
            generation=0,
            seed=0,
            lead=trainers[0],
            trainers=list(trainers),
            coordinator=self.members[0].peer_id,
            voters=choose_voters(rosters, [False] * len(rosters), self.members[:1], {}),
            settings=RunSettings(target_batch_size=self._batch_size * len(trainers)),
            gradient_clip_norm=None,
            gradient_clip_value=None,
            max_steps=None,
            total_steps=None,
            selection=read_selection(self._module, SGD(self._module.parameters(), lr=0.1)),
            stages=self.model.describe([range(index, index + 1) for index in range(NUM_STAGES)], rosters),
        )

    async def begin(self) -> None:
        """Announce, find, admit, and bring one step that is not counted."""
        lead = self._directories[self.manifest.lead]
        await self.gather(lead)
        stages = self.model.build_stages([range(index, index + 1) for index in range(NUM_STAGES)])
        await discovery.admit(self.network.find(self.manifest.lead), self.manifest, stages, timeout=60.0)
        await lead.announce_run(self.manifest.coordinator)
        await self.step()

    async def gather(self, lead: RunDirectory) -> None:
        """Start the servers, and have the lead find them."""
        for server, member in zip(self.servers, self.members, strict=True):
            await server.start()
            await self._directories[member.peer_id].announce(member.boot_id, timeout=10.0)
        wanted = WantedServers(num_servers=len(self.servers), num_trainers=0)
        await lead.find_servers(wanted, timeout=10.0, check=lambda: None, invited=anyone)

    async def step(self) -> None:
        """Of all trainers."""
        await gather(trainer.step() for trainer in self.trainers)
        await asyncio.sleep(1.0)

    @property
    def newest(self) -> Record:
        """What was decided last."""
        record = self.trainers[0].steps.generation.newest_record
        assert record is not None
        return record

    async def close(self) -> None:
        """End it all."""
        for server in self.servers:
            await server.close()
        for transport in self.transports:
            await transport.close()

    def clear(self) -> None:
        """Count from now on."""
        self.calls.counts.clear()
        self.calls.largest.clear()
        for transport in self.transports:
            transport.traffic.sent_bytes.clear()
            transport.traffic.received_bytes.clear()

    def by_method(self, peers: Sequence[PeerId]) -> Counter[str]:
        """Bytes that these peers sent and took, of a step and one of them on the average."""
        found: Counter[str] = Counter()
        for peer in peers:
            traffic = self.network.find(peer).traffic
            for (_, method), num_bytes in [*traffic.sent_bytes.items(), *traffic.received_bytes.items()]:
                if not method.startswith(OF_TENSORS):
                    found[method] += num_bytes
        return Counter({method: num_bytes // len(peers) // NUM_STEPS for method, num_bytes in found.items()})

    def num_calls(self, peers: Sequence[PeerId]) -> float:
        """Likewise, calls that were made or answered."""
        return (
            sum(
                number * ((caller in peers) + (peer in peers))
                for (caller, peer, method), number in self.calls.counts.items()
                if not method.startswith(OF_TENSORS)
            )
            / len(peers)
            / NUM_STEPS
        )
