"""Calls of one microbatch to the peers of its route, linked by tickets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, NoReturn

from msgspec.structs import replace as replaced

from lightning_swarm.client.pipeline.context import AnswersOf, PipelineContext, Refusal
from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ResultEvidence
from lightning_swarm.client.pipeline.result_check import Result
from lightning_swarm.client.pipeline.router import PeerCharge
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    Busy,
    DeadlineExceeded,
    LeaseRevoked,
    OutOfMemory,
    PeerError,
    ProtocolError,
    StageError,
    SwarmError,
    TicketGone,
)
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import from_message
from lightning_swarm.protocol.messages.calls import (
    BackwardRequest,
    CallReport,
    CancelRequest,
    Direction,
    ForwardRequest,
    StageReport,
    Ticket,
    TicketKey,
)
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.rpc import BACKWARD, CANCEL, FORWARD

_KEY_BYTES: Final = 16
_LAST_WAIT_S: Final = 1.0  # wait for a receipt that is overdue
_MAX_REFUSALS: Final = 8  # refusals per server of the run, after which an error that all servers report is raised


class StageCallFailed(Exception):
    """Raised if a peer of the route failed a call, or could not be called."""

    def __init__(self, stage: int, peer: PeerId, error: PeerError) -> None:
        super().__init__(f"stage {stage} on {peer}: {error}")
        self.stage = stage
        self.peer = peer
        self.error = error


@dataclass(frozen=True)
class _InputSource:
    """The peer that is called, and the peers from which the call gets its inputs."""

    peer: PeerId
    source: PeerId | None  # peer whose result the call gets; None: the trainer sends the input itself
    recompute: PeerId | None = None  # to recompute the forward: peer with its input

    def agrees(self, wanted: _InputSource) -> bool:
        """Return whether a call sent like this suffices for `wanted`: the same source, and no other `recompute`."""
        return self.source == wanted.source and self.recompute in (None, wanted.recompute)


@dataclass
class StageCalls:
    """Sends one microbatch's calls. A peer that receives a call twice runs it once."""

    context: PipelineContext
    microbatch: Microbatch
    # In a replay: stage -> peer that adds the gradient. Other peers add nothing.
    holders: Mapping[int, PeerId] | None = None
    route: list[PeerCharge] = field(default_factory=list)  # for each stage, the peer that computes it
    gradients: serialization.Tree = field(default_factory=list)  # one or None for each output tensor, in wire form
    evidence: dict[Direction, ResultEvidence] = field(default_factory=dict)  # from `ResultCheck.evidence_of`
    replaced: set[tuple[int, PeerId]] = field(default_factory=set)  # (stage, peer) that failed and was replaced
    _sent: dict[tuple[int, Direction], _InputSource] = field(default_factory=dict)  # sent and not cancelled
    # (stage, direction) -> servers that answered with an error; cleared when all servers of the stage did.
    _refused: dict[tuple[int, Direction], set[PeerId]] = field(default_factory=dict)
    _num_refusals: int = 0  # all such answers so far
    _names: dict[tuple[int, Direction], tuple[str, TicketKey]] = field(default_factory=dict)  # see `result_name`

    @property
    def step(self) -> int:
        """The step of the microbatch."""
        return self.microbatch.key.step

    @property
    def last_stage(self) -> int:
        """The index of the last stage."""
        return len(self.microbatch.extras) - 1

    @property
    def first_backward_stage(self) -> int:
        """The lowest stage with a backward, which runs its backward last; one past the last stage if there is none."""
        if self.holders is not None:
            return min(self.holders)
        if self.microbatch.input_grad:
            return 0
        return self.microbatch.first_trained if self.microbatch.key.adds else self.last_stage + 1

    def accumulates(self, stage: int) -> bool:
        """Return whether the stage's peer must add the gradient to its sum."""
        if self.holders is not None:
            return stage in self.holders
        return self.microbatch.key.adds and stage >= self.microbatch.first_trained

    def for_input_gradient(self, number: int) -> StageCalls:
        """Return the calls of the `number`-th backward, which computes only the input's gradient, on the same route."""
        key = replaced(self.microbatch.key, input_only=number)
        sent = {call: source for call, source in self._sent.items() if call[1] == "forward"}
        return replace(self, microbatch=replace(self.microbatch, key=key), _sent=sent, _names={})

    def peer(self, stage: int) -> PeerId:
        """Return the peer that computes a stage."""
        return self.route[stage].peer

    def reroute(self, stage: int, avoid: frozenset[PeerId]) -> None:
        """Choose another peer for a stage; no longer count the microbatch as work of the former peer."""
        router = self.context.routers[stage]
        router.release(self.route[stage])
        self.route[stage] = router.choose(self.microbatch.num_rows, now_s=now_s(), avoid=avoid)

    def release(self) -> None:
        """No longer count the microbatch as work of its peers, because it is done or given up."""
        for router, charge in zip(self.context.routers, self.route, strict=False):
            router.release(charge)

    def patience_s(self, stage: int) -> float:
        """Return the seconds that a stage's peer may take once it has its input."""
        return self.context.patience_s(stage, self.route[stage], self.microbatch.shape_hashes[stage])

    def settle(self, stage: int, report: StageReport) -> None:
        """Record that a stage's peer has finished the microbatch, and the time that it reports."""
        router = self.context.routers[stage]
        router.settle(self.route[stage], busy_s=report.busy_s, queued=report.queued)
        router.note_shapes(self.peer(stage), self.microbatch.shape_hashes[stage])
        self.context.note_answer(self.peer(stage), step=self.step)

    def unsent(self, end: int) -> list[int]:
        """Return the stages before `end` whose current peers were never sent the forward."""
        sent = {stage: source.peer for (stage, direction), source in self._sent.items() if direction == "forward"}
        return [stage for stage in range(end) if sent.get(stage) != self.peer(stage)]

    # ------------------------------------------------------------------ sending

    async def send_forward(self, stage: int) -> bool:
        """Send a stage's forward to its peer; False if the peer is busy and will not run it."""
        wanted = _InputSource(self.peer(stage), self.peer(stage - 1) if stage else None)
        await self._cancel_outdated(stage, "forward", wanted)
        microbatch = self.microbatch
        structure, tensors = microbatch.sent[stage]
        request = ForwardRequest(
            key=microbatch.key,
            stage_index=stage,
            mode=microbatch.modes[stage],
            source=self._ticket(stage - 1, "forward") if stage else None,
            result_key=self.result_name(stage, "forward")[1],
            structure=structure,
            keep=stage >= self.first_backward_stage,
        )
        self._sent[stage, "forward"] = wanted  # recorded first, because a call that fails may have arrived
        try:
            await self.context.send(wanted.peer, FORWARD, request, tensors)
        except Busy:
            del self._sent[stage, "forward"]
            return False
        except SwarmError as error:
            self._raise_for(stage, wanted.peer, "forward", error)
        return True

    async def send_backward(self, stage: int, *, recompute: bool = False) -> None:
        """Send a stage's backward to its peer; with `recompute`, the peer repeats the forward if it kept no graph."""
        source = self.peer(stage + 1) if stage < self.last_stage else None
        wanted = _InputSource(self.peer(stage), source, self.peer(stage - 1) if recompute and stage else None)
        await self._cancel_outdated(stage, "backward", wanted)
        microbatch = self.microbatch
        own_input = microbatch.own_input(stage) if recompute else None
        structure, tensors = serialization.flatten((None if source else self.gradients, own_input))
        request = BackwardRequest(
            key=microbatch.key,
            stage_index=stage,
            mode=microbatch.modes[stage],
            weight=microbatch.weight,
            accumulate=self.accumulates(stage),
            source=self._ticket(stage + 1, "backward") if source else None,
            result_key=self.result_name(stage, "backward")[1],
            structure=structure,
            inputs=self._ticket(stage - 1, "forward") if recompute and stage else None,
        )
        self._sent[stage, "backward"] = wanted
        try:
            await self.context.send(wanted.peer, BACKWARD, request, tensors)
        except SwarmError as error:
            self._raise_for(stage, wanted.peer, "backward", error)

    async def cancel(self, stage: int, direction: Direction) -> bool:
        """Cancel a call; return True if that is too late, because the gradient is in the peer's sum."""
        request = CancelRequest(key=self.microbatch.key, stage_index=stage, direction=direction)
        self._sent.pop((stage, direction), None)
        peer = self.peer(stage)
        try:
            return (await self.context.send(peer, CANCEL, request)).added
        except SwarmError as error:
            self._raise_for(stage, peer, direction, error)

    async def _cancel_outdated(self, stage: int, direction: Direction, wanted: _InputSource) -> None:
        """Cancel a sent call with an outdated source, because its peer would take the new call for a repetition."""
        sent = self._sent.get((stage, direction))
        if sent is not None and sent.peer == wanted.peer and not sent.agrees(wanted):
            await self.cancel(stage, direction)

    # ------------------------------------------------------------------ waiting

    async def wait(self, stage: int, direction: Direction, *, timeout: float | None = None) -> CallReport:
        """Wait for a call's report, at most `timeout` seconds, or as long as the stage's peer may take."""
        if timeout is None:
            is_holder = self.holders is not None and stage in self.holders  # no other peer may replace a holder
            timeout = self.context.timeout if is_holder else self.patience_s(stage)
        ticket = self._ticket(stage, direction)
        try:
            with AnswersOf(ticket.peer_id):
                return decode(await self.context.tickets.wait(ticket, timeout=timeout), CallReport)
        except SwarmError as error:
            self._raise_for(stage, ticket.peer_id, direction, error)

    async def fetch(self, stage: int, direction: Direction) -> tuple[Result, CallReport]:
        """Wait for a call's result and its report; a forward may take as long as all stages up to it."""
        stages = range(stage + 1) if direction == "forward" else range(stage, stage + 1)
        timeout = min(sum(map(self.patience_s, stages)), self.context.timeout)
        ticket = self._ticket(stage, direction)
        try:
            with AnswersOf(ticket.peer_id):
                message, report = await self.context.tickets.fetch_reported(ticket, timeout=timeout)
                result = from_message(message)
                evidence = await self.context.results.evidence_of(ticket.peer_id, direction, result, self.microbatch)
                if evidence is not None:
                    self.evidence[direction] = evidence
                return result, decode(report, CallReport)
        except SwarmError as error:
            self._raise_for(stage, ticket.peer_id, direction, error)

    async def receive_all(self) -> Collection[int]:
        """Wait for the last report, which includes the reports of all stages; settle these stages, and return them."""
        # The wait is as long as one stage may take. If receipts are missing then, `receive` finds the late peer.
        stages = range(self.first_backward_stage, self.last_stage + 1)
        if len(stages) < 2:
            return ()
        try:
            report = await self.wait(self.first_backward_stage, "backward", timeout=self.patience_s(self.last_stage))
        except StageCallFailed as failure:
            if not isinstance(failure.error, DeadlineExceeded):
                return ()
            await self.receive(self.last_stage, timeout=_LAST_WAIT_S)  # the last stage's time is over
            return (self.last_stage,)
        reports = [report, *report.others]
        if [report.receipt for report in reports] != [self.accumulates(stage) for stage in stages]:
            return ()
        for stage, stage_report in zip(stages, reports, strict=True):
            self.settle(stage, stage_report)
        return stages

    async def receive(self, stage: int, *, timeout: float | None = None) -> None:
        """Wait for a stage's receipt, at most `timeout` seconds, or as long as its peer may take; settle the stage."""
        report = await self.wait(stage, "backward", timeout=timeout)
        if report.receipt != self.accumulates(stage):
            peer = self.peer(stage)
            if self.holders is None:
                error = ProtocolError(f"{peer} finished stage {stage} with a missing or an unrequested receipt")
                raise StageCallFailed(stage, peer, Refusal(peer, error))
            if not report.receipt:  # a result of another replay, in which this peer added nothing
                await self.cancel(stage, "backward")
                raise StageCallFailed(stage, peer, TicketGone("the gradient was computed, but not added"))
        self.settle(stage, report)

    def _ticket(self, stage: int, direction: Direction) -> Ticket:
        name, key = self.result_name(stage, direction)
        return Ticket(peer_id=self.peer(stage), name=name, key=key)

    def result_name(self, stage: int, direction: Direction) -> tuple[str, TicketKey]:
        """Return the name of a call's result, and its key, which only its holder, its reader and this trainer know."""
        named = self._names.get((stage, direction))
        if named is None:
            name = self.microbatch.key.name(stage, direction, self.context.transport.peer_id)
            # Derived, not drawn at random: a call that is sent again keeps its key, so the holder of its result need
            # not learn the readers of a new route.
            key = blake2b(name.encode(), key=self.context.secret, digest_size=_KEY_BYTES).digest()
            named = self._names[stage, direction] = name, key
        return named

    def _raise_for(self, stage: int, peer: PeerId, direction: Direction, error: SwarmError) -> NoReturn:
        """Raise `StageCallFailed` if another peer may do better, otherwise the error itself."""
        if isinstance(error, LeaseRevoked):
            if self.holders is not None:  # a replay may be too late through no fault of the peer
                raise error
            if peer not in self.context.revokers:
                self.context.revokers.add(peer)
                raise error
            # A peer's first report in a step that a batch was struck is accepted. A second report may be false, so
            # another peer is tried.
            raise self._refused_by(stage, direction, Refusal(peer, error)) from error
        if isinstance(error, Refusal):
            raise self._refused_by(stage, direction, error) from error
        if isinstance(error, PeerError):
            raise StageCallFailed(stage, peer, error) from error
        raise error

    def _refused_by(self, stage: int, direction: Direction, refusal: Refusal) -> Exception:
        """Count a refusal, and return the error to raise: the server's own only if no other server may do better."""
        refused = self._refused.setdefault((stage, direction), set())
        refused.add(self.peer(stage))
        self._num_refusals += 1
        lacks_memory = isinstance(refusal.error, OutOfMemory)
        if isinstance(refusal.error, StageError) and not lacks_memory and self.microbatch.key.is_probe:
            return refusal.error  # probes may fail legitimately
        if not refused >= self.context.peers_of(stage):
            return StageCallFailed(stage, self.peer(stage), refusal)
        refused.clear()  # count anew: after `OutOfMemory`, for example, the microbatch is sent once more, alone
        # The peer that sent the input may have falsified it. Count a refusal by that peer, so that it is replaced.
        suspect = self.context.results.suspect(stage, direction, self.last_stage)
        max_refusals = _MAX_REFUSALS * sum(len(router.peers) for router in self.context.routers)
        if suspect is None or self._num_refusals >= max_refusals:
            return refusal.error
        return self._refused_by(suspect, direction, Refusal(self.peer(suspect), refusal.error))
