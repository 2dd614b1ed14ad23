"""The table of all methods that peers call on each other, with their messages and the roles of caller and callee.

A call is a request and an answer of at most `MAX_CALL_BYTES` each. Messages of a stream may also have tensors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeAlias

from typing_extensions import TypeVar

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import MAX_STREAM_BYTES, Admit, Message, PeerId, Transport
from lightning_swarm.network.access import Role, Rpc
from lightning_swarm.protocol.messages import (
    audits,
    batches,
    calls,
    inference,
    membership,
    parts,
    reports,
    run,
    serving,
    state,
    step,
    tuning,
)
from lightning_swarm.protocol.messages.wire import WireMessage, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

Q = TypeVar("Q", bound="WireMessage | bytes | None", default=None)  # type of a request
A = TypeVar("A", bound="WireMessage | bytes | None", default=None)  # type of an answer
WithTensors: TypeAlias = "tuple[A, Sequence[Tensor]]"


@dataclass(frozen=True, eq=False)
class TypedRpc(Rpc, Generic[Q, A]):
    """A method and the types of its messages: records, or bytes that are not encoded any further."""

    request: type[Q] | None = None  # None: the method takes no arguments
    reply: type[A] | None = None  # None: the answer is empty, so it is not decoded

    def read_request(self, body: bytes) -> Q:
        """Decode a request; raise `ProtocolError` if it is malformed."""
        if self.request is None and body:
            raise ProtocolError(f"{self.name} takes no arguments, got {len(body)} bytes")
        return _unpacked(body, self.request)

    def read_reply(self, body: bytes) -> A:
        """Decode an answer; raise `ProtocolError` if it is malformed."""
        return _unpacked(body, self.reply)


class Call(TypedRpc[Q, A]):
    """A method whose messages have no tensors."""

    def serve(
        self, transport: Transport, handler: Callable[[PeerId, Q], Awaitable[A]], *, admit: Admit | None = None
    ) -> None:
        """Answer the calls of this method. `admit` may refuse a caller before its request is decoded."""

        async def answer(caller: PeerId, body: bytes) -> bytes:
            if admit is not None:
                admit(caller)
            return packed(await handler(caller, self.read_request(body)))

        transport.handle_call(self.name, answer)

    async def ask(self, transport: Transport, peer: PeerId, request: Q, *, timeout: float) -> A:
        """Call a peer and return its answer. Raises the errors of `Transport.call`."""
        return self.read_reply(await transport.call(peer, self.name, packed(request), timeout=timeout))


@dataclass(frozen=True, eq=False)
class StreamRpc(TypedRpc[Q, A]):
    """A method whose messages may have tensors."""

    is_call_if_small: bool = False  # send requests without tensors as calls, which cost less

    async def ask(
        self,
        transport: Transport,
        peer: PeerId,
        request: Q,
        tensors: Sequence[Tensor] = (),
        *,
        timeout: float,
        max_bytes: int = MAX_STREAM_BYTES,
    ) -> tuple[A, tuple[Tensor, ...]]:
        """Send a request with tensors; return the answer and its tensors. Raises the errors of `Transport.stream`."""
        message = Message(packed(request), tuple(tensors))
        if self.is_call_if_small and not tensors:
            return self.read_reply(await transport.call(peer, self.name, message.body, timeout=timeout)), ()
        answer = await transport.stream(peer, self.name, message, timeout=timeout, max_bytes=max_bytes)
        return self.read_reply(answer.body), answer.tensors


class Download(StreamRpc[Q, A]):
    """A method whose answers may have tensors; its requests have none."""

    def serve(
        self,
        transport: Transport,
        handler: Callable[[PeerId, Q], Awaitable[Message | WithTensors[A]]],
        *,
        admit: Admit | None = None,
    ) -> None:
        """Answer the requests of this method; `Transport.handle_stream` explains `admit`."""

        async def answer(caller: PeerId, message: Message) -> Message:
            return _message(await handler(caller, self.read_request(message.body)))

        transport.handle_stream(self.name, answer, max_bytes=0, admit=admit)


class Upload(StreamRpc[Q, A]):
    """A method whose requests have tensors."""

    def serve(
        self,
        transport: Transport,
        handler: Callable[[PeerId, Q, Message], Awaitable[WithTensors[A] | None]],  # None: the answer is empty
        *,
        max_bytes: int = MAX_STREAM_BYTES,
        admit: Admit | None = None,
    ) -> None:
        """Answer the requests of this method; `Transport.handle_stream` explains the limits."""

        async def answer(caller: PeerId, message: Message) -> Message:
            if admit is not None:  # again, after `handle_stream`: rights may have changed while tensors arrived
                admit(caller)
            return _message(await handler(caller, self.read_request(message.body), message))

        async def answer_call(caller: PeerId, body: bytes) -> bytes:
            if admit is not None:
                admit(caller)
            return _message(await handler(caller, self.read_request(body), Message(body))).body

        transport.handle_stream(self.name, answer, max_bytes=max_bytes, admit=admit)
        if self.is_call_if_small:
            transport.handle_call(self.name, answer_call)


def packed(record: WireMessage | bytes | None) -> bytes:
    """Encode a record; return bytes unchanged, and None as empty bytes."""
    return encode(record) if isinstance(record, WireMessage) else record or b""


def _unpacked(body: bytes, kind: type[A] | None) -> A:
    if kind is None or kind is bytes:
        return None if kind is None else body  # type: ignore[return-value]
    return decode(body, kind)


_EMPTY: Final = Message()  # shared, because the most frequent calls have empty answers


def _message(answer: Message | WithTensors[A] | None) -> Message:
    if answer is None:
        return _EMPTY
    return answer if isinstance(answer, Message) else Message(packed(answer[0]), tuple(answer[1]))


_OBSERVER, _SERVER, _TRAINER = Role.OBSERVER, Role.SERVER, Role.TRAINER

# Any peer may call these methods. `HELLO` is the same in every version, so that peers can report different versions.
# `BAN` sends a ban, or its lifting. The owner has signed it, so any peer may forward it.
HELLO: Final = Call("peer.hello", None, reports.Greeting, by=_OBSERVER, of=_OBSERVER)
PEER_REPORT: Final = Call("peer.report", None, reports.PeerReport, by=_OBSERVER, of=_OBSERVER)
OTHERS: Final = Call("peer.others", None, reports.OtherPeers, by=_OBSERVER, of=_OBSERVER)
BAN: Final = Call("peer.ban", bytes, by=_OBSERVER, of=_OBSERVER)
VIEW: Final = Call("run.view", None, run.RunView, by=_OBSERVER)

# Fetching tensors that another peer holds.
WAIT: Final = Download("ticket.wait", calls.WaitRequest, calls.WaitReply, by=_SERVER)
FETCH: Final = Download("ticket.fetch", calls.FetchRequest, bytes, by=_SERVER)

# Beginning, rolling back and ending a run.
CLAIM: Final = Call("run.claim", None, membership.ClaimReply, by=_TRAINER, of=_TRAINER)
ADMIT: Final = Call("server.admit", run.Manifest, by=_TRAINER)
LOAD: Final = Upload("server.load", state.StageState, by=_TRAINER)
RESTART: Final = Call("server.restart", run.RestartRequest, by=_TRAINER)
RELEASE: Final = Call("server.release", run.ReleaseRequest, by=_TRAINER)
LEAVE: Final = Call("run.leave", by=_SERVER)
BREAK_OFF: Final = Call("run.break_off", run.RunAborted, by=_SERVER)

# Microbatches.
FORWARD: Final = Upload("stage.forward", calls.ForwardRequest, by=_TRAINER, is_call_if_small=True)
BACKWARD: Final = Upload("stage.backward", calls.BackwardRequest, by=_TRAINER, is_call_if_small=True)
CANCEL: Final = Call("stage.cancel", calls.CancelRequest, calls.CancelReply, by=_TRAINER)

# A step goes `grant -> microbatches, receipts -> freeze -> average -> record decided -> apply`, so that each granted
# sample is in exactly one decided record. If user code selected other parameters or wrote weights, `change -> settle`
# come first. Trainers call these methods of the coordinator. The coordinator's answer to `TAKE_METRICS` is empty if it
# no longer has the `BatchMetrics`.
CHANGE: Final = Call("step.change", batches.ChangeRequest, by=_TRAINER, only_coordinator=True)
PLAN: Final = Call("step.plan", run.PlanRequest, by=_TRAINER, only_coordinator=True)
TAKE_PLAN: Final = Call("step.take_plan", run.TakePlanRequest, run.TakePlanReply, by=_TRAINER, only_coordinator=True)
GRANT: Final = Call("step.grant", batches.GrantRequest, batches.GrantReply, by=_TRAINER, only_coordinator=True)
BEGIN: Final = Call("step.begin", batches.BatchBegins, by=_TRAINER, only_coordinator=True)
METRICS: Final = Upload("step.metrics", batches.BatchMetrics, by=_TRAINER, only_coordinator=True)
ARMED: Final = Call("step.armed", batches.BatchArmed, by=_TRAINER, only_coordinator=True)
DONE: Final = Call("step.done", batches.BatchDone, batches.BatchDoneReply, by=_TRAINER, only_coordinator=True)
RECORD: Final = Call("step.record", batches.RecordRequest, batches.RecordReply, by=_TRAINER, only_coordinator=True)
TAKE_METRICS: Final = Download("step.take_metrics", batches.MetricsRequest, bytes, by=_TRAINER, only_coordinator=True)
RENEW: Final = Call("step.renew", by=_TRAINER, only_coordinator=True)
REGISTER: Final = Call("step.register", batches.RegisterRequest, by=_TRAINER, only_coordinator=True)
ENLIST: Final = Call("run.enlist", membership.EnlistRequest, membership.EnlistReply, by=_TRAINER, only_coordinator=True)
RETIRE: Final = Call("run.retire", batches.RetireRequest, membership.RetireReply, by=_TRAINER, only_coordinator=True)

# The coordinator calls these methods of servers. All servers may call them, because each may become the coordinator.
SETTLE: Final = Call("step.settle", step.SettleRequest, by=_SERVER)
FENCE: Final = Call("step.fence", step.FenceRequest, by=_SERVER)
RECEIPTS: Final = Call("step.receipts", step.ReceiptsRequest, step.ReceiptsReply, by=_SERVER)
FREEZE: Final = Call("step.freeze", step.FreezeRequest, step.FreezeReply, by=_SERVER)
AVERAGE: Final = Call("step.average", step.AverageRequest, step.AverageReply, by=_SERVER)
PROJECT: Final = Call("step.project", parts.ProjectRequest, parts.ProjectReply, by=_SERVER)
VECTOR: Final = Download("step.vector", parts.VectorRequest, by=_SERVER)
EXAMINE: Final = Call("step.examine", parts.ExamineRequest, parts.ExamineReply, by=_SERVER)
REPLACE_MEAN: Final = Upload("step.replace_mean", parts.MeanReplacement, by=_SERVER)
PREPARE: Final = Call("step.prepare", step.Prepare, step.Promise, by=_SERVER)
PROPOSE: Final = Call("step.propose", step.Proposal, step.Vote, by=_SERVER)
APPLY: Final = Call("step.apply", step.Record, by=_SERVER)

# The coordinator calls these methods of trainers, and servers call `LEADS` of the lead.
REPLAY: Final = Call("trainer.replay", step.ReplayRequest, step.ReplayReply, by=_SERVER, of=_TRAINER)
AVOID: Final = Call("trainer.avoid", step.AvoidRequest, by=_SERVER, of=_TRAINER)
REPORT: Final = Call("trainer.report", batches.ReportRequest, batches.ReportReply, by=_SERVER, of=_TRAINER)
REPORT_METRICS: Final = Download(
    "trainer.report_metrics", batches.LeaseMetricsRequest, batches.BatchMetrics, by=_SERVER, of=_TRAINER
)
LEADS: Final = Call("trainer.leads", run.LeadsRequest, by=_SERVER, of=_TRAINER)

# Audits.
SKETCH: Final = Call("step.sketch", audits.SketchRequest, audits.SketchReply, by=_SERVER)
ORDER_AUDITS: Final = Call("trainer.audit", audits.AuditOrder, audits.AuditOrderReply, by=_SERVER, of=_TRAINER)
RESULTS: Final = Call("trainer.results", run.StepRequest, audits.ResultsReply, by=_SERVER, of=_TRAINER)
AUDIT: Final = Upload("audit.compute", audits.AuditRequest, by=_TRAINER)
KEPT_WORK: Final = Download("audit.kept", audits.KeptWorkRequest, audits.KeptWorkReply, by=_SERVER)
FINDINGS: Final = Call("audit.findings", audits.FindingsRequest, audits.FindingsReply, by=_SERVER)

# Choosing and watching the coordinator.
ANNOUNCE_TERM: Final = Call("run.lead", run.CoordinatorTerm, run.CoordinatorTerm, by=_SERVER)
WATCH: Final = Call("run.watch", run.WatchRequest, run.WatchReply, by=_SERVER)
PULL: Final = Call("run.pull", run.StepRequest, step.Record, by=_SERVER)
TAKE_OVER: Final = Call("run.take_over", run.CoordinatorTerm, by=_SERVER)
INHERIT: Final = Call("run.inherit", run.InheritRequest, by=_SERVER)
# Asked of a peer that keeps the state of the lead's loop, because it may have to take over as the lead.
LOOP: Final = Call("trainer.loop", run.LoopRequest, run.LoopReply, by=_TRAINER, of=_TRAINER)

# Joining and leaving servers.
JOIN: Final = Call("run.join", membership.JoinRequest, membership.JoinReply, by=_SERVER, only_coordinator=True)
READY: Final = Call("run.ready", membership.ReadyRequest, membership.ReadyReply, by=_SERVER, only_coordinator=True)
DRAIN: Final = Call("run.drain", membership.DrainRequest, membership.DrainReply, by=_SERVER, only_coordinator=True)
MEET: Final = Call("run.meet", step.Candidate, by=_SERVER)
LISTEN: Final = Call("run.listen", membership.ListenRequest, membership.ListenReply, by=_SERVER)
RECORD_DIGEST: Final = Call("run.record_digest", run.StepRequest, run.RecordDigestReply, by=_SERVER)
FOLLOW: Final = Download("stage.follow", membership.FollowRequest, membership.FollowReply, by=_SERVER)
PIECE: Final = Download("stage.piece", membership.PieceRequest, by=_SERVER)
NEXT: Final = Download("stage.next", membership.NextRequest, membership.NextReply, by=_SERVER)

# Reading, writing and keeping the state of a stage.
STATE: Final = Download("stage.state", state.StateRequest, state.StageState, by=_TRAINER)
PROVE: Final = Call("stage.prove", state.ProofRequest, state.ProofReply, by=_SERVER)
WRITE: Final = Download("stage.write", state.WriteRequest, state.WriteReply, by=_TRAINER)
SET_EVALUATION_WEIGHTS: Final = Upload("stage.set_evaluation_weights", state.EvaluationWeights, by=_TRAINER)
KEEP: Final = Upload("snapshot.keep", state.Snapshot, by=_SERVER)
KEEP_LOOP: Final = Upload("snapshot.keep_loop", state.KeptLoop, by=_TRAINER, of=_TRAINER)
SNAPSHOT: Final = Download("snapshot.read", state.SnapshotRequest, state.Snapshot, by=_SERVER)
HELD: Final = Call("snapshot.held", None, state.HeldSnapshots, by=_SERVER)

# Inference with the model of a run or a served model.
SESSION_STEPS: Final = Upload("session.steps", inference.SessionSteps, inference.SessionStepsReply, by=_SERVER)
SESSION_REPLAY: Final = Call("session.replay", inference.SessionReplay, by=_TRAINER)
SESSION_CLOSE: Final = Call("session.close", inference.SessionClose, by=_TRAINER)
SESSION_BRANCH: Final = Call("session.branch", inference.SessionBranch, inference.SessionBranched, by=_SERVER)
SESSION_OUTPUTS: Final = Upload("session.outputs", inference.SessionOutputs, by=_SERVER, of=_TRAINER)
SESSION_FAILED: Final = Call("session.failed", inference.SessionFailed, by=_SERVER, of=_TRAINER)
RUN_TEXT: Final = Call("run.text", inference.RunTextRequest, inference.RunText, by=_OBSERVER, of=_TRAINER)

# Served models, and tuning of clients' adapters.
MODEL_CARD: Final = Call("model.card", serving.CardRequest, serving.ModelCard, by=_SERVER)
MODEL_PART: Final = Download("model.part", serving.PartRequest, by=_SERVER)
MODEL_SERVERS: Final = Call("model.servers", None, serving.ModelServers, by=_OBSERVER)
MODEL_STAY: Final = Call("model.stay", serving.StayRequest, serving.StayReply, by=_SERVER)
TUNE_ADAPTER: Final = Upload("tune.adapter", tuning.AdapterUpload, by=_TRAINER)
TUNE_FORWARD: Final = Upload("tune.forward", tuning.TuneForward, bytes, by=_TRAINER)
TUNE_BACKWARD: Final = Upload("tune.backward", tuning.TuneBackward, tuning.TuneGradients, by=_TRAINER)
TUNE_FETCH: Final = Download("tune.fetch", tuning.TuneFetch, bytes, by=_SERVER)

RPCS: Final[Sequence[Call | StreamRpc]] = [value for value in globals().values() if isinstance(value, Call | StreamRpc)]
