"""A server's part in a step: it applies a change, drops struck batches, freezes, and applies the decided record."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import UNSET
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError, StepError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.bans import unrecorded
from lightning_swarm.protocol.messages.calls import CallKey, Origin, batch_name
from lightning_swarm.protocol.messages.run import NO_CHANGE, HeldSnapshot, StepChange
from lightning_swarm.protocol.messages.step import FenceRequest, FreezeReply, FreezeRequest, Record, SettleRequest
from lightning_swarm.protocol.rpc import APPLY, FENCE, FREEZE, SETTLE
from lightning_swarm.server.averaging_round import AveragingRounds
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.gradients import GradientSums, WrittenByStage
from lightning_swarm.server.out_of_memory import is_out_of_memory
from lightning_swarm.server.stage import Stage


class StepHandlers:
    """Answers the coordinator's calls by which a server's stages advance from record to record."""

    # Called with each applied record, the mean gradients of the stages here, and the weights written before the step.
    on_decided: Callable[[Record, Mapping[int, Tensor], WrittenByStage], None]
    on_failed: Callable[[StepError], None]  # called if this server's stages become unusable
    on_fenced: Callable[[str], None]  # called with the prefix of the names of a struck batch's calls

    def __init__(self, context: ServerContext) -> None:
        transport = context.transport
        self._transport, self._tickets, self._events = transport, context.tickets, context.events
        self._compute, self._timeout = context.compute, context.limits.call_timeout
        self._membership, self._me = context.membership, context.me

        # Returns the snapshots of this server's stages whose digests no record names.
        self.unrecorded_snapshots: Callable[[], Sequence[HeldSnapshot]] = tuple
        self._applied = asyncio.Condition()  # notified when the version, written weights or the run change
        self.began_s = 0.0  # time when this server entered the run, on the monotonic clock
        self.sums = GradientSums(context.membership)
        self.rounds = AveragingRounds(context, self.sums)
        context.executor.while_idle(self.sums.hash_while_idle)
        SETTLE.serve(transport, self._handle_settle)
        FENCE.serve(transport, self._handle_fence)
        FREEZE.serve(transport, self._handle_freeze)
        APPLY.serve(transport, self._handle_apply)

    def enter_run(self, stages: dict[int, Stage]) -> None:
        """Begin in a run, with stages at the run's version."""
        self.began_s = time.monotonic()
        self.rounds.discard_round()
        self.sums.enter_run(stages, now_s=now_s())

    async def leave_run(self) -> list[Stage]:
        """Release all stages; return them."""
        stages = list(self.sums.stages.values())
        await self._compute(self.sums.leave_run)  # on the compute thread, so that no running job uses the stages
        self.rounds.discard_round()
        await self._notify()
        return stages

    async def enter_generation(self) -> None:
        """Begin the run's next generation; afterwards, no job of the old generation changes a stage."""
        self.rounds.discard_round()
        self.sums.next.change = NO_CHANGE
        # On the compute thread, after the running job; later jobs check the generation first.
        await self._compute(self.sums.enter_generation)
        await self._notify()

    async def reopen(self) -> None:
        """Reopen sums that a former coordinator froze, until the present coordinator freezes them."""
        await self._compute(self.sums.reopen)

    async def _notify(self) -> None:
        async with self._applied:
            self._applied.notify_all()

    # ------------------------------------------------------------------ the stages

    @property
    def version(self) -> int:
        """The version of the weights of all stages here; the step whose record is next."""
        return self.sums.version

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of the stages that this server holds."""
        return tuple(sorted(self.sums.stages))

    def stage(self, index: int) -> Stage:
        """Return one of the stages that this server holds."""
        return self.sums.stage(index)

    async def add_batch(
        self,
        index: int,
        key: CallKey,
        gradients: Mapping[str, Tensor | None],
        weight: float,
        batch_statistics: Tensor | None = None,
    ) -> None:
        """Add a batch's gradients of layers around the pipeline, which this trainer computed; see `GradientSums.add`.

        The key's ``index`` and ``call`` must be 0. Gradients may be missing or None. `batch_statistics` are the
        statistics of batch norms.
        """
        stage = self.stage(index)
        in_order = [gradients.get(name) for name in stage.trainable_names]
        origin = Origin(weight, self._membership.me.peer_id)
        await self._compute(lambda: self.sums.add(stage, key, in_order, origin, batch_statistics))

    async def copied_weights(self, index: int, version: int | None) -> tuple[int, dict[str, Tensor]]:
        """Copy a stage's weights of a version, or of the newest; return the version and the copies."""
        stage = self.stage(index)

        def copy() -> tuple[int, dict[str, Tensor]]:
            copied_version = stage.version if version is None else version
            with stage.at(copied_version):
                return copied_version, {name: tensor.clone() for name, tensor in stage.weights().items()}

        return await self._compute(copy)

    async def wait_for_version(self, version: int) -> None:
        """Wait until all stages are at `version`, or this server is in no run; raise `DeadlineExceeded` if too late."""
        if self.version >= version:
            return
        try:
            async with asyncio.timeout(self._timeout), self._applied:
                await self._applied.wait_for(lambda: not self._membership.has_run or self.version >= version)
        except TimeoutError:
            raise DeadlineExceeded(
                f"this peer must reach version {version} in {self._timeout:g} s, but is at version {self.version}. Ask "
                "another peer of the stage. If records take longer, raise `Limits.call_timeout`."
            ) from None

    async def wait_for_next(self, version: int) -> None:
        """Wait for `version`, at most the next one, because a caller's data take memory while it waits."""
        if version > self.version + 1:
            raise ProtocolError(
                f"this peer is at version {self.version}, and waits for the next version only, got {version}"
            )
        await self.wait_for_version(version)

    async def wait_for_later(self, version: int, *, within_s: float, after_change: float = math.inf) -> None:
        """Wait up to `within_s` for a later version, or for written weights with a number above `after_change`."""
        known = version, after_change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._applied:
                await self._applied.wait_for(lambda: (self.version, self.sums.next.change.number) > known)

    async def wait_for_written(self, version: int, number: int) -> None:
        """Wait at a joiner for the weights written at a version; raise `DeadlineExceeded` if they do not come."""
        await self.wait_for_later(version, after_change=number - 1, within_s=self._timeout)
        if (self.version, self.sums.next.change.number) < (version, number):
            raise DeadlineExceeded(f"the weights written at version {version} did not come in {self._timeout:g} s")

    # ------------------------------------------------------------------ the coordinator's calls

    async def _handle_settle(self, caller: PeerId, request: SettleRequest) -> None:
        """Begin a step with a change, before any gradient is added."""
        self.sums.check(caller, request.generation, request.step)
        before = self.sums.next.change.written
        await self._compute(lambda: self.sums.settle(request.change, request.generation))
        if request.change.written != before:
            await self._notify()  # joiners wait for the written weights

    async def _handle_fence(self, caller: PeerId, request: FenceRequest) -> None:
        """Give up struck batches: refuse their gradients, and cancel their calls."""
        self.sums.check_open(caller, request.generation, request.step)
        self.sums.strike(request.step, request.batches)
        for first in request.batches:
            self.on_fenced(batch_name(request.generation, request.step, first))
        # Wait for the job that runs on the compute thread, so that none of their gradients is added after the answer.
        await self._compute(lambda: None)

    async def _handle_freeze(self, caller: PeerId, request: FreezeRequest) -> FreezeReply:
        """Freeze a step's sums, begin to average them as expected, and report their ledgers."""
        self.sums.check(caller, request.generation, request.step)
        expected = request.expected
        if expected is not None:
            own = (request.generation, request.step, request.round)
            if (got := (expected.generation, expected.step, expected.round)) != own:
                raise ProtocolError(f"a freeze must expect its own generation, step and round {own}, got {got}")
        term = self.sums.run.term
        at_s = now_s()
        ledgers, stale = await self._compute(lambda: self.sums.freeze(request, term, now_s=at_s))
        for name in stale:
            self._tickets.drop(name)
        if not self.rounds.has_begun(request.generation, request.step, request.round):
            self.rounds.begin(expected)  # a repeated freeze must not end the round that it has begun
        return FreezeReply(
            boot_id=self._me.boot_id,
            ledgers=ledgers,
            noted=self._events.report(),
            bans=unrecorded(self.sums.run.bans, self._transport.bans) or UNSET,
            snapshots=list(self.unrecorded_snapshots()) or UNSET,
            arithmetic=self.sums.arithmetic,
        )

    async def _handle_apply(self, caller: PeerId, record: Record) -> None:
        closing = record.closing
        if self._membership.has_run and record.step < self.version:
            return  # applied already
        self.sums.check(caller, closing.generation, closing.step)
        await self.apply_record(record)

    # ------------------------------------------------------------------ records

    async def apply_record(self, record: Record) -> None:
        """Apply the open step's decided record, with the mean gradients of its round, which must be held here."""
        if record.change != self.sums.next.change:
            raise ProtocolError(f"record {record.step} has another change than that with which its step began here")
        await self.commit(record, self.rounds.means_for(record))

    async def commit(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        """Apply a decided record once, even if it arrives twice at the same time."""
        try:
            await self._compute(lambda: self.sums.apply(record, gradients))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Some parameters may have been stepped, so the stages must not be used or sent any more.
            failure = StepError(
                "a server must have memory for the step of its optimizer, and this server had too little in step "
                f"{record.step}: {error}. It leaves the run. Use `offload_optimizer=True` or an optimizer with less "
                "state, or join with a machine that has more memory."
            )
            self.on_failed(failure)
            raise failure from error
        self.sums.run.check_generation(record.closing.generation)
        async with self._applied:
            # This server has left the run, or another call with the same record was faster.
            if not self._membership.has_run or self.version > record.step:
                return
            for conviction in record.convicted or ():
                self._events.log_only("convicted", peer=conviction.peer, step=record.step, reason=conviction.reason)
            self.rounds.store_state(record)
            self.rounds.discard_round()
            written = self.sums.next.written
            self.sums.open_next_step(record, now_s=now_s())
            self.on_decided(record, gradients, written)
            self._applied.notify_all()

    async def follow_change(self, step: int, change: StepChange, written: Mapping[str, Tensor]) -> None:
        """Begin an open step with its change at a joiner, which gets no SETTLE."""

        def follow() -> None:
            for stage in self.sums.stages.values():
                if stage.version == step:  # else its record was applied meanwhile
                    self.sums.follow_change(stage, change, written)

        await self._compute(follow)
        await self._notify()
