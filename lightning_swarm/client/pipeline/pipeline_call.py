"""One call of the pipelined module: its microbatches, forward and backward, and its place in autograd's graph."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.client.pipeline.call_factory import CallFactory, CallMicrobatches, GrantedBatch
from lightning_swarm.client.pipeline.differentiation import GradientMarks, reaches_weights
from lightning_swarm.client.pipeline.left_values import Unavailable
from lightning_swarm.client.pipeline.leftovers import Collected, Leftovers
from lightning_swarm.client.pipeline.microbatch_run import run_all
from lightning_swarm.client.pipeline.microbatches import concat, concat_gradients, split_gradients
from lightning_swarm.client.pipeline.result_check import Result
from lightning_swarm.core.errors import ConfigError, LeaseRevoked
from lightning_swarm.model.fidelity.written_inputs import Given, write_back
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codec, decoded, to_send
from lightning_swarm.protocol.messages.calls import Receipt


# Without the tensors: their graph holds the call, which holds this, and only garbage collection frees a cycle.
@dataclass(frozen=True)
class OutputForm:
    """The form of a call's tensors: those of its output, then those that its forwards left on modules."""

    structure: serialization.Structure  # of the output
    num_own: int  # tensors of the output
    sizes: Sequence[int]  # rows of each microbatch
    collected: Collected | None  # None: nothing was left
    leftovers: Leftovers

    @property
    def num_tensors(self) -> int:
        """The number of all tensors."""
        return self.num_own + (0 if self.collected is None else len(self.collected.tensors))

    def placed(self, tensors: Sequence[Tensor], given: Given) -> Any:
        """Set the values that forwards left on modules and in the call's arguments; return the output."""
        if self.collected is not None:
            left = tensors[self.num_own :]
            for argument, written in self.leftovers.set_on_modules(self.collected, left):
                write_back(given, argument, written, _not_here)
        return serialization.unflatten(self.structure, tensors[: self.num_own])

    def split(self, gradients: Sequence[Tensor | None], codec: Codec | None) -> list[list[Any]]:
        """Return each microbatch's part of the tensors' gradients, ready to be sent."""
        parts = split_gradients(gradients[: self.num_own], self.sizes)
        own = [to_send(part, codec, copy=False) for part in parts]
        if self.collected is None:
            return own
        left = self.collected.gradients(gradients[self.num_own :])
        return [[*part, *to_send(more, None, copy=False)] for part, more in zip(own, left, strict=True)]


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
        # When the present backward is over, because it may still add to the weights' `.grad`.
        torch.autograd.Variable._execution_engine.queue_callback(call.marks.set_for_step)
        return (None, None, None, *call.backward(gradients))


class PipelineCall:
    """One call of the pipelined module: its microbatches, forward and backward."""

    def __init__(
        self,
        factory: CallFactory,
        marks: GradientMarks,
        batch: GrantedBatch | None,  # None: the call is an evaluation
        microbatches: CallMicrobatches,
        *,
        adds_nothing: bool,  # all weights are frozen for this call
        changes_statistics: bool,
    ) -> None:
        self._factory, self.marks = factory, marks
        self._batch, self._microbatches = batch, microbatches
        self._runs = microbatches.runs
        self.adds_nothing = adds_nothing
        self._changes_statistics = changes_statistics
        self._counted = False  # a backward that counts has begun
        self._added = False  # servers were asked to add gradients or statistics
        self._form: OutputForm | None = None
        if batch is not None:
            batch.calls.append(self)

    @property
    def form(self) -> OutputForm:
        """The form of the output, after the forward."""
        assert self._form is not None
        return self._form

    def forward(self) -> tuple[Sequence[Tensor], Sequence[bool]]:
        """Return the output's tensors for the whole batch, and which of them have a gradient."""
        begin, batch = [], self._batch
        if batch is not None and batch.begin is not None:  # announced together with the first microbatches
            begin, batch.begin = [batch.begin()], None
        factory, call = self._factory, self._microbatches
        results: list[Result] = self._run([run.forward() for run in call.runs], call.runs[0].microbatch.inputs, *begin)
        opened = factory.context.results.opened_all(results, call, factory)
        structure, tensors = concat([output for output, _ in opened], call.sizes)
        num_own = len(tensors)
        flags = results[0][1][:num_own]
        collected = factory.leftovers.collect([left for _, left in opened], call.sizes, partial(factory.trial, call))
        if collected is not None:
            tensors, flags = [*tensors, *collected.tensors.values()], [*flags, *collected.flags()]
        self._form = OutputForm(structure, num_own, call.sizes, collected, factory.leftovers)
        return tensors, flags

    def _run(
        self, works: Sequence[Coroutine[Any, Any, Any]], first: serialization.Tree, *also: Coroutine[Any, Any, None]
    ) -> list[Any]:
        return run_all(self._factory.runtime, works, first, *also, limit=self._factory.config.max_in_flight)

    def release(self) -> None:
        """No longer count the call as work of its peers, because no backward will come."""
        for run in self._runs:
            run.calls.release()

    def begin_backward(self) -> bool:
        """Begin a backward that reaches the weights; return whether its gradients count."""
        batch = self._factory.batch
        if batch is None or not batch.counts:
            self.marks.refuse_or_set()
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

    def count_statistics(self) -> None:
        """Have servers add the call's batch norm statistics, if no backward has added them."""
        trains = self._factory.first_trained < len(self._factory.config.stages)  # else no stage keeps receipts
        if self._changes_statistics and trains and not self._added:
            for run in self._runs:
                run.prepare_for_statistics()
            self.backward([None] * self.form.num_tensors)

    def input_gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of the input's tensors, without adding to any sum."""
        self._check_current()
        parts = self.form.split(gradients, self._factory.config.codecs.gradients)
        works = [run.backward(part, adds=False) for run, part in zip(self._runs, parts, strict=True)]
        return self._joined(self._run(works, parts[0]))

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Let the servers add the weights' gradients; return the gradients of the input's tensors."""
        batch = self._batch
        assert batch is not None
        batch.backward_begun = self._added = True
        parts = self.form.split(gradients, self._factory.config.codecs.gradients)
        first = self._runs[0].microbatch
        no_gradients = [None] * len(serialization.leaves(first.inputs))
        works = [
            run.backward(part, sent=partial(_sent, batch, run.microbatch.key.receipt))
            for run, part in zip(self._runs, parts, strict=True)
        ]
        try:
            found = self._run(works, parts[0])
        except LeaseRevoked:
            if batch.confirm is None:
                raise
            # While this trainer was silent, the servers may have completed the batch, and the step.
            self._factory.runtime.run(batch.confirm())
            return no_gradients  # only batches without layers around the pipeline are armed
        batch.completed += [run.microbatch.key.receipt for run in self._runs]
        return self._joined(found) if first.input_grad else no_gradients

    def _check_current(self) -> None:
        """Refuse a backward with other weights than the forward's."""
        is_current = self._batch is self._factory.batch
        if not is_current and not (self._batch is None and self._factory.has_weights_of(self._runs[0].microbatch.key)):
            raise ConfigError(
                "a call of the pipelined module must be backpropagated in the training_step that made it; its step "
                "has gone on. Detach what you keep from one batch to the next."
            )

    def _joined(self, found: Sequence[serialization.Tree]) -> Sequence[Tensor | None]:
        config = self._factory.config
        parts = [decoded(part, config.codecs.gradients, config.device) for part in found]
        return concat_gradients(parts, self._microbatches.sizes)


async def _sent(batch: GrantedBatch, receipt: Receipt) -> None:
    """Record that all stages have accepted a microbatch's backward; arm the batch after the last one."""
    batch.sent.append(receipt)
    if batch.arm is not None and len(batch.sent) == batch.num_microbatches:
        await batch.arm(batch.sent)


def _not_here(what: str) -> Unavailable:
    """Return the placeholder of a value that a block put into a container of its arguments."""
    return Unavailable.because(
        f"values that blocks put into lists and dicts of their arguments stay on the servers: {what}. Use the output "
        "of the last block, or have the first block copy the container before it changes it."
    )
