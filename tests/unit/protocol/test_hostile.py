"""Malformed messages to every handler: each gets an error that says so, and changes nothing."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from lightning_swarm.core.errors import ProtocolError, SwarmError, TicketGone, from_wire
from lightning_swarm.model.inference.attention_cache import IN_SESSION
from lightning_swarm.model.partition import CALLS
from lightning_swarm.network import Message, PeerId, framing
from lightning_swarm.network.access import CERTIFY, INTRODUCE, OPEN_METHODS, PING
from lightning_swarm.protocol import plain_values as values
from lightning_swarm.protocol import rpc, serialization
from lightning_swarm.protocol.messages.audits import AuditRequest, FindingsRequest, KeptWorkRequest, SketchRequest
from lightning_swarm.protocol.messages.batches import (
    BatchArmed,
    BatchBegins,
    BatchDone,
    BatchMetrics,
    ChangeRequest,
    Grant,
    GrantRequest,
    Lease,
    LoggedValue,
    MetricsRequest,
    MetricState,
    RecordRequest,
    RegisterRequest,
    ReportReply,
    RetireRequest,
)
from lightning_swarm.protocol.messages.calls import (
    BackwardRequest,
    CallKey,
    CallReport,
    CancelRequest,
    ComputeMode,
    Direction,
    FetchRequest,
    Receipt,
    Ticket,
    WaitReply,
    WaitRequest,
    pack,
)
from lightning_swarm.protocol.messages.inference import (
    CacheLayer,
    CacheOperation,
    CacheRecipe,
    SessionClose,
    SessionReplay,
    SessionStep,
    SessionSteps,
    SessionStepsReply,
)
from lightning_swarm.protocol.messages.membership import (
    DrainRequest,
    EnlistRequest,
    FollowRequest,
    JoinRequest,
    ListenRequest,
    NextRequest,
    PieceRequest,
    ReadyRequest,
)
from lightning_swarm.protocol.messages.parts import MeanReplacement, ProjectRequest, VectorRequest
from lightning_swarm.protocol.messages.reports import EventCounts
from lightning_swarm.protocol.messages.run import (
    NO_CHANGE,
    CoordinatorTerm,
    EpochPlan,
    InheritRequest,
    Member,
    PlanRequest,
    RandomNumbers,
    ReleaseRequest,
    RestartRequest,
    RunAborted,
    Selection,
    StepChange,
    StepRequest,
    TakePlanRequest,
    WatchRequest,
)
from lightning_swarm.protocol.messages.state import (
    EvaluationWeights,
    KeptLoop,
    ProofRequest,
    SnapshotRequest,
    StageState,
    StateRequest,
    WriteRequest,
)
from lightning_swarm.protocol.messages.step import (
    AverageRequest,
    Candidate,
    FenceRequest,
    FreezeReply,
    FreezeRequest,
    NamedReceipts,
    Prepare,
    Proposal,
    ReceiptsRequest,
    Record,
    SettleRequest,
    Vacancy,
)
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, WireMessage, decode, encode
from lightning_swarm.protocol.rpc import (
    ADMIT,
    APPLY,
    ARMED,
    AUDIT,
    AVERAGE,
    AVOID,
    BACKWARD,
    BEGIN,
    BREAK_OFF,
    CANCEL,
    CHANGE,
    DONE,
    DRAIN,
    ENLIST,
    EXAMINE,
    FENCE,
    FETCH,
    FINDINGS,
    FOLLOW,
    FORWARD,
    FREEZE,
    GRANT,
    HELD,
    HELLO,
    INHERIT,
    JOIN,
    KEEP,
    KEEP_LOOP,
    KEPT_WORK,
    LEAVE,
    LISTEN,
    LOAD,
    MEET,
    METRICS,
    NEXT,
    ORDER_AUDITS,
    OTHERS,
    PEER_REPORT,
    PIECE,
    PLAN,
    PREPARE,
    PROJECT,
    PROPOSE,
    PROVE,
    PULL,
    READY,
    RECEIPTS,
    RECORD,
    RECORD_DIGEST,
    REGISTER,
    RELEASE,
    RENEW,
    REPLACE_MEAN,
    RESTART,
    RESULTS,
    RETIRE,
    RPCS,
    SESSION_CLOSE,
    SESSION_REPLAY,
    SESSION_STEPS,
    SET_EVALUATION_WEIGHTS,
    SETTLE,
    SKETCH,
    SNAPSHOT,
    STATE,
    TAKE_METRICS,
    TAKE_OVER,
    TAKE_PLAN,
    VECTOR,
    VIEW,
    WAIT,
    WATCH,
    WRITE,
)
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.state_transfer.snapshots import copy_stage
from tests.loops import travelling
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import HYPERPARAMETERS, LEAD, RESULT_KEY, Swarm, closing, key, result_of, rows

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
RESULT = key().name(1, "forward", LEAD)
SESSION = "5" * 32
COUNTED: list[Receipt] = [(0, 0, 0)]
LOGGED = LoggedValue(
    name="loss", reduce="mean", value=1.0, batch_size=2, on_step=True, on_epoch=True, prog_bar=False, logger=True
)
CALL, STREAM = "call", "stream"


OF_AUDITS = (
    PROVE.name,
    RECORD_DIGEST.name,
    PROJECT.name,
    VECTOR.name,
    REPLACE_MEAN.name,
    SKETCH.name,
    KEPT_WORK.name,
    AUDIT.name,
    FINDINGS.name,
)


@dataclass(frozen=True)
class Sample:
    """A valid message, and the preparation of a swarm that expects it."""

    kind: str
    method: str
    message: Callable[[Swarm], Message]
    target: PeerId = B
    caller: PeerId = LEAD
    phase: str = "open"

    @property
    def name(self) -> str:
        return f"{self.method} ({self.kind})"

    @property
    def _of_epoch(self) -> bool:
        return (self.method, self.phase) == (REGISTER.name, "idle")

    def send(self, swarm: Swarm, message: Message) -> Message:
        transport = swarm.trainer if self.caller == LEAD else swarm.servers[self.caller]._transport
        if self.kind == STREAM:
            answer = swarm.run(transport.stream(self.target, self.method, message, timeout=100.0))
            if self.method == SESSION_STEPS.name:
                for refusal in decode(answer.body, SessionStepsReply).refused:
                    raise from_wire(refusal.error, refusal.reason)
            return answer
        return Message(swarm.run(transport.call(self.target, self.method, message.body, timeout=100.0)))

    def prepared(self, make_swarm: MakeSwarm) -> Swarm:
        """Return a swarm that has granted a batch of one microbatch and run its forward, and is then in `phase`."""
        swarm = make_swarm(
            "a",
            "b",
            admit=self.phase not in ("new", "admitted"),
            target_batch_size=4 if self.method in (PLAN.name, TAKE_PLAN.name) or self._of_epoch else None,
            open_to_trainers=self.method in (ENLIST.name, RETIRE.name),
            trainers=f"{LEAD} a b" if self.method in (ENLIST.name, RETIRE.name) else "",
            audit_share=0.0 if self.method in OF_AUDITS else None,
        )
        if self.method == REGISTER.name:  # acts like a successor of another coordinator
            swarm.coordinator.generation.trainers._first_lease = 100
        if self.method == TAKE_OVER.name:
            swarm.servers[A].admission.election._successor = B
        if self.phase == "admitted":
            swarm.run(swarm.trainer.call(B, ADMIT.name, encode(swarm.manifest), timeout=1.0))
        if self.phase in ("new", "admitted"):
            return swarm
        if self.phase == "idle":
            return swarm
        if self.phase == "generating":
            swarm.run(swarm.trainer.stream(A, SESSION_STEPS.name, in_session(swarm), timeout=1.0))
            swarm.run(asyncio.sleep(1.0))
            return swarm
        if self.phase == "joining":
            swarm.join(C)
            if self.method == PIECE.name:  # acts as the joiner, whose own next request would end the download
                for task in swarm.joining:
                    task.cancel()
                    swarm.run(asyncio.wait({task}))
                body = encode(FollowRequest(stage_index=0, version=None, hold_s=0.0))
                swarm.run(swarm.servers[C]._transport.stream(A, FOLLOW.name, Message(body), timeout=1.0))
        elif self.method in (JOIN.name, MEET.name, ENLIST.name):
            swarm.add_server(C)
        swarm.run(swarm.steps.grant(2))
        output = swarm.run(swarm.forward(key(), rows(1)))
        if self.phase == "open" or (self.phase == "joining" and self.method != LISTEN.name):
            return swarm
        swarm.run(swarm.backward(key(), output))
        if self.phase == "through":
            return swarm
        if self.phase == "decided":
            swarm.run(decided(swarm))
            swarm.run(asyncio.sleep(1.0))  # snapshots need time to arrive
            if self.method in (BREAK_OFF.name, INHERIT.name):
                swarm.network.freeze(LEAD)
            return swarm
        for peer in (A, B):
            swarm.run(swarm.servers[A]._transport.call(peer, FREEZE.name, encode(FREEZING), timeout=1.0))
        if self.phase in ("averaged", "joining"):
            for stage, peer in list(enumerate((A, B)))[0 if self.phase == "joining" else 1 :]:
                body = encode(averaging(swarm, stage))
                swarm.run(swarm.servers[A]._transport.call(peer, AVERAGE.name, body, timeout=1.0))
        return swarm


def plain(record: Callable[[Swarm], WireMessage]) -> Callable[[Swarm], Message]:
    return lambda swarm: Message(encode(record(swarm)))


EPOCH_PLAN = EpochPlan(
    epoch=0,
    begin=0,
    sizes=[(2, 4), (1, 1)],
    digest=bytes(32),
    random=RandomNumbers(
        torch=b"1", python=b"2", python_gauss=None, numpy=b"3", numpy_place=0, numpy_gauss=None, own=[b"4"]
    ),
    last=False,
)


def restarting(swarm: Swarm, **changes: Any) -> RestartRequest:
    """Restart with weights of step 3."""
    seats = swarm.steps.run.seats
    asked = RestartRequest(generation=1, first_step=3, seats=seats, selection=other_selection(swarm))
    return msgspec.structs.replace(asked, **changes)


def registering(swarm: Swarm) -> RegisterRequest:
    """Register the lead: a batch that is through, one under way, and one of an epoch that was dropped."""
    through = Lease(
        grant=Grant(lease=7, generation=0, step=0, first=2, weight=1.0),
        request=GrantRequest(step=0, num_samples=2, generation=0, number=1),
        completed=[(2, 0, 0)],
        logs=[LOGGED],
    )
    under_way = Lease(
        grant=Grant(lease=8, generation=0, step=0, first=4, weight=1.0),
        request=GrantRequest(step=0, num_samples=2, generation=0, number=2),
        armed=[(4, 0, 0)],
        has_metrics=True,
    )
    dropped = Lease(
        grant=Grant(lease=9, generation=0, step=0, first=0, weight=1.0, batch=(0, 1), samples=2),
        request=GrantRequest(step=0, num_samples=2, generation=0, number=3, batch=(0, 1)),
        withdrawn=True,
        dropped=True,
    )
    leases = [through, under_way, dropped]
    return RegisterRequest(generation=0, step=0, report=ReportReply(begun=True, leases=leases, closed=[(1, 2.0)]))


def registering_epoch(swarm: Swarm) -> RegisterRequest:
    """Register the lead of a run whose trainers share the order of an epoch."""
    brought = Lease(
        grant=Grant(lease=7, generation=0, step=0, first=2, weight=2.0, batch=(0, 1), samples=2),
        request=GrantRequest(step=0, num_samples=2, generation=0, number=1, batch=(0, 1)),
        completed=[(2, 0, 0)],
    )
    report = ReportReply(begun=True, leases=[brought], closed=[], plans=[EPOCH_PLAN], position=(0, 0))
    return RegisterRequest(generation=0, step=0, report=report)


FREEZING = FreezeRequest(generation=0, step=0)


def enlisting(swarm: Swarm) -> EnlistRequest:
    return EnlistRequest(protocol_version=PROTOCOL_VERSION, generation=None)


def averaging(swarm: Swarm, stage: int) -> AverageRequest:
    named = NamedReceipts(stage_index=stage, receipts=pack(COUNTED), origins=[(1.0, LEAD, 1)])
    return AverageRequest(closing=closing(), named=[named])


def another_mean(swarm: Swarm) -> Message:
    mean = swarm.servers[B].steps.stage(1).next_sum.values.clone()
    return Message(encode(MeanReplacement(closing=closing(), stage_index=1)), (mean,))


def record(swarm: Swarm) -> Record:
    return Record(
        closing=closing(),
        touched=[b"\x03" for _ in swarm.rosters],
        outcome="apply",
        squared_norm=1.0,
        clip_factor=1.0,
        hyperparameters=HYPERPARAMETERS,
        change=NO_CHANGE,
        left=[],
        newcomers=[],
        next_voters=[swarm.members[A]],
        departures=[],
        snapshot=None,
        enlisted=[],
        retired=[],
    )


def done(swarm: Swarm) -> BatchDone:
    return BatchDone(
        step=0,
        lease=1,
        completed=COUNTED,
        withdrawn=False,
        close=False,
        total_weight=None,
        generation=0,
        logs=[LOGGED],
        noted=EventCounts(log=7, counts={}),
    )


def done_and_more(swarm: Swarm) -> BatchDone:
    """Report a batch that ends its step, and request another one."""
    return msgspec.structs.replace(
        done(swarm),
        close=True,
        ends=RecordRequest(step=0, generation=0, version=0, hyperparameters=HYPERPARAMETERS, decided=False),
        following=GrantRequest(step=0, num_samples=2, generation=0, number=2),
    )


METRICS_OF_A_BATCH = [MetricState(name="accuracy", num_updates=1, lengths=[1, 2])]


def metrics(swarm: Swarm) -> Message:
    head = BatchMetrics(generation=0, step=0, lease=1, metrics=METRICS_OF_A_BATCH)
    return Message(encode(head), (rows(1), rows(2), rows(3)))


async def decided(swarm: Swarm) -> None:
    """Decide a step with another trainer's batch, which consists of its metrics only."""
    other = swarm.client(swarm.servers[B]._transport)
    grant = await other.grant(2)
    await other.send_metrics(grant.lease, (METRICS_OF_A_BATCH, [rows(1), rows(2), rows(3)]))
    await other.done(grant.lease, [])
    await swarm.steps.done(1, COUNTED, close=True)
    await swarm.record(0)


def weights(swarm: Swarm) -> Message:
    tensors = {name: parameter.detach() for name, parameter in swarm.stages[1].named_stage_parameters()}
    state = StageState(stage_index=1, version=0, generation=0, optimizer=False, names=list(tensors), structure=None)
    return Message(encode(state), tuple(tensors.values()))


def evaluation_weights(swarm: Swarm) -> Message:
    tensors = swarm.stages[1].named_stage_tensors()
    return Message(
        encode(EvaluationWeights(stage_index=1, generation=0, number=1, names=list(tensors))), tuple(tensors.values())
    )


def momenta(swarm: Swarm) -> Message:
    tensors = {name: torch.ones_like(parameter) for name, parameter in swarm.stages[1].named_stage_parameters()}
    structure, flat = serialization.flatten([{"momentum_buffer": tensor} for tensor in tensors.values()])
    state = StageState(stage_index=1, version=0, generation=0, optimizer=True, names=list(tensors), structure=structure)
    return Message(encode(state), tuple(flat))


def auditing(swarm: Swarm) -> Message:
    """Request an audit from a server of another stage, which refuses it."""
    backward = decode(from_nothing(swarm).body, BackwardRequest)
    structure, tensors = serialization.flatten(((None, {}), [rows(2)]))
    request = AuditRequest(
        key=key(),
        stage_index=1,
        mode=backward.mode,
        weight=1.0,
        audited=A,
        order=3,
        place=0,
        compare=False,
        structure=structure,
    )
    return Message(encode(request), tuple(tensors))


def from_nothing(swarm: Swarm) -> Message:
    return swarm.backward_request(key(), 1, [A, B], rows(2), again=((rows(1),), {}))


def other_selection(swarm: Swarm) -> Selection:
    """Freeze one block, and give a bias a group of its own."""
    groups = {name: int(name == "1.0.bias") for name, _ in swarm.module.named_parameters()}
    return Selection(num_groups=2, groups=groups, frozen=["0.0.bias", "0.0.weight"])


def settling(swarm: Swarm) -> SettleRequest:
    return SettleRequest(generation=0, step=0, change=StepChange(selection=other_selection(swarm)))


def cancelling(swarm: Swarm) -> CancelRequest:
    return CancelRequest(key=key(), stage_index=1, direction="forward")


def address(name: PeerId) -> list[str]:
    return [f"/ip4/127.0.0.1/tcp/9/p2p/{name}"]


def joining(swarm: Swarm) -> JoinRequest:
    return JoinRequest(protocol_version=PROTOCOL_VERSION, boot_id=102, addresses=address(C), stage_index=1)


def meeting(swarm: Swarm) -> Candidate:
    return Candidate(member=Member(peer_id=C, boot_id=102), stage_index=1, addresses=address(C))


def kept(swarm: Swarm) -> Message:
    head, tensors = copy_stage(swarm.servers[A].steps.stage(0), 0)
    return Message(encode(head), tuple(tensors))


def loop_state(swarm: Swarm) -> Message:
    return Message(encode(KeptLoop(generation=0, version=1)), tuple(values.pack(travelling())))


def in_session(_: Swarm) -> Message:
    """Run the first step of a session, whose blocks do not use its cache."""
    extras = {"cache": IN_SESSION, CALLS: {"0": ({}, ()), "1": ({}, ())}}
    structure, tensors = serialization.flatten((rows(0), extras))
    step = SessionStep(
        session=SESSION,
        client=LEAD,
        attempt=0,
        generation=0,
        version=0,
        weights=0,
        number=1,
        resume=1,
        stage_index=0,
        route=[A, B],
        modes=[ComputeMode(training=False, grad=False, default_dtype="float64")] * 2,
        adapters=[],
        drops=[],
        seed=None,
        recipe=CacheRecipe(layers=[CacheLayer(kind="full")], records_past=False),
        operations=[CacheOperation(kind="crop", values=[0])],
        exact=False,
        structure=structure,
        num_tensors=len(tensors),
    )
    return Message(encode(SessionSteps(steps=[step])), tuple(tensors))


SAMPLES = [
    Sample(CALL, HELD.name, lambda _: Message(), phase="decided"),
    Sample(STREAM, KEEP.name, kept, caller=A, phase="decided"),
    Sample(STREAM, SNAPSHOT.name, plain(lambda _: SnapshotRequest(stage_index=0, version=1)), phase="decided"),
    Sample(CALL, VIEW.name, lambda _: Message()),
    Sample(CALL, JOIN.name, plain(joining), target=A, caller=C),
    Sample(CALL, MEET.name, plain(meeting), caller=A),
    Sample(
        CALL, READY.name, plain(lambda _: ReadyRequest(generation=0, version=0)), target=A, caller=C, phase="joining"
    ),
    Sample(
        STREAM,
        FOLLOW.name,
        plain(lambda _: FollowRequest(stage_index=0, version=None, hold_s=0.0)),
        target=A,
        caller=C,
        phase="joining",
    ),
    Sample(
        STREAM,
        PIECE.name,
        plain(lambda _: PieceRequest(stage_index=0, version=0, start=8, stop=90)),
        target=A,
        caller=C,
        phase="joining",
    ),
    Sample(
        STREAM,
        NEXT.name,
        plain(lambda _: NextRequest(generation=0, stage_index=0, version=0, hold_s=0.0)),
        target=A,
        caller=C,
        phase="joining",
    ),
    Sample(
        CALL,
        LISTEN.name,
        plain(lambda _: ListenRequest(closing=closing(), change=NO_CHANGE, challenge=7)),
        target=C,
        caller=A,
        phase="joining",
    ),
    Sample(CALL, ENLIST.name, plain(enlisting), target=A, caller=C),
    Sample(CALL, RETIRE.name, plain(lambda _: RetireRequest(reason="done")), target=A, caller=B),
    Sample(CALL, DRAIN.name, plain(lambda _: DrainRequest(generation=0, boot_id=101)), target=A, caller=B),
    Sample(CALL, PING, lambda _: Message()),
    Sample(CALL, HELLO.name, lambda _: Message()),
    Sample(CALL, PEER_REPORT.name, lambda _: Message()),
    Sample(CALL, OTHERS.name, lambda _: Message()),
    Sample(
        STREAM,
        WAIT.name,
        plain(lambda _: WaitRequest(name=RESULT, hold_s=1.0, ticket_key=RESULT_KEY)),
    ),
    Sample(STREAM, FETCH.name, plain(lambda _: FetchRequest(name=RESULT, ticket_key=RESULT_KEY))),
    Sample(CALL, ADMIT.name, plain(lambda swarm: swarm.manifest), phase="new"),
    Sample(STREAM, LOAD.name, weights, phase="admitted"),
    Sample(STREAM, LOAD.name, momenta),
    Sample(STREAM, SET_EVALUATION_WEIGHTS.name, evaluation_weights),
    Sample(CALL, LEAVE.name, lambda _: Message()),
    Sample(
        CALL,
        BREAK_OFF.name,
        plain(lambda _: RunAborted(reason="the lead is gone")),
        target=B,
        caller=A,
        phase="decided",
    ),
    Sample(
        CALL,
        INHERIT.name,
        plain(lambda _: InheritRequest(generation=0, new_lead=A, first_step=0)),
        target=B,
        caller=A,
        phase="decided",
    ),
    Sample(STREAM, KEEP_LOOP.name, loop_state, phase="decided"),
    Sample(CALL, RELEASE.name, plain(lambda _: ReleaseRequest(generation=0))),
    Sample(CALL, RESTART.name, plain(restarting)),
    Sample(STREAM, FORWARD.name, lambda swarm: swarm.forward_request(key(2), 0, [A, B], rows(2)), target=A),
    Sample(CALL, FORWARD.name, lambda swarm: swarm.forward_request(key(), 1, [A, B], rows(2))),
    Sample(STREAM, BACKWARD.name, from_nothing),
    Sample(CALL, BACKWARD.name, lambda swarm: swarm.backward_request(key(), 0, [A, B], rows(2)), target=A),
    Sample(CALL, CANCEL.name, plain(cancelling)),
    Sample(
        STREAM,
        WRITE.name,
        plain(
            lambda _: WriteRequest(
                stage_index=1,
                version=0,
                generation=0,
                folder=f"/nowhere/.x.{32 * '0'}.partial",
                optimizer=True,
                without=["1.0.bias"],
            )
        ),
    ),
    Sample(
        CALL,
        PROVE.name,
        plain(lambda _: ProofRequest(stage_index=1, version=0, generation=0, kind="weights", challenge=5)),
    ),
    Sample(STREAM, STATE.name, plain(lambda _: StateRequest(stage_index=1, version=0, generation=0, optimizer=True))),
    Sample(
        CALL,
        CHANGE.name,
        plain(lambda swarm: ChangeRequest(generation=0, step=0, change=StepChange(selection=other_selection(swarm)))),
        target=A,
        phase="idle",
    ),
    Sample(
        CALL,
        PLAN.name,
        plain(lambda _: PlanRequest(generation=0, plan=EPOCH_PLAN, position=(0, 0))),
        target=A,
        phase="idle",
    ),
    Sample(CALL, TAKE_PLAN.name, plain(lambda _: TakePlanRequest(generation=0, epoch=0)), target=A, phase="idle"),
    Sample(CALL, SETTLE.name, plain(settling), caller=A, phase="idle"),
    Sample(CALL, FENCE.name, plain(lambda _: FenceRequest(generation=0, step=0, batches=[0])), caller=A, phase="open"),
    Sample(
        CALL,
        RECEIPTS.name,
        plain(lambda _: ReceiptsRequest(generation=0, step=0, trainer=LEAD, receipts=COUNTED)),
        caller=A,
        phase="through",
    ),
    Sample(
        CALL,
        FREEZE.name,
        plain(lambda _: msgspec.structs.replace(FREEZING, expected=closing())),
        caller=A,
        phase="through",
    ),
    Sample(CALL, AVERAGE.name, plain(lambda s: averaging(s, 1)), caller=A, phase="frozen"),
    Sample(
        CALL,
        SKETCH.name,
        plain(lambda _: SketchRequest(generation=0, step=0, round=FREEZING.round, seed=7)),
        caller=A,
        phase="frozen",
    ),
    Sample(
        STREAM,
        KEPT_WORK.name,
        plain(
            lambda _: KeptWorkRequest(
                generation=0, step=0, stage_index=1, receipt=COUNTED[0], input=True, gradients=True, results=True
            )
        ),
        caller=A,
        phase="frozen",
    ),
    Sample(STREAM, AUDIT.name, auditing, phase="through"),
    Sample(
        CALL,
        FINDINGS.name,
        plain(lambda _: FindingsRequest(generation=0, step=0, order=3, seed=7)),
        caller=A,
        phase="frozen",
    ),
    Sample(CALL, PROJECT.name, plain(lambda _: ProjectRequest(closing=closing(), seed=7)), caller=A, phase="averaged"),
    Sample(
        STREAM,
        VECTOR.name,
        plain(lambda _: VectorRequest(closing=closing(), stage_index=1, of="sum")),
        caller=A,
        phase="averaged",
    ),
    Sample(STREAM, REPLACE_MEAN.name, another_mean, caller=A, phase="averaged"),
    Sample(CALL, APPLY.name, plain(record), caller=A, phase="averaged"),
    Sample(
        CALL,
        PREPARE.name,
        plain(lambda _: Prepare(term=(1, A, 100), boot_id=101, generation=0, step=0)),
        caller=A,
        phase="averaged",
    ),
    Sample(
        CALL,
        PROPOSE.name,
        plain(lambda s: Proposal(term=(1, A, 100), boot_id=101, record=record(s))),
        caller=A,
        phase="averaged",
    ),
    Sample(
        CALL,
        GRANT.name,
        plain(lambda _: GrantRequest(step=0, num_samples=2, generation=0, gradient_scale=1.0)),
        target=A,
    ),
    Sample(STREAM, METRICS.name, metrics, target=A),
    Sample(
        STREAM,
        TAKE_METRICS.name,
        plain(lambda _: MetricsRequest(generation=0, step=0, first=0)),
        target=A,
        phase="decided",
    ),
    Sample(
        CALL,
        ARMED.name,
        plain(lambda _: BatchArmed(generation=0, step=0, lease=1, receipts=COUNTED, logs=[LOGGED])),
        target=A,
    ),
    Sample(
        CALL,
        rpc.ANNOUNCE_TERM.name,
        plain(lambda _: CoordinatorTerm(term=(1, A, 100), generation=0, version=0)),
        caller=A,
        phase="averaged",
    ),
    Sample(CALL, WATCH.name, plain(lambda _: WatchRequest(term=(1, A, 100), version=0, hold_s=0.0)), caller=A),
    Sample(
        CALL,
        RECORD_DIGEST.name,
        plain(lambda _: StepRequest(generation=0, step=0)),
        caller=A,
        phase="decided",
    ),
    Sample(CALL, PULL.name, plain(lambda _: StepRequest(generation=0, step=0)), caller=A, phase="decided"),
    Sample(
        CALL,
        TAKE_OVER.name,
        plain(lambda _: CoordinatorTerm(term=(1, A, 100), generation=0, version=0)),
        caller=A,
        phase="averaged",
    ),
    Sample(CALL, REGISTER.name, plain(registering), target=A),
    Sample(CALL, REGISTER.name, plain(registering_epoch), target=A, phase="idle"),
    Sample(CALL, BEGIN.name, plain(lambda _: BatchBegins(generation=0, step=0, first=0)), target=A),
    Sample(CALL, DONE.name, plain(done), target=A),
    Sample(CALL, DONE.name, plain(done_and_more), target=A),
    Sample(
        CALL,
        RECORD.name,
        plain(
            lambda _: RecordRequest(step=0, generation=0, version=0, hyperparameters=HYPERPARAMETERS, resumable=[0, 3])
        ),
        target=A,
    ),
    Sample(CALL, RENEW.name, lambda _: Message(), target=A),
    Sample(STREAM, SESSION_STEPS.name, in_session, target=A),
    Sample(
        CALL,
        SESSION_REPLAY.name,
        plain(lambda _: SessionReplay(session=SESSION, stage_index=0, attempt=1, resume=1, route=[A, B])),
        target=A,
        phase="generating",
    ),
    Sample(
        CALL,
        SESSION_CLOSE.name,
        plain(lambda _: SessionClose(session=SESSION, keeps=False)),
        target=A,
        phase="generating",
    ),
]
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=[sample.name for sample in SAMPLES])


def test_every_handler_has_its_samples(make_swarm: MakeSwarm) -> None:
    transports = [server._transport for server in make_swarm("a", "b").servers.values()]
    calls = {(CALL, method) for one in transports for method in one._call_handlers}  # type: ignore[attr-defined]
    streams = {(STREAM, method) for one in transports for method in one._stream_handlers}  # type: ignore[attr-defined]
    # In an open run the first takes no message, and EXAMINE only its own server's; `test_gatekeeper.py` and
    # `test_mean_checks.py` have their samples. A stand-in for a trainer answers the last three.
    left = {(CALL, method) for method in (CERTIFY, EXAMINE.name, AVOID.name, ORDER_AUDITS.name, RESULTS.name)}
    assert (calls | streams) - left == {(sample.kind, sample.method) for sample in SAMPLES}
    # Trainers and servers of served models answer the other methods; their own tests have malformed messages.
    elsewhere = [rpc.BAN, rpc.CLAIM, rpc.LEADS, rpc.LOOP, rpc.REPLAY, rpc.REPORT, rpc.REPORT_METRICS, rpc.RUN_TEXT]
    elsewhere += [one for one in RPCS if one.name.startswith(("model.", "tune."))]
    elsewhere += [rpc.SESSION_BRANCH, rpc.SESSION_FAILED, rpc.SESSION_OUTPUTS]
    named = {method for _, method in left} | {one.name for one in elsewhere} | {sample.method for sample in SAMPLES}
    assert named == OPEN_METHODS - {INTRODUCE} | {one.name for one in RPCS}


@every_sample
def test_the_samples_are_in_place(make_swarm: MakeSwarm, sample: Sample) -> None:
    swarm = sample.prepared(make_swarm)
    if sample.method == RECORD.name:
        swarm.run(swarm.steps.withdraw(1))
        swarm.run(swarm.steps.close())
    sample.send(swarm, sample.message(swarm))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield all places in nested containers, with their values."""
    if path:
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        yield from paths(child, (*path, name))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = with_value(value[path[0]], path[1:], new)
    return copied


def no_messages(body: bytes) -> Iterator[bytes]:
    """Yield bytes that are no message of any kind, and messages with missing, excess or confused fields."""
    yield from (body[:length] for length in range(0, len(body), max(1, len(body) // 6)))
    yield body + b"\0"
    yield b"\xc1"
    yield b"\x91" * 100_000
    yield b"\xdd\xff\xff\xff\xff"
    yield from map(msgspec.msgpack.encode, ([], 0, "x", b"x", None, True, [1, 2], {"unknown": 1}))
    message = msgspec.msgpack.decode(body)
    yield msgspec.msgpack.encode({**message, "unknown": 1})
    defaults = {
        "gradient_scale",
        "on_trainers",
        "evaluation",
        "input_grad",
        "autocast",
        "default_dtype",
        "deterministic",
        "anomaly",
        "matmul_precision",
        "modules",
        "keep",
        "weights",
        "input_only",
        "logs",
        "first",
        "begun",
        "epoch",
        "resumable",
        "hyperparameters",
        "before",
        "decided",
        "number",
        "batch",
        "samples",
        "dropped",
        "plans",
        "position",
        "scaling",
        "ticket_key",
        "window",
        "num_states",
        *(name for name in RunSettings.__struct_fields__ if name != "target_batch_size"),
    }
    by_place: dict[tuple[Any, ...], set[str]] = {
        ("change",): {"selection", "written"},
        ("plan",): {"metrics"},
        ("plans",): {"metrics"},
        ("leases",): {"completed", "armed", "withdrawn", "has_metrics"},
    }
    for path, value in paths(message):
        if not {"structure", "hyperparameters"}.isdisjoint(path):
            continue  # free form
        if isinstance(value, dict):
            yield from (
                msgspec.msgpack.encode(with_value(message, path, {n: v for n, v in value.items() if n != name}))
                for name in value.keys()
                - defaults
                - by_place.get(path[-1:] or (), set())
                - by_place.get(path[-2:-1], set())
                if not {"hyperparameters", "groups"} & set(path)
            )
        if not {"hyperparameters", "structure"} & set(path):
            yield msgspec.msgpack.encode(with_value(message, path, msgspec.msgpack.Ext(5, b"x")))
            yield msgspec.msgpack.encode(with_value(message, path, {1: []}))


def suspicious(body: bytes) -> Iterator[bytes]:
    """Yield bytes that may be a valid message by chance: flipped bits, numbers at the ends of their range."""
    rng = random.Random(0)
    for _ in range(30):
        flipped = bytearray(body)
        flipped[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        yield bytes(flipped)
    fields = msgspec.msgpack.decode(body)
    for path, value in paths(fields):
        news: tuple[Any, ...] = ()
        if isinstance(value, float):
            news = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 5e-324)
        elif isinstance(value, int):
            news = (-1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), True)
        elif isinstance(value, str):
            news = ("", "x" * 1000, "g0.s0.t0+0.c0/1/forward", "a", "\0")
        elif isinstance(value, list):
            news = ([], value * 2, [*value, None], [[]])
        elif isinstance(value, bytes):
            news = (b"", value * 100, bytes(len(value)))
        yield from (msgspec.msgpack.encode(with_value(fields, path, new)) for new in news)
        yield msgspec.msgpack.encode(with_value(fields, path, None))


def refused(swarm: Swarm, sample: Sample, message: Message) -> bool:
    """Send a message; return whether it was refused, which must be by a known error and without any change."""
    before = swarm.state()
    error: SwarmError | None = None
    try:
        sample.send(swarm, message)
    except SwarmError as caught:
        error = caught
    if error is None:
        return False
    assert "internal error" not in str(error)
    assert type(error) is not SwarmError
    assert swarm.state() == before, f"it raised {error!r}, and changed something"
    return True


class Unread(Exception):
    """Memory was allocated for the tensors of a caller that may not send any."""


FROM_TRAINERS, FROM_THE_LEAD = (
    [FORWARD.name, BACKWARD.name, METRICS.name],
    [LOAD.name, SET_EVALUATION_WEIGHTS.name, KEEP_LOOP.name],
)


@pytest.mark.parametrize(
    ("caller", "method"),
    [
        *(("stranger", method) for method in [*FROM_TRAINERS, *FROM_THE_LEAD, KEEP.name]),
        *(("other", method) for method in [*FROM_THE_LEAD, KEEP.name]),  # a trainer
        *((B, method) for method in [*FROM_TRAINERS, *FROM_THE_LEAD]),  # a server
    ],
)
def test_tensors_of_who_may_not_send_them_stay_unread(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caller: str, method: str
) -> None:
    swarm = make_swarm("a", "b", trainers=f"{LEAD} other")
    transport = swarm.servers[B]._transport if caller == B else swarm.network.transport(caller)
    monkeypatch.setattr(framing, "new_bytes", Mock(side_effect=Unread))
    message = Message(b"", (torch.zeros(1 << 20),))
    with pytest.raises(ProtocolError, match=r"none of the|sends weights|must be a server of|sends its loop's state"):
        swarm.run(transport.stream(A, method, message, timeout=10.0))
    assert not framing.new_bytes.called


@pytest.mark.first_cells(25)
@every_sample
def test_what_is_no_message_is_refused_and_changes_nothing(make_swarm: MakeSwarm, sample: Sample) -> None:
    swarm = sample.prepared(make_swarm)
    message = sample.message(swarm)
    bodies = list(no_messages(message.body)) if message.body else [b"\0", b"\x80", b"x" * 1000]
    before = swarm.state()
    for body in bodies:
        with pytest.raises(ProtocolError):
            sample.send(swarm, Message(body, message.tensors))
    swarm.settle()
    assert swarm.state() == before
    if sample.method != RECORD.name:
        sample.send(swarm, message)


@pytest.mark.thorough
@every_sample
def test_suspicious_messages_do_no_harm(make_swarm: MakeSwarm, sample: Sample) -> None:
    swarm = sample.prepared(make_swarm)
    message = sample.message(swarm)
    num_refused = 0
    for body in suspicious(message.body) if message.body else ():
        if refused(swarm, sample, Message(body, message.tensors)):
            num_refused += 1
        else:
            swarm.settle()  # a bug in an accepted message raises when the swarm is closed
            swarm = sample.prepared(make_swarm)
    assert num_refused > 10 or not message.body


STRUCTURES: list[Any] = [
    [],
    7,
    "x",
    None,
    {},
    ["tensor", 0],
    ["tuple", ["tensor", 0]],
    ["tuple", ["tensor", 0], ["tensor", 0]],
    ["tuple", ["tuple", ["tensor", 0], ["tensor", 1]], {}],
    ["tuple", ["tuple", ["tensor", -1]], {}],
    ["tuple", ["tuple"], {}],
    ["tuple", ["tuple", ["tensor", 0]], {1: None}],
    ["tuple", ["tuple", ["tensor", 0]], []],
    ["tuple", ["list", ["tensor", 0]], {}],
    ["tuple", None, {"x": ["tensor", 0]}],
    ["tuple", ["tuple", ["tensor", True]], {}],
    ["list", ["tuple", ["tensor", 0]], {}],
    ["pickle", "os.system"],
    msgspec.msgpack.Ext(5, b"x"),
]
deep: Any = ["tensor", 0]
for _ in range(100):
    deep = ["tuple", deep]
STRUCTURES.append(["tuple", ["tuple", deep], {}])


@pytest.mark.parametrize("structure", STRUCTURES, ids=range(len(STRUCTURES)))
def test_a_malformed_structure_is_refused(make_swarm: MakeSwarm, structure: Any) -> None:
    for method, path in (FORWARD.name, ("structure",)), (BACKWARD.name, ("structure", 2)):
        sample = next(one for one in SAMPLES if (one.kind, one.method) == (STREAM, method))
        swarm = sample.prepared(make_swarm)
        message = sample.message(swarm)
        body = msgspec.msgpack.encode(with_value(msgspec.msgpack.decode(message.body), path, structure))
        before = swarm.state()
        with pytest.raises(ProtocolError):
            sample.send(swarm, Message(body, message.tensors))
        swarm.settle()
        assert swarm.state() == before


@every_sample
def test_too_few_or_too_many_tensors_are_refused(make_swarm: MakeSwarm, sample: Sample) -> None:
    if sample.kind == CALL:
        return
    swarm = sample.prepared(make_swarm)
    message = sample.message(swarm)
    for tensors in message.tensors[:-1], (*message.tensors, rows(3)), message.tensors * 3:
        if len(tensors) != len(message.tensors):
            with pytest.raises(ProtocolError):
                sample.send(swarm, Message(message.body, tensors))
    sample.send(swarm, message)


@pytest.mark.parametrize("change", [lambda t: t.float(), lambda t: t[:1], lambda t: t[None], lambda t: t.long()])
def test_weights_of_another_shape_or_dtype_are_refused(
    make_swarm: MakeSwarm, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    sample = next(sample for sample in SAMPLES if sample.method == LOAD.name)
    swarm = sample.prepared(make_swarm)
    message = sample.message(swarm)
    before = swarm.state()
    with pytest.raises(ProtocolError, match="has shape"):
        sample.send(swarm, Message(message.body, (*message.tensors[:-1], change(message.tensors[-1]))))
    assert swarm.state() == before


@every_sample
def test_a_stranger_decides_nothing(make_swarm: MakeSwarm, sample: Sample) -> None:
    """Messages of a trainer, the lead or the coordinator change nothing if another peer sends them."""
    # Open to any peer so far: any server may be the next stage's, any trainer the next one's.
    if sample.method in (
        PING,
        HELLO.name,
        PEER_REPORT.name,
        OTHERS.name,
        VIEW.name,
        WATCH.name,
        JOIN.name,
        ENLIST.name,
        WAIT.name,
        FETCH.name,
    ):
        return
    swarm = sample.prepared(make_swarm)
    stranger = swarm.network.transport("stranger")
    message = sample.message(swarm)
    before = swarm.state()
    if sample.kind == STREAM:
        asking: Coroutine[Any, Any, Any] = stranger.stream(sample.target, sample.method, message, timeout=1.0)
    else:
        asking = stranger.call(sample.target, sample.method, message.body, timeout=1.0)
    with pytest.raises(ProtocolError):
        swarm.run(asking)
    assert swarm.state() == before


DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
OTHER_KEY = b"key of a thief  "


@pytest.mark.parametrize("thief", ["stranger", B, "other"])  # the last one trains
def test_results_of_calls_are_for_who_was_named(make_swarm: MakeSwarm, thief: str) -> None:
    """Ticket names can be guessed, and a fetched gradient is gone."""
    quiet, swarm = (make_swarm("a", "b", "c") for _ in range(2))  # B is a server of another stage than the first
    expected = quiet.run(step_with(quiet, lambda k: nothing()))
    transport = swarm.servers[B]._transport if thief == B else swarm.network.transport(thief)
    num_refused = 0

    async def steal(k: CallKey) -> None:
        nonlocal num_refused
        for stage, peer in enumerate(swarm.route()):
            for direction, shown in itertools.product(DIRECTIONS, (None, b"x" * len(RESULT_KEY))):
                name = k.name(stage, direction, LEAD)
                wait = WaitRequest(name=name, hold_s=0.1, take_bytes=1 << 20, ticket_key=shown)
                fetch = FetchRequest(name=name, ticket_key=shown)
                for method, request in ((WAIT.name, wait), (FETCH.name, fetch)):
                    message = Message(encode(request))
                    if peer == transport.peer_id:
                        continue
                    try:
                        answer = await transport.stream(peer, method, message, timeout=5.0, max_bytes=1 << 20)
                    except TicketGone:
                        num_refused += 1
                    else:  # it is not there yet
                        assert not decode(answer.body, WaitReply).ready
                        assert not answer.tensors

    found = swarm.run(step_with(swarm, steal))
    assert num_refused >= 8
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_trainer_takes_back_and_replaces_only_its_own_calls(make_swarm: MakeSwarm) -> None:
    quiet, swarm = (make_swarm("a", "b") for _ in range(2))
    expected = quiet.run(step_with(quiet, lambda k: nothing()))
    thief, num_meant = swarm.network.transport("other"), 0
    num_added: list[bool] = []

    async def meddle(k: CallKey) -> None:
        nonlocal num_meant
        num_meant += 1
        x = torch.full_like(rows(1), 1e3)
        for stage, peer in enumerate(swarm.route()):
            for direction in DIRECTIONS:
                taken_back = CancelRequest(key=k, stage_index=stage, direction=direction)
                await thief.call(peer, CANCEL.name, encode(taken_back), timeout=5.0)
            forward = swarm.forward_request(k, 0, swarm.route(), x)
            await thief.stream(peer, FORWARD.name, at(forward, stage), timeout=5.0)
            if num_meant == 2:  # the trainer's own gradient is in the sum by now
                backward = swarm.backward_request(k, 1, swarm.route(), x, weight=1e6, again=((x,), {}))
                await thief.stream(peer, BACKWARD.name, at(backward, stage), timeout=5.0)
                own = Ticket(peer_id=peer, name=k.name(stage, "backward", thief.peer_id), key=OTHER_KEY)
                report = decode(await readers.wait(own, timeout=5.0), CallReport)
                num_added.append(report.receipt)

    def at(message: Message, stage: int) -> Message:
        fields = msgspec.msgpack.decode(message.body)
        return Message(
            msgspec.msgpack.encode({**fields, "stage_index": stage, "result_key": OTHER_KEY}), message.tensors
        )

    readers = TicketStore(thief, max_bytes=1 << 20)
    found = swarm.run(step_with(swarm, meddle))
    assert num_meant == 2
    assert num_added == [True, True], "it is not told whose batch that is"
    assert all(not server.steps.sums._missent for server in swarm.servers.values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


async def nothing() -> None:
    pass


async def step_with(swarm: Swarm, between: Callable[[CallKey], Coroutine[Any, Any, None]]) -> dict[str, torch.Tensor]:
    """Return the weights after one microbatch; `between` is awaited when its outputs and its gradients are ready."""
    grant = await swarm.steps.grant(2)
    k, route = key(grant.first, step=grant.step), swarm.route()
    for stage, peer in enumerate(route):
        await swarm.send(peer, FORWARD.name, swarm.forward_request(k, stage, route, rows(1)))
    last = result_of(route[-1], k, len(route) - 1, "forward")
    await swarm.tickets.wait(last, timeout=30.0)
    await between(k)
    output = (await swarm.tickets.fetch(last, timeout=30.0)).tensors[0]
    assert all(report.receipt for report in await swarm.backward(k, output, weight=grant.weight))
    await between(k)
    if not await swarm.steps.done(grant.lease, [k.receipt]):
        await swarm.steps.close()
    await swarm.record(grant.step)
    return swarm.weights()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200])
def test_a_gradient_that_is_not_finite_skips_the_step_in_all_stages(make_swarm: MakeSwarm, value: float) -> None:
    swarm = make_swarm("a", "b", clip=1.0)
    start = {name: tensor.clone() for name, tensor in swarm.weights().items()}

    async def poisoned() -> Record:
        grant = await swarm.steps.grant(2)
        output = await swarm.forward(key(), rows(1))
        await swarm.backward(key(), torch.full_like(output, value))
        await swarm.steps.done(grant.lease, COUNTED, close=True)
        return await swarm.record(0)

    decided = swarm.run(poisoned())

    assert decided.outcome == "skip"
    assert not math.isfinite(decided.squared_norm)
    for name, tensor in swarm.weights().items():
        assert torch.equal(tensor, start[name])
    assert all(stage.steps.version == 1 for stage in swarm.servers.values())
    assert swarm.run(swarm.step(rows(1))).outcome == "apply", "a skipped step leaves nothing behind"


def test_a_freeze_reads_every_ledger(make_swarm: MakeSwarm) -> None:
    sample = next(sample for sample in SAMPLES if sample.method == FREEZE.name)
    swarm = sample.prepared(make_swarm)
    (ledger,) = decode(sample.send(swarm, sample.message(swarm)).body, FreezeReply).ledgers
    assert (ledger.stage_index, ledger.held, ledger.touched) == (1, [(0, 0, b"\x01")], b"\x03")


@pytest.mark.parametrize(
    "rosters",
    [lambda s: [[s.members[A]]], lambda s: [[s.members[A], s.members[B]], []], lambda s: [[s.members[A]]] * 2],
    ids=["a stage is missing", "a stage is empty", "it names others only"],
)
def test_a_run_goes_back_with_no_rosters_that_cannot_be(
    make_swarm: MakeSwarm, rosters: Callable[[Swarm], list[list[Member]]]
) -> None:
    sample = next(sample for sample in SAMPLES if sample.method == RESTART.name)
    swarm = sample.prepared(make_swarm)
    before = swarm.state()
    asked = restarting(swarm, seats=msgspec.structs.replace(swarm.steps.run.seats, rosters=rosters(swarm)))
    with pytest.raises(ProtocolError, match=r"at least one server|is in no roster"):
        sample.send(swarm, Message(encode(asked)))
    assert swarm.state() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"left": [Vacancy(member=s.members[B], stage_index=1)]},
        lambda s: {"left": [Vacancy(member=s.members[B], stage_index=2)]},
        lambda s: {"newcomers": [Candidate(member=s.members[A], stage_index=9, addresses=[])]},
        lambda s: {"newcomers": [Candidate(member=s.members[B], stage_index=1, addresses=[])]},
    ],
    ids=["a stage is empty", "somebody left no stage", "somebody joins no stage", "somebody joins who is there"],
)
def test_a_record_of_rosters_that_cannot_be_changes_nothing(
    make_swarm: MakeSwarm, change: Callable[[Swarm], dict[str, Any]]
) -> None:
    sample = next(sample for sample in SAMPLES if sample.method == APPLY.name)
    swarm = sample.prepared(make_swarm)
    before = swarm.state()
    with pytest.raises(ProtocolError, match=r"at least one server|there are 2 stages"):
        sample.send(swarm, Message(encode(msgspec.structs.replace(record(swarm), **change(swarm)))))
    assert swarm.state() == before


@pytest.mark.parametrize(
    ("touched", "says"),
    [([], "must be of the run's 2 stages, got 0"), ([b"\x03", b""], "a bitmap of 2 flags")],
)
def test_a_record_of_other_parameters_than_the_stages_have_is_not_applied(
    make_swarm: MakeSwarm, touched: list[bytes], says: str
) -> None:
    swarm = next(sample for sample in SAMPLES if sample.method == APPLY.name).prepared(make_swarm)
    before, steps = swarm.state(), swarm.servers[B].steps
    short = msgspec.structs.replace(record(swarm), touched=touched)
    with pytest.raises(ProtocolError, match=says):
        swarm.run(steps.commit(short, {1: steps.stage(1).next_sum.values.clone()}))
    assert swarm.state() == before
