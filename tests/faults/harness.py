"""A whole swarm without Lightning under injected faults, and an audit of its result.

Several servers and trainers run on the in-memory network and a virtual clock: the real servers, coordinator, pipelines
and step clients, with tiny models in float64. A trainer is a coroutine that draws batches until the run is over.
Afterwards a single process computes the run from the samples in the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import UNSET
from msgspec.structs import replace as replaced
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm.client.audit.sender import AuditSender
from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun
from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ReplayBuffer
from lightning_swarm.client.pipeline.replayer import Replayer, avoid_when_asked
from lightning_swarm.client.pipeline.router import StageRouter
from lightning_swarm.client.run_generation import PiggybackedRequests
from lightning_swarm.client.step_client import StepClient
from lightning_swarm.core.errors import LeaseRevoked, RunOver, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import cancel_and_wait, gather
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.peer.lifecycle import MembershipLifecycle, RunContacts
from lightning_swarm.protocol.compression import Codecs, decoded, encoded
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import CallKey, ComputeMode, Receipt
from lightning_swarm.protocol.messages.reports import EventKind
from lightning_swarm.protocol.messages.run import Member, UsedInvitations
from lightning_swarm.protocol.messages.scaling import LossScaling
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.settings import NO_COMPRESSION, Compression
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.gradients import WrittenByStage
from lightning_swarm.server.server import Server
from lightning_swarm.testing import Fault, FaultPlan
from lightning_swarm.testing.faults import MessagePoint
from lightning_swarm.testing.sabotage import InMemoryVictims, Saboteur
from tests.unit.swarm import HYPERPARAMETERS, LEAD, TIMEOUTS, WIDTH, Swarm, make_module, make_optimizer
from tests.wire import Averaging, sent

MODE = ComputeMode(training=True, grad=True, default_dtype="float64")
LIMITS = Limits(call_timeout=30.0)
NUM_STEPS = 3
NUM_STEPS_OF_LEAVERS = 4
NUM_STEPS_OF_JOINERS = 5
NUM_MICROBATCHES = 2  # per batch
ROWS = 2  # per microbatch
RUN_TIMEOUT_S = 3600.0
SETTLE_S = 60.0
SCALE = 1024.0
"""Scale of all gradients, as with `16-mixed`. A power of two causes no rounding."""
SCALING = LossScaling(scale=SCALE, growth_factor=1.0, backoff_factor=1.0, growth_interval=1 << 30)
TOLERANCE = 1e-10
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A trainer's delays.

    Args:
        pauses_s: Batch number -> pause before the batch.
        losses_s: Batch number -> time that its loss takes.
    """

    pauses_s: Mapping[int, float] = field(default_factory=dict)
    losses_s: Mapping[int, float] = field(default_factory=dict)


# Servers that join at the start of the second step find it under way. A joiner that is frozen for long is excluded from
# the third step, and has time to return before the fourth.
PACE_OF_JOINERS = Pace(losses_s={1: 0.2}, pauses_s={2: 20.0, 3: 60.0})


@dataclass(frozen=True)
class Sent:
    """A microbatch that a trainer sent for a place of a step."""

    trainer: PeerId
    number: int  # among the trainer's batches
    rows: Tensor


class Scaled(nn.Module):
    """A block with a buffer, which travels with the weights.

    Args:
        block: The block whose output is scaled.
        scale: The buffer's initial value.
    """

    def __init__(self, block: nn.Module, scale: float) -> None:
        super().__init__()
        self.block = block
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    @override
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x) * self.scale
        return output


class Books:
    """A log for the audit: the microbatches sent to each place, and the records."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, Receipt], Sent] = {}
        self.records: dict[int, Record] = {}
        self.rosters: dict[int, Sequence[Sequence[Member]]] = {}  # step -> rosters after its record
        self.done: set[tuple[PeerId, int]] = set()  # batches whose trainers know that they count
        self.begun = asyncio.Event()  # set when a record is decided
        self.decided_s: dict[int, float] = {}  # step -> time when the first peer applied its record

    def note(self, record: Record) -> None:
        """Log a record that a peer applies; all peers must apply the same one."""
        self.begun.set()
        known = self.records.setdefault(record.step, record)
        self.decided_s.setdefault(record.step, asyncio.get_running_loop().time())
        assert encode(known) == encode(record), f"two records of step {record.step}"


class Trainer:
    """A coroutine in place of a Lightning loop.

    Args:
        transport: Its network.
        tickets: Its access to other peers' tensors.
        steps: Its access to the coordinator.
        swarm: The swarm in whose run it trains.
        books: Log of all that it sends.
        seed: Seed of its routing.
        pace: Its delays.
    """

    def __init__(
        self,
        transport: MemoryTransport,
        tickets: TicketStore,
        steps: StepClient,
        swarm: Swarm,
        books: Books,
        *,
        seed: int,
        pace: Pace,
    ) -> None:
        self.peer_id = transport.peer_id
        self._pace = pace
        self.transport = transport
        self._books = books
        self._codecs = Codecs.of(swarm.manifest.settings.compression)
        self._num_stages = len(swarm.rosters)
        self.tickets = tickets
        rng = random.Random(seed)
        routers = [StageRouter(rng) for _ in swarm.rosters]
        for router, roster in zip(routers, swarm.rosters, strict=True):
            router.set_peers(roster)
        self.events = steps.events
        self.copies = ReplayBuffer(swarm.limits.cache_bytes)
        self.link = PipelineContext(
            transport, self.tickets, routers, swarm.limits.call_timeout, self.events, self.copies
        )
        self.steps = steps
        avoid_when_asked(self.link, self.steps.run)
        Replayer(self.link, self.steps.run, max_in_flight=swarm.limits.max_in_flight)
        AuditSender(self.link, self.steps.run, max_in_flight=swarm.limits.max_in_flight)
        self.steps._on_record = self._follow
        if self.peer_id == swarm.manifest.lead:
            self.steps.hyperparameters = lambda: HYPERPARAMETERS
        self._scale = swarm.steps.run.loss_scale or SCALE
        self._is_alone = len(swarm.manifest.trainers) == 1
        self.num_ahead = 0  # batches that had their places before they began
        self.num_batches = 0
        self.in_hand: list[int] = []  # batches that have no place yet, or are under way
        self._through: dict[int, int] = {}  # lease -> batch
        self.num_revoked = 0
        self.num_input_only = 0  # backwards of each microbatch before the counted one

    async def _follow(self, record: Record, rosters: Sequence[Sequence[Member]]) -> None:
        self._books.note(record)
        await self.link.follow(record, rosters)

    async def train(self) -> None:
        """Draw batches until the run is over."""
        with contextlib.suppress(RunOver):
            while True:
                if not self.in_hand:
                    await asyncio.sleep(self._pace.pauses_s.get(self.num_batches, 0.0))
                    self.in_hand.append(self.num_batches)
                    self.num_batches += 1
                if await self._batch(self.in_hand[0]):
                    del self.in_hand[0]
                else:
                    self.num_revoked += 1
                self._take_lost()
        if self.steps.open_step > self.steps.version:
            await self.steps.wait_for_record(self.steps.open_step - 1)
        self._take_lost()

    def _take_lost(self) -> None:
        """Queue completed batches that are in no record to run again, as the loop of `fit` does."""
        for lease in self.steps.generation.lost:
            number = self._through.pop(lease)
            self._books.done.remove((self.peer_id, number))
            self.in_hand.append(number)
            self.num_revoked += 1
        self.steps.generation.lost = []

    async def _batch(self, number: int) -> bool:
        """Train on a batch; return False if it was struck and its samples need another place."""
        self.num_ahead += self.steps.generation.reserved is not None
        grant = await self.steps.grant(NUM_MICROBATCHES * ROWS, self._scale)
        try:
            await self._in_a_place(grant, number)
        except LeaseRevoked:
            await self.steps.report_revoked(grant.lease)
            return False
        return True

    async def _in_a_place(self, grant: Grant, number: int) -> None:
        passages = [self._passage(grant, number, index) for index in range(NUM_MICROBATCHES)]
        works = [self._through_all(passage, number) for passage in passages]
        if self._is_alone and self.steps.open_step > self.steps.version:
            works.append(self.steps.begin_batch(grant))
        await gather(works)
        ahead = (
            PiggybackedRequests(wait_for_step_end=True, num_samples=NUM_MICROBATCHES * ROWS, gradient_scale=self._scale)
            if self._is_alone
            else None
        )
        receipts = [passage.microbatch.key.receipt for passage in passages]
        closing = await self.steps.done(grant.lease, receipts, ahead=ahead)
        self._through[grant.lease] = number
        self._books.done.add((self.peer_id, number))
        if self.steps.generation.imminent_step is not None:
            await self.steps.wait_for_record(self.steps.generation.imminent_step)
        if closing and self.steps.generation.step_ended is None:
            await self.steps.wait_closed(self.steps.open_step)

    def _passage(self, grant: Grant, number: int, index: int) -> MicrobatchRun:
        rows = batch_rows(self.peer_id, number, index)
        key = CallKey(generation=grant.generation, step=grant.step, first=grant.first, index=index, call=0)
        self._books.sent[grant.step, key.receipt] = Sent(self.peer_id, number, rows)
        extras: list[dict[str, Any]] = [{} for _ in range(self._num_stages)]
        inputs = encoded((rows,), self._codecs.activations)
        mode = replaced(MODE, input_grad=self.num_input_only > 0)
        microbatch = Microbatch(
            key=key,
            num_rows=ROWS,
            inputs=inputs,
            extras=extras,
            modes=[mode] * len(extras),
            weight=grant.weight,
            first_trained=0,
        )
        return MicrobatchRun(self.link, microbatch)

    async def _through_all(self, passage: MicrobatchRun, number: int) -> None:
        received, _ = await passage.forward()
        output = decoded(received, self._codecs.activations, CPU)
        await asyncio.sleep(self._pace.losses_s.get(number, 0.0))
        # The batch's loss is the mean over its samples, so that the samples of a step weigh equally.
        gradients = encoded([output * (self._scale / (NUM_MICROBATCHES * ROWS))], self._codecs.gradients)
        aside = [await passage.backward(gradients, adds=False) for _ in range(self.num_input_only)]
        last = await passage.backward(gradients)
        assert all(torch.equal(gradient[0], last[0]) for gradient in aside)


class _Watchman(Saboteur):
    """Shows each message to the test before faults apply."""

    def __init__(
        self,
        plan: FaultPlan,
        victims: InMemoryVictims,
        *,
        struck: Callable[[Fault, MessagePoint], None],
        look: Callable[[MessagePoint], None],
    ) -> None:
        super().__init__(plan, victims, before_strike=struck)
        self._look = look

    @override
    async def _strike(self, passing: MessagePoint, *, has_arrived: bool = False) -> list[Fault]:
        self._look(passing)
        return await super()._strike(passing, has_arrived=has_arrived)


class FaultySwarm(Swarm):
    """A run of a few steps under a fault plan.

    Args:
        rosters: For each stage, the names of its servers. The first server of all coordinates.
        plan: The faults.
        trainers: Names; the first one is the lead.
        voters: Names of servers.
        seed: Seed of the routing.
        joiners: Names of servers that join when the first record is decided.
        leavers: Names of servers that are asked to leave then.
        limits: Limits of all peers.
        module: One block for each stage; None: the usual blocks, with a buffer each.
        optimizer: Makes the optimizer of servers and reference.
        compression: Codecs of the run's tensors.
        delays: Each step but the first computes with weights that are one step old.
        network: Replaces the plain in-memory network.
        invitations: Invitations of the first members; unset: the run admits any peer.
        look: Called with every message, before a fault applies to it.
        is_scaled: Whether several trainers scale their losses.
        keepers: As in `Swarm`.
        audit_share: As in `Swarm`.
        microbatch_size: The run's, with which gradients add up to the same bits; None: rounding may differ.
    """

    trainers_send_audits = True

    def __init__(
        self,
        *rosters: str,
        plan: FaultPlan,
        trainers: str = LEAD,
        voters: str = "",
        seed: int = 0,
        joiners: str = "",
        leavers: str = "",
        limits: Limits = LIMITS,
        module: nn.Module | None = None,
        optimizer: Callable[[nn.Module], Optimizer] = make_optimizer,
        compression: Compression = NO_COMPRESSION,
        delays: bool = False,
        network: MemoryNetwork | None = None,
        invitations: UsedInvitations = UNSET,
        look: Callable[[MessagePoint], None] = lambda _: None,
        is_scaled: bool = True,
        keepers: str = "",
        audit_share: float | None = None,
        microbatch_size: int | None = None,
    ) -> None:
        names = trainers.split()
        target = 2 * NUM_MICROBATCHES * ROWS
        self.num_steps = NUM_STEPS_OF_JOINERS if joiners else NUM_STEPS_OF_LEAVERS if leavers else NUM_STEPS
        super().__init__(
            *rosters,
            target_batch_size=target,
            max_steps=self.num_steps,
            limits=limits,
            voters=voters,
            trainers=trainers,
            module=module or nn.Sequential(*(Scaled(b, 1.0 + i / 8) for i, b in enumerate(make_module(len(rosters))))),
            optimizer=optimizer,
            compression=compression,
            delays=delays,
            network=network,
            invitations=invitations,
            scaling=SCALING if is_scaled and len(names) > 1 else None,
            keepers=keepers,
            audit_share=audit_share,
            microbatch_size=microbatch_size,
        )
        self.plan = plan
        self.books = Books()
        self.dead: set[PeerId] = set()
        self.struck_s: list[float] = []  # times when faults struck
        self.unanswered: set[str] = set()  # peers of a lost message, either of which may count as gone
        self.applied: dict[PeerId, list[int]] = {}  # server -> its applied records, in its order
        self.num_late = 0  # steps whose records came while the next one took batches
        self.struck_idly: list[Fault] = []  # faults that struck while no microbatch was pending for a record
        self._burials: list[asyncio.Task[None]] = []
        self.joiners, self._leavers = tuple(map(PeerId, joiners.split())), tuple(map(PeerId, leavers.split()))
        places = [(self.trainer, self.tickets, self.steps)]
        for name in names[1:]:
            transport = self.network.transport(name)
            places.append((transport, TicketStore(transport, max_bytes=1 << 30), self.client(transport)))
        pace = PACE_OF_JOINERS if joiners or leavers else Pace()
        self.trainers = {
            transport.peer_id: Trainer(transport, tickets, steps, self, self.books, seed=seed + i, pace=pace)
            for i, (transport, tickets, steps) in enumerate(places)
        }
        for name in self.joiners:
            self.add_server(name)
        for name, server in self.servers.items():
            self._watch(name, server)
        self.stays: dict[PeerId, MembershipLifecycle] = {}
        self._lives: dict[PeerId, asyncio.Task[None]] = {}
        self._training: dict[PeerId, asyncio.Task[None]] = {}
        victims = InMemoryVictims(self.network, killed=self._bury)
        self.network.attach_tap(_Watchman(plan, victims, struck=self._struck, look=look))

    @override
    def client(self, trainer: MemoryTransport) -> StepClient:
        steps = super().client(trainer)
        # Wait for a successor until the run's end, because the plan decides when one can take over.
        steps._coordinator._timeouts = replace(TIMEOUTS, successor_s=RUN_TIMEOUT_S)
        return steps

    def _watch(self, name: PeerId, server: Server) -> None:
        apply = server.steps.on_decided
        steps = self.applied.setdefault(name, [])

        def applied(record: Record, gradients: dict[int, Tensor], written: WrittenByStage) -> None:
            self.books.note(record)
            self.num_late += any(step > record.step for step, _ in self.books.sent)
            rosters = server.membership.run.rosters
            assert self.books.rosters.setdefault(record.step, rosters) == rosters, "who is in follows from the records"
            steps.append(record.step)
            apply(record, gradients, written)

        server.steps.on_decided = applied  # type: ignore[assignment]

    def count(self, kind: EventKind) -> int:
        """Count the events of a kind at all peers."""
        logs = [server.events for server in self.servers.values()]
        logs += [trainer.events for trainer in self.trainers.values()]
        return sum(log.counts[kind] for log in logs)

    def _struck(self, fault: Fault, passing: MessagePoint) -> None:
        self.struck_s.append(self.loop.time())
        if fault.kind == "drop":
            self.unanswered |= passing.doers
        newest = max((step for step, _ in self.books.sent), default=-1)
        there = self.servers.keys() - self.dead - {*self.joiners}
        if all(self.servers[name].steps.version > newest for name in there):
            self.struck_idly.append(fault)

    def _bury(self, peer: PeerId) -> None:
        """End the tasks of a killed peer: its process would be gone, but here they would go on."""
        self.dead.add(peer)
        self._burials.append(self.loop.create_task(self._end(peer)))

    async def _end(self, peer: PeerId) -> None:
        if peer in self._training:
            self._training[peer].cancel()
            await asyncio.wait({self._training[peer]})
        if peer in self.servers:
            if peer in self._lives:
                await cancel_and_wait([self._lives.pop(peer)])
            with contextlib.suppress(Exception):  # it is cut off in the middle of any operation
                await self.servers[peer].close()

    # ------------------------------------------------------------------ running

    def train(self) -> None:
        """Run to the end under the plan, whose faults must all strike."""
        self.run(self._train())
        self.plan.check()
        self.run(asyncio.sleep(SETTLE_S))
        assert sorted(self.books.records) == list(range(self.num_steps))

    async def _life(self, trainer: Trainer) -> None:
        try:
            await trainer.train()
        except SwarmError:
            if trainer.peer_id not in self.dead:  # a dead trainer is cut off in the middle of any operation
                raise

    async def _come_and_go(self) -> None:
        """Run servers as their processes would; joiners start at the first record, when leavers leave."""
        if not self.joiners and not self._leavers:
            return
        for name in [one for one in self.servers if one not in self.joiners]:
            self.live(name)
        await self.books.begun.wait()
        for name in self.joiners:
            self.live(name)
        for name in self._leavers:
            self.stays[name].leave()

    def take_ends(self) -> dict[PeerId, BaseException | None]:
        """Return how the servers' tasks ended, and clear them, so that their errors fail no test."""
        ended = [name for name, life in self._lives.items() if life.done()]
        return {name: self._lives.pop(name).exception() for name in ended}

    def live(self, name: PeerId) -> None:
        """Run a server as its process would."""

        async def find() -> Sequence[PeerId]:
            return [*reversed(self.announced), self.manifest.coordinator]

        server = self.servers[name]
        contacts = RunContacts(run_id="run", find_runs=find)
        self.stays[name] = stay = MembershipLifecycle(server._transport, server, contacts, self.limits, server.events)
        self._lives[name] = self.loop.create_task(stay.serve_run(lambda _: None), name=f"server {name}")

    async def _train(self) -> None:
        coming = self.loop.create_task(self._come_and_go())
        for name, trainer in self.trainers.items():
            self._training[name] = self.loop.create_task(self._life(trainer), name=f"trainer {name}")
        async with asyncio.timeout(RUN_TIMEOUT_S):
            done, _ = await asyncio.wait(self._training.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()
        await asyncio.wait(self._training.values())
        await coming

    def close(self) -> None:
        """End the run; raise errors from tasks of living servers."""
        lives = [one for one in self._lives.values() if one.done()]
        for task in (*self._training.values(), *self._burials, *self._lives.values()):
            task.cancel()
        if tasks := {*self._training.values(), *self._burials, *self._lives.values()}:
            self.run(asyncio.wait(tasks))
        for name in self.dead & self.servers.keys():
            del self.servers[name]
        for trainer in self.trainers.values():
            self.run(trainer.transport.close())
            trainer.copies.close()
        super().close()
        for life in lives:
            life.result()

    # ------------------------------------------------------------------ the audit

    @property
    def newest(self) -> int:
        """Return the last step that was decided, or -1."""
        return max(self.books.records, default=-1)

    def survivors(self) -> dict[PeerId, Server]:
        """Return the living servers of the last record's rosters."""
        named = {peer for roster in self.rosters for peer in roster}
        if self.books.records:
            named = {member.peer_id for roster in self.books.rosters[self.newest] for member in roster}
        return {name: server for name, server in self.servers.items() if name in named - self.dead}

    def audit(self) -> None:
        """Check that each sample counts once, that the state equals the reference's, and that no resource is left."""
        self.audit_samples()
        self.audit_state()
        self.audit_leftovers()

    def audit_samples(self) -> None:
        """Check that no sample is missing and none counts twice."""
        counted: list[tuple[PeerId, int, int]] = []
        for step, record in sorted(self.books.records.items()):
            closing, receipts = record.closing, self.counted(record)
            for stage in self.held.by_stage(record):
                assert sorted(one for held in stage.values() for one in held) == receipts, f"step {step}: {stage}"
            for receipt in receipts:
                sent = self.books.sent[step, receipt]
                counted.append((sent.trainer, sent.number, receipt[1]))
            assert closing.num_samples == closing.total_weight == ROWS * len(receipts)
        assert len(set(counted)) == len(counted)
        found = set(counted)
        open_ = {(one.trainer, one.number) for (step, _), one in self.books.sent.items() if step > self.newest}
        done = {(who, number, index) for who, number in self.books.done for index in range(NUM_MICROBATCHES)}
        # A dead trainer cannot repeat its batch; gradients of the batch that servers had added may have died with them.
        gone = {(who, number) for who, number, _ in done - found if who in self.dead and self.count("strike")}
        assert all((who, number, index) not in found for who, number in gone for index in range(NUM_MICROBATCHES))
        lost = {one for one in done - found if one[:2] not in gone | open_}
        assert not lost, f"not counted: {lost}"
        for name, trainer in self.trainers.items():
            if name not in self.dead:
                drawn = {
                    (number, index)
                    for number in range(trainer.num_batches)
                    for index in range(NUM_MICROBATCHES)
                    if number not in trainer.in_hand and (name, number) not in open_
                }
                assert {(number, index) for who, number, index in counted if who == name} == drawn

    def reference(self) -> dict[str, Tensor]:
        """Compute the state of a single process from the samples in the records; keys as in `final_state`."""
        module = copy.deepcopy(self.module)
        self._averaging = [
            Averaging(
                self.manifest.settings.compression,
                [one.shape for one in block.parameters()],
                next(block.parameters()).detach(),
            )
            for block in module.children()
        ]
        optimizer = self._optimizer(module)
        late = copy.deepcopy(module)  # one step old if steps are delayed
        for step, record in sorted(self.books.records.items()):
            assert record.outcome == "apply"
            computing = late if self.manifest.settings.delay_optimizer_step else module
            gradients = {receipt: self._gradients(computing, step, receipt) for receipt in self.counted(record)}
            late = copy.deepcopy(module)
            for stage, block in enumerate(module.children()):
                mean = self._mean(record, stage, {receipt: one[stage] for receipt, one in gradients.items()})
                vector_to_gradients(mean, block)
            squared_norm = sum(float(one.grad.square().sum()) for one in module.parameters() if one.grad is not None)
            assert abs(squared_norm - record.squared_norm) <= TOLERANCE * squared_norm
            optimizer.step()
        found = {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        return found | named({name: optimizer.state[parameter] for name, parameter in module.named_parameters()})

    def _gradients(self, module: nn.Module, step: int, receipt: Receipt) -> list[Tensor]:
        """Return a microbatch's gradients for each stage, scaled by its batch's weight."""
        codecs = Codecs.of(self.manifest.settings.compression)
        x = sent(self.books.sent[step, receipt].rows, codecs)
        for block in module.children():
            x = sent(block(x), codecs)
        module.zero_grad()
        (x.square().sum() / 2).backward()
        return [torch.cat([one.grad.reshape(-1) for one in block.parameters()]) for block in module.children()]

    def _mean(self, record: Record, stage: int, gradients: Mapping[Receipt, Tensor]) -> Tensor:
        """Return the mean that a stage's servers compute from each server's sum."""
        before = self.books.rosters.get(record.step - 1)
        roster = self.rosters[stage] if before is None else [member.peer_id for member in before[stage]]
        held = self.held.by_stage(record)[stage]
        nothing = torch.zeros_like(next(iter(gradients.values())))
        sums = {
            peer: sum((gradients[receipt] for receipt in sorted(held.get(peer, ()))), nothing)
            for peer in roster
            if peer not in record.closing.absent
        }
        return self._averaging[stage].mean(sums, record.closing.total_weight)

    def final_state(self) -> dict[str, Tensor]:
        """Return weights, buffers and optimizer state by name; replicas must have the same bytes."""
        found: dict[str, Tensor] = {}
        fingerprints: dict[int, int] = {}
        for server in self.survivors().values():
            assert server.steps.version == self.newest + 1
            for index in server.steps.stages:
                stage = server.steps.stage(index)
                for name, tensor in (stage.weights() | named(stage.optimizer.state())).items():
                    assert torch.equal(found.setdefault(name, tensor), tensor), name
                there = stage.fingerprint()
                assert fingerprints.setdefault(index, there) == there, f"stage {index} differs by a zero's sign"
        return found

    def audit_state(self) -> None:
        """Check the state of all survivors against that of a single process."""
        found, expected = self.final_state(), self.reference()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name)

    def audit_leftovers(self) -> None:
        """Check that no queue, cache or store has an entry, and that no task is left."""
        left: dict[str, object] = {}
        for name, server in self.survivors().items():
            left |= {
                f"{name}'s calls": list(server.calls.under_way.tasks),
                f"{name}'s cache": list(server.calls.cache._kept),
                f"{name}'s tickets": list(server._tickets._entries),
                f"{name}'s queue": server._executor.queued,
                f"{name}'s tasks": tasks_of(server._tasks._tasks),
                f"{name}'s downloads": [one for one in server.donor._state.downloads if one in self.survivors()],
                f"{name}'s queued joiners": list(server.donor._queued),
                f"{name}'s sums": [
                    index for index in server.steps.stages if server.steps.stage(index).next_sum.values.any()
                ],
            }
            if server.calls.cache.used_bytes:
                left[f"{name}'s cache, in bytes"] = server.calls.cache.used_bytes
            if server.admission.election.coordinator is not None:
                tasks = tasks_of(server.admission.election.coordinator.generation.context.tasks._tasks)
                # It monitors the lead until it is notified of the run's end.
                left[f"{name}'s coordinator's tasks"] = [one for one in tasks if "_replace_lead_or_end" not in one]
        for name, trainer in self.trainers.items():
            if name not in self.dead:
                left[f"{name}'s tickets"] = list(trainer.tickets._entries)
                if not trainer.num_revoked:  # a trainer that was frozen may have returned only after the run's end
                    left[f"{name}'s copies"] = len(trainer.copies)
        left = {name: what for name, what in left.items() if what}
        assert not left, left


def named(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return an optimizer's state, keyed by the parameter's name and its own."""
    return {f"{name}/{key}": value for name, one in state.items() for key, value in one.items()}


def vector_to_gradients(vector: Tensor, block: nn.Module) -> None:
    """Split a vector into the gradients of a block's parameters, in their order."""
    own = list(block.parameters())
    for parameter, part in zip(own, vector.split([one.numel() for one in own]), strict=True):
        parameter.grad = part.view_as(parameter).clone()


def tasks_of(tasks: Iterable[asyncio.Task[None]]) -> list[str]:
    return [str(task.get_coro()) for task in tasks if not task.done()]


def batch_rows(trainer: PeerId, number: int, index: int) -> Tensor:
    """Return a microbatch's samples ``[ROWS, WIDTH]``, a function of the arguments."""
    seed = random.Random(f"{trainer} {number} {index}").getrandbits(60)
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
