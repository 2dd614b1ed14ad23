"""A server's part in checking the means of an audited run: it projects its sums and means, and sends them on request.

If projections disagree, the coordinator's own server fetches the sums and means and examines them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Literal

from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Damaged, ProtocolError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol.compression import to_cpu
from lightning_swarm.protocol.mean_projections import num_buckets
from lightning_swarm.protocol.messages.parts import (
    ExamineReply,
    ExamineRequest,
    MeanReplacement,
    PartProjections,
    ProjectReply,
    ProjectRequest,
    VectorRequest,
)
from lightning_swarm.protocol.messages.step import Closing
from lightning_swarm.protocol.patience import MAX_SLOWDOWN, Durations
from lightning_swarm.protocol.rpc import EXAMINE, PROJECT, REPLACE_MEAN, VECTOR
from lightning_swarm.server.audit.examination import Examination
from lightning_swarm.server.audit.projection import (
    bucket_norms,
    part_digest,
    part_digests,
    parts_of,
    project_parts,
    sum_parts,
)
from lightning_swarm.server.averaging.all_reduce import (
    AveragingState,
    Compute,
    Group,
    fetch_part,
    message_for_joiners,
    squared_norm,
)
from lightning_swarm.server.averaging_round import HeldRound
from lightning_swarm.server.context import RunMembership, ServerContext
from lightning_swarm.server.oversight import RoundLog
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers

_MEAN: Final = "mean"  # the ticket from which joiners fetch the mean
_TRIES: Final = 3  # attempts to fetch a vector that arrives damaged


class AuditedRoundLog(RoundLog):
    """Computes digests of the members' contributions, which the round keeps, and serves the whole mean to joiners."""

    def __init__(self, membership: RunMembership) -> None:
        self._membership = membership

    @override
    async def digests(self, parts: Sequence[Sequence[Tensor]], compute: Compute | None) -> Sequence[bytes]:
        def run() -> list[bytes]:
            return [part_digest(part) for part in parts]

        return run() if compute is None else await compute(run)

    @override
    def offer(self, group: Group, mean: Tensor) -> None:
        group.offer(_MEAN, message_for_joiners(mean))

    @override
    def withhold(self, group: Group, reason: str) -> None:
        group.withhold([_MEAN], reason)

    @override
    async def collect(
        self,
        group: Group,
        closing: Closing,
        like: Tensor,
        fetch_parts: Callable[[], Awaitable[tuple[Tensor, AveragingState]]],
    ) -> tuple[Tensor, AveragingState]:
        # Fetch the whole mean from one member: if each sent a part, any of them could keep joiners out by a false part.
        # The coordinator checks the mean. If it is false, the next round asks another member.
        rank = self._rank_to_ask(closing, group.roster)
        mean = await fetch_part(group, rank, _MEAN, like=like, length=len(like))
        return mean.to(like.device), AveragingState()

    def _rank_to_ask(self, closing: Closing, roster: Sequence[PeerId]) -> int:
        """Return the roster index of the member to ask for a mean: a trusted member, otherwise each in turn."""
        trusted = [rank for rank, peer in enumerate(roster) if peer in self._membership.run.trusted]
        turn = self._membership.me.boot_id + closing.step + closing.round
        return trusted[0] if trusted else turn % len(roster)


class MeanChecks:
    """Sends the coordinator projections of a round's sums and means, and examines all members' vectors on request."""

    def __init__(self, context: ServerContext, steps: StepHandlers, audit_transport: Transport) -> None:
        self._transport, self._compute = context.transport, context.compute
        self._membership, self._me = context.membership, context.me.peer_id
        self._timeout = context.limits.call_timeout
        self._durations = Durations()  # times to fetch a vector
        self._sums, self._rounds = steps.sums, steps.rounds
        max_bytes, admit = context.limits.max_message_bytes, self._check_coordinator
        PROJECT.serve(audit_transport, self._handle_project)
        EXAMINE.serve(audit_transport, self._handle_examine)
        VECTOR.serve(audit_transport, self._handle_vector)
        REPLACE_MEAN.serve(audit_transport, self._handle_replacement, max_bytes=max_bytes, admit=admit)

    # ------------------------------------------------------------------ this server's vectors

    def _round(self, caller: PeerId, closing: Closing) -> HeldRound:
        """Return the result of a round; refuse any caller but the coordinator, and a round that is not held here."""
        self._sums.check(caller, closing.generation, closing.step)
        self._sums.check_frozen(closing)
        if not self._sums.run.manifest.settings.has_strangers:  # runs without strangers serve these calls, too
            raise ProtocolError("sums and means are checked only in runs with `trust='audited'`")
        return self._rounds.held(closing)

    def _check_coordinator(self, caller: PeerId) -> None:
        self._sums.run.check_coordinator(caller)

    async def _handle_project(self, caller: PeerId, request: ProjectRequest) -> ProjectReply:
        closing = request.closing
        held_round, present = self._round(caller, closing), self._sums.run.present(closing.absent)
        stages = sorted(self._sums.stages.items())
        works = [
            partial(
                _projection, stage, stage.sum_of(closing.step).values, held_round, len(present[index]), request.seed
            )
            for index, stage in stages
        ]
        projections = await self._compute(lambda: [work() for work in works])
        self._round(caller, closing)  # raises if the step was decided meanwhile, and its sums reused
        return ProjectReply(stages=projections)

    async def _handle_vector(self, caller: PeerId, request: VectorRequest) -> Message:
        """Send a whole sum or mean of a stage, for an examination."""
        held_round, stage = self._round(caller, request.closing), self._sums.stage(request.stage_index)
        vector = stage.sum_of(request.closing.step).values
        if request.of == "mean":
            vector = held_round.gradients[stage.index]
        # No copy is needed: a frozen sum does not change, and no record is decided while the coordinator waits for it.
        return Message(b"", (to_cpu(vector),))

    async def _handle_replacement(self, caller: PeerId, request: MeanReplacement, message: Message) -> None:
        """Replace this member's mean by the coordinator's mean of all sums, because the members' means disagree."""
        held_round, stage = self._round(caller, request.closing), self._sums.stage(request.stage_index)
        mean = held_round.gradients[stage.index]
        received = [(tensor.dtype, tensor.shape) for tensor in message.tensors]
        if received != [(mean.dtype, mean.shape)]:
            raise ProtocolError(f"a mean of stage {stage.index} must be {(mean.dtype, mean.shape)}, got {received}")
        self._rounds.replace_mean(request.closing, stage.index, message.tensors[0].to(mean.device))

    # ------------------------------------------------------------------ other servers' vectors

    async def _handle_examine(self, caller: PeerId, request: ExamineRequest) -> ExamineReply:
        """Compare the vectors of a stage's members with their projections, for the coordinator in this process."""
        closing = request.closing
        if caller != self._me:
            raise ProtocolError(f"only {self._me} itself, as coordinator, may have it examine sums, not {caller}")
        self._sums.check(caller, closing.generation, closing.step)
        run = self._sums.run
        members = [member.peer_id for member in run.present(closing.absent)[request.stage_index]]
        examination = Examination(request, members, exact=run.manifest.settings.deterministic)
        try:
            await self._examine(request, examination)
        except _Unreached as error:
            return ExamineReply(lies={}, contradictions=[], unreached={error.peer: str(error)}, squared_norm=None)
        return examination.reply()

    async def _examine(self, request: ExamineRequest, examination: Examination) -> None:
        """Fetch and examine vectors one by one, because each may take as much memory as the stage."""
        for peer in examination.members:
            if request.drawn is None or peer in request.drawn:  # a spot check examines only the sums of drawn members
                vector = await self._fetch(peer, request, "sum", examination)
                await self._compute(partial(examination.examine_sum, peer, vector))
        if request.drawn is not None or examination.lies:
            return
        await self._compute(examination.reduce)
        for peer in examination.members:
            if examination.needs_mean(peer):
                vector = await self._fetch(peer, request, "mean", examination)
                await self._compute(partial(examination.examine_mean, peer, vector))
        await self._compute(examination.decide)
        if examination.contradictions and not examination.lies:  # means differ, but no member is proven false
            mean = examination.mean
            await gather(self._replace(peer, request, mean) for peer in examination.members)

    async def _fetch(
        self, peer: PeerId, request: ExamineRequest, of: Literal["sum", "mean"], examination: Examination
    ) -> Tensor | None:
        """Fetch a vector; None if the answer has another dtype or shape."""
        wanted = VectorRequest(closing=request.closing, stage_index=request.stage_index, of=of)
        expected = examination.expected_vector(of)
        max_bytes = expected.numel() * expected.itemsize
        begin_s = now_s()
        deadline_s = begin_s + self._patience_s  # shared by all attempts, because the coordinator waits no longer
        for tries_left in reversed(range(_TRIES)):
            try:
                timeout = max(0.0, deadline_s - now_s())
                _, tensors = await VECTOR.ask(self._transport, peer, wanted, timeout=timeout, max_bytes=max_bytes)
                break
            except SwarmError as error:
                if not isinstance(error, Damaged) or not tries_left:
                    raise _Unreached(peer, error) from error
        if peer != self._me:
            self._durations.add(now_s() - begin_s)
        received = [(tensor.dtype, tensor.shape) for tensor in tensors]
        return tensors[0] if received == [(expected.dtype, expected.shape)] else None

    @property
    def _patience_s(self) -> float:
        """Seconds to wait for a vector, estimated from earlier vectors."""
        return self._durations.deadline_s(longest_s=self._timeout, slowdown=MAX_SLOWDOWN)

    async def _replace(self, peer: PeerId, request: ExamineRequest, mean: Tensor) -> None:
        """Send a member the mean computed here, in place of its own."""
        replacement = MeanReplacement(closing=request.closing, stage_index=request.stage_index)
        try:
            await REPLACE_MEAN.ask(self._transport, peer, replacement, (mean,), timeout=self._patience_s, max_bytes=0)
        except SwarmError as error:
            raise _Unreached(peer, error) from error


class _Unreached(SwarmError):
    """A member did not send a vector, or did not accept a mean."""

    def __init__(self, peer: PeerId, error: SwarmError) -> None:
        super().__init__(f"{peer} did not answer in an examination: {error}")
        self.peer = peer


def _projection(stage: Stage, values: Tensor, held_round: HeldRound, num_members: int, seed: int) -> PartProjections:
    """Project the sum and the mean of a stage, part by part."""
    mean, size = held_round.gradients[stage.index], num_buckets(num_members)
    means = parts_of(mean, num_members)
    sums = sum_parts(values, num_members)
    return PartProjections(
        stage_index=stage.index,
        sums=project_parts(sums, seed, num_buckets=size),
        norms=bucket_norms(sums, num_buckets=size),
        means=project_parts(means, seed, num_buckets=size),
        parts=part_digests(mean, num_members),
        given=list(held_round.given[stage.index]),  # digests of the parts that members gave
        squared_norm=squared_norm(mean),
    )
