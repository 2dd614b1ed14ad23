"""One call of the pipelined module: its microbatches, forward and backward, and its place in autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor

from lightning_swarm.client.pipeline.differentiation import reaches_weights
from lightning_swarm.client.pipeline.left_values import Unavailable
from lightning_swarm.client.pipeline.leftovers import Collected
from lightning_swarm.client.pipeline.microbatches import (
    CallArguments,
    MicrobatchInput,
    concat,
    concat_gradients,
    split,
    split_gradients,
    take_rows,
)
from lightning_swarm.core.errors import ConfigError, LeaseRevoked, PeerError, SwarmError
from lightning_swarm.core.tasks import gather, gather_bounded
from lightning_swarm.model.fidelity.leftovers import Left
from lightning_swarm.model.fidelity.leftovers import part as split_left
from lightning_swarm.model.fidelity.written_inputs import Given, write_back
from lightning_swarm.network import SMALL_BYTES, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codec, decoded, encoded, on_cpu, to_cpu
from lightning_swarm.protocol.messages.calls import ComputeMode, ModuleStates, Receipt

if TYPE_CHECKING:
    from lightning_swarm.client.pipeline.pipeline import GrantedBatch, Pipeline


_Formed: TypeAlias = tuple[object, tuple[Any, Left] | None]
"""Structure, dtypes and row shapes of a microbatch's output, and the output with the values that its forward left."""

# Turns of the event loop between the starts of two microbatches, so that the first stage can begin as soon as the first
# of them has arrived. Microbatches small enough to travel inside of calls are sent all at once, which is cheaper.
_TURNS_APART: Final = 4
_MAX_OTHER_FORMS: Final = 8  # rounds in which other servers compute outputs of a wrong form again


class PipelineFunction(torch.autograd.Function):
    """A call of the pipeline in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: PipelineCall, leaf: Tensor, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the call's outputs. `leaf` and `weights` later show the purpose of a backward."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs, have_gradient = call.forward()
        ctx.mark_non_differentiable(*(o for o, has in zip(outputs, have_gradient, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Let the servers compute gradients, which count if the backward is Lightning's own."""
        call: PipelineCall = ctx.call
        counts = reaches_weights(ctx, gradients) and not call.adds_nothing and call.begin_backward()
        if all(gradient is None for gradient in gradients) or not (counts or any(ctx.needs_input_grad[3:])):
            return (None,) * len(ctx.needs_input_grad)
        if not counts:
            return (None, None, None, *call.input_gradients(gradients))
        call.mark_weights()
        return (None, None, None, *call.backward(gradients))


class PipelineCall:
    """One call of the pipelined module: its microbatches, forward and backward."""

    def __init__(
        self,
        pipeline: Pipeline,
        arguments: CallArguments,
        modes: Sequence[ComputeMode],
        parts: Sequence[MicrobatchInput],
    ) -> None:
        self._pipeline = pipeline
        self._arguments, self._modes = arguments, modes
        # A call without gradients that changes no statistics is an evaluation, and belongs to no batch.
        self._changes_statistics = pipeline.norms.changes(in_batch=pipeline.batch is not None)
        self._batch = pipeline.batch if modes[0].grad or self._changes_statistics else None
        self._counted = False  # a backward that counts has begun
        self._added = False  # servers were asked to add gradients or statistics
        self.adds_nothing = False  # all weights are frozen for this call
        number = pipeline.next_call(self._batch)
        self._sizes = [part.num_rows for part in parts]
        self._microbatch_runs = [
            pipeline.microbatch_run(pipeline.key(self._batch, number, index), arguments.structure, part, modes)
            for index, part in enumerate(parts)
        ]
        self._output_structure: serialization.Structure = None
        self._collected: Collected | None = None
        self._num_outputs = 0
        pipeline.num_microbatches += len(parts)
        if self._batch is not None:
            self._batch.num_microbatches += len(parts)
            self._batch.calls.append(self)

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """Return the output's tensors for the whole batch, and which of them have a gradient."""
        works = [run.forward() for run in self._microbatch_runs]
        results = self._run(works, self._microbatch_runs[0].microbatch.inputs, *self._begin())
        judge = self._pipeline.context.judge
        opened = [self._open(result) for result in results] if judge is None else self._of_one_form(results, judge)
        outputs, lefts = [output for output, _ in opened], [left for _, left in opened]
        self._output_structure, tensors = concat(outputs, self._sizes)
        flags = results[0][1][: len(tensors)]
        self._collected = self._pipeline.leftovers.collect(lefts, self._sizes, self._trial)
        if self._collected is not None:
            tensors, flags = [*tensors, *self._collected.tensors.values()], [*flags, *self._collected.flags()]
        self._num_outputs = len(tensors)
        return tensors, flags

    def _open(self, result: Any) -> tuple[Any, Left]:
        """Return a microbatch's output, and the values that its forward left."""
        config = self._pipeline.config
        output, left = split_left(decoded(result[0], config.codecs.activations, config.device))
        left.take_output_note()  # there is no next stage
        return output, left

    def _of_one_form(self, results: list[Any], judge: Callable[[], PeerId]) -> list[tuple[Any, Left]]:
        """In an audited run: open results, which must have one form.

        If their forms differ, `judge` names the coordinator, which computes the first microbatch. Other servers
        recompute the results of other forms than the coordinator's.
        """
        found = [self._formed(*pair) for pair in zip(results, self._sizes, strict=True)]
        if any(form is None or form != found[0][0] for form, _ in found):
            self._compute_anew(results, found, judge)
        return [self._open(result) if one is None else one for result, (_, one) in zip(results, found, strict=True)]

    def _compute_anew(self, results: list[Any], found: list[_Formed], judge: Callable[[], PeerId]) -> None:
        """Have other servers recompute results of other forms than the coordinator's; replace them in both lists."""
        size = self._sizes[0]
        pipeline, cut = self._pipeline, take_rows(self._arguments, torch.arange(size), self._pipeline.config.shared)
        mode = replace_fields(self._modes[0], grad=False, input_grad=False)
        try:
            ((structure, tensors),) = pipeline.evaluate([(cut, 0)], mode, by=judge)
        except PeerError:  # the right form stays unknown
            return
        expected = _form_of(structure, tensors, size)
        error = PeerError("its output has another form than the coordinator's, or no row for each sample")
        for _ in range(_MAX_OTHER_FORMS):
            wrong = [place for place, (form, _) in enumerate(found) if form != expected]
            works = [self._microbatch_runs[place].forward_anew(error) for place in wrong]
            if not works:
                break
            for place, result in zip(wrong, self._run(works, self._microbatch_runs[0].microbatch.inputs), strict=True):
                results[place], found[place] = result, self._formed(result, self._sizes[place])

    def _formed(self, result: Any, size: int) -> _Formed:
        """Return a result's form, and the opened result; None for a malformed result."""
        try:
            opened = self._open(result)
            return _form_of(*serialization.flatten(opened[0]), size), opened
        except (SwarmError, RuntimeError, TypeError, ValueError):  # a server may send anything
            return None, None

    def _trial(self, training: bool) -> tuple[list[Left], list[int]]:
        """Compute the first two microbatches apart, then as one; return the values that they leave, and their sizes."""
        pipeline, size = self._pipeline, self._sizes[0]
        cut = partial(split, self._arguments, rows=sum(self._sizes), shared=pipeline.config.shared)
        parts = [*cut(size=size)[:2], cut(size=2 * size)[0]]
        mode = replace_fields(self._modes[0], training=training, grad=False, input_grad=False)
        modes = by_stage(mode, [(mode.training, mode.modules) for mode in self._modes])
        number = pipeline.next_call(None)
        runs = [
            pipeline.microbatch_run(pipeline.key(None, number, index), self._arguments.structure, part, modes)
            for index, part in enumerate(parts)
        ]
        results = self._run([run.forward() for run in runs], runs[0].microbatch.inputs)
        return [self._open(result)[1] for result in results], self._sizes[:2]

    def placed(self, tensors: Sequence[Tensor], given: Given) -> Any:
        """Set the values that forwards left on modules and in the call's arguments; return the output."""
        if self._collected is None:
            return serialization.unflatten(self._output_structure, tensors)
        num_left = len(self._collected.tensors)
        for argument, written in self._pipeline.leftovers.set_on_modules(
            self._collected, tensors[len(tensors) - num_left :]
        ):
            write_back(given, argument, written, _not_here)
        return serialization.unflatten(self._output_structure, tensors[: len(tensors) - num_left])

    def release(self) -> None:
        """No longer count the call as work of its peers, because no backward will come."""
        for run in self._microbatch_runs:
            run.release()

    def begin_backward(self) -> bool:
        """Begin a backward that reaches the weights; return whether its gradients count."""
        batch = self._pipeline.batch
        if batch is None or not batch.counts:
            self._pipeline.refuse_or_mark()
            return False
        self._check_current()
        if self._batch is None:
            raise ConfigError(
                "a loss may depend only on calls of the pipelined module in the same `training_step`, got a call made "
                "before it. Make the call in `training_step`, or detach its output."
            )
        if self._counted:
            raise ConfigError(
                "one call of the pipelined module can be backpropagated once for a step: its gradients are in the "
                "step's sum already. Add the losses up and call backward once."
            )
        if batch.confirm is not None:
            raise ConfigError(
                "the batch of one of several trainers is complete once all of its calls were backpropagated, got "
                "another loss after that. Return the sum of all losses."
            )
        self._counted = True
        return True

    def mark_weights(self) -> None:
        """Mark the weights when the present backward is over, because it may still add to their `.grad`."""
        torch.autograd.Variable._execution_engine.queue_callback(self._pipeline.marks.set_for_step)

    def count_statistics(self) -> None:
        """Have servers add the call's batch norm statistics, if no backward has added them."""
        trains = self._pipeline.first_trained < len(self._pipeline.config.stages)  # else no stage keeps receipts
        if self._changes_statistics and trains and not self._added:
            for run in self._microbatch_runs:
                run.want_no_gradient()
            self.backward([None] * self._num_outputs)

    def input_gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of the input's tensors, without adding to any sum."""
        self._check_current()
        parts = self._split(gradients)
        works = [run.backward(part, adds=False) for run, part in zip(self._microbatch_runs, parts, strict=True)]
        return self._joined(self._run(works, parts[0]))

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Let the servers add the weights' gradients; return the gradients of the input's tensors."""
        batch = self._batch
        assert batch is not None
        batch.backward_begun = self._added = True
        parts = self._split(gradients)
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
            return no_gradients  # only batches without layers around the pipeline are armed
        batch.completed += [run.microbatch.key.receipt for run in self._microbatch_runs]
        if not first.input_grad:
            return no_gradients
        return self._joined(found)

    def _check_current(self) -> None:
        """Refuse a backward with other weights than the forward's."""
        pipeline, key = self._pipeline, self._microbatch_runs[0].microbatch.key
        evaluated_here = (key.generation, key.step, key.weights) == (
            pipeline.generation,
            pipeline.version,
            pipeline.evaluation_number,
        )
        if self._batch is not pipeline.batch and not (self._batch is None and evaluated_here):
            raise ConfigError(
                "a call of the pipelined module must be backpropagated in the training_step that made it; its step "
                "has gone on. Detach what you keep from one batch to the next."
            )

    def _split(self, gradients: Sequence[Tensor | None]) -> list[list[Any]]:
        """Return each microbatch's part of the outputs' gradients, ready to be sent."""
        codec, collected = self._pipeline.config.codecs.gradients, self._collected
        num_own = len(gradients) - (0 if collected is None else len(collected.tensors))
        parts = [to_send(part, codec, copy=False) for part in split_gradients(gradients[:num_own], self._sizes)]
        if collected is None:
            return parts
        left = collected.gradients(gradients[num_own:])
        return [[*own, *to_send(more, None, copy=False)] for own, more in zip(parts, left, strict=True)]

    def _joined(self, found: Sequence[serialization.Tree]) -> Sequence[Tensor | None]:
        """Return the gradients of the whole batch's input from those of the microbatches."""
        config = self._pipeline.config
        parts = [decoded(part, config.codecs.gradients, config.device) for part in found]
        return concat_gradients(parts, self._sizes)

    async def _sent(self, batch: GrantedBatch, receipt: Receipt) -> None:
        """Record that all stages have accepted a microbatch's backward; arm the batch after the last one."""
        batch.sent.append(receipt)
        if batch.arm is not None and len(batch.sent) == batch.num_microbatches:
            await batch.arm(batch.sent)

    def _begin(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the call that announces the batch's begin. It runs together with the first microbatches."""
        if self._batch is not None and self._batch.begin is not None:
            begin, self._batch.begin = self._batch.begin, None
            yield begin()

    def _run(self, works: list[Any], first: serialization.Tree, *also: Coroutine[Any, Any, None]) -> list[Any]:
        """Run the works of all microbatches, and also these coroutines. The first work sends the tensors in `first`."""
        through = gather_bounded(works, self._pipeline.config.max_in_flight, turns_apart=turns_apart(first))
        coroutines: list[Coroutine[Any, Any, Any]] = [through, *also]
        return list(self._pipeline.runtime.run(gather(coroutines))[0])


def _form_of(structure: serialization.Structure, tensors: Sequence[Tensor], size: int) -> object:
    """Return an output's structure, and each tensor's dtype and row shape; None if a tensor has not `size` rows."""
    if any(tensor.ndim == 0 or len(tensor) != size for tensor in tensors):
        return None
    return structure, [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]


def _not_here(what: str) -> Unavailable:
    """Return the placeholder of a value that a block put into a container of its arguments."""
    return Unavailable.because(
        f"values that blocks put into lists and dicts of their arguments stay on the servers: {what}. Use the output "
        "of the last block, or have the first block copy the container before it changes it."
    )


def by_stage(mode: ComputeMode, states: Sequence[tuple[bool, ModuleStates | None]]) -> list[ComputeMode]:
    """Return each stage's mode; if `mode` is eval, all modules are in eval mode."""
    if mode.training:
        return [replace_fields(mode, training=training, modules=modules) for training, modules in states]
    kept = [None if modules is None else replace_fields(modules, modes={}) for _, modules in states]
    return [replace_fields(mode, modules=modules) for modules in kept]


def turns_apart(sent: serialization.Tree) -> int:
    """Return the turns of the event loop between the starts of two microbatches that send such tensors."""
    return _TURNS_APART if sum(tensor.nbytes for tensor in serialization.flatten(sent)[1]) > SMALL_BYTES else 0


def detached(arguments: CallArguments) -> CallArguments:
    """Detach a call's tensors from autograd; also copy the tensors of keyword arguments to the CPU, to send them."""
    if any(tensor.requires_grad for _, tensors in arguments.keywords.values() for tensor in tensors):
        raise ConfigError(
            "keyword arguments of the pipelined module must not require a gradient: they go to several stages, and "
            "no gradient comes back for them. Pass the tensor as a positional argument, or detach it."
        )
    keywords = {
        name: (structure, [to_cpu(tensor.detach(), copy=True) for tensor in tensors])
        for name, (structure, tensors) in arguments.keywords.items()
    }
    return replace(arguments, tensors=[tensor.detach() for tensor in arguments.tensors], keywords=keywords)


def to_send(tensors: Sequence[Tensor | None], codec: Codec | None, *, copy: bool) -> list[Any]:
    """Encode tensors on their device, and move them to the CPU, from which they can be sent repeatedly."""
    # `copy` is for inputs, because the user may overwrite the batch before a microbatch is sent again.
    return list(on_cpu(encoded(list(tensors), codec), copy=copy))
