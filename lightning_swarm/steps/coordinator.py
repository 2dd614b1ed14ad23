"""The coordinator: grants places in the open step, keeps its books, and has it closed when all is through."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace as replaced

from lightning_swarm.clock import now_s
from lightning_swarm.config import Limits
from lightning_swarm.errors import LeaseRevoked, NotCoordinator, ProtocolError, StageLost, StepError, SwarmError
from lightning_swarm.events import EventLog
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.selection import check_selection, first_trained
from lightning_swarm.steps import ARMED, DONE, GRANT, METRICS, QUIT, RECORD, REGISTER, RENEW, SELECT, TAKE_METRICS
from lightning_swarm.steps.closing import Closer
from lightning_swarm.steps.gate import Gate
from lightning_swarm.steps.policy import OpenStep
from lightning_swarm.steps.proposer import Proposer
from lightning_swarm.steps.servers import Servers
from lightning_swarm.steps.snapshots import SnapshotOrders
from lightning_swarm.steps.takeover import Books, fetch_metrics, first_lease
from lightning_swarm.steps.watch import TrainerWatch
from lightning_swarm.tasks import TaskOwner
from lightning_swarm.types.batches import (
    BatchArmed,
    BatchDone,
    BatchDoneReply,
    BatchMetrics,
    Grant,
    GrantReply,
    GrantRequest,
    MetricsRequest,
    Quit,
    RecordReply,
    RecordRequest,
    RegisterRequest,
    SelectRequest,
    Wait,
)
from lightning_swarm.types.events import EventKind
from lightning_swarm.types.steps import Record, SettleRequest
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)


class Coordinator:
    """A role of one peer.

    Args:
        transport: Its network.
        run: The run as this peer's server knows it, which applies the records.
        proposer: Has the records decided.
        limits: Bounds.
        events: Of this peer.
        on_deposed: Called when another peer coordinates.
        books: To go on from; None: the run begins.

    Attributes:
        deposed: Another peer coordinates by now; this role is to be retired.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunState,
        proposer: Proposer,
        *,
        limits: Limits,
        events: EventLog,
        on_deposed: Callable[[], None],
        books: Books | None = None,
    ) -> None:
        manifest = run.manifest
        books = books or Books(OpenStep(manifest.first_step, manifest.target_batch_size))
        self._transport = transport
        self._run = run
        self._events = events
        self._manifest = manifest
        self._timeout = limits.call_timeout
        self._lead_timeout = limits.lead_timeout
        self._servers = Servers(transport, run, proposer.term, spawn=self._spawn, timeout=limits.call_timeout)
        self._term = proposer.term
        self._leases = itertools.count(first_lease(proposer.term))
        self._open = books.open
        self._selection = books.reselected or run.selection
        self._reselected = books.reselected  # in the open step
        self._settling = asyncio.Lock()
        self._begun = books.begun  # the lead's loop asked for its first place
        self._heard_s = 0.0  # when the lead was last heard of
        self._finishing = False  # a task of this object decides the open step
        self._closing_s: float | None = None  # since when the open step closes
        self._asked: tuple[int, list[dict[str, Any]]] | None = None  # the record the lead asked for, and how to step
        self._waiting: dict[PeerId, GrantRequest] = {}  # who found the step full, first come first
        self._reserved: dict[PeerId, tuple[GrantRequest, Grant]] = {}  # their places in the step after
        self._record = books.record
        self._logs = books.logs  # of the other trainers' batches in it
        self._metrics = books.metrics  # likewise
        self._seen = events.counts  # until the newest record
        self._noted: dict[EventKind, int] = {}  # between it and the one before
        self._max_metric_bytes = limits.max_metric_bytes
        self._failure: SwarmError | None = None
        self._changed = asyncio.Condition()
        self._tasks = TaskOwner()
        self.gate = Gate(transport, run, limits=limits, events=events)
        self._on_deposed = on_deposed
        self.deposed = False
        self._snapshots = SnapshotOrders(
            transport, run, interval_s=limits.snapshot_interval, timeout=limits.call_timeout
        )
        self._watch = TrainerWatch(
            transport,
            run,
            events,
            spawn=self._spawn,
            open_step=lambda: self._open,
            first_trained=lambda: first_trained(self._selection, run.manifest.stages),
            on_change=self._on_change,
            interval_s=limits.silence_timeout / 5,
            timeout=limits.call_timeout,
        )
        self._closer = Closer(
            run,
            self._servers,
            self.gate,
            proposer,
            self._snapshots,
            spawn=self._spawn,
            lead_asks=self._asked_for,
            fence=self._watch.fence,
            limits=limits,
            events=events,
        )
        self._warned_large = False

    async def start(self) -> None:
        """Begin to answer."""
        self._heard_s = now_s()
        await self._tasks.start()
        self._answer()
        if self._open.closing:
            self._closing_s = now_s()
        for trainer in self._open.missing():
            self._watch.watch(trainer)
        if self._open.ready:
            self._finishing = True
            self._spawn(self._finish_guarded(self._open))

    def _answer(self) -> None:
        """Not before there is an owner for the tasks that calls begin: trainers may be calling already."""
        transport = self._transport
        transport.handle_call(SELECT, self._handle_select)
        transport.handle_call(GRANT, self._handle_grant)
        transport.handle_stream(METRICS, self._handle_metrics, max_bytes=self._max_metric_bytes)
        transport.handle_call(ARMED, self._handle_armed)
        transport.handle_call(REGISTER, self._handle_register)
        transport.handle_call(DONE, self._handle_done)
        transport.handle_call(RECORD, self._handle_record)
        transport.handle_stream(TAKE_METRICS, self._handle_take_metrics, max_bytes=0)
        transport.handle_call(RENEW, self._handle_renew)
        transport.handle_call(QUIT, self._handle_quit)

    async def retire(self) -> None:
        """Another peer coordinates: whoever waits here is told to ask that one. Raises what a task raised."""
        self._failure = NotCoordinator(f"{self._transport.peer_id} does not coordinate any more")
        await self._notify()
        await self._tasks.close()

    async def close(self) -> None:
        """Stop. Raises what a task raised."""
        try:
            await self.gate.close()
        finally:
            await self._tasks.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if not self._tasks.is_running:  # a call that waited for something while this role ended
            work.close()
            raise NotCoordinator(f"{self._transport.peer_id} does not coordinate any more")
        return self._tasks.spawn(work)  # whose owner is another one after the run went back

    async def go_back(self) -> None:
        """The run entered its next generation: a step that closes is given up, and whoever waits for it is told."""
        self._manifest = manifest = self._run.manifest
        tasks, self._tasks = self._tasks, TaskOwner()
        await self._tasks.start()
        await tasks.close()
        self._open = OpenStep(manifest.first_step, manifest.target_batch_size)
        self._selection, self._reselected = manifest.selection, None
        self._closing_s = self._asked = self._record = self._failure = None
        self._finishing = False
        self._servers.go_back()
        self._waiting, self._reserved, self._logs, self._metrics = {}, {}, [], {}
        self.gate.go_back()
        self._snapshots.go_back()
        self._watch.go_back()
        await self._notify()

    # ------------------------------------------------------------------ the trainers' calls

    async def _handle_select(self, caller: PeerId, body: bytes) -> bytes:
        if caller != self._manifest.lead:
            raise ProtocolError(f"the lead {self._manifest.lead} says what trains, not {caller}")
        request = decode(body, SelectRequest)
        self._run.check_generation(request.generation)
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
            await self._servers.settle(settle)
            self._run.check_generation(request.generation)  # it may have changed meanwhile
            self._selection = self._reselected = request.selection
        return b""

    async def _handle_grant(self, caller: PeerId, body: bytes) -> bytes:
        self._hear(caller)
        request = decode(body, GrantRequest)
        self._run.check_generation(request.generation)
        if request.step > self._open.step:
            raise ProtocolError(f"step {self._open.step} is open, got a request for step {request.step}")
        if caller == self._manifest.lead and not self._begun:
            self._begun = True
            await self._notify()
        elif not self._begun and not await self._until(lambda: self._begun):
            self._check_lead()
            return encode(GrantReply(wait=Wait(step=None)))
        async with self._settling:  # not before all servers know what this step trains
            return encode(self._place(caller, request))

    def _place(self, caller: PeerId, request: GrantRequest) -> GrantReply:
        self._run.check_generation(request.generation)
        step = self._open
        if self._is_beyond(step):
            return GrantReply(over=True)
        if request.step < step.step:  # a place may be kept for it, and it must know the record before that step first
            return GrantReply(wait=Wait(step=step.step - 1))
        asked, grant = self._reserved.get(caller, (None, None))
        if grant is not None and asked == replaced(request, step=step.step - 1):
            del self._reserved[caller]
            return GrantReply(grant=grant)
        grant = self._grant(step, caller, request)
        if grant is None:
            self._waiting[caller] = request
            return GrantReply(wait=Wait(step=step.step))
        self._waiting.pop(caller, None)
        target = self._manifest.target_batch_size
        if target is not None and request.num_samples > target and not self._warned_large:
            self._warned_large = True
            _log.warning("A batch of %d samples is a step: `target_batch_size` is %d.", request.num_samples, target)
        return GrantReply(grant=grant)

    def _grant(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> Grant | None:
        before = step.granted(trainer, request.number)
        if before is not None:
            lease, first, weight = before
        else:
            lease = next(self._leases)
            place = step.grant(lease, trainer, request.num_samples, request.gradient_scale, request.number)
            if place is None:
                return None
            first, weight = place
        generation = self._manifest.generation
        if step.closing:
            self._closing_s = now_s()
        self._watch.watch(trainer)
        return Grant(lease=lease, generation=generation, step=step.step, attempt=0, first=first, weight=weight)

    async def _handle_metrics(self, caller: PeerId, message: Message) -> Message:
        self._hear(caller)
        request = decode(message.body, BatchMetrics)
        self._run.check_generation(request.generation)
        self._check_open(request.step, "metrics of a batch")
        num_tensors = sum(length for one in request.metrics for length in one.lengths)
        if num_tensors != len(message.tensors):
            raise ProtocolError(f"these metrics have {num_tensors} tensors, got {len(message.tensors)}")
        self._open.keep_metrics(request.lease, caller, message, max_bytes=self._max_metric_bytes)
        return Message()

    async def _handle_take_metrics(self, caller: PeerId, message: Message) -> Message:
        if caller != self._manifest.lead:
            raise ProtocolError(f"metrics are for the lead {self._manifest.lead}, not for {caller}")
        self._hear(caller)
        request = decode(message.body, MetricsRequest)
        self._run.check_generation(request.generation)
        step = -1 if self._record is None else self._record.step
        if request.step != step:
            raise ProtocolError(f"the newest record is that of step {step}, got a request for step {request.step}")
        return self._metrics.get(request.first, Message())  # whose trainer may be gone, with the one who was told

    async def _handle_armed(self, caller: PeerId, body: bytes) -> bytes:
        self._hear(caller)
        request = decode(body, BatchArmed)
        self._run.check_generation(request.generation)
        self._check_open(request.step, "an armed batch")
        self._open.arm(request.lease, caller, request.receipts, request.logs)
        return b""

    async def _handle_register(self, caller: PeerId, body: bytes) -> bytes:
        """A trainer that did not answer when this peer took over: what it has counts still, if its step is open."""
        self._hear(caller)
        request = decode(body, RegisterRequest)
        self._run.check_generation(request.generation)
        step = self._open
        if request.step != step.step or self._finishing:
            return b""
        for lease in request.report.leases:
            if lease.grant.lease >= first_lease(self._term) or lease.grant.attempt:
                raise ProtocolError(
                    f"a trainer registers what it was granted by another coordinator, got {lease.grant}"
                )
        metrics = await fetch_metrics(self._transport, {caller: request.report}, timeout=self._timeout)
        if step is not self._open or self._finishing:
            return b""
        for lease in request.report.leases:
            if lease.grant.step == step.step:
                step.restore(caller, lease, metrics.get((lease.grant.step, lease.grant.lease)))
                self._watch.watch(caller)
        if request.report.close_asked and caller == self._manifest.lead and not step.close_asked:
            step.ask_to_close(request.report.total_weight)
            self._closing_s = now_s()
        await self._on_change(step)
        return b""

    async def _handle_done(self, caller: PeerId, body: bytes) -> bytes:
        self._hear(caller)
        request = decode(body, BatchDone)
        self._run.check_generation(request.generation)
        step = self._open
        if request.step < step.step and (not request.close or request.step + 1 == step.step):
            if request.lease is not None and not request.withdrawn:  # it was away, or did not hear that it was heard
                self._run.check_counted(request.step, request.first)
            return encode(BatchDoneReply(closing=True))
        if request.step != step.step:
            raise ProtocolError(f"step {step.step} is open, got the end of a batch of step {request.step}")
        if request.close and caller != self._manifest.lead:
            raise ProtocolError(f"the lead {self._manifest.lead} closes steps, not {caller}")
        if request.lease is not None:
            if request.withdrawn:
                first = step.withdraw(request.lease, caller)
                if request.begun:
                    self._watch.fence(step, [first])
            else:
                step.complete(request.lease, caller, request.completed, request.logs)
        if request.close and not step.close_asked:
            step.ask_to_close(request.total_weight)
            self._closing_s = now_s()
        await self._on_change(step)
        return encode(BatchDoneReply(closing=step.closing))

    async def _on_change(self, step: OpenStep) -> None:
        """A batch is through, or will not come: end the step if that was the last one it waited for."""
        if step.ready and step is self._open and not self._finishing:
            self._finishing = True
            self._spawn(self._finish_guarded(step))
        if not step.closing:
            await self._notify()  # who waits for the record may have a place again

    async def _handle_record(self, caller: PeerId, body: bytes) -> bytes:
        """Hold the answer until the record is decided and applied everywhere, for a while."""
        self._hear(caller)
        request = decode(body, RecordRequest)
        self._run.check_generation(request.generation)
        step = self._open
        if request.step > step.step:
            raise ProtocolError(f"step {step.step} is open, got a request for record {request.step}")
        if caller == self._manifest.lead and request.step == step.step:
            if not request.hyperparameters:
                raise ProtocolError("the lead says with which hyperparameters to step, got none")
            self._asked = (step.step, request.hyperparameters)
            await self._notify()
        await self._until(lambda: self._open.step > request.step or not self._open.closing)
        self._run.check_generation(request.generation)  # it may have changed meanwhile
        if self._open.step > request.step:
            if caller != self._manifest.lead:
                return encode(RecordReply(record=self._record, closing=False))
            reply = RecordReply(
                record=self._record,
                closing=False,
                logs=self._logs,
                measured=sorted(self._metrics),
                events={} if caller == self._servers.own else self._noted,
            )
            return encode(reply)
        await self._check_overdue(step)
        if caller == self._manifest.lead and not step.closing:
            self._asked = None  # its loop goes on, to validation perhaps, until it asks again
        return encode(RecordReply(record=None, closing=step.closing))

    async def _handle_renew(self, caller: PeerId, body: bytes) -> bytes:
        if body:
            raise ProtocolError(f"{RENEW} takes no arguments, got {len(body)} bytes")
        self._hear(caller)
        return b""

    async def _handle_quit(self, caller: PeerId, body: bytes) -> bytes:
        self._run.check_trainer(caller)
        request = decode(body, Quit)
        if caller == self._manifest.lead:
            raise ProtocolError("the lead ends the run by dismissing the others")
        await self._fail(self._open, f"trainer {caller} ended, and its server with it: {request.reason}")
        return b""

    # ------------------------------------------------------------------ waiting, for each other and for the lead

    def _hear(self, caller: PeerId) -> None:
        """Whoever may ask is answered with what went wrong, if something did."""
        self._run.check_trainer(caller)
        if caller == self._manifest.lead:
            self._heard_s = now_s()
        if self._failure is not None:
            raise self._failure

    def _check_open(self, step: int, what: str) -> None:
        """Refuse what a trainer says of a batch in another step than the open one."""
        if step < self._open.step:
            raise LeaseRevoked(f"the batch was struck from step {step}, which is decided")
        if step > self._open.step:
            raise ProtocolError(f"step {self._open.step} is open, got {what} of step {step}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, reached: Callable[[], bool]) -> bool:
        """Wait for as long as a caller may be held; whether it was reached. Raises what the step failed with."""
        try:
            # Shorter than the caller waits for its answer.
            async with asyncio.timeout(self._timeout / 2), self._changed:
                await self._changed.wait_for(lambda: reached() or self._failure is not None)
        except TimeoutError:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    async def _check_overdue(self, step: OpenStep) -> None:
        """Do without batches that a closing step waits for for too long."""
        since_s = self._closing_s
        if step.closing and not step.ready and since_s is not None and now_s() >= since_s + self._timeout:
            self._closing_s = now_s()
            for trainer in step.missing() if await self._watch.is_whole() else ():
                await self._watch.give_up(
                    step,
                    trainer,
                    f"it was not through {self._timeout:g} s after its step was full. Raise `Limits.call_timeout` if "
                    "batches take longer.",
                )

    def _check_lead(self) -> None:
        if now_s() >= self._heard_s + self._lead_timeout:
            raise StepError(
                f"the lead {self._manifest.lead} was not heard of for {self._lead_timeout:g} s. Raise "
                "`Limits.lead_timeout` if what it does between two batches takes longer."
            )

    async def _asked_for(self, step: OpenStep) -> list[dict[str, Any]]:
        """Wait until the lead's loop asks for the record, so that it sees every step and validates frozen weights."""
        while self._asked is None or self._asked[0] != step.step:
            self._check_lead()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._heard_s + self._lead_timeout), self._changed:
                    await self._changed.wait()
        return self._asked[1]

    def _is_beyond(self, step: OpenStep) -> bool:
        return self._manifest.max_steps is not None and step.step >= self._manifest.max_steps

    def _opened(self, number: int) -> OpenStep:
        """A step with places for those who wait: the lead first, so that it waits for one record only."""
        step = OpenStep(number, self._manifest.target_batch_size)
        waiting = sorted(self._waiting.items(), key=lambda item: item[0] != self._manifest.lead)
        self._waiting, self._reserved = {}, {}
        for trainer, request in () if self._is_beyond(step) else waiting:
            with contextlib.suppress(ProtocolError):  # which it will get when it asks again
                grant = self._grant(step, trainer, request)
                if grant is None:
                    self._waiting[trainer] = replaced(request, step=number)
                else:
                    self._reserved[trainer] = (request, grant)
        return step

    # ------------------------------------------------------------------ the step's end

    async def _finish_guarded(self, step: OpenStep) -> None:
        try:
            record = await self._finish(step)
        except NotCoordinator as error:
            _log.info("Step %d is another's to close: %s", step.step, error)
            self._failure, self.deposed = error, True
            self._on_deposed()
            await self._notify()
            return
        except SwarmError as error:
            await self._fail(step, str(error), StageLost if isinstance(error, StageLost) else StepError)
            return
        except Exception as error:
            # A bug: it ends this server, and whoever waits shall not wait for ever.
            await self._fail(step, f"internal error: {type(error).__name__}: {error}")
            raise
        self._finishing = False
        if record is None:
            await self._notify()  # who waits for the record has a place again
            return
        self._record, self._closing_s = record, None
        self._logs, self._metrics = step.logs_for(self._manifest.lead), step.metrics_for(self._manifest.lead)
        self._noted = dict(self._events.take(self._seen))
        self._reselected = None
        self._open = self._opened(step.step + 1)
        await self._notify()

    async def _finish(self, step: OpenStep) -> Record | None:
        """Decide it. None: it takes batches again."""
        while step.ready:
            record = await self._closer.finish(step, self._selection, self._reselected)
            if record is not None:
                return record
        return None

    async def _fail(self, step: OpenStep, reason: str, kind: type[StepError] = StepError) -> None:
        if self._failure is None:
            self._failure = kind(f"step {step.step} could not be decided: {reason}")
        await self._notify()
