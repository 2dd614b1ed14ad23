"""A server's part in averaging rounds: means of frozen sums, held until a record says which round counts.

A round begins as soon as the sums are frozen, if they are to be averaged as the coordinator expects. That they hold
what the step counts, the coordinator finds meanwhile; if not, nobody asks for the round's result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.core.tasks import ended, gather
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import Member, TiedTensors, trained_names
from lightning_swarm.protocol.messages.step import AverageReply, AverageRequest, Closing, PartNorm, Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import AVERAGE
from lightning_swarm.server.averaging.all_reduce import (
    AveragingFailed,
    Compute,
    Group,
    GroupParts,
    for_joiners,
    taken,
)
from lightning_swarm.server.averaging.averager import (
    Averager,
    AveragingResult,
    AveragingState,
    Butterfly,
    PowerSGD,
    refuse,
)
from lightning_swarm.server.averaging.clipped import ClippedAverager
from lightning_swarm.server.averaging.deterministic import DeterministicAverager
from lightning_swarm.server.averaging.powersgd import LowRank
from lightning_swarm.server.averaging.tied import TiedMeans
from lightning_swarm.server.batch_norm import collect_statistics, offer_statistics, refuse_statistics
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.pending_work import IdleLinkWait
from lightning_swarm.server.stage import Stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldRound:
    """The result of a round at one server, by stage."""

    closing: Closing
    gradients: Mapping[int, Tensor]  # by stage
    carried: Mapping[int, AveragingState]  # likewise
    given: Mapping[int, Sequence[bytes]]  # likewise, of audited runs: digests of what each member gave


_MEAN: Final = "mean"  # what joiners take, in audited runs

NOTHING_GIVEN: Final = MappingProxyType[int, Sequence[bytes]]({})

_StageResults: TypeAlias = dict[int, AveragingResult]


class AveragingRounds:
    """Averages the sums of a server's stages with their other replicas."""

    idle_link: IdleLinkWait  # what averaging waits for if it is late

    def __init__(self, context: ServerContext, sums: GradientSums) -> None:
        self._tickets = context.tickets  # where parts of gradients wait for the other replicas
        self._compute: Compute = context.compute
        self._sums = sums
        self._membership = context.membership
        self._me = context.me
        self._timeout = context.limits.call_timeout  # for one exchange of a round, at most
        self._patience_s = self._timeout  # likewise, in the newest round that was asked for
        self._held: HeldRound | None = None
        self._running: tuple[Closing, asyncio.Task[_StageResults]] | None = None  # the newest round
        context.transport.handle_call(AVERAGE, self._handle_average)

    def discard_round(self) -> None:
        """Forget the round: its record is applied, or it will have none."""
        self._held = None
        self.begin(None)

    async def close(self) -> None:
        """Give up the round, and wait for its end."""
        if self._running is not None:
            await ended([self._running[1]])

    def has_begun(self, generation: int, step: int, round_: int) -> bool:
        """Tell whether the newest round is this one."""
        newest = self._running[0] if self._running is not None else None
        return newest is not None and (newest.generation, newest.step, newest.round) == (generation, step, round_)

    def begin(self, closing: Closing | None, *, late: bool = False) -> None:
        """Begin to average the frozen sums, unless that has begun, and give up any other round."""
        if self._running is not None:
            if self._running[0] == closing:
                return
            self._running[1].cancel()
        self._running = None
        if closing is not None:
            task = asyncio.create_task(self._average_round(closing, late=late))
            task.add_done_callback(_log_bug)
            self._running = (closing, task)

    def hold(
        self,
        closing: Closing,
        gradients: Mapping[int, Tensor],
        carried: Mapping[int, AveragingState],
        given: Mapping[int, Sequence[bytes]] = NOTHING_GIVEN,
    ) -> None:
        """Keep a round's mean gradients until its record is decided, or those of a later round come.

        All mappings are by stage; `carried` is what goes on to the next step, `given` says what each
        member gave of the parts that this server reduced.
        """
        before = self._held
        if before is not None and before.closing.step == closing.step and before.closing.round > closing.round:
            return  # a coordinator that was replaced had it averaged
        if before is not None and before.closing == closing:
            return  # a request that comes twice; its mean may have been replaced meanwhile
        self._held = HeldRound(closing, gradients, carried, given)

    def holds(self, closing: Closing) -> bool:
        """Tell whether the round's mean gradients are held here."""
        return self._held is not None and self._held.closing == closing

    def held(self, closing: Closing) -> HeldRound:
        """The round's result; a `ProtocolError` if it is not held here."""
        if self._held is None or self._held.closing != closing:
            raise ProtocolError(f"no mean of round {closing.round} of step {closing.step} is held here")
        return self._held

    def replace_mean(self, closing: Closing, index: int, mean: Tensor) -> None:
        """Hold another mean gradient of a stage, of the same length, in the place of the round's own."""
        held = self.held(closing)
        self._held = replace(held, gradients={**held.gradients, index: mean})

    def counted(self, record: Record) -> Mapping[int, Tensor]:
        """The mean gradients that a record counts, by stage; a `ProtocolError` if they are not held here."""
        if self._held is None or self._held.closing != record.closing:
            raise ProtocolError(f"no round of this peer averaged what record {record.step} counts")
        return self._held.gradients

    def carry(self, record: Record) -> None:
        """After a record, give the stages what its round carries to the next step.

        A skipped step carries nothing: its gradients were no numbers. What was carried to it waits for the next one.
        """
        held = self._held
        if held is not None and held.closing == record.closing and record.outcome == "apply":
            for index, carried in held.carried.items():
                self._sums.stages[index].generation.carried = carried

    async def collect(
        self, closing: Closing, stage: Stage, rosters: Sequence[Sequence[Member]]
    ) -> tuple[Tensor, AveragingState]:
        """The mean gradient of a round without this server, and what the server carries to its first round."""
        group = self._group(closing, stage.index, rosters[stage.index])
        like = stage.sum_of(closing.step).like
        if self._is_audited:
            # Of one member, for each of those that give parts of it could keep out whom it likes. The coordinator tells
            # whether it is the mean of the others; if not, another one is asked in the next round.
            place = self._giver(closing, group.roster)
            mean = await taken(group, place, _MEAN, like=like, length=len(like))
            return mean.to(like.device), AveragingState()
        mean, carried = await self._averager(stage).collect(like, group)
        mean.div_(closing.gradient_scale)
        tied = self._tied(self._sums.run.ties, closing, rosters, stage)
        mean = await tied.collected(stage.index, mean, self._me.boot_id)
        return await self._with_statistics(stage, closing, group, None, mean), carried

    @property
    def _is_audited(self) -> bool:
        return self._sums.run.manifest.settings.is_audited

    def _giver(self, closing: Closing, roster: Sequence[PeerId]) -> int:
        """The place of the member to take a mean from: one that needs nobody to confirm it, or each in its turn."""
        believed = [place for place, peer in enumerate(roster) if peer in self._sums.run.believed]
        return believed[0] if believed else (self._me.boot_id + closing.step + closing.round) % len(roster)

    async def _handle_average(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, AverageRequest)
        closing = request.closing
        self._sums.check(caller, closing.generation, closing.step)
        run = self._sums.run
        try:
            await self._compute(lambda: self._sums.check_named(request))
        except SwarmError as error:
            self._sums.check(caller, closing.generation, closing.step)  # a decided step's tickets are freed already
            self._refuse(run.ties, closing, run.present(closing.absent), str(error))
            raise
        try:
            self._patience_s = min(request.patience_s, self._timeout)
            found = await self._result(closing, late=request.late)
        except AveragingFailed as error:
            missed, refusing = ([] if peer is None else [peer] for peer in (error.missed, error.refusing))
            return encode(AverageReply(parts=[], failure=str(error), unreached=missed, refusing=refusing))
        self._sums.run.check_generation(closing.generation)
        self._sums.check_frozen(closing)
        carried = {index: result.carried for index, result in found.items()}
        given = {index: result.given for index, result in found.items()}
        self.hold(closing, {index: result.mean for index, result in found.items()}, carried, given)
        norms = [PartNorm(stage_index=index, squared_norm=result.squared_norm) for index, result in found.items()]
        return encode(AverageReply(parts=norms))

    async def _result(self, closing: Closing, *, late: bool) -> _StageResults:
        """Wait for a round, which may have begun with the freeze."""
        self.begin(closing, late=late)
        assert self._running is not None
        task = self._running[1]
        await asyncio.wait([task])
        if task.cancelled():
            raise AveragingFailed(f"round {closing.round} of step {closing.step} was given up", None)
        return task.result()

    async def _average_round(self, closing: Closing, *, late: bool) -> _StageResults:
        """Average the frozen sums; a failure tells the other servers that they need not wait for this one."""
        sums, run = self._sums, self._sums.run
        rosters = run.present(closing.absent)
        try:
            if late:
                await self.idle_link.wait()
            begin_s = now_s()
            places = await self._compute(lambda: sums.bind(closing, rosters))
            found = await self._averaged(closing, run.ties, rosters, places)
            self.idle_link.averaging_took(now_s() - begin_s)
        except BaseException as error:  # a cancellation, too
            self._refuse(run.ties, closing, rosters, f"the round failed: {error!r}")
            raise
        finally:
            if (sums.version, closing.generation) != (closing.step, run.manifest.generation):
                self._tickets.drop(round_name(closing))  # the record came while this round went on
        return found

    async def _averaged(
        self, closing: Closing, ties: TiedTensors, rosters: Sequence[Sequence[Member]], places: Mapping[int, int]
    ) -> _StageResults:
        """Average each stage, adding what tied parameters get from other stages, and what batch norms saw."""
        # Held here, for this server may give a stage up, or leave the run, while the round goes on.
        stages = {index: self._sums.stage(index) for index in places}
        groups = {index: self._group(closing, index, rosters[index]) for index in places}
        for index, stage in stages.items():
            if stage.statistics:
                offer_statistics(self._seen(closing, stage), stage.statistics.length, groups[index])
        averages = await gather(
            self._average(closing, stages[index], groups[index], place) for index, place in places.items()
        )
        found = dict(zip(places, averages, strict=True))
        if ties:
            found = await self._tied(ties, closing, rosters, *stages.values()).averaged(found, places)
        for index, result in found.items():
            mean = await self._with_statistics(stages[index], closing, groups[index], places[index], result.mean)
            found[index] = result._replace(mean=mean)
            if self._is_audited:
                groups[index].offer(_MEAN, for_joiners(mean))
        return found

    def _refuse(self, ties: TiedTensors, closing: Closing, rosters: Sequence[Sequence[Member]], reason: str) -> None:
        own = [index for index, members in enumerate(rosters) if self._me in members]
        for index in own:
            group = self._group(closing, index, rosters[index])
            refuse(group, rosters[index].index(self._me), reason)
            group.withhold([_MEAN], reason)
            if index in self._sums.stages and self._sums.stages[index].statistics:
                refuse_statistics(group, reason)
        if ties:
            self._tied(ties, closing, rosters).refuse(own, reason)

    async def _average(self, closing: Closing, stage: Stage, group: Group, place: int) -> AveragingResult:
        # In the units of what is added up: the scale is what keeps small gradients in the range of a narrow format.
        scale = closing.gradient_scale
        found = await self._averager(stage).average(
            stage.sum_of(closing.step).values,
            closing.total_weight,
            group,
            place,
            stage.generation.carried.times(scale),
        )
        if scale == 1.0:
            return found
        # Not in place: it may be on its way to others still.
        return found._replace(
            mean=found.mean / scale,
            squared_norm=found.squared_norm / scale / scale,
            carried=found.carried.times(1.0 / scale),
        )

    def _group(self, closing: Closing, index: int, roster: Sequence[Member]) -> Group:
        return Group(
            roster=[member.peer_id for member in roster],
            prefix=round_name(closing, index),
            tickets=self._tickets,
            timeout=self._patience_s,
            shares_with=self._membership.knows_server,
            is_audited=self._is_audited,
        )

    def _seen(self, closing: Closing, stage: Stage) -> dict[Receipt, Tensor]:
        return stage.statistics.seen(closing.step, self._sums.ledgers[stage.index].held)

    async def _with_statistics(
        self, stage: Stage, closing: Closing, group: Group, place: int | None, mean: Tensor
    ) -> Tensor:
        """Append to a stage's mean the running statistics of its batch norms after the step, if it has any."""
        if not stage.statistics:
            return mean
        own = self._seen(closing, stage) if place is not None else {}
        every = await collect_statistics(own, stage.statistics.length, group, place)
        after: Tensor = await self._compute(lambda: stage.with_statistics(mean, stage.statistics.after(every)))
        return after

    def _tied(
        self, ties: TiedTensors, closing: Closing, rosters: Sequence[Sequence[Member]], *stages: Stage
    ) -> TiedMeans:
        """The means of parameters that several stages hold; any of `stages`, this server's own, knows what trains."""
        selections = [stage.selection for stage in stages if stage.selection is not None]
        return TiedMeans(
            ties,
            trained_names(selections[0]) if selections else (),
            lambda index: self._group(closing, index, rosters[index]),
            self._compute,
            exact=any(stage.exact for stage in stages),
        )

    def _averager(self, stage: Stage) -> Averager:
        codecs = stage.codecs
        if stage.exact:
            return DeterministicAverager(stage.next_sum.like, self._compute)
        if self._sums.run.manifest.settings.robust_averaging != "none":
            ledger = self._sums.ledgers[stage.index]
            weight = sum(ledger.origins[first].weight for first, _, _ in ledger.held)
            return ClippedAverager(weight, self._compute)
        if codecs.rank is None:
            return Butterfly(GroupParts(codecs.averaging, self._compute), codecs.error_feedback)
        shapes = [parameter.shape for parameter in stage.trainable]
        return PowerSGD(LowRank(shapes, codecs.rank), codecs.error_feedback, self._compute)


def _log_bug(task: asyncio.Task[_StageResults]) -> None:
    # The coordinator hears of a failure if it asks for the round, and nobody needs to otherwise.
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, SwarmError):
        _log.error("A round of averaging failed", exc_info=error)


def round_name(closing: Closing, stage_index: int | None = None) -> str:
    """The prefix of the tickets of a stage's averaging; without a stage, of all stages."""
    # With the number of absent members, which only grows in a round: what began with the freeze may be of more members,
    # and nobody may take its parts for those of what follows.
    round_ = f"g{closing.generation}.s{closing.step}.r{closing.round}.{len(closing.absent)}/average/"
    return round_ if stage_index is None else f"{round_}{stage_index}"
