"""Joins the results of a call's microbatches: the output, and the values that forwards left on modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace as replace_fields
from torch import Tensor

from lightning_swarm.client.pipeline.call_factory import CallFactory, CallMicrobatches, by_stage, to_send
from lightning_swarm.client.pipeline.left_values import Unavailable
from lightning_swarm.client.pipeline.leftovers import Collected, Leftovers
from lightning_swarm.client.pipeline.microbatches import CallArguments, concat, split, split_gradients
from lightning_swarm.client.pipeline.result_check import Forwards, Result
from lightning_swarm.model.fidelity.leftovers import Left
from lightning_swarm.model.fidelity.leftovers import part as split_left
from lightning_swarm.model.fidelity.written_inputs import Given, write_back
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codec, decoded
from lightning_swarm.protocol.messages.calls import ComputeMode

Opened: TypeAlias = tuple[Any, Left]
"""A microbatch's output, decoded, and the values that its forward left."""


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


@dataclass(frozen=True)
class Collector:
    """Joins the results of calls."""

    factory: CallFactory
    leftovers: Leftovers

    def opened(self, result: Result) -> Opened:
        """Return a microbatch's output, and the values that its forward left."""
        config = self.factory.config
        output, left = split_left(decoded(result[0], config.codecs.activations, config.device))
        left.take_output_note()  # there is no next stage
        return output, left

    def join(
        self, results: list[Result], call: CallMicrobatches
    ) -> tuple[OutputForm, Sequence[Tensor], Sequence[bool]]:
        """Join the results of a call's forwards: their form, the tensors, and which of them have a gradient."""
        opened = self.factory.context.results.opened(results, call, self)
        structure, tensors = concat([output for output, _ in opened], call.sizes)
        num_own = len(tensors)
        flags = results[0][1][:num_own]
        collected = self.leftovers.collect([left for _, left in opened], call.sizes, partial(self._trial, call))
        if collected is not None:
            tensors, flags = [*tensors, *collected.tensors.values()], [*flags, *collected.flags()]
        return OutputForm(structure, num_own, call.sizes, collected, self.leftovers), tensors, flags

    def _trial(self, call: CallMicrobatches, training: bool) -> tuple[list[Left], Sequence[int]]:
        """Compute the first two microbatches apart, then as one; return the values that they leave, and their sizes."""
        size = call.sizes[0]
        cut = partial(split, call.arguments, rows=sum(call.sizes), shared=self.factory.config.shared)
        parts = [*cut(size=size)[:2], cut(size=2 * size)[0]]
        mode = replace_fields(call.modes[0], training=training, grad=False, input_grad=False)
        modes = by_stage(mode, [(mode.training, mode.modules) for mode in call.modes])
        results = self.factory.forwards(self.factory.microbatches(None, call.arguments, modes, parts).runs)
        return [self.opened(result)[1] for result in results], call.sizes[:2]

    def evaluate(
        self, probes: Sequence[tuple[CallArguments, int]], mode: ComputeMode, *, forwards: Forwards | None = None
    ) -> list[tuple[serialization.Structure, list[Tensor]]]:
        """Compute probes, as `CallFactory.probes` does, and return their outputs, flattened."""
        results = self.factory.probes(probes, mode, forwards)
        return [serialization.flatten(self.opened(result)[0]) for result in results]


def _not_here(what: str) -> Unavailable:
    """Return the placeholder of a value that a block put into a container of its arguments."""
    return Unavailable.because(
        f"values that blocks put into lists and dicts of their arguments stay on the servers: {what}. Use the output "
        "of the last block, or have the first block copy the container before it changes it."
    )
