"""The form of a call's output, by which its tensors and their gradients are cut and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_swarm.client.pipeline.left_values import Unavailable
from lightning_swarm.client.pipeline.leftovers import Collected, Leftovers
from lightning_swarm.client.pipeline.microbatches import split_gradients
from lightning_swarm.model.fidelity.written_inputs import Given, write_back
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codec, to_send


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


def _not_here(what: str) -> Unavailable:
    """Return the placeholder of a value that a block put into a container of its arguments."""
    return Unavailable.because(
        f"values that blocks put into lists and dicts of their arguments stay on the servers: {what}. Use the output "
        "of the last block, or have the first block copy the container before it changes it."
    )
