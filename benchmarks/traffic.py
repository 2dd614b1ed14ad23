"""What a step costs beside tensors, as the swarm grows: bytes and calls at who coordinates, at servers, at trainers.

The real servers, coordinator, passages and step clients, with a tiny model, on the network in memory and a virtual
clock: each trainer brings one batch a step, for which it computes so many seconds. What is counted is the protocol of
the steps and signs of life; tensors and the calls that go with them depend on the model, and are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import SGD

from benchmarks.report import table, write
from lightning_swarm import membership
from lightning_swarm.clock import VirtualLoop
from lightning_swarm.config import Limits
from lightning_swarm.events import EventLog
from lightning_swarm.network import MAX_CALL_BYTES, Directory, PeerId
from lightning_swarm.network.base import PING
from lightning_swarm.network.exchange import Responder
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryDirectory, MemoryNetwork, MemoryTransport
from lightning_swarm.partition import find_blocks
from lightning_swarm.pipeline.copies import Copies, Microbatch
from lightning_swarm.pipeline.link import Link
from lightning_swarm.pipeline.passage import Passage
from lightning_swarm.pipeline.policy import StageRouter
from lightning_swarm.run_state import RunState
from lightning_swarm.selection import read_selection
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.server.model import Model
from lightning_swarm.server.server import Server
from lightning_swarm.steps import APPLY, AVERAGE, FREEZE, PROPOSE, RECORD
from lightning_swarm.steps.client import StepClient
from lightning_swarm.steps.rosters import choose_voters
from lightning_swarm.tasks import gather
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.calls import CallKey, Mode
from lightning_swarm.types.runs import Manifest, Member
from lightning_swarm.types.steps import Closing, Record, StageClosing
from lightning_swarm.types.wire import PROTOCOL_VERSION, encode, to_bitmap

BESIDE: Final = ((8, 10), (8, 30), (8, 100), (8, 300), (8, 1000), (32, 10), (128, 10), (30, 30), (100, 100))
"""Servers and trainers of swarms that take their steps."""
ALIKE: Final = ((100, 4), (300, 4), (1000, 1), (1000, 4), (1000, 16))
"""As many servers as trainers, and microbatches of a batch: of records that are only built."""
NUM_STAGES: Final = 2
NUM_MICROBATCHES: Final = 4  # of a batch; of one sample each
COMPUTING_S: Final = 10.0
NUM_STEPS: Final = 2  # that are counted
WIDTH: Final = 4
RUN: Final = "run"
HYPERPARAMETERS: Final[list[dict[str, Any]]] = [{"lr": 0.1}]
LIMITS: Final = Limits(call_timeout=600.0)
OF_TENSORS: Final = ("stage.", "ticket.", "averaging.")
"""How the methods begin that are left out."""
METHODS: Final = (RECORD, APPLY, AVERAGE, FREEZE, PROPOSE, PING)
"""Those that most bytes are of."""


def names_of(number: int) -> list[PeerId]:
    """As long as those that libp2p gives."""
    return [PeerId(f"12D3KooW{index:044d}") for index in range(number)]


def record_of(num_servers: int, num_trainers: int, num_microbatches: int) -> Record:
    """A step's record as it is where all goes well, without the step."""
    rng = random.Random(0)
    names = names_of(num_servers + num_trainers)
    members = [Member(peer_id=peer, boot_id=rng.getrandbits(62)) for peer in names[:num_servers]]
    rosters = membership.assign(NUM_STAGES, members)
    places = range(0, num_trainers * num_microbatches, num_microbatches)
    counted = [(first, index, 0) for first in places for index in range(num_microbatches)]
    stages = []
    for roster in rosters:
        holders = [rng.randrange(len(roster)) for _ in counted]
        bitmaps = [to_bitmap(holder == place for holder in holders) for place in range(len(roster))]
        stages.append(StageClosing(roster=roster, holders=bitmaps, touched=to_bitmap([True] * 2)))
    closing = Closing(
        generation=0,
        step=0,
        attempt=0,
        round=0,
        counted=counted,
        batches=[(first, 0, 0) for first in places],
        num_samples=len(counted),
        total_weight=float(len(counted)),
        stages=stages,
    )
    return Record(
        closing=closing,
        outcome="apply",
        squared_norm=1.0,
        clip_factor=1.0,
        hyperparameters=HYPERPARAMETERS,
        selection=None,
        next_roster=rosters,
        next_voters=choose_voters(rosters, members[:1], {}),
        next_trainers=names[num_servers:],
        newcomers=[],
        departures=[],
        snapshot=None,
    )


class Calls:
    """Counts calls at all wires, by who makes one, who answers, and which."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[PeerId, PeerId, str]] = Counter()

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder, /) -> Responder:
        """See `Tap`."""
        if caller != peer:
            self.counts[caller, peer, head.method] += 1
        return respond

    async def arrived(self, caller: PeerId, peer: PeerId, method: str, request: bytes, answer: bytes, /) -> None:
        """See `Tap`."""

    def damages(self, *_: object, answer: bytes | None, is_answer: bool) -> bool:
        """See `WireTap`."""
        return False


class CountedDirectory(Directory):
    """A directory that knows what went through it."""

    def __init__(self, directory: MemoryDirectory, totals: Counter[str]) -> None:
        self._directory = directory
        self._totals = totals

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """See `Directory`."""
        self._totals.update({"records": 1, "record bytes": len(value)})
        await self._directory.announce(key, value, ttl_s=ttl_s)

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """See `Directory`."""
        found = await self._directory.read(key)
        self._totals.update({"reads": 1, "read bytes": sum(map(len, found.values()))})
        return found

    async def close(self) -> None:
        """See `Directory`."""
        await self._directory.close()


class Trainer:
    """A coroutine in the place of a Lightning loop."""

    def __init__(self, transport: MemoryTransport, manifest: Manifest, rng: random.Random) -> None:
        run = RunState(manifest)
        routers = [StageRouter(rng) for _ in run.rosters]
        for router, roster in zip(routers, run.rosters, strict=True):
            router.set_peers(member.peer_id for member in roster)
        events = EventLog()
        tickets = TicketStore(transport, max_bytes=1 << 30)
        self._link = Link(transport, tickets, routers, LIMITS.call_timeout, events, Copies(1 << 30))
        self.steps = StepClient(
            transport,
            run,
            timeout=LIMITS.call_timeout,
            patience_s=600.0,
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
            key = CallKey(
                generation=grant.generation, step=grant.step, attempt=0, first=grant.first, index=index, call=0
            )
            microbatch = Microbatch(
                key=key,
                num_rows=1,
                inputs=(torch.ones(1, WIDTH),),
                extras=[{} for _ in range(NUM_STAGES)],
                mode=Mode(training=True, grad=True),
                weight=grant.weight,
            )
            passages.append(Passage(self._link, microbatch))
        outputs = await gather(passage.forward() for passage in passages)
        await asyncio.sleep(COMPUTING_S)
        receipts = [passage.microbatch.key.receipt for passage in passages]
        await self.steps.armed(grant.lease, receipts)
        await gather(passage.backward([output]) for passage, (_, (output,)) in zip(passages, outputs, strict=True))
        await self.steps.done(grant.lease, receipts)
        while self.steps.version == grant.step:
            await self.steps.record(grant.step)


class Swarm:
    """Servers and trainers of a run."""

    def __init__(self, num_servers: int, num_trainers: int) -> None:
        self.loop = VirtualLoop()
        self._rng = random.Random(0)
        self.network = MemoryNetwork(latency_s=0.02)
        self.calls = Calls()
        self.directory: Counter[str] = Counter()
        self._directories: dict[PeerId, CountedDirectory] = {}
        names = names_of(num_servers + num_trainers)
        self.transports = [self._transport(name) for name in names]
        self.servers = [self._server(transport) for transport in self.transports[:num_servers]]
        self.model = self._model()
        self.manifest = self._manifest(names[:num_servers], names[num_servers:])
        self.trainers = [Trainer(transport, self.manifest, self._rng) for transport in self.transports[num_servers:]]
        self.network.be_tapped(self.calls)

    def _transport(self, name: PeerId) -> MemoryTransport:
        transport = self.network.transport(name)
        self._directories[name] = CountedDirectory(self.network.directory(transport), self.directory)
        return transport

    def _model(self) -> Model:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)))
        self._module = module
        return Model(
            module,
            find_blocks(module, None),
            lambda _: SGD(module.parameters(), lr=0.1),
            torch.device("cpu"),
            keep=True,
        )

    def _server(self, transport: MemoryTransport) -> Server:
        directory = self._directories[transport.peer_id]

        async def announce(coordinator: PeerId) -> None:
            await membership.announce_run(directory, RUN, coordinator)

        return Server(
            transport,
            TicketStore(transport, max_bytes=1 << 30),
            InlineExecutor(),
            self._model(),
            boot_id=self._rng.getrandbits(62),
            limits=LIMITS,
            events=EventLog(),
            connect=lambda: membership.connect_all(directory, transport, RUN),
            announce=announce,
        )

    def _manifest(self, servers: Sequence[PeerId], trainers: Sequence[PeerId]) -> Manifest:
        members = [
            Member(peer_id=peer, boot_id=server.admission.me.boot_id)
            for peer, server in zip(servers, self.servers, strict=True)
        ]
        rosters = membership.assign(NUM_STAGES, members)
        return Manifest(
            protocol_version=PROTOCOL_VERSION,
            run_id=RUN,
            generation=0,
            seed=0,
            lead=trainers[0],
            trainers=list(trainers),
            coordinator=servers[0],
            voters=choose_voters(rosters, members[:1], {}),
            target_batch_size=NUM_MICROBATCHES * len(trainers),
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
        transport = self.network.find(self.manifest.lead)
        for server, one in zip(self.servers, self.transports, strict=False):
            await server.start()
            boot_id = server.admission.me.boot_id
            await membership.announce(self._directories[one.peer_id], one, RUN, boot_id, timeout=10.0)
        await membership.find_servers(
            lead, transport, RUN, len(self.servers), num_trainers=0, timeout=10.0, check=lambda: None
        )
        stages = self.model.cut([range(index, index + 1) for index in range(NUM_STAGES)])
        await membership.admit(transport, self.manifest, stages, timeout=60.0)
        await membership.announce_run(lead, RUN, self.manifest.coordinator)
        await self.step()

    async def step(self) -> None:
        """Of all trainers."""
        await gather(trainer.step() for trainer in self.trainers)
        await asyncio.sleep(1.0)

    async def close(self) -> None:
        """End it all."""
        for server in self.servers:
            await server.close()
        for transport in self.transports:
            await transport.close()

    def clear(self) -> None:
        """Count from now on."""
        self.calls.counts.clear()
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


def kb(num_bytes: float) -> str:
    """In thousands."""
    return f"{num_bytes / 1e3:,.1f}" if num_bytes < 1e5 else f"{num_bytes / 1e3:,.0f}"


def measure(num_servers: int, num_trainers: int) -> tuple[list[object], list[object], list[object]]:
    """Rows of the tables: of a step, of the coordinator's part of it, of the directory."""
    swarm = Swarm(num_servers, num_trainers)
    run = swarm.loop.run_until_complete
    run(swarm.begin())
    found = swarm.directory.copy()
    directory = [num_servers, found["records"], kb(found["record bytes"]), found["reads"], kb(found["read bytes"])]
    swarm.clear()
    for _ in range(NUM_STEPS):
        run(swarm.step())
    names = [transport.peer_id for transport in swarm.transports]
    coordinator, servers, trainers = names[:1], names[1:num_servers], names[num_servers + 1 :]
    record = swarm.trainers[0].steps.newest
    assert record is not None
    assert len(record.closing.batches) == num_trainers
    assert swarm.directory == found, "steps need no directory"
    row: list[object] = [num_servers, num_trainers, kb(len(encode(record)))]
    for peers in (coordinator, servers, trainers):
        row += [kb(swarm.by_method(peers).total()), f"{swarm.num_calls(peers):.0f}"]
    methods = swarm.by_method(coordinator)
    parts: list[object] = [num_servers, num_trainers, *(kb(methods[method]) for method in METHODS)]
    run(swarm.close())
    swarm.loop.close()
    return row, parts, directory


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=1000, help="leave out what has more trainers or servers")
    arguments = parser.parse_args()
    head = ["servers", "trainers"]
    steps: list[list[object]] = [
        [*head, "its record", "coordinator", "calls", "a server", "calls", "a trainer", "calls"]
    ]
    parts: list[list[object]] = [[*head, *METHODS]]
    directory: list[list[object]] = [["servers", "records", "kB", "reads", "kB read"]]
    for size in BESIDE:
        if max(size) <= arguments.most:
            row, of_coordinator, of_directory = measure(*size)
            steps.append(row)
            parts.append(of_coordinator)
            directory += [of_directory] if of_directory not in directory else []
    records: list[list[object]] = [["servers and trainers", "microbatches of a batch", "kB", "travels"]]
    for number, num_microbatches in ALIKE:
        num_bytes = len(encode(record_of(number, number, num_microbatches)))
        records.append([number, num_microbatches, kb(num_bytes), "yes" if num_bytes < MAX_CALL_BYTES else "no"])
    tables = [
        table("A step, in kB: sent and taken, and calls made and answered", steps),
        table("The coordinator's part by method, in kB", parts),
        table("The directory, until a run has begun", directory),
        table("A step's record, as large as a call may be or not", records),
    ]
    write("traffic", "\n\n".join(tables))


if __name__ == "__main__":
    main()
