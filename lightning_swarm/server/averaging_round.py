"""Runs averaging rounds: averages a server's frozen sums, and holds the newest round's means for its record.

A round begins as soon as the sums are frozen, on the batches that the coordinator expects to count. Meanwhile the
coordinator checks the ledgers. If they differ from this expectation, it never asks for the round's result.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never

from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.core.tasks import cancel_and_wait, gather
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import Member, trained_names
from lightning_swarm.protocol.messages.step import AverageReply, AverageRequest, Closing, PartNorm, Record
from lightning_swarm.protocol.rpc import AVERAGE
from lightning_swarm.protocol.tied_tensors import TiedTensors
from lightning_swarm.server.averaging.all_reduce import (
    AveragingFailed,
    AveragingResult,
    AveragingState,
    Compute,
    Group,
    PartEncoder,
)
from lightning_swarm.server.averaging.averager import Averager, Butterfly, PowerSGD, refuse
from lightning_swarm.server.averaging.clipped import ClippedAverager
from lightning_swarm.server.averaging.deterministic import DeterministicAverager
from lightning_swarm.server.averaging.powersgd import LowRank
from lightning_swarm.server.averaging.tied import TiedMeans
from lightning_swarm.server.batch_norm import STATISTICS, collect_statistics, offer_statistics
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.pending_work import IdleLinkWait
from lightning_swarm.server.stage import Stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldRound:
    """The result of a round at one server, by stage."""

    closing: Closing
    gradients: Mapping[int, Tensor]  # stage -> mean gradient
    carried: Mapping[int, AveragingState]  # stage -> state for the next step
    given: Mapping[int, Sequence[bytes]]  # stage -> digests of the parts that members gave; see `Group.digests`


NOTHING_GIVEN: Final = MappingProxyType[int, Sequence[bytes]]({})

_StageResults: TypeAlias = dict[int, AveragingResult]


class AveragingRounds:
    """Averages the sums of a server's stages with their other replicas."""

    idle_link: IdleLinkWait  # delays late averaging until the link is idle; set by the `Server`

    def __init__(self, context: ServerContext, sums: GradientSums) -> None:
        self._tickets = context.tickets  # where parts of gradients wait for the other replicas
        self._compute: Compute = context.compute
        self._sums, self._membership, self._me = sums, context.membership, context.me
        self._timeout = context.limits.call_timeout
        self._patience_s = self._timeout  # seconds for one exchange of the newest round; its request may set fewer
        self._held: HeldRound | None = None
        self._running: tuple[Closing, asyncio.Task[_StageResults]] | None = None  # the newest round
        AVERAGE.serve(context.transport, self._handle_average)

    def discard_round(self) -> None:
        """Drop the round, because its record is applied or will never come."""
        self._held = None
        self.begin(None)

    async def close(self) -> None:
        """Cancel the round, and wait until it has ended."""
        if self._running is not None:
            await cancel_and_wait([self._running[1]])

    def has_begun(self, generation: int, step: int, round_: int) -> bool:
        """Return whether this is the newest round."""
        newest = self._running[0] if self._running is not None else None
        return newest is not None and (newest.generation, newest.step, newest.round) == (generation, step, round_)

    def begin(self, closing: Closing | None, *, late: bool = False) -> None:
        """Begin to average the frozen sums unless this round has begun; cancel any other round."""
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
        """Keep a round's results, by stage, until its record is decided or a later round replaces them."""
        before = self._held
        if before is not None and before.closing.step == closing.step and before.closing.round > closing.round:
            return  # an older round, requested by a coordinator that was replaced
        if before is not None and before.closing == closing:
            return  # a repeated request; `replace_mean` may have replaced the mean meanwhile
        self._held = HeldRound(closing, gradients, carried, given)

    def holds(self, closing: Closing) -> bool:
        """Return whether the round's mean gradients are held here."""
        return self._held is not None and self._held.closing == closing

    def held(self, closing: Closing) -> HeldRound:
        """Return the round's result; raise `ProtocolError` if it is not held here."""
        if self._held is None or self._held.closing != closing:
            raise ProtocolError(f"no mean of round {closing.round} of step {closing.step} is held here")
        return self._held

    def replace_mean(self, closing: Closing, index: int, mean: Tensor) -> None:
        """Replace the round's mean gradient of a stage by another of the same length."""
        held = self.held(closing)
        self._held = replace(held, gradients={**held.gradients, index: mean})

    def means_for(self, record: Record) -> Mapping[int, Tensor]:
        """Return the mean gradients that a record counts, by stage; raise `ProtocolError` if they are not held here."""
        if self._held is None or self._held.closing != record.closing:
            raise ProtocolError(f"no round of this peer averaged what record {record.step} counts")
        return self._held.gradients

    def store_state(self, record: Record) -> None:
        """Store the averaging state of a record's round in the stages, for the next step."""
        # The gradients of a skipped step were not finite, so the former state remains.
        held = self._held
        if held is not None and held.closing == record.closing and record.outcome == "apply":
            for index, carried in held.carried.items():
                self._sums.stages[index].generation.carried = carried

    async def collect(
        self, closing: Closing, stage: Stage, rosters: Sequence[Sequence[Member]]
    ) -> tuple[Tensor, AveragingState]:
        """Fetch the mean of a round in which this server took no part, and the averaging state for its first step."""
        group = self._group(closing, stage.index, rosters[stage.index])
        like = stage.sum_of(closing.step).like

        async def in_parts() -> tuple[Tensor, AveragingState]:
            mean, carried = await self._averager(stage).collect(like, group)
            mean.div_(closing.gradient_scale)
            tied = self._tied(self._sums.run.ties, closing, rosters, stage)
            mean = await tied.collected(stage.index, mean, self._me.boot_id)
            return await self._with_statistics(stage, closing, group, None, mean), carried

        return await self._membership.oversight.rounds.collect(group, closing, like, in_parts)

    async def _handle_average(self, caller: PeerId, request: AverageRequest) -> AverageReply:
        """Average and hold the means; return squared norms or, after a failure, the servers that caused it."""
        closing = request.closing
        self._sums.check(caller, closing.generation, closing.step)
        run = self._sums.run
        try:
            await self._compute(lambda: self._sums.check_named(request))
        except SwarmError as error:
            self._sums.check(caller, closing.generation, closing.step)  # refuses a decided step: its tickets are gone
            self._refuse(run.ties, closing, run.present(closing.absent), str(error))
            raise
        try:
            self._patience_s = min(request.patience_s, self._timeout)
            results = await self._result(closing, late=request.late)
        except AveragingFailed as error:
            missed, refusing = ([] if peer is None else [peer] for peer in (error.missed, error.refusing))
            return AverageReply(parts=[], failure=str(error), unreached=missed, refusing=refusing)
        self._sums.run.check_generation(closing.generation)
        self._sums.check_frozen(closing)
        carried = {index: result.carried for index, result in results.items()}
        given = {index: result.given for index, result in results.items()}
        self.hold(closing, {index: result.mean for index, result in results.items()}, carried, given)
        norms = [PartNorm(stage_index=index, squared_norm=result.squared_norm) for index, result in results.items()]
        return AverageReply(parts=norms)

    async def _result(self, closing: Closing, *, late: bool) -> _StageResults:
        """Return the result of a round, which may have begun with the freeze."""
        self.begin(closing, late=late)
        assert self._running is not None
        task = self._running[1]
        await asyncio.wait([task])
        if task.cancelled():
            raise AveragingFailed(f"round {closing.round} of step {closing.step} was given up", None)
        return task.result()

    async def _average_round(self, closing: Closing, *, late: bool) -> _StageResults:
        """Average the frozen sums; on failure, notify the other servers, so that they stop waiting for this server."""
        sums, run = self._sums, self._sums.run
        rosters = run.present(closing.absent)
        try:
            if late:
                await self.idle_link.wait()
            begin_s = now_s()
            ranks = await self._compute(lambda: sums.bind(closing, rosters))
            results = await self._average_stages(closing, run.ties, rosters, ranks)
            self.idle_link.averaging_s = now_s() - begin_s
        except BaseException as error:  # a cancellation, too
            self._refuse(run.ties, closing, rosters, f"the round failed: {error!r}")
            raise
        finally:
            if (sums.version, closing.generation) != (closing.step, run.manifest.generation):
                self._tickets.drop(round_name(closing))  # the record was applied while this round ran
        return results

    async def _average_stages(
        self, closing: Closing, ties: TiedTensors, rosters: Sequence[Sequence[Member]], ranks: Mapping[int, int]
    ) -> _StageResults:
        """Average each stage, and add the shares of tied parameters and the statistics of batch norms."""
        # Keep the stages, because this server may release one, or leave the run, while the round runs.
        stages = {index: self._sums.stage(index) for index in ranks}
        groups = {index: self._group(closing, index, rosters[index]) for index in ranks}
        for index, stage in stages.items():
            if stage.statistics:
                offer_statistics(self._own_batch_statistics(closing, stage), stage.statistics.length, groups[index])
        averages = await gather(
            self._average_stage(closing, stages[index], groups[index], rank) for index, rank in ranks.items()
        )
        results = dict(zip(ranks, averages, strict=True))
        if ties:
            results = await self._tied(ties, closing, rosters, *stages.values()).averaged(results, ranks)
        for index, result in results.items():
            mean = await self._with_statistics(stages[index], closing, groups[index], ranks[index], result.mean)
            results[index] = result._replace(mean=mean)
            self._membership.oversight.rounds.offer(groups[index], mean)
        return results

    def _refuse(self, ties: TiedTensors, closing: Closing, rosters: Sequence[Sequence[Member]], reason: str) -> None:
        """Notify the other servers that this server offers nothing more in this round, so that they stop waiting."""
        own = [index for index, members in enumerate(rosters) if self._me in members]
        for index in own:
            group = self._group(closing, index, rosters[index])
            refuse(group, rosters[index].index(self._me), reason)
            self._membership.oversight.rounds.withhold(group, reason)
            if index in self._sums.stages and self._sums.stages[index].statistics:
                group.withhold([STATISTICS], reason)
        if ties:
            self._tied(ties, closing, rosters).refuse(own, reason)

    async def _average_stage(self, closing: Closing, stage: Stage, group: Group, rank: int) -> AveragingResult:
        # Average in the units of the sums, whose scale keeps small gradients within the range of a narrow format.
        scale = closing.gradient_scale
        result = await self._averager(stage).average(
            stage.sum_of(closing.step).values, closing.total_weight, group, rank, stage.generation.carried.times(scale)
        )
        if scale == 1.0:
            return result
        # Not in place, because the mean may still be in transit to other servers.
        return result._replace(
            mean=result.mean / scale,
            squared_norm=result.squared_norm / scale / scale,
            carried=result.carried.times(1.0 / scale),
        )

    def _group(self, closing: Closing, index: int, roster: Sequence[Member]) -> Group:
        return Group(
            roster=[member.peer_id for member in roster],
            prefix=round_name(closing, index),
            tickets=self._tickets,
            timeout=self._patience_s,
            shares_with=self._membership.knows_server,
            digests=self._membership.oversight.rounds.digests,
        )

    def _own_batch_statistics(self, closing: Closing, stage: Stage) -> dict[Receipt, Tensor]:
        return stage.statistics.batch_statistics_of(closing.step, self._sums.ledgers[stage.index].held)

    async def _with_statistics(
        self, stage: Stage, closing: Closing, group: Group, rank: int | None, mean: Tensor
    ) -> Tensor:
        """Append the batch norms' running statistics after the step to a stage's mean, if the stage has any."""
        if not stage.statistics:
            return mean
        own = self._own_batch_statistics(closing, stage) if rank is not None else {}
        every = await collect_statistics(own, stage.statistics.length, group, rank)
        after: Tensor = await self._compute(lambda: stage.with_statistics(mean, stage.statistics.merged(every)))
        return after

    def _tied(
        self, ties: TiedTensors, closing: Closing, rosters: Sequence[Sequence[Member]], *stages: Stage
    ) -> TiedMeans:
        """Return the averager of tied parameters; any of this server's `stages` shows which parameters train."""
        selections = [stage.selection for stage in stages if stage.selection is not None]
        return TiedMeans(
            ties,
            trained_names(selections[0]) if selections else (),
            lambda index: self._group(closing, index, rosters[index]),
            self._compute,
            exact=any(stage.exact for stage in stages),
        )

    def _averager(self, stage: Stage) -> Averager:
        """Return the averager that the run's settings require for a stage."""
        codecs = stage.codecs
        if stage.exact:
            return DeterministicAverager(stage.next_sum.like, self._compute)
        rule = self._sums.run.manifest.settings.robust_averaging
        if rule == "centered_clip":
            ledger = self._sums.ledgers[stage.index]
            # Not `sum`, which rounds differently since Python 3.12: all servers must agree.
            weight = math.fsum(ledger.origins[first].weight for first, _, _ in ledger.held)
            return ClippedAverager(weight, self._compute)
        if rule != "none":
            assert_never(rule)
        if codecs.rank is None:
            return Butterfly(PartEncoder(codecs.averaging, self._compute), codecs.error_feedback)
        shapes = [parameter.shape for parameter in stage.trainable]
        return PowerSGD(LowRank(shapes, codecs.rank), codecs.error_feedback, self._compute)


def _log_bug(task: asyncio.Task[_StageResults]) -> None:
    # Log bugs only: the coordinator receives other failures when it asks for the round.
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, SwarmError):
        _log.error("A round of averaging failed", exc_info=error)


def round_name(closing: Closing, stage_index: int | None = None) -> str:
    """Return the prefix of the tickets of a stage's averaging; without a stage, of all stages."""
    # The name includes the number of absent members, which only grows within a round. An attempt that began with the
    # freeze may include more members, and its parts must not enter a later attempt.
    round_ = f"g{closing.generation}.s{closing.step}.r{closing.round}.{len(closing.absent)}/average/"
    return round_ if stage_index is None else f"{round_}{stage_index}"
