"""A server: holds one stage, or several, and computes them for whoever routes microbatches through it."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from lightning_swarm import trees
from lightning_swarm.config import Limits
from lightning_swarm.errors import (
    Busy,
    GradientGone,
    GradientMissing,
    InputMissing,
    LeaseRevoked,
    NotMember,
    ProtocolError,
    StageError,
    SwarmError,
    TicketGone,
)
from lightning_swarm.events import EventLog
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.randomness import key_seed
from lightning_swarm.server import BACKWARD, CANCEL, FORWARD, RELEASE, RESTART
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.cache import Cache, Kept, num_bytes
from lightning_swarm.server.donor import Donor
from lightning_swarm.server.executor import FIRST, Executor, priority_of
from lightning_swarm.server.joiner import Joiner
from lightning_swarm.server.lending import Lending
from lightning_swarm.server.model import Model
from lightning_swarm.server.snapshots import Snapshots
from lightning_swarm.server.stage import Forwarded, Stage
from lightning_swarm.server.stepping import Stepping
from lightning_swarm.steps import RECEIPTS, proposer
from lightning_swarm.steps.voting import Voter
from lightning_swarm.tasks import TaskOwner, ended
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.calls import (
    BackwardRequest,
    CallKey,
    CallReport,
    CancelReply,
    CancelRequest,
    Computed,
    ForwardRequest,
    Ticket,
)
from lightning_swarm.types.reports import ServerReport
from lightning_swarm.types.runs import ReleaseRequest, RestartRequest
from lightning_swarm.types.steps import ReceiptsReply, ReceiptsRequest, Record, StageReceipts
from lightning_swarm.types.wire import decode, encode, to_bitmap

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Server:
    """Answers the calls of the data plane; `Stepping` answers those of the steps, `Admission` those around them.

    Args:
        transport: Its network.
        tickets: Where its results wait to be fetched.
        executor: Computes, one job at a time.
        model: Its copy of the model.
        boot_id: Of this process's life.
        limits: Bounds.
        events: Of this peer.
        connect: Makes the run's other servers reachable.
        announce: Tells those who come later who coordinates the run.
        hosts: Whom this peer was told to join. They may end it while no run has it.
    """

    def __init__(
        self,
        transport: Transport,
        tickets: TicketStore,
        executor: Executor,
        model: Model,
        *,
        boot_id: int,
        limits: Limits,
        events: EventLog,
        connect: Callable[[], Awaitable[None]],
        announce: Callable[[PeerId], Awaitable[None]],
        hosts: Collection[PeerId] = (),
    ) -> None:
        self._transport = transport
        self._tickets = tickets
        self._executor = executor
        self._limits = limits
        self.events = events
        self._tasks = TaskOwner()
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self.cache = Cache(limits.cache_bytes)
        self.num_forwards = 0
        self.num_samples = 0
        self.stepping = Stepping(
            transport,
            tickets,
            executor,
            boot_id=boot_id,
            timeout=limits.call_timeout,
            on_decided=self._take_leave_of,
            on_fenced=self._give_up,
        )
        self.admission = Admission(
            transport,
            executor,
            model,
            self.stepping,
            boot_id=boot_id,
            limits=limits,
            events=events,
            connect=connect,
            announce=announce,
            hosts=hosts,
        )
        self.donor = Donor(transport, executor, self.admission, self.stepping, limits=limits)
        self.joiner = Joiner(transport, tickets, executor, model, self.admission, self.stepping, limits=limits)
        self.snapshots = Snapshots(transport, executor, self.admission, self.stepping, limits=limits)
        Lending(transport, executor, self.admission, self.stepping, max_bytes=limits.max_message_bytes)
        self.voter = Voter(boot_id)
        proposer.serve(self.voter, transport, self.admission.serves_with)
        transport.handle_call(RESTART, self._handle_restart)
        transport.handle_call(RELEASE, self._handle_release)
        transport.handle_stream(FORWARD, self._handle_forward, max_bytes=limits.max_message_bytes)
        transport.handle_stream(BACKWARD, self._handle_backward, max_bytes=limits.max_message_bytes)
        transport.handle_call(FORWARD, self._handle_forward_call)
        transport.handle_call(BACKWARD, self._handle_backward_call)
        transport.handle_call(CANCEL, self._handle_cancel)
        transport.handle_call(RECEIPTS, self._handle_receipts)

    async def start(self) -> None:
        """Begin to answer."""
        await self._tasks.start()

    async def close(self) -> None:
        """Stop computing. Raises what a task of this server raised."""
        self._closed = True
        try:
            await self.admission.close()
        finally:
            self._executor.close()
            self.snapshots.go_back()
            await self._tasks.close()

    def report(self) -> ServerReport | None:
        """For people; None before there is a run."""
        if not self.admission.ready.is_set():
            return None
        coordinator, run = self.admission.run.coordinator, self.admission.run.manifest
        return ServerReport(
            lead=run.lead,
            coordinator=coordinator,
            num_stages=len(run.stages),
            stages=list(self.stepping.stages),
            first_step=run.first_step,
            step=self.stepping.version,
            age_s=time.monotonic() - self.stepping.began_s,
            num_samples=self.num_samples // max(1, len(self.stepping.stages)),
            queued=self._executor.queued,
        )

    # ------------------------------------------------------------------ going back, and out

    async def step_out(self) -> None:
        """A record has left this server out: nothing is left here of the run but a stage to join it with again."""
        if not self.admission.has_run:
            return
        holders = [len(roster) for roster in self.admission.run.rosters]
        await self.admission.step_out()  # what comes from now on is refused
        await self._end_calls()
        self._forget("g")
        stages = await self.stepping.step_out()
        self.donor.go_back()
        self.snapshots.go_back()
        self.joiner.keep(stages, holders)

    async def release(self) -> None:
        """The run is void here: this server is as it was before, and may be admitted to one, or join one."""
        await self.step_out()
        self.voter.forget()

    def serve_with(self, model: Model) -> None:
        """Build stages of another copy of the model from now on. Not while there is a run."""
        self.admission.model = self.joiner.model = model

    async def _handle_release(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, ReleaseRequest)
        if self.admission.has_run:  # else it was told twice
            self.admission.check_release(caller, request)
            await self.release()
            self.admission.note_release(request)
        return b""

    async def _end_calls(self) -> None:
        await ended(self._calls.values())

    async def _handle_restart(self, caller: PeerId, body: bytes) -> bytes:
        """Nothing is left of the running generation when this returns."""
        run = self.admission.run
        old = run.manifest.generation
        self.admission.go_back(caller, decode(body, RestartRequest))
        await self.admission.leadership.go_back()
        await self._end_calls()
        self._forget(f"g{old}.")
        await self.stepping.go_back()
        self.donor.go_back()
        self.snapshots.go_back()
        return b""

    # ------------------------------------------------------------------ forward

    async def _handle_forward_call(self, caller: PeerId, body: bytes) -> bytes:
        return (await self._handle_forward(caller, Message(body))).body

    async def _handle_forward(self, caller: PeerId, message: Message) -> Message:
        self.admission.run.check_trainer(caller)
        request = decode(message.body, ForwardRequest)
        stage = self._checked_stage(request.key, request.stage_index)
        inputs, extras = _input_tree(request.structure, message.tensors, request.source)
        name = request.key.name(stage.index, "forward")
        if name not in self._calls and len(self._calls) >= self._limits.max_pending_calls:
            raise Busy(f"{len(self._calls)} calls are under way here, at most {self._limits.max_pending_calls} may be")
        self._begin(name, lambda: self._forward(name, stage, request, inputs, extras))
        return Message()

    async def _forward(
        self, name: str, stage: Stage, request: ForwardRequest, inputs: Any, extras: dict[str, Any]
    ) -> None:
        mode = request.mode
        key = request.key
        inputs, wants_grad = await self._inputs(request.source, inputs, mode.input_grad)
        await self.stepping.reached(key.step)
        seed = key_seed(
            self.admission.run.manifest.seed, key.step, key.first, key.index, key.call, stage.index, int(key.evaluation)
        )

        def compute() -> Forwarded:
            if not key.evaluation:
                self.stepping.sums.check_counts(stage, key)
            stage.check_version(key.step)
            with stage.holding(key.weights):
                return stage.forward(inputs, extras, wants_grad, mode, seed)

        result, busy_s = await self._compute(stage, priority_of(key, "forward"), compute)
        self.num_forwards += 1
        self.num_samples += _num_samples(inputs)
        keep = mode.grad and request.keep
        if keep:
            kept = Kept(inputs, extras, wants_grad, mode, seed, busy_s=busy_s)
            self._keep(name, kept, result)
        computed = Computed(structure=result.structure, flags=result.requires_grad)
        report = CallReport(busy_s=busy_s, queued=self._executor.queued)
        outputs = tuple(tensor.cpu() for tensor in result.outputs)
        # What is fetched once is not kept on; what is lost on the way is computed again, like all else.
        once = self.cache.full or not keep
        self._tickets.fulfil(name, Message(encode(computed), outputs), encode(report), once=once)

    def _keep(self, name: str, kept: Kept, result: Forwarded) -> None:
        kept.graph = result.graph
        kept.input_bytes = num_bytes(trees.flatten((kept.inputs, kept.extras))[1])
        kept.graph_bytes = result.graph_bytes
        self.cache.keep(name, kept)

    async def _inputs(
        self, source: Ticket | None, inputs: Any, input_grad: bool
    ) -> tuple[tuple[Any, ...], Sequence[bool]]:
        """The positional inputs of a stage, and which of their tensors want a gradient."""
        if source is None:
            return inputs, [input_grad and trees.is_differentiable(t) for t in trees.flatten(inputs)[1]]
        message = await self._fetch(source)
        computed = decode(message.body, Computed)
        return (trees.unflatten(computed.structure, list(message.tensors)),), computed.flags

    # ------------------------------------------------------------------ backward

    async def _handle_backward_call(self, caller: PeerId, body: bytes) -> bytes:
        return (await self._handle_backward(caller, Message(body))).body

    async def _handle_backward(self, caller: PeerId, message: Message) -> Message:
        self.admission.run.check_trainer(caller)
        request = decode(message.body, BackwardRequest)
        stage = self._checked_stage(request.key, request.stage_index)
        if request.key.evaluation or request.key.step != stage.version or not request.mode.grad:
            raise ProtocolError(
                f"a backward must belong to a forward with gradients of the open step {stage.version}: {request.key}"
            )
        _, rest = trees.placed(request.present, message.tensors)
        if request.recompute is not None:
            _input_tree(request.recompute.structure, rest, request.recompute.source)
        elif rest:
            raise ProtocolError(f"{sum(request.present)} tensors were announced, {len(message.tensors)} came")
        name = request.key.name(stage.index, "backward")
        self._begin(name, lambda: self._backward(name, stage, request, message.tensors))
        return Message()

    async def _backward(self, name: str, stage: Stage, request: BackwardRequest, tensors: tuple[Tensor, ...]) -> None:
        key, mode = request.key, request.mode
        gradients, rest = trees.placed(request.present, tensors)
        kept = await self._kept(stage, request, rest)  # before the gradient, which can be fetched only once
        if request.source is not None:
            try:
                message = await self._fetch(request.source, gradient=True)
            except BaseException:
                if self.stepping.sums.may_count(stage, key):
                    self.cache.keep(key.name(stage.index, "forward"), kept)  # for when another peer has the gradient
                raise
            gradients, _ = trees.placed(decode(message.body, Computed).flags, message.tensors)
        receipt = False

        def compute() -> list[Tensor | None]:
            nonlocal receipt
            self.stepping.sums.check_counts(stage, key)
            stage.check_version(key.step)
            graph = kept.graph
            if graph is None:
                graph = stage.forward(kept.inputs, kept.extras, kept.wants_grad, kept.mode, kept.seed).graph
            assert graph is not None
            input_gradients, parameter_gradients = stage.backward(graph, gradients, mode)
            if request.accumulate:
                receipt = self.stepping.sums.add(stage, key, parameter_gradients, request.weight)
            return input_gradients

        found, busy_s = await self._compute(stage, priority_of(key, "backward"), compute)
        computed = Computed(structure=None, flags=[gradient is not None for gradient in found])
        report = CallReport(busy_s=kept.busy_s + busy_s, queued=self._executor.queued, receipt=receipt)
        present = tuple(gradient.cpu() for gradient in found if gradient is not None)
        self._tickets.fulfil(name, Message(encode(computed), present), encode(report), once=True)

    async def _kept(self, stage: Stage, request: BackwardRequest, tensors: Sequence[Tensor]) -> Kept:
        """What this peer kept of the forward, or what the request brings instead."""
        key = request.key
        forward_name = key.name(stage.index, "forward")
        kept = self.cache.take(forward_name)
        if kept is not None:
            return kept
        if request.recompute is None:
            raise TicketGone(f"nothing is kept of {forward_name}; send its input along")
        inputs, extras = _input_tree(request.recompute.structure, tensors, request.recompute.source)
        inputs, wants_grad = await self._inputs(request.recompute.source, inputs, request.mode.input_grad)
        seed = key_seed(self.admission.run.manifest.seed, key.step, key.first, key.index, key.call, stage.index, 0)
        return Kept(inputs, extras, wants_grad, request.mode, seed)

    # ------------------------------------------------------------------ cancelling

    async def _handle_cancel(self, caller: PeerId, body: bytes) -> bytes:
        self.admission.run.check_trainer(caller)
        request = decode(body, CancelRequest)
        stage = self._checked_stage(request.key, request.stage_index)
        name = request.key.name(stage.index, request.direction)
        task = self._calls.get(name)
        if task is not None:
            await ended([task])
        self._tickets.withdraw(name)
        if request.direction == "forward":
            return encode(CancelReply(added=False))
        # On the compute thread: a job that runs there is not interrupted, and may be about to add.
        added, _ = await self._executor.submit(FIRST, lambda: self.stepping.sums.holds(stage.index, request.key))
        return encode(CancelReply(added=added))

    # ------------------------------------------------------------------ what a trainer left behind

    async def _handle_receipts(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, ReceiptsRequest)
        self.stepping.sums.check(caller, request.generation, request.step, request.attempt)
        keys = [CallKey.of(request, receipt) for receipt in request.receipts]
        # First, for what is under way may be added meanwhile.
        pending = {
            index: [key.name(index, "backward") in self._calls for key in keys] for index in self.stepping.stages
        }

        def look() -> list[StageReceipts]:
            return [
                StageReceipts(
                    stage_index=index,
                    held=to_bitmap(self.stepping.sums.holds(index, key) for key in keys),
                    pending=to_bitmap(flags),
                )
                for index, flags in pending.items()
            ]

        stages, _ = await self._executor.submit(FIRST, look)
        return encode(ReceiptsReply(stages=stages))

    # ------------------------------------------------------------------ parts

    def _checked_stage(self, key: CallKey, stage_index: int) -> Stage:
        if self._closed:
            raise NotMember("this peer has left")
        self.admission.run.check_generation(key.generation)
        if not key.evaluation and key.attempt != self.stepping.sums.attempt:
            raise ProtocolError(
                f"attempt {self.stepping.sums.attempt} of the step is open, got a call of {key.attempt}"
            )
        stage = self.stepping.stage(stage_index)
        if stage.on_trainers:
            raise ProtocolError(f"stage {stage_index} is what trainers compute themselves; no microbatch goes there")
        self.admission.run.check_holds(self.admission.me, stage_index)
        if key.weights and not key.evaluation:
            raise ProtocolError(f"only evaluations may mean lent weights, got {key}")
        stage.check_borrowed(key.weights)
        if stage_index not in self.admission.loaded:
            raise NotMember(f"stage {stage_index} has no weights yet")
        if not key.evaluation:
            self.stepping.sums.check_counts(stage, key)
        if key.step < stage.version:
            raise ProtocolError(f"stage {stage_index} is at version {stage.version}, got a call of step {key.step}")
        return stage

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a call unless it is under way, or its result is there."""
        if self._tickets.promise(name):
            task = self._tasks.spawn(self._guarded(name, work))
            self._calls[name] = task
            task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._calls.get(name) is task:  # else it was given up, and sent again
            del self._calls[name]

    async def _guarded(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except SwarmError as error:
            self._tickets.fail(name, error)
        except Exception as error:
            # A bug: it ends this server, and whoever waits shall not wait for ever.
            self._tickets.fail(name, SwarmError(f"internal error: {type(error).__name__}: {error}"))
            _log.exception("A call of this server failed: %s", name)
            raise

    async def _fetch(self, source: Ticket, *, gradient: bool = False) -> Message:
        try:
            return await self._tickets.fetch(source, timeout=self._limits.call_timeout)
        except StageError:
            raise  # the model's own error: the trainer wants to see that one
        except TicketGone as error:  # nobody is to blame: it is computed again
            gone = GradientGone if gradient else TicketGone
            raise gone(f"{source.name} is not at {source.peer_id} any more: {error}") from error
        except SwarmError as error:
            missing = GradientMissing if gradient else InputMissing
            raise missing(f"{source.name} did not come from {source.peer_id}: {error}") from error

    async def _compute(self, stage: Stage, priority: tuple[int, ...], run: Callable[[], _T]) -> tuple[_T, float]:
        try:
            return await self._executor.submit(priority, run)
        except SwarmError:
            raise
        except Exception as error:  # the model's code may raise anything; it goes to the trainer as text
            raise StageError(
                f"stage {stage.index} raised {type(error).__name__} on peer {self._transport.peer_id}: {error}\n"
                + "".join(traceback.format_exception(error))
            ) from error

    def _take_leave_of(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        self._forget(f"g{record.closing.generation}.s{record.step}.")
        self.donor.note(record, gradients)
        if (work := self.snapshots.note(record)) is not None:
            self._tasks.spawn(work)

    def _give_up(self, prefix: str) -> None:
        """A batch was struck: its trainer, if it is still there, is told where it waits."""
        error = LeaseRevoked("the batch was struck from its step")
        for name, task in self._calls.items():
            if name.startswith(prefix):
                self._tickets.fail(name, error)
                task.cancel()
        self._forget(prefix)

    def _forget(self, prefix: str) -> None:
        self._tickets.drop(prefix)
        self.cache.drop(prefix)


def _input_tree(structure: Any, tensors: Sequence[Tensor], source: Ticket | None) -> tuple[Any, dict[str, Any]]:
    tree = trees.unflatten(structure, list(tensors))
    if not isinstance(tree, tuple) or len(tree) != 2 or not isinstance(tree[1], dict):
        raise ProtocolError("a call must bring a pair of inputs and extras")
    if isinstance(tree[0], tuple) != (source is None) or (source is not None and tree[0] is not None):
        raise ProtocolError("a call must bring a tuple of inputs, or say where its input is, and not both")
    return tree


def _num_samples(inputs: tuple[Any, ...]) -> int:
    """How many samples a microbatch has: it was cut along the first dimension."""
    return next((tensor.shape[0] for tensor in trees.flatten(inputs)[1] if tensor.ndim), 0)
