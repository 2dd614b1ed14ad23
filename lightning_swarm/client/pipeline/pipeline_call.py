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


# Holds no tensors: their autograd graph refers to the call, and the call to this object, so they would form a cycle
# that only the garbage collector frees.
@dataclass(frozen=True)
class OutputForm:
    """The layout of a call's tensors: first the output's, then the tensors that the call's forwards left on modules."""

    structure: serialization.Structure  # structure of the output
    num_outputs: int  # tensors of the output
    sizes: Sequence[int]  # rows of each microbatch
    collected: Collected | None  # None: the forwards left no values
    leftovers: Leftovers

    @property
    def num_tensors(self) -> int:
        """The number of all tensors."""
        return self.num_outputs + (0 if self.collected is None else len(self.collected.tensors))

    def assemble(self, tensors: Sequence[Tensor], given: Given) -> Any:
        """Return the output; set the values that forwards left on modules or wrote into the call's arguments."""
        if self.collected is not None:
            left = tensors[self.num_outputs :]
            for argument, written in self.leftovers.set_on_modules(self.collected, left):
                write_back(given, argument, written, _stayed_on_servers)
        return serialization.unflatten(self.structure, tensors[: self.num_outputs])

    def split(self, gradients: Sequence[Tensor | None], codec: Codec | None) -> list[list[Any]]:
        """Return the gradients of each microbatch's tensors, in wire form."""
        parts = split_gradients(gradients[: self.num_outputs], self.sizes)
        outputs = [to_send(part, codec, copy=False) for part in parts]
        if self.collected is None:
            return outputs
        left_values = self.collected.gradients(gradients[self.num_outputs :])
        return [[*part, *to_send(left, None, copy=False)] for part, left in zip(outputs, left_values, strict=True)]


class PipelineFunction(torch.autograd.Function):
    """A call of the pipeline in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: PipelineCall, leaf: Tensor, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the call's outputs. `leaf` and `weights` only mark the graph, for `reaches_weights`."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs, have_gradient = call.forward()
        ctx.mark_non_differentiable(*(o for o, has in zip(outputs, have_gradient, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Let the servers compute gradients, which count if the backward is Lightning's own."""
        call: PipelineCall = ctx.call
        counts = reaches_weights(ctx, gradients) and not call.is_frozen and call.begin_backward()
        if all(gradient is None for gradient in gradients) or not (counts or any(ctx.needs_input_grad[3:])):
            return (None,) * len(ctx.needs_input_grad)
        if not counts:
            return (None, None, None, *call.input_gradients(gradients))
        # Set marks at the weights' `.grad` when the whole backward is over, because until then it may add to `.grad`.
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
        is_frozen: bool,  # all weights are frozen for this call alone
        changes_statistics: bool,
    ) -> None:
        self._factory, self.marks = factory, marks
        self._batch, self._microbatches = batch, microbatches
        self._runs = microbatches.runs
        self.is_frozen = is_frozen
        self._changes_statistics = changes_statistics
        self._has_backward = False  # a backward that counts has begun
        self._has_added = False  # servers were asked to add gradients or statistics
        self._form: OutputForm | None = None
        if batch is not None:
            batch.calls.append(self)

    @property
    def form(self) -> OutputForm:
        """The layout of the call's tensors, known after the forward."""
        assert self._form is not None
        return self._form

    def forward(self) -> tuple[Sequence[Tensor], Sequence[bool]]:
        """Return the output's tensors for the whole batch, and which of them have a gradient."""
        announcements, batch = [], self._batch
        if batch is not None and batch.begin is not None:  # once a batch, together with the first microbatches
            announcements, batch.begin = [batch.begin()], None
        factory, call = self._factory, self._microbatches
        works = [run.forward() for run in call.runs]
        results: list[Result] = self._run(works, call.runs[0].microbatch.inputs, *announcements)
        opened = factory.context.results.opened_all(results, call, factory)
        structure, tensors = concat([output for output, _ in opened], call.sizes)
        num_outputs = len(tensors)
        flags = results[0][1][:num_outputs]
        collected = factory.leftovers.collect([left for _, left in opened], call.sizes, partial(factory.trial, call))
        if collected is not None:
            tensors, flags = [*tensors, *collected.tensors.values()], [*flags, *collected.flags()]
        self._form = OutputForm(structure, num_outputs, call.sizes, collected, factory.leftovers)
        return tensors, flags

    def _run(
        self, works: Sequence[Coroutine[Any, Any, Any]], first: serialization.Tree, *others: Coroutine[Any, Any, None]
    ) -> list[Any]:
        return run_all(self._factory.runtime, works, first, *others, limit=self._factory.config.max_in_flight)

    def release(self) -> None:
        """No longer count the call as work of its peers, because there will be no backward."""
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
        if self._has_backward:
            raise ConfigError(
                "one call of the pipelined module can be backpropagated once for a step: its gradients are in the "
                "step's sum already. Add up the losses and call backward once."
            )
        if batch.confirm is not None:
            raise ConfigError(
                "in a run of several trainers, a batch is complete once all of its calls were backpropagated: got "
                "another loss after that. Return the sum of all losses."
            )
        self._has_backward = True
        return True

    def count_statistics(self) -> None:
        """Have servers add the call's batch norm statistics, if no backward has added them."""
        any_trains = self._factory.first_trained < len(self._factory.config.stages)  # if not, no server sends receipts
        if self._changes_statistics and any_trains and not self._has_added:
            for run in self._runs:
                run.prepare_for_statistics()
            self.backward([None] * self.form.num_tensors)

    def input_gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients of the input's tensors, without adding to any sum."""
        self._check_current()
        parts = self.form.split(gradients, self._factory.config.codecs.gradients)
        works = [run.backward(part, adds=False) for run, part in zip(self._runs, parts, strict=True)]
        return self._join(self._run(works, parts[0]))

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Let the servers add the weights' gradients; return the gradients of the input's tensors."""
        batch = self._batch
        assert batch is not None
        batch.backward_begun = self._has_added = True
        parts = self.form.split(gradients, self._factory.config.codecs.gradients)
        first = self._runs[0].microbatch
        no_gradients = [None] * len(serialization.leaves(first.inputs))
        works = [
            run.backward(part, on_accepted=partial(_record_accepted, batch, run.microbatch.key.receipt))
            for run, part in zip(self._runs, parts, strict=True)
        ]
        try:
            input_gradients = self._run(works, parts[0])
        except LeaseRevoked:
            if batch.confirm is None:
                raise
            # While this trainer was silent, servers may have completed the batch. Ask whether it counts.
            self._factory.runtime.run(batch.confirm())
            return no_gradients  # nothing needs them, because batches are armed only if trainers train no layers
        batch.completed += [run.microbatch.key.receipt for run in self._runs]
        return self._join(input_gradients) if first.input_grad else no_gradients

    def _check_current(self) -> None:
        """Refuse a backward once the forward's batch, or an evaluation's weights, are no longer current."""
        is_current = self._batch is self._factory.batch
        if not is_current and not (self._batch is None and self._factory.has_weights_of(self._runs[0].microbatch.key)):
            raise ConfigError(
                "a call of the pipelined module must be backpropagated in the `training_step` that made it, which has "
                "ended. Detach outputs that you keep from one batch to the next."
            )

    def _join(self, gradients: Sequence[serialization.Tree]) -> Sequence[Tensor | None]:
        """Decode and join the input gradients of the microbatches."""
        config = self._factory.config
        parts = [decoded(part, config.codecs.gradients, config.device) for part in gradients]
        return concat_gradients(parts, self._microbatches.sizes)


async def _record_accepted(batch: GrantedBatch, receipt: Receipt) -> None:
    """Record that all stages have accepted a microbatch's backward; arm the batch after the last backward."""
    batch.accepted.append(receipt)
    if batch.arm is not None and len(batch.accepted) == batch.num_microbatches:
        await batch.arm(batch.accepted)


def _stayed_on_servers(what: str) -> Unavailable:
    """Return the placeholder for a value that a block put into a list or dict among its arguments."""
    return Unavailable.because(
        f"values that blocks put into lists and dicts of their arguments stay on the servers: {what}. Use the output "
        "of the last block, or have the first block copy the container before it changes it."
    )
