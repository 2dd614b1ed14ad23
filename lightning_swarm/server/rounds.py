"""A server's part in averaging rounds: means of frozen sums, held until a record says which round counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_swarm.averaging.butterfly import RoundFailed, average, refuse
from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.gradient_sums import GradientSums
from lightning_swarm.steps import AVERAGE
from lightning_swarm.tasks import gather
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.runs import Member
from lightning_swarm.types.steps import AverageReply, AverageRequest, Closing, PartNorm, Record
from lightning_swarm.types.wire import decode, encode


@dataclass(frozen=True)
class _Averaged:
    closing: Closing
    gradients: Mapping[int, Tensor]  # by stage


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

    def hold(self, closing: Closing, gradients: Mapping[int, Tensor]) -> None:
        """Keep a round's mean gradients until its record is decided, or those of a later round come."""
        before = self._averaged
        if before is not None and before.closing.step == closing.step and before.closing.round > closing.round:
            return  # a coordinator that was replaced had it averaged
        self._averaged = _Averaged(closing, gradients)

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
        self.hold(closing, {index: mean for index, (mean, _) in zip(places, averages, strict=True)})
        return encode(AverageReply(parts=[norm for _, norm in averages]))

    def _refuse(self, closing: Closing, rosters: Sequence[Sequence[Member]], reason: str) -> None:
        for index, members in enumerate(rosters):
            if self._me in members:
                roster = [member.peer_id for member in members]
                place, prefix = members.index(self._me), round_name(closing, index)
                refuse(roster, place, prefix=prefix, tickets=self._tickets, reason=reason)

    async def _average(
        self, closing: Closing, index: int, roster: Sequence[Member], place: int
    ) -> tuple[Tensor, PartNorm]:
        mean, squared_norm = await average(
            self._sums.stages[index].gradient_sum,
            closing.total_weight,
            roster=[member.peer_id for member in roster],
            place=place,
            prefix=round_name(closing, index),
            tickets=self._tickets,
            timeout=self._timeout,
        )
        # Here, and not in what travels: the scale is what keeps small gradients in the range of a narrow format.
        scale = closing.gradient_scale
        # The mean may be on its way to others still.
        return mean if scale == 1.0 else mean / scale, PartNorm(
            stage_index=index, squared_norm=squared_norm / scale / scale
        )


def round_name(closing: Closing, stage_index: int | None = None) -> str:
    """What the tickets of a stage's averaging begin with; without a stage, of all."""
    round_ = f"g{closing.generation}.s{closing.step}.a{closing.attempt}.r{closing.round}/average/"
    return round_ if stage_index is None else f"{round_}{stage_index}"
