"""A server's part in averaging rounds: means of frozen sums, held until a record says which round counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.averaging.butterfly import Mean, RoundFailed, average, collect, refuse
from lightning_swarm.averaging.parts import Parts
from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.gradient_sums import GradientSums
from lightning_swarm.server.stage import Stage
from lightning_swarm.steps import AVERAGE
from lightning_swarm.tasks import gather
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.runs import Member
from lightning_swarm.types.steps import AverageReply, AverageRequest, Closing, PartNorm, Record
from lightning_swarm.types.wire import decode, encode

_NOTHING: Final[Mapping[int, Tensor]] = MappingProxyType({})


@dataclass(frozen=True)
class _Averaged:
    closing: Closing
    gradients: Mapping[int, Tensor]  # by stage
    lost: Mapping[int, Tensor]  # likewise: what codecs lost of them


class Rounds:
    """Averages the sums of a server's stages with their other replicas.

    Args:
        transport: Its network.
        tickets: Where parts of gradients wait for the other replicas.
        executor: Computes.
        sums: Of the server.
        boot_id: Of this process's life.
        timeout: Seconds for one exchange of a round.
    """

    def __init__(
        self,
        transport: Transport,
        tickets: TicketStore,
        executor: Executor,
        sums: GradientSums,
        *,
        boot_id: int,
        timeout: float,
    ) -> None:
        self._tickets = tickets
        self._executor = executor
        self._sums = sums
        self._me = Member(peer_id=transport.peer_id, boot_id=boot_id)
        self._timeout = timeout
        self._averaged: _Averaged | None = None
        transport.handle_call(AVERAGE, self._handle_average)

    def forget(self) -> None:
        """The round's record is applied, or it will have none."""
        self._averaged = None

    def hold(self, closing: Closing, gradients: Mapping[int, Tensor], lost: Mapping[int, Tensor] = _NOTHING) -> None:
        """Keep a round's mean gradients until its record is decided, or those of a later round come.

        Args:
            closing: Of the round.
            gradients: By stage.
            lost: Of each stage, what the codecs lost of them here, if it is to be added to the next step's.
        """
        before = self._averaged
        if before is not None and before.closing.step == closing.step and before.closing.round > closing.round:
            return  # a coordinator that was replaced had it averaged
        self._averaged = _Averaged(closing, gradients, lost)

    def holds(self, closing: Closing) -> bool:
        """Whether the round's mean gradients are held here."""
        return self._averaged is not None and self._averaged.closing == closing

    def counted(self, record: Record) -> Mapping[int, Tensor]:
        """The mean gradients that a record counts, by stage.

        Raises:
            ProtocolError: Another round's are held, or none.
        """
        if self._averaged is None or self._averaged.closing != record.closing:
            raise ProtocolError(f"no round of this peer averaged what record {record.step} counts")
        return self._averaged.gradients

    def carry(self, record: Record) -> None:
        """The record is applied: what the codecs lost of its gradients is added to the next step's.

        Of a step that is skipped nothing is: its gradients were no numbers. What was carried to it waits for the next.
        """
        averaged = self._averaged
        if averaged is not None and averaged.closing == record.closing and record.outcome == "apply":
            for index, lost in averaged.lost.items():
                self._sums.stages[index].lost = lost

    async def collect(self, closing: Closing, stage: Stage, roster: Sequence[Member]) -> Tensor:
        """The mean gradient of a round that this server has no part in."""
        mean = await collect(
            stage.gradient_sum,
            roster=[member.peer_id for member in roster],
            prefix=round_name(closing, stage.index),
            tickets=self._tickets,
            parts=self._parts(stage),
            timeout=self._timeout,
        )
        return mean.div_(closing.gradient_scale)

    async def _handle_average(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, AverageRequest)
        closing = request.closing
        sums = self._sums
        sums.check(caller, closing.generation, closing.step, closing.attempt)
        run = sums.run
        rosters = run.present(closing.absent)
        try:
            places, _ = await self._executor.submit(FIRST, lambda: sums.bind(request, rosters, self._me))
            averages = await gather(
                self._average(closing, index, rosters[index], place) for index, place in places.items()
            )
        except BaseException as error:  # a cancellation, too
            self._refuse(closing, rosters, f"the round failed: {error!r}")
            if not isinstance(error, RoundFailed):
                raise
            missed = [error.missed] if error.missed is not None else []
            return encode(AverageReply(parts=[], failure=str(error), unreached=missed))
        finally:
            if (sums.version, closing.generation) != (closing.step, run.manifest.generation):
                self._tickets.drop(round_name(closing))  # asked twice: the record came while this round went on
        sums.run.check_generation(closing.generation)
        sums.check_frozen(closing)
        means = dict(zip(places, averages, strict=True))
        lost = {index: mean.lost for index, mean in means.items() if mean.lost is not None}
        self.hold(closing, {index: mean.mean for index, mean in means.items()}, lost)
        norms = [PartNorm(stage_index=index, squared_norm=mean.squared_norm) for index, mean in means.items()]
        return encode(AverageReply(parts=norms))

    def _refuse(self, closing: Closing, rosters: Sequence[Sequence[Member]], reason: str) -> None:
        for index, members in enumerate(rosters):
            if self._me in members:
                roster = [member.peer_id for member in members]
                place, prefix = members.index(self._me), round_name(closing, index)
                refuse(roster, place, prefix=prefix, tickets=self._tickets, reason=reason)

    async def _average(self, closing: Closing, index: int, roster: Sequence[Member], place: int) -> Mean:
        stage = self._sums.stages[index]
        # In the units of what is added up: the scale is what keeps small gradients in the range of a narrow format.
        scale = closing.gradient_scale
        found = await average(
            stage.gradient_sum,
            closing.total_weight,
            roster=[member.peer_id for member in roster],
            place=place,
            prefix=round_name(closing, index),
            tickets=self._tickets,
            parts=self._parts(stage),
            carried=_carried(stage, scale),
            timeout=self._timeout,
        )
        if scale == 1.0:
            return found
        # Not in place: it may be on its way to others still.
        lost = None if found.lost is None else found.lost / scale
        return Mean(found.mean / scale, found.squared_norm / scale / scale, lost)

    def _parts(self, stage: Stage) -> Parts:
        async def compute(run: Callable[[], Any]) -> Any:
            return (await self._executor.submit(FIRST, run))[0]

        return Parts(stage.codecs.averaging, compute)


def _carried(stage: Stage, scale: float) -> Tensor | None:
    if not stage.codecs.error_feedback:
        return None
    return torch.zeros_like(stage.gradient_sum) if stage.lost is None else stage.lost * scale


def round_name(closing: Closing, stage_index: int | None = None) -> str:
    """What the tickets of a stage's averaging begin with; without a stage, of all."""
    round_ = f"g{closing.generation}.s{closing.step}.a{closing.attempt}.r{closing.round}/average/"
    return round_ if stage_index is None else f"{round_}{stage_index}"
