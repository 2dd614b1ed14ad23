"""One call of the pipelined module: its microbatches, forward and backward, and its place in autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.client.pipeline.call_factory import CallFactory, CallMicrobatches, GrantedBatch
from lightning_swarm.client.pipeline.differentiation import GradientMarks, reaches_weights
from lightning_swarm.client.pipeline.microbatches import concat_gradients
from lightning_swarm.client.pipeline.output_form import OutputForm
from lightning_swarm.core.errors import ConfigError, LeaseRevoked
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import decoded
from lightning_swarm.protocol.messages.calls import Receipt


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
        results = self._factory.forwards(self._runs, *begin)
        self._form, tensors, flags = self._factory.join(results, self._microbatches)
        return tensors, flags

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
        return self._joined(self._factory.run(works, parts[0]))

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
            found = self._factory.run(works, parts[0])
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
