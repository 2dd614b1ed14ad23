"""Runs calls of the pipelined module through the swarm, as one autograd function each."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun
from lightning_swarm.client.pipeline.microbatches import (
    CallArguments,
    MicrobatchInput,
    concat,
    concat_gradients,
    num_rows,
    split,
    split_gradients,
)
from lightning_swarm.client.pipeline.replay_buffer import Microbatch
from lightning_swarm.client.pipeline.row_check import RowCheck
from lightning_swarm.core.errors import ConfigError, LeaseRevoked
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.tasks import gather, gather_bounded
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.partition import CALLS, StageModule
from lightning_swarm.network import SMALL_BYTES
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import PLAIN, Codec, Codecs, decoded, encoded
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import PLACES, CallKey, ComputeMode, Receipt


class _PipelineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.used = False
        ctx.set_materialize_grads(False)
        outputs, have_gradient = call.forward()
        ctx.mark_non_differentiable(*(o for o, has in zip(outputs, have_gradient, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # set by create_graph
            raise ConfigError(
                "`create_graph=True` needs the graph of the gradient, and the swarm's stages keep theirs to "
                "themselves. Compute gradient penalties outside the pipelined module, or without the swarm."
            )
        if ctx.used:
            raise ConfigError(
                "one call of the pipelined module can be backpropagated once: its gradients are in the step's sum "
                "already. Add the losses up and call backward once."
            )
        ctx.used = True
        if all(gradient is None for gradient in gradients):
            return (None, None, *(None for _ in ctx.needs_input_grad[2:]))
        return (None, None, *ctx.call.backward(gradients))


# Turns of the event loop until what a microbatch sends is on its way, so that the first stage can begin when the first
# microbatch has arrived. Microbatches small enough to travel inside of calls go all at once, which is cheaper.
_TURNS_APART: Final = 4


@dataclass
class GrantedBatch:
    """The batch in hand, from its grant to its end."""

    grant: Grant
    num_calls: int = 0
    num_microbatches: int = 0  # of all of its calls
    sent: list[Receipt] = field(default_factory=list)  # microbatches whose backward all stages have accepted
    completed: list[Receipt] = field(default_factory=list)
    backward_begun: bool = False
    # Called beside its first microbatches.
    begin: Callable[[], Coroutine[Any, Any, None]] | None = None
    # Called when all of it was sent, and nothing else of it is to come.
    arm: Callable[[list[Receipt]], Awaitable[None]] | None = None
    # Set when it is armed: asks whether it counts although the servers do not know it any more.
    confirm: Callable[[], Coroutine[Any, Any, None]] | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Settings that all calls of a pipeline share."""

    stages: Sequence[StageModule]  # of this trainer's copy of the model, without the layers that trainers compute
    shared: tuple[str, ...]  # names of extras that go whole to every microbatch
    microbatch_size: int | None  # in rows; None: each batch is cut in `num_microbatches` parts
    num_microbatches: int
    max_in_flight: int  # microbatches under way at once
    device: torch.device  # of the trainer's tensors
    codecs: Codecs = PLAIN  # by which tensors travel


class Pipeline:
    """Runs calls of the pipelined module through the swarm."""

    def __init__(
        self, blocks: Sequence[nn.Module], context: PipelineContext, runtime: Runtime, config: PipelineConfig
    ) -> None:
        self.blocks = blocks  # as the user sees them; their `training` flags count
        self.context = context
        self.runtime = runtime
        self.config = config
        self.generation = 0  # of the run
        self.version = 0  # of the weights that calls outside a batch use
        self.lent = 0  # the number of lent weights that calls outside a batch use; 0: they use those of the step
        self.first_trained = 0  # no stage before this one trains
        self.batch: GrantedBatch | None = None
        self.num_microbatches = 0
        self._evaluations = itertools.count()
        self._row_check = RowCheck(
            self._evaluate,
            shared=config.shared,
            codec=config.codecs.activations,
            has_batch_norm=any(isinstance(module, _BatchNorm) for block in blocks for module in block.modules()),
        )

    def __call__(self, *args: Any, **extras: Any) -> Any:
        """Compute what the module's own forward would, with gradients if autograd is on."""
        self._check_extras(extras)
        arguments = CallArguments.of(args, extras)
        tensors = list(arguments.tensors)
        grad = torch.is_grad_enabled() and self.batch is not None
        mode = capture(
            self.config.device.type,
            training=self._training(),
            grad=grad,
            input_grad=grad and any(tensor.requires_grad for tensor in tensors),
        )
        with torch.inference_mode(False), torch.no_grad():  # another thread cannot use inference tensors
            arguments = _detached(arguments)
            rows = num_rows(arguments, self.config.shared)
            size = self.microbatch_size(rows)
            if 0 < size < rows:
                self._row_check.check(arguments, mode, rows=rows, size=size)
            call = _Call(self, arguments, mode, split(arguments, rows=rows, size=size, shared=self.config.shared))
        if grad:
            # Without an input that wants a gradient autograd would leave the function out.
            anchor = torch.zeros((), requires_grad=True)
            outputs = list(_PipelineFunction.apply(call, anchor, *tensors))  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outputs, _ = call.forward()
        return serialization.unflatten(call.output_structure, outputs)

    def enter_generation(self, generation: int, version: int) -> None:
        """Send calls of this generation of the run, and give up a batch in hand."""
        self.generation, self.version, self.batch = generation, version, None

    def key(self, batch: GrantedBatch | None, call: int, index: int) -> CallKey:
        """Name a microbatch of the batch in hand, or of an evaluation."""
        if batch is None:
            return CallKey(
                generation=self.generation,
                step=self.version,
                first=0,
                index=index,
                call=call,
                evaluation=True,
                weights=self.lent,
            )
        grant = batch.grant
        return CallKey(
            generation=grant.generation,
            step=grant.step,
            first=grant.first,
            index=index,
            call=call,
        )

    def next_call(self, batch: GrantedBatch | None) -> int:
        """Number one more call of a batch, or outside of batches."""
        if batch is None:
            return next(self._evaluations)
        batch.num_calls += 1
        return batch.num_calls - 1

    def microbatch_size(self, rows: int) -> int:
        """Return the rows of a microbatch for a batch of `rows`."""
        return self.config.microbatch_size or -(-rows // self.config.num_microbatches)

    def microbatch_run(
        self, key: CallKey, structure: serialization.Structure, part: MicrobatchInput, mode: ComputeMode, weight: float
    ) -> MicrobatchRun:
        """Prepare to run a microbatch, whose positional arguments have a structure."""
        tensors = _to_send(part.tensors, self.config.codecs.activations, copy=True)
        microbatch = Microbatch(
            key=key,
            num_rows=part.num_rows,
            inputs=serialization.unflatten(structure, tensors),
            extras=[stage.extras_for(part.kwargs) for stage in self.config.stages],
            mode=mode,
            weight=weight,
            first_trained=self.first_trained,
        )
        return MicrobatchRun(self.context, microbatch)

    def _evaluate(self, probes: Sequence[tuple[CallArguments, int]], mode: ComputeMode) -> list[list[Tensor]]:
        """Compute each call as one microbatch that leaves no trace; equal numbers draw equal random numbers."""
        config, works = self.config, []
        calls: dict[int, int] = {}
        for repeat, (arguments, number) in enumerate(probes):
            if number not in calls:
                calls[number] = next(self._evaluations)
            rows = len(arguments.tensors[0])
            (part,) = split(arguments, rows=rows, size=rows, shared=config.shared)
            key = replace_fields(self.key(None, calls[number], 0), first=(1 + repeat) * PLACES)
            works.append(self.microbatch_run(key, arguments.structure, part, mode, 0.0).forward())
        found = self.runtime.run(gather_bounded(works, config.max_in_flight))
        outputs = [decoded(output, config.codecs.activations, config.device) for output, _ in found]
        return [serialization.flatten(output)[1] for output in outputs]

    def _check_extras(self, extras: dict[str, Any]) -> None:
        known = frozenset[str]().union(*(stage.keywords for stage in self.config.stages))
        for name in extras:
            if CALLS not in extras and name not in known:
                raise TypeError(
                    f"the pipelined module got an unexpected keyword argument {name!r}: no block's forward names it "
                    f"(they name {sorted(known)})"
                )

    def _training(self) -> bool:
        flags = {module.training for block in self.blocks for module in block.modules()}
        if len(flags) > 1:
            raise ConfigError(
                "all blocks of a pipeline must be in train mode, or all in eval mode, got some of each. "
                "Call train() or eval() on the whole module."
            )
        return flags.pop()


class _Call:
    """One call of the pipelined module: its microbatches, forward and backward."""

    def __init__(
        self, pipeline: Pipeline, arguments: CallArguments, mode: ComputeMode, parts: Sequence[MicrobatchInput]
    ) -> None:
        self._pipeline = pipeline
        self._batch = pipeline.batch if mode.grad else None
        number = pipeline.next_call(self._batch)
        weight = self._batch.grant.weight if self._batch else 0.0
        self._sizes = [part.num_rows for part in parts]
        self._microbatch_runs = [
            pipeline.microbatch_run(pipeline.key(self._batch, number, index), arguments.structure, part, mode, weight)
            for index, part in enumerate(parts)
        ]
        self.output_structure: serialization.Structure = None
        pipeline.num_microbatches += len(parts)
        if self._batch is not None:
            self._batch.num_microbatches += len(parts)

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Return the output's tensors for the whole batch, and which of them have a gradient."""
        works = [run.forward() for run in self._microbatch_runs]
        results = self._run(works, self._microbatch_runs[0].microbatch.inputs, *self._begin())
        config = self._pipeline.config
        outputs = [decoded(output, config.codecs.activations, config.device) for output, _ in results]
        self.output_structure, tensors = concat(outputs, self._sizes)
        return tensors, results[0][1]

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of the input's tensors."""
        batch = self._batch
        assert batch is not None
        if batch is not self._pipeline.batch:
            raise ConfigError(
                "a call of the pipelined module must be backpropagated in the training_step that made it; its step "
                "has gone on. Detach what you keep from one batch to the next."
            )
        batch.backward_begun = True
        config = self._pipeline.config
        codec = config.codecs.gradients
        parts = [_to_send(part, codec, copy=False) for part in split_gradients(gradients, self._sizes)]
        first = self._microbatch_runs[0].microbatch
        no_gradients = [None] * len(serialization.leaves(first.inputs))
        works = [
            run.backward(part, sent=partial(self._sent, batch, run.microbatch.key.receipt))
            for run, part in zip(self._microbatch_runs, parts, strict=True)
        ]
        try:
            found = self._run(works, parts[0])
        except LeaseRevoked:
            if batch.confirm is None:
                raise
            # While this trainer was silent, the servers may have completed the batch, and the step.
            self._pipeline.runtime.run(batch.confirm())
            return no_gradients  # there is nothing around the pipeline that wants one
        batch.completed += [run.microbatch.key.receipt for run in self._microbatch_runs]
        if not first.mode.input_grad:
            return no_gradients
        return concat_gradients([decoded(part, codec, config.device) for part in found], self._sizes)

    async def _sent(self, batch: GrantedBatch, receipt: Receipt) -> None:
        batch.sent.append(receipt)
        if batch.arm is not None and len(batch.sent) == batch.num_microbatches:
            await batch.arm(batch.sent)

    def _begin(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the call that tells of the batch's begin: it is made beside the microbatches, not before them."""
        if self._batch is not None and self._batch.begin is not None:
            begin, self._batch.begin = self._batch.begin, None
            yield begin()

    def _run(self, works: list[Any], first: serialization.Tree, *also: Coroutine[Any, Any, None]) -> list[Any]:
        """Run all microbatches, of which the first one sends `first`: a hidden state, or its gradient."""
        through = gather_bounded(works, self._pipeline.config.max_in_flight, turns_apart=turns_apart(first))
        coroutines: list[Coroutine[Any, Any, Any]] = [through, *also]
        return list(self._pipeline.runtime.run(gather(coroutines))[0])


def turns_apart(sent: serialization.Tree) -> int:
    """Return the turns of the loop between the begins of two microbatches that send such tensors."""
    return _TURNS_APART if sum(tensor.nbytes for tensor in serialization.flatten(sent)[1]) > SMALL_BYTES else 0


def _detached(arguments: CallArguments) -> CallArguments:
    """Detach a call's tensors from autograd; those of keyword arguments are also copied to where they are sent from."""
    if any(tensor.requires_grad for _, tensors in arguments.keywords.values() for tensor in tensors):
        raise ConfigError(
            "keyword arguments of the pipelined module must not require a gradient: they go to several stages, and "
            "no gradient comes back for them. Pass the tensor as a positional argument, or detach it."
        )
    keywords = {
        name: (structure, [_copied(tensor) for tensor in tensors])
        for name, (structure, tensors) in arguments.keywords.items()
    }
    return replace(arguments, tensors=[tensor.detach() for tensor in arguments.tensors], keywords=keywords)


def _to_send(tensors: Sequence[Tensor | None], codec: Codec | None, *, copy: bool) -> list[Any]:
    """Encode tensors where they are, and bring them to where they can be sent from again and again."""

    # With `copy`, for the user may overwrite the batch while a microbatch may still have to be sent again.
    def on_cpu(leaf: Tensor | serialization.Encoded) -> Tensor | serialization.Encoded:
        if isinstance(leaf, serialization.Encoded):
            return replace(leaf, parts=tuple(part.cpu() for part in leaf.parts))
        return _copied(leaf) if copy else leaf.cpu()

    return list(serialization.transform(encoded(list(tensors), codec), on_cpu))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
