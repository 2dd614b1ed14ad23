"""The servers of a run, as its coordinator asks them: settle, freeze, average, apply."""

from __future__ import annotations

from lightning_swarm.errors import StepError, Unreachable
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.selection import first_trained
from lightning_swarm.steps import APPLY, AVERAGE, FREEZE, SETTLE
from lightning_swarm.steps.policy import OpenStep, add_up, check_ledgers
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import Member, Selection
from lightning_swarm.types.steps import (
    AverageReply,
    Closing,
    FreezeReply,
    FreezeRequest,
    Record,
    SettleRequest,
    StageClosing,
    StageLedger,
)
from lightning_swarm.types.wire import Wire, decode, encode


class Servers:
    """All that hold a stage.

    Args:
        transport: The coordinator's.
        run: As its own server knows it.
        timeout: Seconds for one phase.
    """

    def __init__(self, transport: Transport, run: RunState, *, timeout: float) -> None:
        self._transport = transport
        self._run = run
        self._timeout = timeout

    async def settle(self, request: SettleRequest) -> None:
        """Have them train what the open step shall train."""
        await self._ask(SETTLE, request)

    async def close(self, step: OpenStep, selection: Selection | None) -> tuple[Closing, list[int]]:
        """Freeze the sums of a step.

        Args:
            step: All of its batches are through.
            selection: What it trains.

        Returns:
            The closing, and for each stage the hash of the weights that its replicas agree on.

        Raises:
            StepError: The sums do not hold what counts.
        """
        manifest = self._run.manifest
        counted, batches = step.counted, step.batches
        generation = manifest.generation
        request = FreezeRequest(generation=generation, step=step.step, attempt=0, counted=counted, batches=batches)
        replies = {peer: decode(body, FreezeReply) for peer, body in (await self._ask(FREEZE, request)).items()}
        ledgers = [
            [_ledger(replies[member.peer_id], member, index) for member in roster]
            for index, roster in enumerate(self._run.rosters)
        ]
        first = first_trained(selection, manifest.stages)
        expected = [batches if stage.on_trainers else counted for stage in manifest.stages]
        check_ledgers(step.step, expected, ledgers, first_trained=first)
        closing = Closing(
            generation=generation,
            step=step.step,
            attempt=0,
            round=0,
            counted=counted,
            batches=batches,
            num_samples=step.num_granted,
            total_weight=step.total_weight,
            stages=[
                StageClosing(
                    roster=roster,
                    holders=[ledger.held for ledger in stage],
                    touched=_union([ledger.touched for ledger in stage]),
                )
                for roster, stage in zip(self._run.rosters, ledgers, strict=True)
            ],
            gradient_scale=step.gradient_scale or 1.0,  # with no batch at all the sums are nothing
        )
        return closing, [stage[0].version_hash for stage in ledgers]

    async def average(self, closing: Closing) -> float:
        """The squared norm of the mean gradient over all stages. Every server holds its stages' means then."""
        replies = await self._ask(AVERAGE, closing)
        # Summed in one order, so that a repeated round gives the same record.
        parts = sorted(
            (part.stage_index, peer, part.squared_norm)
            for peer, body in replies.items()
            for part in decode(body, AverageReply).parts
        )
        return add_up(squared_norm for _, _, squared_norm in parts)

    async def apply(self, record: Record) -> None:
        """Have them apply a decided record, those that come with it too."""
        await self._ask(APPLY, record, *(candidate.member.peer_id for candidate in record.newcomers))

    async def _ask(self, method: str, request: Wire, *more: PeerId) -> dict[PeerId, bytes]:
        """Ask every server of the roster, and `more`, at once; the first failure ends the phase."""
        peers = [*self._run.servers, *more]
        body = encode(request)
        bodies = await gather(self._call(peer, method, body) for peer in peers)
        return dict(zip(peers, bodies, strict=True))

    async def _call(self, peer: PeerId, method: str, body: bytes) -> bytes:
        try:
            return await self._transport.call(peer, method, body, timeout=self._timeout)
        except Unreachable as error:
            held = [index for index, roster in enumerate(self._run.rosters) if peer in {one.peer_id for one in roster}]
            stages = " and ".join(f"stage {index}" for index in held) or "no stage yet"
            raise Unreachable(f"peer {peer}, which holds {stages}, is gone ({error})") from error


def _ledger(reply: FreezeReply, member: Member, stage_index: int) -> StageLedger:
    if reply.boot_id != member.boot_id:
        raise StepError(f"peer {member.peer_id} was restarted: its sums are gone")
    for ledger in reply.ledgers:
        if ledger.stage_index == stage_index:
            return ledger
    raise StepError(f"peer {member.peer_id} holds no ledger of stage {stage_index}")


def _union(bitmaps: list[bytes]) -> bytes:
    """Bitmaps of equal length, or-ed."""
    if len({len(bitmap) for bitmap in bitmaps}) != 1:
        raise StepError("the replicas of a stage disagree on its number of parameters")
    return bytes(map(_or, *bitmaps)) if len(bitmaps) > 1 else bitmaps[0]


def _or(*values: int) -> int:
    result = 0
    for value in values:
        result |= value
    return result
