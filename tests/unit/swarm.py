"""A few servers and one trainer on the in-memory network: the protocol without Lightning."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_swarm.client.coordinator_client import CoordinatorTimeouts
from lightning_swarm.client.pipeline.router import FIRST_MEASURED, StageRouter
from lightning_swarm.client.step_client import StepClient
from lightning_swarm.coordinator.coordinator import Coordinator
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.optimizer_state import read_selection
from lightning_swarm.model.partition import StageModule, find_blocks
from lightning_swarm.monitor import survey
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.peer import discovery
from lightning_swarm.peer.oversight import overseer
from lightning_swarm.protocol import queries, serialization
from lightning_swarm.protocol.compression import from_message
from lightning_swarm.protocol.events import Event, EventLog
from lightning_swarm.protocol.messages.audits import AuditOrder, AuditOrderReply, ResultsReply
from lightning_swarm.protocol.messages.calls import (
    BackwardRequest,
    CallKey,
    CallReport,
    CancelReply,
    CancelRequest,
    ComputeMode,
    Direction,
    ForwardRequest,
    Origin,
    Receipt,
    Ticket,
)
from lightning_swarm.protocol.messages.reports import PeerReport
from lightning_swarm.protocol.messages.run import Manifest, Member, UsedInvitations
from lightning_swarm.protocol.messages.scaling import LossScaling
from lightning_swarm.protocol.messages.step import AverageRequest, Closing, Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.rpc import AVERAGE, AVOID, BACKWARD, CANCEL, FORWARD, ORDER_AUDITS, RESULTS
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.settings import NO_COMPRESSION, Compression, RunSettings
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel
from tests.held import Held

T = TypeVar("T")

LEAD = PeerId("trainer")
WIDTH = 3
RESULT_KEY = b"key of results  "
HYPERPARAMETERS: list[dict[str, Any]] = [{"lr": 0.1}]
TIMEOUTS = CoordinatorTimeouts(answer_s=30.0, successor_s=600.0)
MODE = ComputeMode(training=True, grad=True, input_grad=True, default_dtype="float64")


def make_module(num_blocks: int) -> nn.Sequential:
    """Return blocks in float64, the same blocks for the same number."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks))).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def make_optimizer(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, momentum=0.9)


def rows(seed: int, num_rows: int = 2) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def key(first: int = 0, index: int = 0, **changes: Any) -> CallKey:
    """Return the key of a microbatch of step 0."""
    return CallKey(**{"generation": 0, "step": 0, "first": first, "index": index, "call": 0, **changes})


def result_of(peer: PeerId, k: CallKey, stage: int, direction: Direction, trainer: PeerId = LEAD) -> Ticket:
    """Return the ticket of a result that a test requested by a raw call."""
    return Ticket(peer_id=peer, name=k.name(stage, direction, trainer), key=RESULT_KEY)


def closing(**changes: Any) -> Closing:
    """Return the closing of a step with one microbatch of two samples."""
    fields: dict[str, Any] = {
        "generation": 0,
        "step": 0,
        "round": 0,
        "batches": [(0, 1, 1)],
        "num_samples": 2,
        "total_weight": 1.0,
        "absent": [],
    }
    return Closing(**{**fields, **changes})


async def _have_no_copies(_caller: PeerId, body: bytes) -> bytes:
    return encode(AuditOrderReply(undone={}, lost=[one.receipt for one in decode(body, AuditOrder).work]))


async def _have_no_results(_caller: PeerId, _body: bytes) -> bytes:
    return encode(ResultsReply(results=[], replaced=[]))


async def _avoid_nobody(_caller: PeerId, _body: bytes) -> bytes:
    return b""


def _answer_audits(transport: MemoryTransport) -> None:
    """Make a trainer that tests drive by hand report that it has no copies of microbatches."""
    transport.handle_call(ORDER_AUDITS.name, _have_no_copies)
    transport.handle_call(RESULTS.name, _have_no_results)
    transport.handle_call(AVOID.name, _avoid_nobody)


class Swarm:
    """Servers that hold the stages of one model, admitted to a run, and its lead.

    Args:
        rosters: For each stage, the names of its servers. The first server of all coordinates and votes.
        target_batch_size: The run's.
        clip: The run's.
        limits: Limits of the servers.
        network: Replaces the plain in-memory network.
        admit: Whether to begin the run.
        optimizer: Makes each server's optimizer.
        hosts: Peers that the servers were started to join.
        voters: Names of servers; empty: the coordinator alone.
        trainers: Names, the lead's first; empty: the lead, two more, and all servers.
        open_to_trainers: Whether further trainers may join.
        module: One block for each stage; None: `make_module`'s.
        compression: Codecs of the run's tensors.
        delays: Each step but the first computes with weights that are one step old.
        around: Names of the trainers that hold the layers around the pipeline; empty: there are no such layers.
        invitations: Invitations of the first members; unset: the run admits any peer.
        scaling: All trainers' loss scaling; None: a single trainer scales freely, several do not scale.
        keepers: Names of the deciding servers of an audited run, besides the lead; empty: the voters.
        audit_share: Share of an audited run; None: 0 in a run with `keepers`, and other runs are not audited.
        microbatch_size: The run's, with which gradients add up to the same bits; None: rounding may differ.
    """

    trainers_send_audits = False  # otherwise this class answers audits for them

    def __init__(
        self,
        *rosters: str,
        target_batch_size: int | None = None,
        clip: float | None = None,
        max_steps: int | None = None,
        limits: Limits | None = None,
        network: MemoryNetwork | None = None,
        admit: bool = True,
        optimizer: Callable[[nn.Module], Optimizer] = make_optimizer,
        around: str = "",
        compression: Compression = NO_COMPRESSION,
        delays: bool = False,
        hosts: Sequence[PeerId] = (),
        voters: str = "",
        trainers: str = "",
        open_to_trainers: bool = False,
        module: nn.Module | None = None,
        invitations: UsedInvitations = UNSET,
        scaling: LossScaling | None = None,
        keepers: str = "",
        audit_share: float | None = None,
        microbatch_size: int | None = None,
    ) -> None:
        self.loop = VirtualLoop()
        self.held = Held()
        self.seated: dict[tuple[int, int], Sequence[Sequence[Member]]] = {}  # the rosters after each record
        self.network = network or MemoryNetwork(latency_s=0.001)
        self.limits = limits or Limits(call_timeout=30.0)
        self.rosters = [[PeerId(name) for name in roster.split()] for roster in rosters]
        self.around = [PeerId(name) for name in around.split()]
        self._optimizer = optimizer
        self._hosts = hosts
        self.module: nn.Module = module or make_module(len(rosters))
        if around:
            self.module = nn.ModuleDict({"body": self.module, "head": make_module(1)})
        self._pipeline = "body" if around else None
        self.trainer = self.network.transport(LEAD)
        self.tickets = TicketStore(self.trainer, max_bytes=1 << 30)
        names = sorted({name for roster in [*self.rosters, self.around] for name in roster})
        self.servers: dict[PeerId, Server] = {
            name: self._server(name, 100 + i, optimizer) for i, name in enumerate(names)
        }
        self.members = {name: Member(peer_id=name, boot_id=100 + i) for i, name in enumerate(names)}
        self._model = PeerModel(
            self.module,
            find_blocks(self.module, self._pipeline),
            lambda _: optimizer(self.module),
            ComputeSettings(torch.device("cpu")),
        )
        self.ranges = [range(i, i + 1) for i in range(len(rosters))]
        self.manifest = Manifest(
            protocol_version=PROTOCOL_VERSION,
            run_id="run",
            generation=0,
            seed=7,
            lead=LEAD,
            trainers=[PeerId(name) for name in trainers.split()] or [LEAD, PeerId("other"), PeerId("second"), *names],
            coordinator=self.rosters[0][0],
            voters=[self.members[PeerId(name)] for name in voters.split() or [self.rosters[0][0]]],
            settings=RunSettings(
                target_batch_size=target_batch_size,
                delay_optimizer_step=delays,
                compression=compression,
                audit_share=0.0 if keepers and audit_share is None else audit_share,
                microbatch_size=microbatch_size,
                deterministic=microbatch_size is not None,
            ),
            gradient_clip_norm=clip,
            gradient_clip_value=None,
            max_steps=max_steps,
            total_steps=None,
            open_to_trainers=open_to_trainers,
            invitations=invitations,
            scaling=scaling,
            keepers=self._keepers(keepers or voters) if keepers or audit_share is not None else UNSET,
            selection=read_selection(self.module, optimizer(self.module)),
            stages=self._model.describe(
                self.ranges, [[self.members[name] for name in r] for r in [*self.rosters, self.around]]
            ),
        )
        self.joining: list[asyncio.Task[None]] = []
        self.announced: list[PeerId] = []  # peers that became coordinator
        self.steps = self.client(self.trainer)
        self.steps.hyperparameters = lambda: HYPERPARAMETERS
        for server in self.servers.values():
            self.run(server.start())
        if not self.trainers_send_audits:
            for transport in {self.trainer, *(server._transport for server in self.servers.values())}:
                _answer_audits(transport)
        if admit:
            self.run(discovery.admit(self.trainer, self.manifest, self.stages, timeout=10.0))

    def _keepers(self, names: str) -> list[PeerId]:
        return [LEAD, *(map(PeerId, names.split()) if names else self.rosters[0][:1])]

    async def _no_others(self) -> dict[PeerId, list[str]]:
        return {}

    def _server(self, name: PeerId, boot_id: int, optimizer: Callable[[nn.Module], Optimizer]) -> Server:
        module = copy.deepcopy(self.module)
        for tensor in [*module.parameters(), *module.buffers()]:
            nn.init.constant_(tensor, float("nan"))
        blocks = find_blocks(module, self._pipeline)
        model = PeerModel(module, blocks, lambda _: optimizer(module), ComputeSettings(torch.device("cpu")))
        transport = self.network.transport(name)
        queries.answer_greetings(transport, now=lambda: 1000.0)
        report = PeerReport(run_id="x", age_s=1.0, sent_bytes=0, received_bytes=0, server=None)
        survey.answer(transport, lambda: report, self._no_others)
        tickets = TicketStore(transport, max_bytes=1 << 30)

        async def connect() -> None:
            """Do nothing: peers of one network reach each other anyway."""

        async def announce(coordinator: PeerId) -> None:
            self.announced.append(coordinator)

        context = ServerContext(
            transport,
            tickets,
            InlineExecutor(),
            boot_id=boot_id,
            limits=self.limits,
            events=EventLog(),
            connect=connect,
            announce=announce,
            overseer=overseer,
            hosts=self._hosts,
        )
        server = Server(context, model)
        average = transport._call_handlers[AVERAGE.name]

        async def noted(caller: PeerId, body: bytes) -> bytes:
            with contextlib.suppress(ProtocolError):
                request = decode(body, AverageRequest)
                self.held.note(name, request.closing, request.named)
            return await average(caller, body)

        transport._call_handlers[AVERAGE.name] = noted
        return server

    def add_server(self, name: str) -> Server:
        """Add a server that is in no roster."""
        server = self.servers[PeerId(name)] = self._server(PeerId(name), 100 + len(self.servers), self._optimizer)
        self.run(server.start())
        return server

    def join(self, name: str) -> Server:
        """Add a server that has downloaded the state, and waits for a record to admit it."""
        server = self.add_server(name)

        async def find() -> Sequence[PeerId]:
            return [self.manifest.coordinator]

        self.joining.append(self.loop.create_task(server.joiner.enter(find)))
        self.run(asyncio.sleep(1.0))
        return server

    def client(self, trainer: MemoryTransport) -> StepClient:
        """Return the client of a further trainer."""

        async def note(record: Record, rosters: Sequence[Sequence[Member]]) -> None:
            """Keep the routes, which the tests choose themselves."""
            self.seated[record.closing.generation, record.step] = rosters

        run = RunState(self.manifest)
        return StepClient(trainer, run, timeouts=TIMEOUTS, on_record=note, events=EventLog())

    def counted(self, record: Record) -> list[Receipt]:
        """Return the microbatches that a record counts, each held by one server in each stage of the pipeline."""
        return self.held.counted(record, len(self.rosters))

    def names_after(self, record: Record) -> list[str]:
        """Return each stage's holders after a record."""
        rosters = self.seated[record.closing.generation, record.step]
        return ["".join(member.peer_id for member in roster) for roster in rosters]

    @property
    def rosters_now(self) -> list[list[Member]]:
        """The rosters as the lead knows them."""
        return self.steps.run.rosters

    @property
    def stages(self) -> Sequence[StageModule]:
        return self._model.build_stages(self.ranges)

    @property
    def coordinator(self) -> Coordinator:
        coordinator = self.servers[self.manifest.coordinator].admission.election.coordinator
        assert coordinator is not None
        return coordinator

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def settle(self) -> None:
        """Let all pending work end: wait longer than any call, and shorter than a download may idle."""
        self.run(asyncio.sleep(50.0))

    def close(self) -> None:
        """Close all peers; raise errors from the servers' tasks."""
        try:
            for task in self.joining:
                task.cancel()
                self.run(asyncio.wait({task}))
            for server in self.servers.values():
                self.run(server.close())
        finally:
            for server in self.servers.values():
                self.run(server._transport.close())
            self.run(self.trainer.close())
            self.loop.close()

    def events(self, peer: PeerId) -> tuple[Event, ...]:
        """Return a server's events."""
        return self.servers[peer].events.newest

    def state(self) -> dict[str, Any]:
        """Return all state that a refused message must leave unchanged."""
        state: dict[str, Any] = {}
        for name, server in self.servers.items():
            steps = server.steps
            state[name] = (
                server.membership.run.view() if server.membership.has_run else None,
                server.admission.left.is_set(),
                str(server.admission.ending_error),
                steps.version,
                steps.rounds._held,
                {step: one.struck for step, one in steps.sums._open.items()},
                steps.sums.next.change,
            )
            state[f"{name}'s joiners"] = (
                dict(server.donor._introduced),
                {peer: (one.stage_index, one.version) for peer, one in server.donor._state.followers.items()},
                list(server.donor._state.kept),
                {peer: (one.copy is None, one.num_pieces) for peer, one in server.donor._state.downloads.items()},
                list(server.donor._state.copies),
            )
            state[f"{name}'s events"] = server.events.known_counts(name)
            state[f"{name}'s snapshots"] = server.snapshots.store.held
            state[f"{name}'s votes"] = (server.voter.term, dict(server.voter._accepted))
            for index in steps.stages:
                stage, ledger = steps.stage(index), steps.sums.ledgers[index]
                state[f"{name}/{index}"] = (
                    stage.next_sum.values.numpy().tobytes(),
                    tuple(stage.next_sum.touched),
                    stage.version,
                    stage.fingerprint(),
                    stage.selection,
                    stage.generation.evaluation_weights and stage.generation.evaluation_weights[0],
                    [len(group["params"]) for group in stage.optimizer.torch_optimizer.param_groups],
                    [parameter.requires_grad for parameter in stage.parameters.values()],
                    (ledger.step, frozenset(ledger._receipts), dict(ledger.origins), ledger._named),
                )
            if server.admission.election.coordinator is not None:
                coordinator = server.admission.election.coordinator
                books, lead = coordinator.generation.step_state, coordinator.generation.trainers.lead
                state["books"] = copy.deepcopy(
                    (
                        books.open,
                        lead._permitted_until,
                        lead.hyperparameters,
                        coordinator.generation.step_state.selection(coordinator.generation._run),
                    )
                )
                state["newest record"] = (books.outcome.record, books.outcome.logs, sorted(books.outcome.metrics))
                state["misses"] = copy.deepcopy(coordinator.generation.server_membership._misses)
                enrolment = coordinator.generation.trainers.membership
                state["enrolment"] = (sorted(enrolment._asked_s), dict(enrolment._going))
                state["leaving"] = coordinator.generation.server_membership.leaving
                state["gate"] = {
                    peer: (one.candidate, one.ready, one.refusal)
                    for peer, one in coordinator.generation.server_membership._waiting.items()
                }
        return state

    # ------------------------------------------------------------------ one microbatch, by hand

    def route(self, choice: int = 0) -> list[PeerId]:
        return [roster[choice % len(roster)] for roster in self.rosters]

    def forward_request(
        self,
        k: CallKey,
        stage: int,
        route: Sequence[PeerId],
        x: Tensor,
        mode: ComputeMode = MODE,
        *,
        trainer: PeerId = LEAD,
    ) -> Message:
        source = result_of(route[stage - 1], k, stage - 1, "forward", trainer) if stage else None
        structure, tensors = serialization.flatten((None if stage else (x,), {}))
        request = ForwardRequest(
            key=k, stage_index=stage, mode=mode, source=source, result_key=RESULT_KEY, structure=structure
        )
        return Message(encode(request), tuple(tensors))

    def backward_request(
        self, k: CallKey, stage: int, route: Sequence[PeerId], gradient: Tensor, **changes: Any
    ) -> Message:
        """Return a backward request; `again`, a tree of inputs (or None) and extras, makes the forward repeatable."""
        last, trainer = stage == len(self.rosters) - 1, changes.pop("trainer", LEAD)
        structure, tensors = serialization.flatten(([gradient] if last else None, changes.pop("again", None)))
        fields: dict[str, Any] = {
            "key": k,
            "stage_index": stage,
            "mode": MODE,
            "weight": 1.0,
            "accumulate": True,
            "source": None if last else result_of(route[stage + 1], k, stage + 1, "backward", trainer),
            "result_key": RESULT_KEY,
            "structure": structure,
        }
        return Message(encode(BackwardRequest(**{**fields, **changes})), tuple(tensors))

    async def send(self, peer: PeerId, method: str, message: Message) -> Message:
        if method not in (FORWARD.name, BACKWARD.name) or message.tensors:
            return await self.trainer.stream(peer, method, message, timeout=30.0)
        return Message(await self.trainer.call(peer, method, message.body, timeout=30.0))

    async def forward(
        self, k: CallKey, x: Tensor, *, route: Sequence[PeerId] | None = None, mode: ComputeMode = MODE
    ) -> Tensor:
        """Call all stages at once; return the last one's output."""
        route = route or self.route()
        for stage, peer in enumerate(route):
            await self.send(peer, FORWARD.name, self.forward_request(k, stage, route, x, mode))
        output = result_of(route[-1], k, len(route) - 1, "forward")
        return (await self.tickets.fetch(output, timeout=30.0)).tensors[0]

    async def backward(
        self, k: CallKey, gradient: Tensor, *, route: Sequence[PeerId] | None = None, **changes: Any
    ) -> list[CallReport]:
        """Call all stages; return their reports, first stage first."""
        route = route or self.route()
        for stage in reversed(range(len(route))):
            await self.send(route[stage], BACKWARD.name, self.backward_request(k, stage, route, gradient, **changes))
        return await self.receipts(k, route)

    async def send_as(self, trainer: PeerId, peer: PeerId, method: str, message: Message) -> None:
        """Deliver a message that a trainer sent before it was frozen or killed."""
        handler, *_ = self.servers[peer]._transport._stream_handlers[method]
        await handler(trainer, message)

    async def receipts(self, k: CallKey, route: Sequence[PeerId], trainer: PeerId = LEAD) -> list[CallReport]:
        """Return the reports of backwards that were sent."""
        names = [result_of(peer, k, stage, "backward", trainer) for stage, peer in enumerate(route)]
        return [decode(await self.tickets.wait(name, timeout=30.0), CallReport) for name in names]

    async def input_gradient(self, k: CallKey, peer: PeerId) -> Tensor | None:
        message = await self.tickets.fetch(result_of(peer, k, 0, "backward"), timeout=30.0)
        (gradient,), _ = from_message(message)
        return gradient

    async def cancel(self, k: CallKey, stage: int, direction: Direction, peer: PeerId) -> bool:
        request = CancelRequest(key=k, stage_index=stage, direction=direction)
        return decode(await self.trainer.call(peer, CANCEL.name, encode(request), timeout=30.0), CancelReply).added

    async def through(
        self, k: CallKey, x: Tensor, *, route: Sequence[PeerId] | None = None, weight: float = 1.0
    ) -> Tensor:
        """Run one microbatch forward and backward; the loss is half the sum of squares."""
        output = await self.forward(k, x, route=route)
        reports = await self.backward(k, output, route=route, weight=weight)
        assert all(report.receipt for report in reports)
        self._attribute(k, route or self.route())
        return output

    def _attribute(self, k: CallKey, route: Sequence[PeerId]) -> None:
        """Attribute a microbatch to the trainer that was granted it, because here the lead sends for all."""
        led = [server.admission.election.coordinator for server in self.servers.values()]
        states = [coordinator.generation.step_state for coordinator in led if coordinator is not None]
        steps = [step for state in states if (step := state.find(k.step)) is not None and k.first in step.origins]
        for stage, peer in enumerate(route if steps else ()):
            opened = self.servers[peer].steps.sums._open.get(k.step)
            if opened is not None and k.first in (origins := opened.ledgers[stage].origins):
                origins[k.first] = Origin(origins[k.first].weight, steps[-1].origins[k.first].trainer)

    # ------------------------------------------------------------------ whole steps

    async def batch(self, *microbatches: Tensor) -> bool:
        """Run a granted batch, its microbatches on successive routes; return whether its step closes."""
        grant = await self.steps.grant(sum(map(len, microbatches)))
        done = []
        for index, x in enumerate(microbatches):
            k = key(grant.first, index, step=grant.step)
            await self.through(k, x, route=self.route(index), weight=grant.weight)
            done.append(k.receipt)
        return await self.steps.done(grant.lease, done)

    async def step(self, *microbatches: Tensor) -> Record:
        """Run a step of one batch."""
        if not await self.batch(*microbatches):
            await self.steps.close()
        return await self.record(self.steps.version)

    async def record(self, step: int) -> Record:
        record = await self.steps.wait_for_record(step)
        assert record is not None
        return record

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name; all replicas must have the same bytes."""
        found: dict[str, Tensor] = {}
        for server in self.servers.values():
            for index in server.steps.stages:
                for name, tensor in server.steps.stage(index).weights().items():
                    assert torch.equal(found.setdefault(name, tensor), tensor)
        return found


def prefer(router: StageRouter, peers: Collection[str]) -> None:
    """Make a trainer measure these peers as fast, and all other peers as slow."""
    for peer in router.peers:
        for _ in range(FIRST_MEASURED):
            router.settle(router.charge(peer, 1), busy_s=1e-3 if peer in peers else 1e3, queued=0)


def plain_steps(module: nn.Module, batches: Sequence[Sequence[Tensor]], *, divisors: Sequence[float]) -> None:
    """Train on one machine: one optimizer step for each batch, with its summed gradients over `divisors`."""
    optimizer = make_optimizer(module)
    for microbatches, divisor in zip(batches, divisors, strict=True):
        optimizer.zero_grad()
        for x in microbatches:
            (module(x).square().sum() / 2 / divisor).backward()
        optimizer.step()
