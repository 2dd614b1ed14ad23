"""Handles forward and backward calls, from the request to the ticket that holds the result."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from lightning_swarm.core.errors import (
    Busy,
    GradientGone,
    GradientMissing,
    InputMissing,
    LeaseRevoked,
    NotMember,
    OutOfMemory,
    ProtocolError,
    StageError,
    SwarmError,
    TicketGone,
)
from lightning_swarm.model.partition.timing import synchronize
from lightning_swarm.model.random import key_seed
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import from_message, to_message
from lightning_swarm.protocol.messages.calls import (
    PLACES,
    BackwardRequest,
    CallKey,
    CallReport,
    CancelReply,
    CancelRequest,
    ComputeMode,
    ForwardRequest,
    Origin,
    StageReport,
    Ticket,
)
from lightning_swarm.protocol.messages.step import ReceiptsReply, ReceiptsRequest, StageReceipts
from lightning_swarm.protocol.messages.wire import decode, encode, to_bitmap
from lightning_swarm.protocol.rpc import BACKWARD, CANCEL, FORWARD, RECEIPTS
from lightning_swarm.server.activation_cache import ActivationCache, CachedForward
from lightning_swarm.server.compute import ForwardCall, ForwardResult
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import FIRST, priority_of
from lightning_swarm.server.kept_graphs import KeptGraphs
from lightning_swarm.server.out_of_memory import free_memory, is_out_of_memory
from lightning_swarm.server.pending_work import PendingWork
from lightning_swarm.server.sample_costs import num_bytes
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers

_T = TypeVar("_T")
_Inputs = tuple[Any, dict[str, Any]]  # positional inputs as received, and extras


class ComputeHandlers:
    """Answers the trainers' forward and backward calls."""

    def __init__(self, context: ServerContext, steps: StepHandlers) -> None:
        transport, limits = context.transport, context.limits
        self._transport, self._tickets, self._executor = transport, context.tickets, context.executor
        self._events, self._membership, self._limits = context.events, context.membership, limits
        self._steps, self._sums = steps, steps.sums
        self._closed = False
        self.cache = ActivationCache(limits.cache_bytes)  # forwards whose backward is pending
        self.graphs = KeptGraphs()
        self.num_forwards = 0  # counted since the start
        self.num_samples = 0  # counted since the start, summed over stages
        self.under_way = PendingWork(context.tickets, context.tasks.spawn)  # calls without a result yet
        max_bytes, admit = limits.max_message_bytes, self._membership.check_trainer
        FORWARD.serve(transport, self._handle_forward, max_bytes=max_bytes, admit=admit)
        BACKWARD.serve(transport, self._handle_backward, max_bytes=max_bytes, admit=admit)
        CANCEL.serve(transport, self._handle_cancel, admit=admit)
        RECEIPTS.serve(transport, self._handle_receipts)

    def close(self) -> None:
        """Refuse calls from now on."""
        self._closed = True

    def give_up(self, prefix: str) -> None:
        """Cancel the calls of a struck batch; a trainer that still waits for them receives an error."""
        self.under_way.fail(prefix, LeaseRevoked("the batch was struck from its step"))
        self.discard_results(prefix)

    def discard_results(self, prefix: str) -> None:
        """Drop results whose names begin with `prefix`, and the forwards kept for them."""
        self._tickets.drop(prefix)
        self.cache.drop(prefix)

    # ------------------------------------------------------------------ forward

    async def _handle_forward(self, caller: PeerId, request: ForwardRequest, message: Message) -> None:
        self._sums.check_own_batches(caller)
        key, index = request.key, request.stage_index
        work_log = self._membership.oversight.work
        stage = None if work_log.borrows(key, index) else self._checked_stage(key, index)  # None: `_forward` borrows it
        own_inputs = checked_inputs(serialization.unflatten(request.structure, message.tensors), request.source)
        name = key.name(index, "forward", caller)
        tasks = self.under_way.tasks
        if name not in tasks and len(tasks) >= self._limits.max_pending_calls:
            raise Busy(f"this server accepts {self._limits.max_pending_calls} calls at once, and has {len(tasks)}")
        self.under_way.start(name, request.result_key, lambda: self._forward(name, stage, request, own_inputs))

    async def _forward(self, name: str, stage: Stage | None, request: ForwardRequest, own_inputs: _Inputs) -> None:
        """Compute a forward, keep it if its backward may come, and fulfil the ticket of its output."""
        key, work_log = request.key, self._membership.oversight.work
        stage = stage or await work_log.borrowed(request.stage_index, self._computes_on(key))
        call, input_reports = await self._forward_call(stage, request, request.source, own_inputs)
        version = self._computes_on(key)
        await self._steps.wait_for_version(version)

        keep = request.mode.grad and request.keep

        def compute() -> tuple[ForwardResult, CachedForward]:
            if not key.evaluation:
                self._sums.check_counts(stage, key)
            with stage.at(version), stage.holding(key.weights):
                result = stage.computation.forward(call)
            kept = CachedForward(call, graph=result.graph, graph_bytes=result.graph_bytes)
            if keep:
                work_log.note_output(kept, result)
                self.graphs.enter(kept)
            result.graph = None  # only `kept` may refer to it
            return result, kept

        (result, kept), busy_s = await self._compute(stage, priority_of(key, "forward"), compute)
        self.num_forwards += 1
        self.num_samples += call.num_samples
        if not any(result.requires_grad) and not key.evaluation:  # no backward will come and count the samples
            stage.load.count_samples(call.num_samples, busy_s=busy_s, queued=self._executor.queued)
        if keep:
            input_bytes = num_bytes(serialization.flatten((call.inputs, call.extras))[1])
            kept.busy_s, kept.input_bytes = busy_s, input_bytes
            self.cache.keep(name, kept)
        report = CallReport(busy_s=busy_s, queued=self._executor.queued, others=input_reports)
        # With `once`, the result is dropped when it is fetched. If it is lost in transit, it is computed again.
        once = self.cache.full or not keep or key.evaluation
        self._tickets.fulfil(name, to_message(result.output, result.requires_grad), encode(report), once=once)

    async def _forward_call(
        self, stage: Stage, request: ForwardRequest | BackwardRequest, source: Ticket | None, own_inputs: _Inputs
    ) -> tuple[ForwardCall, tuple[StageReport, ...]]:
        """Return a request's forward, with its own inputs or those of `source`, and the reports of the source."""
        inputs, extras = own_inputs
        reports: tuple[StageReport, ...] = ()
        if source is None:
            wants_grad = wanted_gradients(inputs, request.mode)
        else:
            output, wants_grad, reports = await self._fetch(source)
            inputs = (output,)
        draws = draws_of(self._membership.run.manifest.seed, request.key, stage.index)
        return ForwardCall(inputs, extras, wants_grad, request.mode, draws, request.key.is_probe), reports

    # ------------------------------------------------------------------ backward

    async def _handle_backward(self, caller: PeerId, request: BackwardRequest, message: Message) -> None:
        self._sums.check_own_batches(caller)
        stage = self._checked_stage(request.key, request.stage_index)
        self._check_backward(request)
        gradients, forward_inputs = _gradient_tree(request, message.tensors)
        name = request.key.name(stage.index, "backward", caller)
        work = partial(self._backward, caller, stage, request, gradients, forward_inputs)
        self.under_way.start(name, request.result_key, work)

    def _check_backward(self, request: BackwardRequest) -> None:
        """Refuse a backward without a forward with gradients, and a backward that would add but must not."""
        key, open_steps = request.key, self._sums.open_steps
        if (key.step not in open_steps and not key.evaluation) or not request.mode.grad:
            raise ProtocolError(
                f"a backward must belong to a forward with gradients, in an evaluation or in one of the open steps "
                f"{[*open_steps]}, got {key}"
            )
        if request.accumulate and not key.adds:
            raise ProtocolError(
                f"evaluations, and backwards for the input's gradient only, must add nothing to a sum, got {key}"
            )

    async def _backward(
        self,
        trainer: PeerId,
        stage: Stage,
        request: BackwardRequest,
        gradients: serialization.Tree,
        forward_inputs: _Inputs | None,  # set if the request has the forward's inputs
    ) -> None:
        """Compute a backward, add its gradients once if asked to, and fulfil the ticket of the input's gradient."""
        key, work_log = request.key, self._membership.oversight.work
        # Fetch the forward's input before the gradient: after a failure, only the input can be fetched again.
        kept = await self._kept_forward(trainer, stage, request, forward_inputs)
        gradient_reports: tuple[StageReport, ...] = ()
        if request.source is not None:
            try:
                gradients, _, gradient_reports = await self._fetch(request.source, gradient=True)
            except BaseException:
                if key.evaluation or self._sums.may_count(key):  # the gradient may come from another peer later
                    self.cache.keep(key.name(stage.index, "forward", trainer), kept)
                raise
        receipt, version, origin = False, self._computes_on(key), Origin(request.weight, trainer)
        await self._steps.wait_for_version(version)  # a peer that replaces another may lag behind

        def compute() -> serialization.Tree:
            nonlocal receipt
            if not key.evaluation:
                self._sums.check_counts(stage, key)
            with stage.at(version), stage.holding(key.weights):
                graph = work_log.graph_of(stage, kept, adds=request.accumulate)
                input_gradients, parameter_gradients = stage.computation.backward(graph, gradients, request.mode)
            if request.accumulate:
                keep = work_log.keep_function(stage, key.receipt, kept, gradients, input_gradients)
                receipt = self._sums.add(stage, key, parameter_gradients, origin, graph.batch_statistics, keep)
            synchronize(stage.device)  # the call's time includes its kernels
            return input_gradients

        computed, busy_s = await self._compute(stage, priority_of(key, "backward"), compute)
        took_s, queued = kept.busy_s + busy_s, self._executor.queued
        report = CallReport(busy_s=took_s, queued=queued, receipt=receipt, others=gradient_reports)
        stage.load.count_samples(kept.call.num_samples, busy_s=took_s, queued=queued)
        self.graphs.limit.note_backward()
        name = key.name(stage.index, "backward", trainer)
        self._tickets.fulfil(name, to_message(computed), encode(report), once=True)

    async def _kept_forward(
        self, trainer: PeerId, stage: Stage, request: BackwardRequest, inputs: _Inputs | None
    ) -> CachedForward:
        """Return the kept forward of a backward, or a new forward with the inputs in the request."""
        forward_name = request.key.name(stage.index, "forward", trainer)
        kept = self.cache.pop(forward_name)
        if kept is not None:
            return kept
        if inputs is None:
            raise TicketGone(f"{forward_name} is no longer kept here; send its input with the backward")
        return CachedForward((await self._forward_call(stage, request, request.inputs, inputs))[0])

    # ------------------------------------------------------------------ cancelling, and receipts of a lost trainer

    async def _handle_cancel(self, caller: PeerId, request: CancelRequest) -> CancelReply:
        """Cancel one of the caller's calls; report whether it is a backward that has added its gradient already."""
        stage = self._checked_stage(request.key, request.stage_index)
        name = request.key.name(stage.index, request.direction, caller)  # only the caller's own call has this name
        await self.under_way.cancel(name)
        if request.direction == "forward":
            return CancelReply(added=False)
        # On the compute thread, because a running job is not interrupted, and may still add the gradient.
        added, _ = await self._executor.submit(FIRST, lambda: self._sums.holds(stage.index, request.key))
        return CancelReply(added=added and request.key.adds)

    async def _handle_receipts(self, caller: PeerId, request: ReceiptsRequest) -> ReceiptsReply:
        """Report which microbatches of a lost trainer are in the sums, and which are still being computed."""
        self._sums.check(caller, request.generation, request.step)
        keys = [CallKey.of(request.generation, request.step, receipt) for receipt in request.receipts]
        # Before asking the compute thread: a call that ends meanwhile would otherwise be in neither bitmap.
        pending = {
            index: [key.name(index, "backward", request.trainer) in self.under_way.tasks for key in keys]
            for index in self._steps.stages
        }

        def receipts_of(index: int) -> StageReceipts:
            held = to_bitmap(self._sums.holds(index, key) for key in keys)
            return StageReceipts(stage_index=index, held=held, pending=to_bitmap(pending[index]))

        stages, _ = await self._executor.submit(FIRST, lambda: list(map(receipts_of, pending)))
        return ReceiptsReply(stages=stages)

    # ------------------------------------------------------------------ parts

    def _checked_stage(self, key: CallKey, stage_index: int) -> Stage:
        """Return the stage of a call; refuse a call that cannot be computed here, or that no record will count."""
        if self._closed:
            raise NotMember("this peer has left")
        self._membership.run.check_generation(key.generation)
        stage = self._steps.stage(stage_index)
        if stage.on_trainers:
            raise ProtocolError(f"trainers compute stage {stage_index} themselves; no microbatch is sent there")
        self._membership.run.check_holds(self._membership.me, stage_index)
        if key.weights and not key.evaluation:
            raise ProtocolError(f"only evaluations may use evaluation weights, got {key}")
        stage.check_evaluation_weights(key.weights)
        if stage_index not in self._membership.loaded:
            raise NotMember(f"stage {stage_index} has no weights yet")
        if not key.evaluation:
            self._sums.check_counts(stage, key)
        if key.step < (stage.oldest if key.evaluation else stage.version):
            raise ProtocolError(f"stage {stage_index} is at version {stage.version}, got a call of step {key.step}")
        return stage

    def _computes_on(self, key: CallKey) -> int:
        """Return the version of the weights with which a call is computed."""
        return key.step if key.evaluation else self._membership.run.weights_version(key.step)

    async def _fetch(
        self, source: Ticket, *, gradient: bool = False
    ) -> tuple[serialization.Tree, list[bool], tuple[StageReport, ...]]:
        """Fetch another stage's result, with the `requires_grad` flags of its tensors, and its reports."""
        try:
            message, report = await self._tickets.fetch_reported(source, timeout=self._limits.call_timeout)
            return *from_message(message), _reports(report)
        except TicketGone as error:  # not a fault of the peer: the tensor is computed again
            gone = GradientGone if gradient else TicketGone
            raise gone(f"{source.name} is not at {source.peer_id} any more: {error}") from error
        except SwarmError as error:
            missing = GradientMissing if gradient else InputMissing
            reason, *_ = str(error).splitlines() or [""]  # the trainer fetches the traceback from the same peer
            raise missing(f"{source.name} did not come from {source.peer_id}: {reason}") from error

    async def _compute(self, stage: Stage, priority: tuple[int, ...], run: Callable[[], _T]) -> tuple[_T, float]:
        """Compute a microbatch; if memory runs out, drop the graphs of other microbatches and compute it again."""
        raising = partial(raising_stage_errors, stage.index, self._transport.peer_id)
        try:
            return await self._executor.submit(priority, run)
        except Exception as error:
            if not is_out_of_memory(error):
                with raising():
                    raise
            first_error = error

        def run_alone() -> _T:
            self.graphs.drop_all(stage.index, first_error)
            free_memory(first_error, stage.device)
            return run()

        with raising():
            try:
                return await self._executor.submit(FIRST, run_alone)
            except Exception as error:
                await self._note_out_of_memory(stage, priority[1], error)  # `priority[1]` is the step
                raise

    async def _note_out_of_memory(self, stage: Stage, step: int, error: Exception) -> None:
        """Report that memory ran out even for a single microbatch, and free the objects that the error keeps alive."""
        if is_out_of_memory(error):
            await self._executor.submit(FIRST, lambda: free_memory(error, stage.device))
            stage.load.count_refusal()
            me, reason = self._transport.peer_id, str(error)
            self._events.note("out_of_memory", peer=me, stage=stage.index, step=step, reason=reason)


def wanted_gradients(inputs: serialization.Tree, mode: ComputeMode) -> list[bool]:
    """Return for each of the pipeline's own inputs whether backward returns its gradient."""
    return [mode.input_grad and serialization.is_differentiable(leaf) for leaf in serialization.leaves(inputs)]


def draws_of(seed: int, key: CallKey, stage_index: int) -> int:
    """Return the seed of all random draws of a call, the same on each server that computes it."""
    return key_seed(seed, key.step, key.first % PLACES, key.index, key.call, stage_index, int(key.evaluation))


@contextlib.contextmanager
def raising_stage_errors(stage: int, peer: PeerId) -> Iterator[None]:
    """Convert any error of the model's code, raised inside, to an error that travels as text."""
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(stage, peer, error) from error
        text = f"stage {stage} raised {type(error).__name__} on peer {peer}: {error}\n"
        raise StageError(text + "".join(traceback.format_exception(error))) from error


def out_of_memory(stage: int, peer: PeerId, error: Exception) -> OutOfMemory:
    """Return the error for a trainer whose microbatch needs more memory than this server has."""
    return OutOfMemory(
        f"a server must have memory for one microbatch of its stage, and {peer} has too little for one of stage "
        f"{stage}: {str(error).rstrip('.')}. Lower `microbatch_size`, use activation checkpointing in the blocks or "
        "`offload_optimizer=True`, cut the model into more stages, or leave the stage to machines with more memory."
    )


def checked_inputs(tree: serialization.Tree, source: Ticket | None) -> _Inputs:
    """Return a call's inputs and extras as received; raise `ProtocolError` for another tree."""
    if not isinstance(tree, tuple) or len(tree) != 2 or not isinstance(tree[1], dict):
        raise ProtocolError("a call must have a pair of inputs and extras")
    if isinstance(tree[0], tuple) != (source is None) or (source is not None and tree[0] is not None):
        raise ProtocolError("a call must have either a tuple of inputs or the source of its input")
    return tree


def _gradient_tree(request: BackwardRequest, tensors: Sequence[Tensor]) -> tuple[serialization.Tree, _Inputs | None]:
    tree = serialization.unflatten(request.structure, tensors)
    if not isinstance(tree, tuple) or len(tree) != 2 or isinstance(tree[0], list) != (request.source is None):
        raise ProtocolError("a backward must have either the output's gradients or their source")
    if tree[1] is None and request.inputs is not None:
        raise ProtocolError("a backward with the source of its input must have the extras")
    return tree[0], None if tree[1] is None else checked_inputs(tree[1], request.inputs)


def _reports(report: bytes) -> tuple[StageReport, ...]:
    """Return the report of a call, followed by the reports that came with its input."""
    own = decode(report, CallReport)
    return (StageReport(busy_s=own.busy_s, queued=own.queued, receipt=own.receipt), *own.others)
