"""A server's part in a step: freeze the ledgers, average, apply the decided record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_swarm.averaging.butterfly import RoundFailed, average
from lightning_swarm.errors import DeadlineExceeded, LeaseRevoked, NotMember, ProtocolError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.selection import check_selection
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.ledger import Ledger
from lightning_swarm.server.stage import Stage
from lightning_swarm.steps import APPLY, AVERAGE, FENCE, FREEZE, SETTLE
from lightning_swarm.tasks import gather
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.calls import CallKey, Receipt, batch_name
from lightning_swarm.types.runs import Member, Selection, Term
from lightning_swarm.types.steps import (
    AverageReply,
    Closing,
    FenceRequest,
    FreezeReply,
    FreezeRequest,
    PartNorm,
    Record,
    SettleRequest,
    StageClosing,
    StageLedger,
)
from lightning_swarm.types.wire import decode, encode, from_bitmap, to_bitmap

_NO_FENCES: tuple[Term, frozenset[int]] = ((0, "", 0), frozenset())


@dataclass(frozen=True)
class _Averaged:
    closing: Closing
    gradients: Mapping[int, Tensor]  # by stage


class Stepping:
    """The stages of a server, their ledgers, and the coordinator's calls.

    Args:
        transport: Its network.
        tickets: Where parts of gradients wait for the other replicas.
        executor: Computes.
        boot_id: Of this process's life.
        timeout: Seconds for one exchange of an averaging round.
        on_decided: Called with each record that was applied, and the mean gradients of this server's stages.
        on_fenced: Called with what the names of a struck batch's calls begin with.
    """

    def __init__(
        self,
        transport: Transport,
        tickets: TicketStore,
        executor: Executor,
        *,
        boot_id: int,
        timeout: float,
        on_decided: Callable[[Record, Mapping[int, Tensor]], None],
        on_fenced: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._tickets = tickets
        self._executor = executor
        self._boot_id = boot_id
        self._timeout = timeout
        self._on_decided = on_decided
        self._on_fenced = on_fenced
        # Batches that were struck from the open step, and by whom: who takes over may count them.
        self._fenced = _NO_FENCES
        self._run: RunState | None = None
        self._stages: dict[int, Stage] = {}
        self._ledgers: dict[int, Ledger] = {}
        self._averaged: _Averaged | None = None
        self._reselected: Selection | None = None  # in the open step
        self._applied = asyncio.Condition()
        self.began_s = 0.0  # on the monotonic clock: when this server came into the run
        self.attempt = 0
        self._round = 0  # of the newest freeze in the open step
        transport.handle_call(SETTLE, self._handle_settle)
        transport.handle_call(FENCE, self._handle_fence)
        transport.handle_call(FREEZE, self._handle_freeze)
        transport.handle_call(AVERAGE, self._handle_average)
        transport.handle_call(APPLY, self._handle_apply)

    def begin(self, run: RunState, stages: dict[int, Stage]) -> None:
        """Enter the run with stages at its version."""
        self._run = run
        self._stages = stages
        self.began_s = time.monotonic()
        self._averaged = self._reselected = None
        self._round = 0
        self._ledgers = {index: Ledger(self.version) for index in stages}
        self._fenced = _NO_FENCES

    async def step_out(self) -> list[Stage]:
        """Be in no run. Returns the stages that were held."""
        stages = list(self._stages.values())

        def end() -> None:
            self._run, self._stages, self._ledgers = None, {}, {}
            self._averaged = self._reselected = None

        await self._executor.submit(FIRST, end)  # after what runs on the compute thread
        async with self._applied:
            self.attempt = 0
            self._applied.notify_all()
        return stages

    async def go_back(self) -> None:
        """The run entered its next generation: nothing of the old one may change a stage any more."""
        self._averaged = self._reselected = None
        # After what runs on the compute thread; what comes later there looks at the generation first.
        await self._executor.submit(FIRST, self._reset)
        async with self._applied:
            self.attempt = self._round = 0
            self._applied.notify_all()

    def _reset(self) -> None:
        assert self._run is not None
        manifest = self._run.manifest
        for index, stage in self._stages.items():
            stage.go_back(manifest.first_step, manifest.selection)
            self._ledgers[index] = Ledger(manifest.first_step)
        self._fenced = _NO_FENCES

    @property
    def version(self) -> int:
        """Of the weights of all stages here; the step that is open."""
        return self._run.version if self._run is not None else 0

    def stage(self, index: int) -> Stage:
        """One of the stages that this server holds."""
        if index not in self._stages:
            raise NotMember(f"this peer serves the stages {sorted(self._stages)}, not stage {index}")
        return self._stages[index]

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of the stages that this server holds."""
        return tuple(sorted(self._stages))

    def add(self, stage: Stage, key: CallKey, gradients: Sequence[Tensor | None], weight: float) -> bool:
        """Enter the receipt and add the gradients, once. On the compute thread.

        Returns:
            True: the sum holds the microbatch, from now on or from before.
        """
        self._check_generation(key.generation)
        self.check_counts(stage, key)
        ledger = self._ledgers[stage.index]
        if (key.step, key.attempt) != (ledger.step, ledger.attempt):
            raise ProtocolError(f"step {ledger.step}, attempt {ledger.attempt} is open, got a gradient of {key}")
        if ledger.add(key.receipt):
            stage.add(gradients, weight)
        return True

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
        await self._executor.submit(FIRST, lambda: self.add(stage, key, found, weight))

    async def copied_weights(self, index: int) -> tuple[int, dict[str, Tensor]]:
        """The newest version of a stage, and copies of its weights."""
        stage = self.stage(index)

        def copy() -> tuple[int, dict[str, Tensor]]:
            return stage.version, {name: tensor.clone() for name, tensor in stage.weights().items()}

        return (await self._executor.submit(FIRST, copy))[0]

    def holds(self, stage_index: int, key: CallKey) -> bool:
        """Whether the sum holds the microbatch."""
        ledger = self._ledgers.get(stage_index)
        return (
            ledger is not None
            and (ledger.step, ledger.attempt) == (key.step, key.attempt)
            and ledger.holds(key.receipt)
        )

    async def reached(self, version: int) -> None:
        """Wait until all stages are at `version`."""
        try:
            async with asyncio.timeout(self._timeout), self._applied:
                await self._applied.wait_for(lambda: self.version >= version)
        except TimeoutError:
            raise DeadlineExceeded(
                f"this peer is at version {self.version}; version {version} did not come in {self._timeout:g} s"
            ) from None

    async def passed(self, version: int, *, within_s: float) -> None:
        """Wait until the stages are beyond `version`, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._applied:
                await self._applied.wait_for(lambda: self.version > version)

    # ------------------------------------------------------------------ the coordinator's calls

    async def _handle_settle(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, SettleRequest)
        self.check(caller, request.generation, request.step, request.attempt)
        await self._executor.submit(FIRST, lambda: self._settle(request))
        return b""

    def _settle(self, request: SettleRequest) -> None:
        self._check_generation(request.generation)
        selection = request.selection
        assert self._run is not None
        check_selection(selection, self._run.manifest.stages)
        if any(ledger.begun for ledger in self._ledgers.values()):
            raise ProtocolError(f"step {self.version} has begun here; what it trains changes no more")
        for stage in self._stages.values():
            stage.select(selection)
        self._reselected = selection

    async def _handle_fence(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, FenceRequest)
        self.check(caller, request.generation, request.step, request.attempt)
        assert self._run is not None
        self._fenced = (self._run.term, self._struck | set(request.batches))
        for first in request.batches:
            self._on_fenced(batch_name(request.generation, request.step, request.attempt, first))
        # A job on the compute thread is not interrupted; when this is answered, nothing is added any more.
        await self._executor.submit(FIRST, lambda: None)
        return b""

    @property
    def _struck(self) -> frozenset[int]:
        """Batches of the open step that who coordinates has struck."""
        term, batches = self._fenced
        return batches if self._run is not None and self._run.term == term else frozenset()

    def may_count(self, stage: Stage, key: CallKey) -> bool:
        """Whether the open step's record may count it."""
        assert self._run is not None
        of_the_step = (key.generation, key.step) == (self._run.manifest.generation, stage.version)
        return of_the_step and key.first not in self._struck

    def check_counts(self, stage: Stage, key: CallKey) -> None:
        """Refuse what no record will count: of a batch that was struck, or of a step that is over.

        Raises:
            LeaseRevoked: Its trainer was not heard of for a while.
        """
        if key.step == stage.version and key.first in self._struck:
            raise LeaseRevoked(f"the batch at {key.first} was struck from step {key.step}")
        if key.step < stage.version:
            raise LeaseRevoked(f"step {key.step} is decided, and does not count what comes now")

    async def _handle_freeze(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, FreezeRequest)
        self.check(caller, request.generation, request.step, request.attempt)
        # On the compute thread, so that it falls between two additions and never into one.
        (ledgers, stale), _ = await self._executor.submit(FIRST, lambda: self._freeze(request))
        for name in stale:
            self._tickets.drop(name)
        return encode(FreezeReply(boot_id=self._boot_id, ledgers=ledgers))

    def _freeze(self, request: FreezeRequest) -> tuple[list[StageLedger], list[str]]:
        """The ledgers, and the tickets of earlier results that would keep what is named now from being computed."""
        self._check_generation(request.generation)
        self._check_round(request)
        named = self._named(request)
        self._round = request.round
        reports, stale = [], []
        for index, stage in sorted(self._stages.items()):
            stale += self._bound(stage, named.get(index), request)
            ledger = self._ledgers[index]
            held, num_unnamed = ledger.bitmap(self._expected(index, request))
            reports.append(
                StageLedger(
                    stage_index=index,
                    held=held,
                    num_unnamed=num_unnamed,
                    touched=to_bitmap(stage.touched),
                    version_hash=stage.fingerprint(),
                )
            )
        return reports, stale

    def _check_round(self, request: FreezeRequest) -> None:
        here = (self.version, self.attempt, self._round)
        if (request.step, request.attempt) != here[:2] or request.round < self._round:
            asked = (request.step, request.attempt, request.round)
            raise ProtocolError(f"step, attempt, round are {here} here, got a request to freeze of {asked}")

    def _named(self, request: FreezeRequest) -> dict[int, list[Receipt]]:
        """By stage, what the sums here shall hold, if the request says so."""
        if request.named is None:
            return {}
        if sorted(one.stage_index for one in request.named) != sorted(self._stages):
            raise ProtocolError(f"what is named must be of the stages {sorted(self._stages)}, got {request.named}")
        named = {}
        for one in request.named:
            expected = self._expected(one.stage_index, request)
            flags = from_bitmap(one.receipts, len(expected))
            named[one.stage_index] = [receipt for receipt, flag in zip(expected, flags, strict=True) if flag]
        return named

    def _bound(self, stage: Stage, named: list[Receipt] | None, request: FreezeRequest) -> list[str]:
        """Say what may be added to a stage's sum from now on; returns tickets of earlier results, now stale."""
        if request.reopens:
            self._bounded(stage, self._expected(stage.index, request)).thaw()
            return []
        if named is None:
            self._ledgers[stage.index].freeze(())
            return []
        ledger = self._bounded(stage, named)
        ledger.freeze(named)
        return [CallKey.of(request, receipt).name(stage.index, "backward") for receipt in ledger.lacks(named)]

    def _bounded(self, stage: Stage, named: Sequence[Receipt]) -> Ledger:
        """A stage's ledger, begun anew with its sum if that holds more than what is named."""
        ledger = self._ledgers[stage.index]
        if ledger.goes_beyond(named):
            stage.zero_sum()
            ledger = self._ledgers[stage.index] = Ledger(ledger.step, ledger.attempt)
        return ledger

    async def _handle_average(self, caller: PeerId, body: bytes) -> bytes:
        closing = decode(body, Closing)
        self.check(caller, closing.generation, closing.step, closing.attempt)
        assert self._run is not None
        # On the compute thread, so that it falls between two additions and never into one.
        places, _ = await self._executor.submit(FIRST, lambda: self._bind(closing))
        try:
            averages = await gather(self._average(closing, index, place) for index, place in places.items())
        except RoundFailed as error:
            missed = [error.missed] if error.missed is not None else []
            return encode(AverageReply(parts=[], failure=str(error), unreached=missed))
        finally:
            if (self.version, closing.generation) != (closing.step, self._run.manifest.generation):
                self._tickets.drop(round_name(closing))  # asked twice: the record came while this round went on
        self._check_generation(closing.generation)
        self._check_frozen(closing)
        self.hold(closing, {index: mean for index, (mean, _) in zip(places, averages, strict=True)})
        return encode(AverageReply(parts=[norm for _, norm in averages]))

    def _bind(self, closing: Closing) -> dict[int, int]:
        """Check that the frozen sums are what the closing names here.

        Returns:
            This server's place in the roster of each of its stages.
        """
        self._check_generation(closing.generation)
        self._check_frozen(closing)
        self.check_stages(closing)
        places = {index: self._place(closing.stages[index]) for index in self._stages}
        for index, place in places.items():
            holders, touched = closing.stages[index].holders[place], closing.stages[index].touched
            from_bitmap(touched, len(self._stages[index].trainable))
            ledger = self._ledgers[index]
            if not ledger.final:
                raise ProtocolError(f"the ledger of stage {index} is not frozen; a sum that may change has no mean")
            held, num_unnamed = ledger.bitmap(self._expected(index, closing))
            if held != holders or num_unnamed:
                raise ProtocolError(
                    f"the sum of stage {index} on {self._transport.peer_id} is not what the closing of step "
                    f"{closing.step} names: it holds {num_unnamed} others, or lacks some"
                )
        return places

    def _check_frozen(self, closing: Closing) -> None:
        if closing.round != self._round:
            raise ProtocolError(
                f"the sums of step {closing.step} are frozen for round {self._round}, not {closing.round}"
            )

    def _expected(self, index: int, closing: FreezeRequest | Closing) -> list[Receipt]:
        """The receipts that stage `index` shall have, all replicas together."""
        assert self._run is not None
        return closing.batches if self._run.manifest.stages[index].on_trainers else closing.counted

    async def _average(self, closing: Closing, index: int, place: int) -> tuple[Tensor, PartNorm]:
        stage_closing = closing.stages[index]
        mean, squared_norm = await average(
            self._stages[index].gradient_sum,
            closing.total_weight,
            roster=[member.peer_id for member in stage_closing.roster],
            place=place,
            prefix=round_name(closing, index),
            tickets=self._tickets,
            timeout=self._timeout,
        )
        # Here, and not in what travels: the scale is what keeps small gradients in the range of a narrow format.
        scale = closing.gradient_scale
        return mean.div_(scale), PartNorm(stage_index=index, squared_norm=squared_norm / scale / scale)

    async def _handle_apply(self, caller: PeerId, body: bytes) -> bytes:
        record = decode(body, Record)
        closing = record.closing
        if self._run is not None and record.step < self.version:
            return b""  # told twice
        self.check(caller, closing.generation, closing.step, closing.attempt)
        await self.take(record)
        return b""

    async def take(self, record: Record) -> None:
        """Apply the open step's record, which was decided, with the mean gradients that are held here.

        Raises:
            ProtocolError: Another round's are held, or none.
        """
        if record.selection != self._reselected:
            raise ProtocolError(f"record {record.step} is of another selection of parameters than its gradients here")
        averaged = self._averaged
        if averaged is None or averaged.closing != record.closing:
            raise ProtocolError(f"no round of this peer averaged what record {record.step} counts")
        await self.commit(record, averaged.gradients)

    async def reopen(self) -> None:
        """Another peer coordinates: what the one before it froze takes gradients again, until it is frozen anew."""

        def reopen() -> None:
            for ledger in self._ledgers.values():
                ledger.thaw()

        await self._executor.submit(FIRST, reopen)

    @property
    def reselected(self) -> Selection | None:
        """What trains in the open step, if it is not what trained in the step before."""
        return self._reselected

    def hold(self, closing: Closing, gradients: Mapping[int, Tensor]) -> None:
        """Keep a round's mean gradients until its record is decided, or those of a later round come."""
        before = self._averaged
        if before is not None and before.closing.step == closing.step and before.closing.round > closing.round:
            return  # a coordinator that was replaced had it averaged
        self._averaged = _Averaged(closing, gradients)

    def has_averaged(self, closing: Closing) -> bool:
        """Whether the round's mean gradients are held here."""
        return self._averaged is not None and self._averaged.closing == closing

    async def reselect(self, step: int, selection: Selection | None) -> None:
        """For a joiner, that nobody asks to settle: train what the step's gradients are of, if it is open still."""

        def select() -> None:
            for stage in self._stages.values():
                if selection is not None and stage.version == step:
                    stage.select(selection)

        await self._executor.submit(FIRST, select)
        if self.version == step:  # else its record was applied meanwhile
            self._reselected = selection

    async def commit(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        """Apply a decided record. Told twice at once, by whatever ways, it is applied once."""
        await self._executor.submit(FIRST, lambda: self._apply(record, gradients))
        self._check_generation(record.closing.generation)
        async with self._applied:
            if self._run is None or self.version > record.step:
                return
            self._averaged = self._reselected = None
            self._fenced = _NO_FENCES
            self._run.apply(record)
            self._on_decided(record, gradients)
            self.attempt = self._round = 0
            self._applied.notify_all()

    def _apply(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        self._check_generation(record.closing.generation)
        if all(stage.version == record.step + 1 for stage in self._stages.values()):
            return  # told before, by a caller that hung up before it had the answer
        assert self._run is not None
        self._run.check(record)
        for stage in self._stages.values():  # all of them or none
            stage.check_applies(record)
        for index, stage in self._stages.items():
            touched = from_bitmap(record.closing.stages[index].touched, len(stage.trainable))
            stage.apply(record, gradients[index], touched)
            self._ledgers[index] = Ledger(record.step + 1)

    def check_stages(self, closing: Closing) -> None:
        """Refuse a closing of another number of stages than the run has."""
        assert self._run is not None
        if len(closing.stages) != len(self._run.rosters):
            raise ProtocolError(f"a closing of {len(closing.stages)} stages; there are {len(self._run.rosters)}")

    def check(self, caller: PeerId, generation: int, step: int, attempt: int) -> None:
        """Refuse who does not coordinate the run, and what is not of the open step."""
        if self._run is None:
            raise ProtocolError("this peer was not admitted to a run yet")
        self._run.check_coordinator(caller)
        manifest = self._run.manifest
        here = (manifest.generation, self.version, self.attempt)
        if (generation, step, attempt) != here:
            raise ProtocolError(f"generation, step, attempt are {here} here, got {(generation, step, attempt)}")

    def _check_generation(self, generation: int) -> None:
        """After a wait, in which the run may have gone back, or on without this server."""
        if self._run is None:
            raise ProtocolError("this peer is in no run (any more)")
        self._run.check_generation(generation)

    def _place(self, closing: StageClosing) -> int:
        me = Member(peer_id=self._transport.peer_id, boot_id=self._boot_id)
        if me not in closing.roster:
            raise ProtocolError(f"peer {me.peer_id} with boot id {me.boot_id} is not in the closing's roster")
        if len(closing.holders) != len(closing.roster):
            raise ProtocolError(f"a roster of {len(closing.roster)} came with the receipts of {len(closing.holders)}")
        return closing.roster.index(me)


def round_name(closing: Closing, stage_index: int | None = None) -> str:
    """What the tickets of a stage's averaging begin with; without a stage, of all."""
    round_ = f"g{closing.generation}.s{closing.step}.a{closing.attempt}.r{closing.round}/average/"
    return round_ if stage_index is None else f"{round_}{stage_index}"
