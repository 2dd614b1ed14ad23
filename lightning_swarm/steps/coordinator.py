"""The coordinator: grants places in the open step, closes it, has it averaged, and decides its record."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from typing import Any

from lightning_swarm.errors import DeadlineExceeded, ProtocolError, StepError, SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.selection import check_selection, first_trained
from lightning_swarm.steps import APPLY, AVERAGE, DONE, FREEZE, GRANT, RECORD, SELECT, SETTLE
from lightning_swarm.steps.policy import OpenStep, add_up, check_ledgers, clip_factor
from lightning_swarm.steps.voting import decide
from lightning_swarm.tasks import TaskOwner, gather
from lightning_swarm.types import (
    AverageReply,
    BatchDone,
    BatchDoneReply,
    Closing,
    FreezeReply,
    FreezeRequest,
    Grant,
    GrantReply,
    GrantRequest,
    Manifest,
    Member,
    Record,
    RecordRequest,
    Selection,
    SelectRequest,
    SettleRequest,
    StageClosing,
    StageLedger,
    Wait,
    Wire,
    check_trainer,
    decode,
    encode,
)

_log = logging.getLogger(__name__)


class Coordinator:
    """A role of one peer.

    Args:
        transport: Its network.
        manifest: Of the run.
        timeout: Seconds for one phase of a step.
    """

    def __init__(self, transport: Transport, manifest: Manifest, *, timeout: float) -> None:
        self._transport = transport
        self._manifest = manifest
        self._timeout = timeout
        self._term = (1, transport.peer_id)
        self._leases = itertools.count(1)
        self._open = OpenStep(manifest.first_step, manifest.target_batch_size)
        self._roster = [list(stage.roster) for stage in manifest.stages]
        self._voters = list(manifest.voters)
        self._hyperparameters: list[dict[str, Any]] = []
        self._selection = manifest.selection
        self._reselected: Selection | None = None  # in the open step
        self._settling = asyncio.Lock()
        self._record: Record | None = None
        self._failure: SwarmError | None = None
        self._decided = asyncio.Condition()
        self._tasks = TaskOwner()
        self._warned_large = False
        transport.handle_call(SELECT, self._handle_select)
        transport.handle_call(GRANT, self._handle_grant)
        transport.handle_call(DONE, self._handle_done)
        transport.handle_call(RECORD, self._handle_record)

    async def start(self) -> None:
        """Begin to answer."""
        await self._tasks.start()

    async def close(self) -> None:
        """Stop. Raises what a task raised."""
        await self._tasks.close()

    # ------------------------------------------------------------------ the trainers' calls

    async def _handle_select(self, caller: PeerId, body: bytes) -> bytes:
        if caller != self._manifest.lead:
            raise ProtocolError(f"the lead {self._manifest.lead} says what trains, not {caller}")
        request = decode(body, SelectRequest)
        check_selection(request.selection, self._manifest.stages)
        async with self._settling:
            step = self._open
            if request.step != step.step or step.begun:
                raise ProtocolError(
                    f"what trains changes before a step's first grant; step {step.step} is open, and something was "
                    f"granted in it or step {request.step} was meant"
                )
            generation = self._manifest.generation
            settle = SettleRequest(generation=generation, step=step.step, attempt=0, selection=request.selection)
            await self._ask_all(SETTLE, settle)
            self._selection = self._reselected = request.selection
        return b""

    async def _handle_grant(self, caller: PeerId, body: bytes) -> bytes:
        check_trainer(self._manifest, caller)
        request = decode(body, GrantRequest)
        async with self._settling:  # not before all servers know what this step trains
            return encode(self._grant(caller, request))

    def _grant(self, caller: PeerId, request: GrantRequest) -> GrantReply:
        step = self._open
        if request.step > step.step:
            raise ProtocolError(f"step {step.step} is open, got a request for step {request.step}")
        if request.step < step.step:
            return GrantReply(wait=Wait(step=step.step - 1))
        if self._manifest.max_steps is not None and step.step >= self._manifest.max_steps:
            raise ProtocolError(f"the run ends after step {self._manifest.max_steps - 1}; no step opens beyond it")
        lease = next(self._leases)
        place = step.grant(lease, caller, request.num_samples, request.gradient_scale)
        if place is None:
            return GrantReply(wait=Wait(step=step.step))
        target = self._manifest.target_batch_size
        if target is not None and request.num_samples > target and not self._warned_large:
            self._warned_large = True
            _log.warning("A batch of %d samples is a step: `target_batch_size` is %d.", request.num_samples, target)
        first, weight = place
        generation = self._manifest.generation
        grant = Grant(lease=lease, generation=generation, step=step.step, attempt=0, first=first, weight=weight)
        return GrantReply(grant=grant)

    async def _handle_done(self, caller: PeerId, body: bytes) -> bytes:
        check_trainer(self._manifest, caller)
        request = decode(body, BatchDone)
        step = self._open
        if request.step != step.step:
            raise ProtocolError(f"step {step.step} is open, got the end of a batch of step {request.step}")
        if request.close and caller != self._manifest.lead:
            raise ProtocolError(f"the lead {self._manifest.lead} closes steps, not {caller}")
        if request.close and step.close_asked:
            raise ProtocolError(f"step {step.step} closes already")
        was_ready = step.ready
        if request.lease is not None:
            if request.withdrawn:
                step.withdraw(request.lease, caller)
            else:
                step.complete(request.lease, caller, request.completed)
        if caller == self._manifest.lead and request.hyperparameters is not None:
            self._hyperparameters = request.hyperparameters
        if request.close:
            step.ask_to_close(request.total_weight)
        if step.ready and not was_ready:
            self._tasks.spawn(self._finish_guarded(step))
        return encode(BatchDoneReply(closing=step.closing))

    async def _handle_record(self, caller: PeerId, body: bytes) -> bytes:
        """Hold the answer until the record is decided and applied everywhere, or the caller's deadline."""
        check_trainer(self._manifest, caller)
        step = decode(body, RecordRequest).step
        if step > self._open.step:
            raise ProtocolError(f"step {self._open.step} is open, got a request for record {step}")
        try:
            async with asyncio.timeout(self._timeout), self._decided:
                await self._decided.wait_for(lambda: self._open.step > step or self._failure is not None)
        except TimeoutError:
            raise DeadlineExceeded(f"record {step} was not decided in {self._timeout:g} s") from None
        if self._failure is not None:
            raise self._failure
        if self._record is None or self._record.step != step:
            raise ProtocolError(f"record {step} is no longer kept; the open step is {self._open.step}")
        return encode(self._record)

    # ------------------------------------------------------------------ close, average, decide, apply

    async def _finish_guarded(self, step: OpenStep) -> None:
        try:
            record = await self._finish(step)
        except SwarmError as error:
            await self._fail(step, str(error))
            return
        except Exception as error:
            # A bug: it ends this server, and whoever waits shall not wait for ever.
            await self._fail(step, f"internal error: {type(error).__name__}: {error}")
            raise
        async with self._decided:
            self._record = record
            self._open = OpenStep(step.step + 1, self._manifest.target_batch_size)
            self._reselected = None
            self._decided.notify_all()

    async def _fail(self, step: OpenStep, reason: str) -> None:
        async with self._decided:
            self._failure = StepError(f"step {step.step} could not be decided: {reason}")
            self._decided.notify_all()

    async def _finish(self, step: OpenStep) -> Record:
        if not self._hyperparameters:
            raise StepError("the lead has not said with which hyperparameters to step")
        closing = await self._close(step)
        squared_norm = await self._average(closing)
        record = Record(
            closing=closing,
            outcome="apply" if math.isfinite(squared_norm) else "skip",
            squared_norm=squared_norm,
            clip_factor=clip_factor(squared_norm, self._manifest.gradient_clip_norm),
            hyperparameters=self._hyperparameters,
            selection=self._reselected,
            next_roster=self._roster,
            next_voters=self._voters,
        )
        await decide(self._transport, self._voters, self._term, record, timeout=self._timeout)
        await self._ask_all(APPLY, record)
        self._roster, self._voters = record.next_roster, record.next_voters
        return record

    async def _close(self, step: OpenStep) -> Closing:
        counted = step.counted
        request = FreezeRequest(generation=self._manifest.generation, step=step.step, attempt=0, counted=counted)
        replies = {peer: decode(body, FreezeReply) for peer, body in (await self._ask_all(FREEZE, request)).items()}
        ledgers = [
            [_ledger(replies[member.peer_id], member, index) for member in roster]
            for index, roster in enumerate(self._roster)
        ]
        first = first_trained(self._selection, self._manifest.stages)
        check_ledgers(step.step, counted, ledgers, first_trained=first)
        return Closing(
            generation=self._manifest.generation,
            step=step.step,
            attempt=0,
            round=0,
            counted=counted,
            num_samples=step.num_granted,
            total_weight=step.total_weight,
            stages=[
                StageClosing(
                    roster=roster,
                    holders=[ledger.held for ledger in stage],
                    touched=_union([ledger.touched for ledger in stage]),
                )
                for roster, stage in zip(self._roster, ledgers, strict=True)
            ],
            gradient_scale=step.gradient_scale or 1.0,  # with no batch at all the sums are nothing
        )

    async def _average(self, closing: Closing) -> float:
        """The squared norm of the mean gradient over all stages. Every server holds its stages' means then."""
        replies = await self._ask_all(AVERAGE, closing)
        # Summed in one order, so that a repeated round gives the same record.
        parts = sorted(
            (part.stage_index, peer, part.squared_norm)
            for peer, body in replies.items()
            for part in decode(body, AverageReply).parts
        )
        return add_up(squared_norm for _, _, squared_norm in parts)

    async def _ask_all(self, method: str, request: Wire) -> dict[PeerId, bytes]:
        """Ask every server of the roster at once; the first failure ends the phase."""
        peers = sorted({member.peer_id for roster in self._roster for member in roster})
        body = encode(request)
        bodies = await gather(self._transport.call(peer, method, body, timeout=self._timeout) for peer in peers)
        return dict(zip(peers, bodies, strict=True))


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
