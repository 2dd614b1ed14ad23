"""A server's part in a step: settle what it trains, give up what is struck, freeze, apply the decided record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.calls import CallKey, batch_name
from lightning_swarm.protocol.messages.run import Member, Selection
from lightning_swarm.protocol.messages.step import FenceRequest, FreezeReply, FreezeRequest, Record, SettleRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import APPLY, FENCE, FREEZE, SETTLE
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.averaging_round import AveragingRounds
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.stage import Stage


class StepHandlers:
    """A server's stages on their way from record to record, and the coordinator's calls that take them there.

    Args:
        transport: Its network.
        tickets: Where parts of gradients wait for the other replicas.
        executor: Computes.
        boot_id: Of this process's life.
        timeout: Seconds for one exchange of an averaging round.
        events: Of this peer.
        on_decided: Called with each record that was applied, and the mean gradients of this server's stages.
        on_fenced: Called with what the names of a struck batch's calls begin with.

    Attributes:
        sums: What was added up in the open step.
        rounds: The means of that.
        began_s: When this server came into the run; on the monotonic clock.
    """

    def __init__(
        self,
        transport: Transport,
        tickets: TicketStore,
        executor: Executor,
        *,
        boot_id: int,
        timeout: float,
        events: EventLog,
        on_decided: Callable[[Record, Mapping[int, Tensor]], None],
        on_fenced: Callable[[str], None],
    ) -> None:
        self._tickets = tickets
        self._executor = executor
        self._me = Member(peer_id=transport.peer_id, boot_id=boot_id)
        self._timeout = timeout
        self._events = events
        self._on_decided = on_decided
        self._on_fenced = on_fenced
        self._applied = asyncio.Condition()
        self.began_s = 0.0
        self.sums = GradientSums(self._me)
        self.rounds = AveragingRounds(transport, tickets, executor, self.sums, boot_id=boot_id, timeout=timeout)
        executor.while_idle(self.sums.look_ahead)
        transport.handle_call(SETTLE, self._handle_settle)
        transport.handle_call(FENCE, self._handle_fence)
        transport.handle_call(FREEZE, self._handle_freeze)
        transport.handle_call(APPLY, self._handle_apply)

    def enter_run(self, run: RunState, stages: dict[int, Stage]) -> None:
        """Enter the run with stages at its version."""
        self.began_s = time.monotonic()
        self.rounds.discard_round()
        self.sums.enter_run(run, stages, now_s=now_s())

    async def step_out(self) -> list[Stage]:
        """Be in no run. Returns the stages that were held."""
        stages = list(self.sums.stages.values())

        def end() -> None:
            self.sums.step_out()
            self.rounds.discard_round()

        await self._executor.submit(FIRST, end)  # after what runs on the compute thread
        await self._notify()
        return stages

    async def go_back(self) -> None:
        """The run entered its next generation: nothing of the old one may change a stage any more."""
        self.rounds.discard_round()
        self.sums.reselected = None
        # After what runs on the compute thread; what comes later there looks at the generation first.
        await self._executor.submit(FIRST, self.sums.go_back)
        await self._notify()

    async def reopen(self) -> None:
        """Another peer coordinates: what the one before it froze takes gradients again, until it is frozen anew."""
        await self._executor.submit(FIRST, self.sums.reopen)

    async def _notify(self) -> None:
        async with self._applied:
            self._applied.notify_all()

    # ------------------------------------------------------------------ the stages

    @property
    def version(self) -> int:
        """Of the weights of all stages here; the step whose record is next."""
        return self.sums.version

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of the stages that this server holds."""
        return tuple(sorted(self.sums.stages))

    def stage(self, index: int) -> Stage:
        """One of the stages that this server holds."""
        return self.sums.stage(index)

    async def add_batch(self, index: int, key: CallKey, gradients: Mapping[str, Tensor | None], weight: float) -> None:
        """Add what a batch gave the parameters that this peer, a trainer, holds itself; once, as `add` does.

        Args:
            index: Of the stage on the trainers.
            key: Of the batch: ``index`` and ``call`` are 0.
            gradients: By parameter name; None, or left out, where there is none.
            weight: Of the batch.
        """
        stage = self.stage(index)
        found = [gradients.get(name) for name in stage.trainable_names]
        await self._executor.submit(FIRST, lambda: self.sums.add(stage, key, found, weight))

    async def copied_weights(self, index: int, version: int | None) -> tuple[int, dict[str, Tensor]]:
        """Copies of a stage's weights, and their version.

        Args:
            index: Of the stage.
            version: Which; None: the newest.
        """
        stage = self.stage(index)

        def copy() -> tuple[int, dict[str, Tensor]]:
            found = stage.version if version is None else version
            with stage.at(found):
                return found, {name: tensor.clone() for name, tensor in stage.weights().items()}

        return (await self._executor.submit(FIRST, copy))[0]

    async def reached(self, version: int, *, within_s: float | None = None) -> None:
        """Wait until all stages are at `version`, or this server is in no run.

        Args:
            version: Of the weights.
            within_s: Seconds; None: those of an exchange.

        Raises:
            DeadlineExceeded: They do not come to it.
        """
        within_s = self._timeout if within_s is None else within_s
        try:
            async with asyncio.timeout(within_s), self._applied:
                await self._applied.wait_for(lambda: not self.sums.in_run or self.version >= version)
        except TimeoutError:
            raise DeadlineExceeded(
                f"version {version} must come in {within_s:g} s, and this peer is at version {self.version}. Ask "
                "another peer of the stage; if records take longer, raise `Limits.call_timeout`, or `leave_timeout` "
                "for a fit's end."
            ) from None

    async def tensors_at(self, version: int, *, within_s: float) -> list[Tensor]:
        """Parameters and buffers of all stages, when they are at `version`; none, if this server is in no run.

        Raises:
            DeadlineExceeded: They do not come to it.
            ProtocolError: They are beyond it.
        """
        await self.reached(version, within_s=within_s)
        if self.sums.in_run and self.version > version:
            raise ProtocolError(
                f"weights are read at the newest version, which is {self.version} on this peer's own server, got "
                f"{version}. Read them before the next step's record is asked for."
            )
        return [one for stage in self.sums.stages.values() for one in stage.module.named_stage_tensors().values()]

    async def passed(self, version: int, *, within_s: float) -> None:
        """Wait until the stages are beyond `version`, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._applied:
                await self._applied.wait_for(lambda: self.version > version)

    # ------------------------------------------------------------------ the coordinator's calls

    async def _handle_settle(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, SettleRequest)
        self.sums.check(caller, request.generation, request.step, request.attempt)
        await self._executor.submit(FIRST, lambda: self.sums.settle(request.selection, request.generation))
        return b""

    async def _handle_fence(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, FenceRequest)
        self.sums.check_open(caller, request.generation, request.step, request.attempt)
        self.sums.strike(request.step, request.batches)
        for first in request.batches:
            self._on_fenced(batch_name(request.generation, request.step, request.attempt, first))
        # A job on the compute thread is not interrupted; when this is answered, nothing is added any more.
        await self._executor.submit(FIRST, lambda: None)
        return b""

    async def _handle_freeze(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, FreezeRequest)
        self.sums.check(caller, request.generation, request.step, request.attempt)
        term = self.sums.run.term
        at_s = now_s()
        (ledgers, stale), _ = await self._executor.submit(FIRST, lambda: self.sums.freeze(request, term, now_s=at_s))
        for name in stale:
            self._tickets.drop(name)
        return encode(FreezeReply(boot_id=self._me.boot_id, ledgers=ledgers, noted=self._events.report()))

    async def _handle_apply(self, caller: PeerId, body: bytes) -> bytes:
        record = decode(body, Record)
        closing = record.closing
        if self.sums.in_run and record.step < self.version:
            return b""  # told twice
        self.sums.check(caller, closing.generation, closing.step, closing.attempt)
        await self.apply_record(record)
        return b""

    # ------------------------------------------------------------------ records

    async def apply_record(self, record: Record) -> None:
        """Apply the open step's record, which was decided, with the mean gradients that are held here.

        Raises:
            ProtocolError: Another round's are held, or none.
        """
        if record.selection != self.sums.reselected:
            raise ProtocolError(f"record {record.step} is of another selection of parameters than its gradients here")
        await self.commit(record, self.rounds.counted(record))

    async def commit(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        """Apply a decided record. Told twice at once, by whatever ways, it is applied once."""
        await self._executor.submit(FIRST, lambda: self.sums.apply(record, gradients))
        self.sums.run.check_generation(record.closing.generation)
        async with self._applied:
            if not self.sums.in_run or self.version > record.step:
                return
            self.rounds.carry(record)
            self.rounds.discard_round()
            self.sums.turn(record, now_s=now_s())
            self._on_decided(record, gradients)
            self._applied.notify_all()

    async def reselect(self, step: int, selection: Selection | None) -> None:
        """For a joiner, that nobody asks to settle: train what the step's gradients are of, if it is open still."""

        def select() -> None:
            for stage in self.sums.stages.values():
                if selection is not None and stage.version == step:
                    stage.select(selection)

        await self._executor.submit(FIRST, select)
        if self.version == step:  # else its record was applied meanwhile
            self.sums.reselected = selection
