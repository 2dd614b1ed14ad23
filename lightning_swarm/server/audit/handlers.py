"""Answers a server's calls in audits: it sketches its sums, sends its kept work, and recomputes other servers' work.

In an audit, the trainer sends each microbatch to the auditor (AUDIT). Data that the trainer does not have come from the
audited server (KEPT_WORK). The auditor recomputes, and the coordinator fetches its findings (FINDINGS).
"""

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
_FOR_OTHERS: Final[Priority] = (2, 1)  # requests of the stage's other servers, after the audits by this server
_MAX_ORDERS: Final = 8  # audit orders whose sums are kept
_SENT_AT_ONCE: Final = 2  # kept microbatches that are sent to one auditor at a time
_FARTHEST: Final = sys.float_info.max  # the largest number in a message
_MAX_OVERFLOWING: Final = 1e-3  # share of a float16 result's elements that may overflow on one machine only

_T = TypeVar("_T")
_Order = tuple[int, int, int]  # generation, step, the coordinator's number of the order


@dataclass(eq=False)
class _Recomputed:
    """Another server's work in one stage, recomputed by this server."""

    stage: Stage
    total: GradientSum  # sum of the recomputed gradients
    claims: dict[Receipt, bytes] = field(default_factory=dict)  # digests, see `CLAIM_BYTES`
    origins: dict[int, Origin] = field(default_factory=dict)  # place of a batch -> its origin, as first received
    refused: set[Receipt] = field(default_factory=set)  # the audited server sent no usable tensors
    unheard: set[Receipt] = field(default_factory=set)  # the audited server did not answer
    magnitude: float = 0.0  # sum of the norms of the gradients in `total`
    precision: str = ""  # dtype of the computation
    distance: float | None = None  # largest relative distance of a result; None: results are not compared
    num_taken: int = 0  # microbatches that were taken to be computed
    early: dict[int, _Inputs] = field(default_factory=dict)  # index in adding order -> inputs that came too early

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
    # The audited server's output, the `requires_grad` flags of its tensors, and the input's gradient.
    results: tuple[serialization.Tree, Sequence[bool], serialization.Tree] | None = None


class AuditHandlers:
    """Answers the calls of audits in a run."""

    def __init__(
        self,
        context: ServerContext,
        steps: StepHandlers,
        borrowed: BorrowedStages,
        log: AuditedWorkLog,
        role: Transport,  # receives calls in audited runs only
    ) -> None:
        self._context, self._transport = context, context.transport
        self._membership, self._sums = context.membership, steps.sums
        self._borrowed, self._log = borrowed, log
        self._timeout = context.limits.call_timeout
        self._sending = defaultdict[PeerId, asyncio.Semaphore](lambda: asyncio.Semaphore(_SENT_AT_ONCE))  # per caller
        self._works: dict[_Order, dict[tuple[PeerId, int], _Recomputed]] = {}  # order -> (audited, stage) -> work
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
            sketches = [
                sketch_of(stage.index, stage.sum_of(request.step).values, request.seed, exact=stage.exact)
                for stage in stages
            ]
            return SketchReply(stages=sketches)

        return await self._context.compute(compute)

    async def _handle_kept(self, caller: PeerId, request: KeptWorkRequest) -> WithTensors[KeptWorkReply]:
        """Send an auditor the kept work on a microbatch: its input, its gradients and its recomputed results."""
        run = self._membership.run
        run.check_generation(request.generation)
        # Only the coordinator and servers of the stage see its work, and only after the sums are frozen.
        in_stage = request.stage_index < len(run.rosters) and any(
            member.peer_id == caller for member in run.rosters[request.stage_index]
        )
        if caller != run.coordinator and not in_stage:
            raise ProtocolError(f"only servers of stage {request.stage_index} may audit its work, not {caller}")
        # Limited, because a caller with many requests could keep this server from its own audits.
        async with self._sending[caller]:
            self._membership.run.check_generation(request.generation)  # it may have changed meanwhile
            return await self._kept_work(request, _LAST if caller == run.coordinator else _FOR_OTHERS)

    async def _kept_work(self, request: KeptWorkRequest, priority: Priority) -> WithTensors[KeptWorkReply]:
        """Read kept work, recompute its results if requested, and return the requested parts."""
        if not self._sums.ledger(request.step, request.stage_index).final:
            raise ProtocolError(
                f"work is sent only after its sum is frozen, and that of stage {request.stage_index} is not"
            )
        read = partial(self._log.kept_work, request.step, request.stage_index, request.receipt)
        try:
            work = await asyncio.to_thread(read)  # the work may be in a file
        except OSError as error:  # the coordinator excludes a server that refuses, but a broken disk is no refusal
            raise Busy(f"the kept work on {request.receipt} cannot be read: {error}") from error
        stage_input = work.call.inputs if request.stage_index == 0 else work.call.inputs[0]
        output, requires_grad, input_gradients = None, list[bool](), None
        if request.results:
            stage = self._sums.stage(request.stage_index)
            version = self._membership.run.weights_version(request.step)
            results = await self._submit(stage, version, lambda: _recompute(stage, work.call, work.gradients), priority)
            output, requires_grad, input_gradients = results.output, results.requires_grad, results.input_gradients
        structure, tensors = serialization.flatten(
            (
                stage_input if request.input else None,
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
            raise ProtocolError(f"an audit must be of a microbatch of an open step in an audited run, got {key}")
        stage = await self._stage_for(request)
        work = self._work_under((key.generation, key.step, request.order), request.audited, stage)
        if request.place < work.num_taken or request.place in work.early:
            return  # a duplicate
        if work.refused or work.unheard:
            return  # the sum lacks a microbatch already, so the coordinator does not need the rest
        try:
            inputs = await self._inputs(stage, request, message.tensors, Origin(request.weight, caller))
        except _UNHEARD:  # no proof against the audited server, which may be gone or have a slow link
            work.unheard.add(key.receipt)
            raise
        if inputs is None:
            work.refused.add(key.receipt)
            return
        work.early.setdefault(request.place, inputs)
        # A sum's bits depend on the order of adding, so this server adds in the audited server's order.
        while (inputs := work.take_next()) is not None:
            await self._recompute_next(work, inputs, run.weights_version(key.step))

    async def _recompute_next(self, work: _Recomputed, inputs: _Inputs, version: int) -> None:
        if work.origins.setdefault(inputs.request.key.first, inputs.origin) != inputs.origin:
            return  # not added, because its batch came with two weights, or from two trainers
        try:
            await self._submit(work.stage, version, partial(_add_recomputed, work, inputs))
        except OutOfMemory:
            raise  # this server lacks memory, which says nothing about the audited server
        except SwarmError:
            work.refused.add(inputs.request.key.receipt)  # the audited server sent data that cannot be computed

    async def _stage_for(self, request: AuditRequest) -> Stage:
        """Return the stage of an audit; the coordinator borrows a stage that it does not hold, to settle a dispute."""
        run = self._membership.run
        if run.coordinator != self._transport.peer_id:
            return self._sums.stage(request.stage_index)
        return await self._borrowed.get(request.stage_index, run.weights_version(request.key.step))

    def _work_under(self, order: _Order, audited: PeerId, stage: Stage) -> _Recomputed:
        """Return the recomputed work of a server and stage under an order, begun if new; drop work of decided steps."""
        newest = (self._membership.run.manifest.generation, self._sums.version)
        self._works = {known: works for known, works in self._works.items() if known[:2] >= newest}
        if order not in self._works and len(self._works) >= _MAX_ORDERS:
            del self._works[next(iter(self._works))]  # the coordinator has fetched these findings long ago
        works = self._works.setdefault(order, {})
        if (audited, stage.index) not in works:
            works[audited, stage.index] = _Recomputed(stage, stage.new_sum())
        return works[audited, stage.index]

    async def _inputs(
        self, stage: Stage, request: AuditRequest, tensors: Sequence[Tensor], origin: Origin
    ) -> _Inputs | None:
        """Collect the data to recompute a microbatch; None if the audited server refuses its part."""
        sent = serialization.unflatten(request.structure, tensors)
        if not isinstance(sent, tuple) or len(sent) != 2:
            raise ProtocolError("an audit must have a pair: inputs with extras, and gradients")
        inputs, extras = checked_inputs(sent[0], None if stage.index == 0 else _ELSEWHERE)
        gradients = sent[1]
        run, key = self._membership.run, request.key
        wants_grad, results = wanted_gradients(inputs, request.mode) if inputs is not None else [], None
        if inputs is None or gradients is None or request.compare:
            try:
                has_input, has_gradients = inputs is not None, gradients is not None
                reply, tree = await self._ask_kept(request, has_input=has_input, has_gradients=has_gradients)
            except _UNHEARD:
                raise
            except SwarmError:
                return None
            if inputs is None:
                inputs, wants_grad = (tree[0],), reply.wants_grad
            gradients = tree[1] if gradients is None else gradients
            if request.compare:
                results = tree[2], reply.requires_grad, tree[3]
        draws = draws_of(run.manifest.seed, key, stage.index)
        call = ForwardCall(inputs, extras, wants_grad, request.mode, draws)
        return _Inputs(request, origin, call, gradients, results)

    async def _ask_kept(
        self, request: AuditRequest, *, has_input: bool, has_gradients: bool
    ) -> tuple[KeptWorkReply, tuple[Any, ...]]:
        """Fetch the data that the trainer did not send; return the reply, and its four values as checked below."""
        key = request.key
        asked = KeptWorkRequest(
            generation=key.generation,
            step=key.step,
            stage_index=request.stage_index,
            receipt=key.receipt,
            input=not has_input,
            gradients=not has_gradients,
            results=request.compare,
        )
        max_bytes = self._context.limits.max_message_bytes
        timeout = min(request.patience_s, self._timeout)
        reply, tensors = await KEPT_WORK.ask(
            self._transport, request.audited, asked, timeout=timeout, max_bytes=max_bytes
        )
        tree = serialization.unflatten(reply.structure, tensors)
        if not isinstance(tree, tuple) or len(tree) != 4 or (not has_gradients and not isinstance(tree[1], list)):
            raise ProtocolError("kept work must be an input, a list of gradients, an output and a list of gradients")
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
        works = self._works.get((request.generation, request.step, request.order), {})

        def compute() -> FindingsReply:
            return FindingsReply(
                findings=[_finding(audited, work, request.seed) for (audited, _), work in sorted(works.items())]
            )

        return await self._context.compute(compute)


_UNHEARD: Final = (Unreachable, DeadlineExceeded, Busy, Damaged)  # errors that do not prove a refusal
_ELSEWHERE: Any = object()  # stands for the source of an input that only the audited server has


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
        raise ProtocolError("an audit must be of a microbatch with gradients")
    input_gradients, parameter_gradients = stage.computation.backward(forward.graph, gradients, call.mode)
    digest = output_digest(forward)
    return _Results(forward.output, forward.requires_grad, digest, input_gradients, parameter_gradients)


def _add_recomputed(work: _Recomputed, inputs: _Inputs) -> None:
    """Recompute a microbatch, and add its results to the findings; runs on the compute thread."""
    stage, request = work.stage, inputs.request
    results = _recompute(stage, inputs.call, inputs.gradients)
    work.total.add(results.parameter_gradients, request.weight)
    present = [gradient for gradient in results.parameter_gradients if gradient is not None]
    work.magnitude = min(work.magnitude + magnitude_of(present, request.weight), _FARTHEST)
    work.precision = precision_of(request.mode, work.total.like.dtype)
    # If results are compared by distance, the claim is computed from the results that the audited server sent.
    claimed_digest, input_gradients = results.output_digest, results.input_gradients
    if inputs.results is not None:
        output, requires_grad, input_gradients = inputs.results
        claimed_digest = tree_digest(output, requires_grad)
        pairs = [
            (stage.codecs.activations, output, results.output),
            (stage.codecs.gradients, input_gradients, results.input_gradients),
        ]
        distances = [
            relative_distance(
                decoded(audited, codec, stage.device),
                decoded(recomputed, codec, stage.device),
                may_overflow=work.precision == "float16",
            )
            for codec, audited, recomputed in pairs
        ]
        work.distance = max(*distances, work.distance or 0.0)
    kept = KeptWork.of(inputs.call, claimed_digest, inputs.gradients, input_gradients, is_first=stage.index == 0)
    work.claims[request.key.receipt] = kept.claim


def magnitude_of(gradients: Sequence[Tensor], weight: float) -> float:
    """Return the weighted norm of a microbatch's gradients, the scale of rounding errors; 0 if any is not finite."""
    magnitude = weight * math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients))
    if math.isfinite(magnitude):
        return magnitude
    # The norm overflows although all elements are finite.
    return _FARTHEST if all(bool(each.isfinite().all()) for each in gradients) else 0.0


def relative_distance(tree: serialization.Tree, reference: serialization.Tree, *, may_overflow: bool) -> float:
    """Return the largest distance of two tensors, relative to the reference's norm; infinite if the trees differ."""
    (structure, tensors), (expected, references) = serialization.flatten(tree), serialization.flatten(reference)
    if structure != expected or [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in references]:
        return math.inf
    return max(
        (_distance(*pair, may_overflow=may_overflow) for pair in zip(tensors, references, strict=True)), default=0.0
    )


def _distance(tensor: Tensor, reference: Tensor, *, may_overflow: bool) -> float:
    if not tensor.numel():
        return 0.0
    tensor, reference = tensor.to(torch.float64), reference.to(torch.float64)
    # A number may overflow on one kind of machine and stay finite on another, but this happens to few numbers.
    finite, num_allowed = tensor.isfinite() & reference.isfinite(), _MAX_OVERFLOWING * tensor.numel() * may_overflow
    if int((tensor.isfinite() ^ reference.isfinite()).sum()) > num_allowed:
        return math.inf
    tensor, reference = tensor[finite], reference[finite]
    norm, distance = float(reference.norm()), float((tensor - reference).norm())
    return distance / norm if norm else (math.inf if distance else 0.0)


def _finding(audited: PeerId, work: _Recomputed, seed: int) -> AuditFinding:
    """Summarize the recomputed work of one server in one stage, with a sketch of the sum under `seed`."""
    stage = work.stage
    sketch = sketch_of(stage.index, work.total.values, seed, exact=stage.exact)
    return AuditFinding(
        audited=audited,
        stage_index=stage.index,
        receipts=pack(work.claims),
        origins=pack_origins({first: work.origins[first] for first, _, _ in work.claims}),
        claims=b"".join(claim for _, claim in sorted(work.claims.items())),
        refused=pack(work.refused - work.claims.keys()),
        unheard=pack(work.unheard - work.claims.keys() - work.refused),
        sum_digest=sum_digest(work.total.values),
        values=sketch.values,
        magnitude=work.magnitude,
        precision=work.precision,
        touched=to_bitmap(work.total.touched),
        distance=UNSET if work.distance is None else min(work.distance, _FARTHEST),
    )
