"""Answers a server's calls in audits: it sketches its sums, shows its kept work, and recomputes other servers' work."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import torch
from msgspec import UNSET
from torch import Tensor

from lightning_swarm.core.errors import (
    Busy,
    Damaged,
    DeadlineExceeded,
    OutOfMemory,
    ProtocolError,
    SwarmError,
    Unreachable,
)
from lightning_swarm.model.fingerprint import tree_digest
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import decoded
from lightning_swarm.protocol.messages.audits import (
    AuditFinding,
    AuditRequest,
    FindingsReply,
    FindingsRequest,
    KeptWorkReply,
    KeptWorkRequest,
    SketchReply,
    SketchRequest,
)
from lightning_swarm.protocol.messages.calls import Origin, Receipt, pack, pack_origins
from lightning_swarm.protocol.messages.wire import to_bitmap
from lightning_swarm.protocol.rpc import AUDIT, FINDINGS, KEPT_WORK, SKETCH, WithTensors
from lightning_swarm.server.arithmetic import precision_of
from lightning_swarm.server.audit.borrowed import BorrowedStages
from lightning_swarm.server.audit.kept_work import KeptWork, output_digest, sketch_of, sum_digest
from lightning_swarm.server.audit.work_log import AuditedWorkLog
from lightning_swarm.server.compute import ForwardCall
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import Priority
from lightning_swarm.server.gradient_buffer import GradientSum
from lightning_swarm.server.handlers import checked_inputs, draws_of, raising_stage_errors, wanted_gradients
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers

_LAST: Final[Priority] = (2,)  # runs after all waiting microbatches
_FOR_OTHERS: Final[Priority] = (2, 1)  # requests of the stage's other servers, after this server's own audits
_MAX_ORDERS: Final = 8  # audit orders whose sums are kept
_SHOWN_AT_ONCE: Final = 2  # microbatches shown to one auditor at a time
_FARTHEST: Final = sys.float_info.max  # the largest number in a message
_MAX_OVERFLOWING: Final = 1e-3  # share of a result's elements that may overflow on one machine alone, in float16

_T = TypeVar("_T")
_Order = tuple[int, int, int]  # generation, step, the coordinator's number of the order


@dataclass(eq=False)
class _Recomputed:
    """Another server's work in one stage, recomputed by this server."""

    stage: Stage
    total: GradientSum  # sum of the recomputed gradients
    claims: dict[Receipt, bytes] = field(default_factory=dict)  # digests, see `CLAIM_BYTES`
    origins: dict[int, Origin] = field(default_factory=dict)  # batch -> its weight and trainer, as first received
    refused: set[Receipt] = field(default_factory=set)  # the audited server sent no usable tensors
    unheard: set[Receipt] = field(default_factory=set)  # the audited server did not answer
    magnitude: float = 0.0  # sum of the norms of the gradients in `total`
    precision: str = ""  # dtype of the computation
    distance: float | None = None  # largest distance of a result; None: results are not compared
    num_taken: int = 0  # microbatches that were computed, or are about to be
    early: dict[int, _Inputs] = field(default_factory=dict)  # place -> inputs of a microbatch that came before its turn

    def take_next(self) -> _Inputs | None:
        """Remove and return the inputs of the microbatch to add next; None if they have not come yet."""
        inputs = self.early.pop(self.num_taken, None)
        self.num_taken += inputs is not None
        return inputs


@dataclass(frozen=True)
class _Inputs:
    """Data to recompute a microbatch, and the audited server's results for comparison."""

    request: AuditRequest
    origin: Origin  # weight and trainer of its batch, as received
    call: ForwardCall
    gradients: serialization.Tree
    # The audited server's output, the `requires_grad` flags of the output's tensors, and the input's gradient.
    results: tuple[serialization.Tree, Sequence[bool], serialization.Tree] | None = None


class AuditHandlers:
    """Answers the calls of audits in a run."""

    def __init__(
        self,
        context: ServerContext,
        steps: StepHandlers,
        borrowed: BorrowedStages,
        log: AuditedWorkLog,
        role: Transport,  # answers calls in audited runs only
    ) -> None:
        self._context, self._transport = context, context.transport
        self._membership, self._sums = context.membership, steps.sums
        self._borrowed, self._log = borrowed, log
        self._timeout = context.limits.call_timeout
        self._shown = defaultdict[PeerId, asyncio.Semaphore](lambda: asyncio.Semaphore(_SHOWN_AT_ONCE))  # per caller
        self._found: dict[_Order, dict[tuple[PeerId, int], _Recomputed]] = {}  # order -> (audited, stage) -> work
        max_bytes, membership = context.limits.max_message_bytes, self._membership
        SKETCH.serve(role, self._handle_sketch)
        FINDINGS.serve(role, self._handle_findings)
        KEPT_WORK.serve(role, self._handle_kept, admit=membership.check_server)
        AUDIT.serve(role, self._handle_audit, max_bytes=max_bytes, admit=membership.check_trainer)

    # ------------------------------------------------------------------ this server's own work

    async def _handle_sketch(self, caller: PeerId, request: SketchRequest) -> SketchReply:
        self._sums.check(caller, request.generation, request.step)

        def compute() -> SketchReply:
            self._sums.check_round(request.step, request.round)
            stages = [stage for _, stage in sorted(self._sums.stages.items()) if not stage.on_trainers]
            found = [
                sketch_of(stage.index, stage.sum_of(request.step).values, request.seed, exact=stage.exact)
                for stage in stages
            ]
            return SketchReply(stages=found)

        return await self._context.compute(compute)

    async def _handle_kept(self, caller: PeerId, request: KeptWorkRequest) -> WithTensors[KeptWorkReply]:
        """Show an auditor the kept work on a microbatch: its input, its gradients and its recomputed results."""
        run = self._membership.run
        run.check_generation(request.generation)
        # Only the coordinator and servers of the stage see its work, and only after the sums are frozen.
        in_stage = request.stage_index < len(run.rosters) and any(
            member.peer_id == caller for member in run.rosters[request.stage_index]
        )
        if caller != run.coordinator and not in_stage:
            raise ProtocolError(f"{caller} holds no copy of stage {request.stage_index}, and audits nothing of it")
        # Few at a time: otherwise a caller with many requests could keep this server from its own audits.
        async with self._shown[caller]:
            self._membership.run.check_generation(request.generation)  # may have changed meanwhile
            return await self._show(request, _LAST if caller == run.coordinator else _FOR_OTHERS)

    async def _show(self, request: KeptWorkRequest, priority: Priority) -> WithTensors[KeptWorkReply]:
        """Read kept work, recompute its results if requested, and return the requested parts."""
        if not self._sums.ledger(request.step, request.stage_index).final:
            raise ProtocolError(f"the sum of stage {request.stage_index} in step {request.step} is not frozen here")
        read = partial(self._log.kept_work, request.step, request.stage_index, request.receipt)
        try:
            work = await asyncio.to_thread(read)  # the work may be in a file
        except OSError as error:  # a server that refuses is convicted, but a broken disk is no refusal
            raise Busy(f"what was kept of {request.receipt} cannot be read: {error}") from error
        its_input = work.call.inputs if request.stage_index == 0 else work.call.inputs[0]
        output, requires_grad, input_gradients = None, list[bool](), None
        if request.results:
            stage = self._sums.stage(request.stage_index)
            version = self._membership.run.weights_version(request.step)
            results = await self._submit(stage, version, lambda: _recompute(stage, work.call, work.gradients), priority)
            output, requires_grad, input_gradients = results.output, results.requires_grad, results.input_gradients
        structure, tensors = serialization.flatten(
            (
                its_input if request.input else None,
                work.gradients if request.gradients else None,
                output,
                input_gradients,
            )
        )
        reply = KeptWorkReply(structure=structure, wants_grad=list(work.call.wants_grad), requires_grad=requires_grad)
        return reply, tensors

    # ------------------------------------------------------------------ other servers' work

    async def _handle_audit(self, caller: PeerId, request: AuditRequest, message: Message) -> None:
        """Recompute a microbatch for an audit, in its turn; the findings are fetched by a later call."""
        run, key = self._membership.run, request.key
        run.check_generation(key.generation)
        if (
            key.step not in run.open_steps
            or not key.adds
            or not request.mode.grad
            or not run.manifest.settings.has_strangers
        ):
            raise ProtocolError(f"an audit looks into a microbatch of an open step of an audited run, got {key}")
        stage = await self._stage_for(request)
        found = self._recomputed((key.generation, key.step, request.order), request.audited, stage)
        if request.place < found.num_taken or request.place in found.early:
            return  # a duplicate
        if found.refused or found.unheard:
            return  # the sum lacks a microbatch already, so the coordinator does not need the rest
        try:
            inputs = await self._inputs(stage, request, message.tensors, Origin(request.weight, caller))
        except _UNHEARD:  # no proof against the audited server: it may be gone, or the link slow
            found.unheard.add(key.receipt)
            raise
        if inputs is None:
            found.refused.add(key.receipt)
            return
        found.early.setdefault(request.place, inputs)
        # A sum's bits depend on the order of adding, so this server adds in the audited server's order.
        while (inputs := found.take_next()) is not None:
            await self._compute_again(found, inputs, run.weights_version(key.step))

    async def _compute_again(self, found: _Recomputed, inputs: _Inputs, version: int) -> None:
        if found.origins.setdefault(inputs.request.key.first, inputs.origin) != inputs.origin:
            return  # not added, because its batch came with two weights, or from two trainers
        try:
            await self._submit(found.stage, version, partial(_enter, found, inputs))
        except OutOfMemory:
            raise  # this server lacks memory, which says nothing about the audited server
        except SwarmError:
            found.refused.add(inputs.request.key.receipt)  # the audited server sent data that cannot be computed

    async def _stage_for(self, request: AuditRequest) -> Stage:
        """Return the stage to compute with; only the coordinator borrows one, to settle a contradiction."""
        run = self._membership.run
        if run.coordinator != self._transport.peer_id:
            return self._sums.stage(request.stage_index)
        return await self._borrowed.get(request.stage_index, run.weights_version(request.key.step))

    def _recomputed(self, order: _Order, audited: PeerId, stage: Stage) -> _Recomputed:
        """Return the work under an order on one server and stage, begun if need be; drop work of decided steps."""
        newest = (self._membership.run.manifest.generation, self._sums.version)
        self._found = {one: found for one, found in self._found.items() if one[:2] >= newest}
        if order not in self._found and len(self._found) >= _MAX_ORDERS:
            del self._found[next(iter(self._found))]  # the coordinator has read these findings long ago
        units = self._found.setdefault(order, {})
        if (audited, stage.index) not in units:
            units[audited, stage.index] = _Recomputed(stage, stage.new_sum())
        return units[audited, stage.index]

    async def _inputs(
        self, stage: Stage, request: AuditRequest, tensors: Sequence[Tensor], origin: Origin
    ) -> _Inputs | None:
        """Collect the data to recompute a microbatch; None if the audited server refuses its part."""
        brought = serialization.unflatten(request.structure, tensors)
        if not isinstance(brought, tuple) or len(brought) != 2:
            raise ProtocolError("an audit brings a pair: inputs with extras, and gradients")
        own, extras = checked_inputs(brought[0], None if stage.index == 0 else _ELSEWHERE)
        gradients = brought[1]
        run, key = self._membership.run, request.key
        wants_grad, results = wanted_gradients(own, request.mode) if own is not None else [], None
        if own is None or gradients is None or request.compare:
            try:
                reply, tree = await self._ask_kept(request, wants_input=own is None, wants_gradients=gradients is None)
            except _UNHEARD:
                raise
            except SwarmError:
                return None
            if own is None:
                own, wants_grad = (tree[0],), reply.wants_grad
            gradients = tree[1] if gradients is None else gradients
            if request.compare:
                results = tree[2], reply.requires_grad, tree[3]
        draws = draws_of(run.manifest.seed, key, stage.index)
        return _Inputs(request, origin, ForwardCall(own, extras, wants_grad, request.mode, draws), gradients, results)

    async def _ask_kept(
        self, request: AuditRequest, *, wants_input: bool, wants_gradients: bool
    ) -> tuple[KeptWorkReply, tuple[Any, ...]]:
        """Ask the audited server for what the trainer did not send; return the reply and its tree of four."""
        key = request.key
        asked = KeptWorkRequest(
            generation=key.generation,
            step=key.step,
            stage_index=request.stage_index,
            receipt=key.receipt,
            input=wants_input,
            gradients=wants_gradients,
            results=request.compare,
        )
        max_bytes = self._context.limits.max_message_bytes
        timeout = min(request.patience_s, self._timeout)
        reply, tensors = await KEPT_WORK.ask(
            self._transport, request.audited, asked, timeout=timeout, max_bytes=max_bytes
        )
        tree = serialization.unflatten(reply.structure, tensors)
        if not isinstance(tree, tuple) or len(tree) != 4 or (wants_gradients and not isinstance(tree[1], list)):
            raise ProtocolError("kept work is an input, a list of gradients, an output and a list of gradients")
        return reply, tree

    async def _submit(self, stage: Stage, version: int, compute: Callable[[], _T], priority: Priority = _LAST) -> _T:
        """Compute with the stage's weights of a version, on the compute thread."""

        def at_version() -> _T:
            with stage.at(version):
                return compute()

        with raising_stage_errors(stage.index, self._transport.peer_id):
            return (await self._context.executor.submit(priority, at_version))[0]

    async def _handle_findings(self, caller: PeerId, request: FindingsRequest) -> FindingsReply:
        self._sums.check(caller, request.generation, request.step)
        units = self._found.get((request.generation, request.step, request.order), {})

        def compute() -> FindingsReply:
            return FindingsReply(
                findings=[_finding(audited, found, request.seed) for (audited, _), found in sorted(units.items())]
            )

        return await self._context.compute(compute)


_UNHEARD: Final = (Unreachable, DeadlineExceeded, Busy, Damaged)  # errors that do not prove a refusal
_ELSEWHERE: Any = object()  # placeholder for a source: the audited server has the input


@dataclass(frozen=True)
class _Results:
    """Results of a recomputed microbatch."""

    output: serialization.Tree
    requires_grad: list[bool]
    output_digest: bytes
    input_gradients: serialization.Tree
    parameter_gradients: list[Tensor | None]


def _recompute(stage: Stage, call: ForwardCall, gradients: serialization.Tree) -> _Results:
    """Recompute a microbatch forward and backward; runs on the compute thread."""
    forward = stage.computation.forward(call)
    if forward.graph is None:
        raise ProtocolError("an audit is of a microbatch with gradients")
    found, own = stage.computation.backward(forward.graph, gradients, call.mode)
    return _Results(forward.output, forward.requires_grad, output_digest(forward), found, own)


def _enter(found: _Recomputed, inputs: _Inputs) -> None:
    """Recompute a microbatch, and add its results to the findings; runs on the compute thread."""
    stage, request = found.stage, inputs.request
    again = _recompute(stage, inputs.call, inputs.gradients)
    found.total.add(again.parameter_gradients, request.weight)
    given = [gradient for gradient in again.parameter_gradients if gradient is not None]
    found.magnitude = min(found.magnitude + magnitude_of(given, request.weight), _FARTHEST)
    found.precision = precision_of(request.mode, found.total.like.dtype)
    # If numbers are compared, the claim is about the results that the audited server sent, and their distance counts.
    its_digest, input_gradients = again.output_digest, again.input_gradients
    if inputs.results is not None:
        output, requires_grad, input_gradients = inputs.results
        its_digest = tree_digest(output, requires_grad)
        pairs = [
            (stage.codecs.activations, output, again.output),
            (stage.codecs.gradients, input_gradients, again.input_gradients),
        ]
        distances = [
            relative_distance(
                decoded(its, codec, stage.device),
                decoded(own, codec, stage.device),
                may_overflow=found.precision == "float16",
            )
            for codec, its, own in pairs
        ]
        found.distance = max(*distances, found.distance or 0.0)
    work = KeptWork.of(inputs.call, its_digest, inputs.gradients, input_gradients, is_first=stage.index == 0)
    found.claims[request.key.receipt] = work.claim


def magnitude_of(gradients: Sequence[Tensor], weight: float) -> float:
    """Return the weighted norm of a microbatch's gradients, to which rounding is relative; 0 if one is not finite."""
    magnitude = weight * math.hypot(*(float(torch.linalg.vector_norm(one, dtype=torch.float64)) for one in gradients))
    if math.isfinite(magnitude):
        return magnitude
    # The norm overflows although all elements are finite.
    return _FARTHEST if all(bool(one.isfinite().all()) for one in gradients) else 0.0


def relative_distance(one: serialization.Tree, other: serialization.Tree, *, may_overflow: bool) -> float:
    """Return the largest distance of two trees' tensors, relative to the other's norm; infinite if the trees differ."""
    (structure, tensors), (expected, others) = serialization.flatten(one), serialization.flatten(other)
    if structure != expected or [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in others]:
        return math.inf
    return max(
        (_tensor_distance(*pair, may_overflow=may_overflow) for pair in zip(tensors, others, strict=True)), default=0.0
    )


def _tensor_distance(one: Tensor, other: Tensor, *, may_overflow: bool) -> float:
    if not one.numel():
        return 0.0
    wide, its_wide = one.to(torch.float64), other.to(torch.float64)
    # A number may overflow on one kind of machine and stay finite on another, but few numbers do.
    finite = wide.isfinite() & its_wide.isfinite()
    if int((wide.isfinite() ^ its_wide.isfinite()).sum()) > (_MAX_OVERFLOWING * one.numel() if may_overflow else 0):
        return math.inf
    wide, its_wide = wide[finite], its_wide[finite]
    norm, distance = float(its_wide.norm()), float((wide - its_wide).norm())
    return distance / norm if norm else (math.inf if distance else 0.0)


def _finding(audited: PeerId, found: _Recomputed, seed: int) -> AuditFinding:
    """Summarize the recomputed work of one server in one stage; `seed` draws the sketch."""
    stage = found.stage
    sketch = sketch_of(stage.index, found.total.values, seed, exact=stage.exact)
    return AuditFinding(
        audited=audited,
        stage_index=stage.index,
        receipts=pack(found.claims),
        origins=pack_origins({first: found.origins[first] for first, _, _ in found.claims}),
        claims=b"".join(claim for _, claim in sorted(found.claims.items())),
        refused=pack(found.refused - found.claims.keys()),
        unheard=pack(found.unheard - found.claims.keys() - found.refused),
        sum_digest=sum_digest(found.total.values),
        values=sketch.values,
        magnitude=found.magnitude,
        precision=found.precision,
        touched=to_bitmap(found.total.touched),
        distance=UNSET if found.distance is None else min(found.distance, _FARTHEST),
    )
