"""Calls of one microbatch to the peers of its route, linked by tickets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, NoReturn

from msgspec.structs import replace as replaced

from lightning_swarm.client.pipeline.context import AnswersOf, PipelineContext, Refusal
from lightning_swarm.client.pipeline.replay_buffer import GivenResult, Microbatch
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
_MOMENT_S: Final = 1.0  # last wait for a receipt that is overdue
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
    recompute: PeerId | None = None  # peer with the forward's input

    def agrees(self, now: _InputSource) -> bool:
        """Return whether a call that was sent with this source also does what `now` requires."""
        return self.source == now.source and self.recompute in (None, now.recompute)


@dataclass
class StageCalls:
    """Sends one microbatch's calls. A peer that receives a call twice runs it once."""

    context: PipelineContext
    microbatch: Microbatch
    # In a replay: stage -> peer that adds the gradient. Other peers add nothing.
    holders: Mapping[int, PeerId] | None = None
    route: list[PeerCharge] = field(default_factory=list)  # for each stage, the peer that computes it
    gradients: serialization.Tree = field(default_factory=list)  # one or None for each output tensor, in wire form
    given: dict[Direction, GivenResult] = field(default_factory=dict)  # as recorded by the context's `ResultCheck`
    replaced: set[tuple[int, PeerId]] = field(default_factory=set)  # (stage, peer) that failed
    _sent: dict[tuple[int, Direction], _InputSource] = field(default_factory=dict)  # sent and not cancelled
    # (stage, direction) -> servers that answered with an error; and the number of all such answers.
    _refused: dict[tuple[int, Direction], set[PeerId]] = field(default_factory=dict)
    _num_refusals: int = 0
    _names: dict[tuple[int, Direction], tuple[str, TicketKey]] = field(default_factory=dict)  # see `named`

    @property
    def step(self) -> int:
        """The step of the microbatch."""
        return self.microbatch.key.step

    @property
    def last_stage(self) -> int:
        """The index of the last stage."""
        return len(self.microbatch.extras) - 1

    @property
    def gradient_end(self) -> int:
        """The first stage with gradients, where a backward ends; if there is none, a number above the last stage's."""
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

    def input_only(self, number: int) -> StageCalls:
        """Return the calls of a backward that computes only the input's gradient, on the same route."""
        key = replaced(self.microbatch.key, input_only=number)
        sent = {call: source for call, source in self._sent.items() if call[1] == "forward"}
        return replace(self, microbatch=replace(self.microbatch, key=key), _sent=sent, _names={})

    def peer(self, stage: int) -> PeerId:
        """Return the peer that computes a stage."""
        return self.route[stage].peer

    def reroute(self, stage: int, avoid: frozenset[PeerId]) -> None:
        """Choose another peer for a stage; no longer count the microbatch as work of the former one."""
        router = self.context.routers[stage]
        router.release(self.route[stage])
        self.route[stage] = router.choose(self.microbatch.num_rows, now_s=now_s(), avoid=avoid)

    def release(self) -> None:
        """No longer count the microbatch as work of its peers, because it is done or given up."""
        for router, charge in zip(self.context.routers, self.route, strict=False):
            router.release(charge)

    def patience_s(self, stage: int) -> float:
        """Return the seconds that a stage's peer may take once it has its input."""
        return self.context.patience_s(stage, self.route[stage], self.microbatch.shapes[stage])

    def settle(self, stage: int, report: StageReport) -> None:
        """Record that a stage's peer has finished the microbatch, and the time that it reports."""
        router = self.context.routers[stage]
        router.settle(self.route[stage], busy_s=report.busy_s, queued=report.queued)
        router.note_shapes(self.peer(stage), self.microbatch.shapes[stage])
        self.context.note_answer(self.peer(stage), step=self.step)

    def unsent(self, end: int) -> list[int]:
        """Return the stages before `end` whose present peers were never sent the forward."""
        sent = {stage: source.peer for (stage, direction), source in self._sent.items() if direction == "forward"}
        return [stage for stage in range(end) if sent.get(stage) != self.peer(stage)]

    # ------------------------------------------------------------------ sending

    async def send_forward(self, stage: int) -> bool:
        """Send a stage's forward to its peer; False if the peer is busy and will not run it."""
        now = _InputSource(self.peer(stage), self.peer(stage - 1) if stage else None)
        await self._cancel_other(stage, "forward", now)
        microbatch = self.microbatch
        structure, tensors = microbatch.sent[stage]
        request = ForwardRequest(
            key=microbatch.key,
            stage_index=stage,
            mode=microbatch.modes[stage],
            source=self._ticket(stage - 1, "forward") if stage else None,
            result_key=self.named(stage, "forward")[1],
            structure=structure,
            keep=stage >= self.gradient_end,
        )
        self._sent[stage, "forward"] = now  # recorded first, because a call that breaks off may have arrived
        try:
            await self.context.send(now.peer, FORWARD, request, tensors)
        except Busy:
            del self._sent[stage, "forward"]
            return False
        except SwarmError as error:
            self._raise_for(stage, now.peer, "forward", error)
        return True

    async def send_backward(self, stage: int, *, recompute: bool = False) -> None:
        """Send a stage's backward to its peer; with `recompute`, the peer runs the forward again if it kept nothing."""
        source = self.peer(stage + 1) if stage < self.last_stage else None
        now = _InputSource(self.peer(stage), source, self.peer(stage - 1) if recompute and stage else None)
        await self._cancel_other(stage, "backward", now)
        microbatch = self.microbatch
        again = microbatch.own_input(stage) if recompute else None
        structure, tensors = serialization.flatten((None if source else self.gradients, again))
        request = BackwardRequest(
            key=microbatch.key,
            stage_index=stage,
            mode=microbatch.modes[stage],
            weight=microbatch.weight,
            accumulate=self.accumulates(stage),
            source=self._ticket(stage + 1, "backward") if source else None,
            result_key=self.named(stage, "backward")[1],
            structure=structure,
            inputs=self._ticket(stage - 1, "forward") if recompute and stage else None,
        )
        self._sent[stage, "backward"] = now
        try:
            await self.context.send(now.peer, BACKWARD, request, tensors)
        except SwarmError as error:
            self._raise_for(stage, now.peer, "backward", error)

    async def cancel(self, stage: int, direction: Direction) -> bool:
        """Cancel a call; True if that is too late, because the gradient is in the peer's sum."""
        request = CancelRequest(key=self.microbatch.key, stage_index=stage, direction=direction)
        self._sent.pop((stage, direction), None)
        peer = self.peer(stage)
        try:
            return (await self.context.send(peer, CANCEL, request)).added
        except SwarmError as error:
            self._raise_for(stage, peer, direction, error)

    async def _cancel_other(self, stage: int, direction: Direction, now: _InputSource) -> None:
        """Cancel a call whose input now comes from another peer; its peer would take the new call for a repetition."""
        sent = self._sent.get((stage, direction))
        if sent is not None and sent.peer == now.peer and not sent.agrees(now):
            await self.cancel(stage, direction)

    # ------------------------------------------------------------------ waiting

    async def wait(self, stage: int, direction: Direction, *, timeout: float | None = None) -> CallReport:
        """Wait for a call's report, at most `timeout` seconds, or as long as the stage's peer may take."""
        if timeout is None:
            is_only_one = self.holders is not None and stage in self.holders  # no other peer may replace a holder
            timeout = self.context.timeout if is_only_one else self.patience_s(stage)
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
                given = await self.context.results.received(ticket.peer_id, direction, result, self.microbatch)
                if given is not None:
                    self.given[direction] = given
                return result, decode(report, CallReport)
        except SwarmError as error:
            self._raise_for(stage, ticket.peer_id, direction, error)

    async def receive_all(self) -> Collection[int]:
        """Wait for the receipt that comes last, which carries the others; settle the stages, and return them."""
        # It takes no longer than one stage may take. If not all receipts have come then, `receive` finds the late peer.
        stages = range(self.gradient_end, self.last_stage + 1)
        if len(stages) < 2:
            return ()
        try:
            report = await self.wait(self.gradient_end, "backward", timeout=self.patience_s(self.last_stage))
        except StageCallFailed as failure:
            if not isinstance(failure.error, DeadlineExceeded):
                return ()
            await self.receive(self.last_stage, timeout=_MOMENT_S)  # the last stage has had its time
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
                error = ProtocolError(f"{peer} finished stage {stage} with a receipt too few or too many")
                raise StageCallFailed(stage, peer, Refusal(peer, error))
            if not report.receipt:  # the result of another replay, in which this peer added nothing
                await self.cancel(stage, "backward")
                raise StageCallFailed(stage, peer, TicketGone("the gradient was computed, and not added"))
        self.settle(stage, report)

    def _ticket(self, stage: int, direction: Direction) -> Ticket:
        name, key = self.named(stage, direction)
        return Ticket(peer_id=self.peer(stage), name=name, key=key)

    def named(self, stage: int, direction: Direction) -> tuple[str, TicketKey]:
        """Return the name of a call's result, and its key, which only its holder, its reader and this trainer know."""
        found = self._names.get((stage, direction))
        if found is None:
            name = self.microbatch.key.name(stage, direction, self.context.transport.peer_id)
            # Derived, not drawn at random: a call that is sent again keeps its key, so the holder of its result need
            # not learn which readers a new route has.
            key = blake2b(name.encode(), key=self.context.secret, digest_size=_KEY_BYTES).digest()
            found = self._names[stage, direction] = name, key
        return found

    def _raise_for(self, stage: int, peer: PeerId, direction: Direction, error: SwarmError) -> NoReturn:
        """Raise a call's error, or the error for the peer that is at fault for it."""
        if isinstance(error, LeaseRevoked):
            if self.holders is not None:  # a replay may rightly come too late, without a fault of the peer
                raise error
            if peer not in self.context.revokers:
                self.context.revokers.add(peer)
                raise error
            # A peer's second report in this step that a batch was struck may be false, so another peer is tried.
            raise self._refused_by(stage, direction, Refusal(peer, error)) from error
        if isinstance(error, Refusal):
            raise self._refused_by(stage, direction, error) from error
        if isinstance(error, PeerError):
            raise StageCallFailed(stage, peer, error) from error
        raise error

    def _refused_by(self, stage: int, direction: Direction, refusal: Refusal) -> Exception:
        """Return the error to raise for a refusal: the server's own error only if no other server could do better."""
        refused = self._refused.setdefault((stage, direction), set())
        refused.add(self.peer(stage))
        self._num_refusals += 1
        lacks_memory = isinstance(refusal.error, OutOfMemory)
        if isinstance(refusal.error, StageError) and not lacks_memory and self.microbatch.key.is_probe:
            return refusal.error  # probes may fail legitimately
        if not refused >= self.context.peers_of(stage):
            return StageCallFailed(stage, self.peer(stage), refusal)
        refused.clear()  # after `OutOfMemory` the microbatch is sent once more, alone
        suspect = self.context.results.suspect(stage, direction, self.last_stage)
        most = _MAX_REFUSALS * sum(len(router.peers) for router in self.context.routers)
        if suspect is None or self._num_refusals >= most:
            return refusal.error
        return self._refused_by(suspect, direction, Refusal(self.peer(suspect), refusal.error))
