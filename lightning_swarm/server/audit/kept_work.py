"""A server's work on microbatches, kept until their step is decided, and the digests by which it claims its work."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from tempfile import gettempdir

from torch import Tensor

from lightning_swarm.model.fingerprint import digest, tree_digest
from lightning_swarm.model.tensor_file import TensorFile, TensorPlace
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.audits import StageSketch
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.server.audit.sketch import project
from lightning_swarm.server.averaging import deterministic
from lightning_swarm.server.compute import ForwardCall, ForwardResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptWork:
    """A microbatch as a server computed it: the data to recompute it, and digests of its inputs and results."""

    call: ForwardCall
    gradients: serialization.Tree  # gradients of the outputs, as received
    claim: bytes  # see `CLAIM_BYTES`

    @classmethod
    def of(
        cls,
        call: ForwardCall,
        output_digest: bytes,
        gradients: serialization.Tree,
        input_gradients: serialization.Tree,
        *,
        is_first: bool,  # the stage's input is the pipeline's input
    ) -> KeptWork:
        """Return the kept work of a finished forward and backward."""
        parts = [
            tree_digest(call.inputs if is_first else call.inputs[0], call.wants_grad),
            output_digest,
            tree_digest(gradients),
            tree_digest(input_gradients),
        ]
        return cls(call, gradients, b"".join(parts))


@dataclass(frozen=True)
class _SpilledWork:
    """Kept work whose tensors were moved to a file."""

    without_tensors: KeptWork  # inputs, extras and gradients are empty
    structure: serialization.Structure
    places: Sequence[TensorPlace]  # positions in the file of the tensors of `structure`


class KeptWorks:
    """Keeps the work of one stage in one step: up to `max_bytes` of tensors in memory, the rest in a file."""

    # The compute thread adds work, and other threads read it.
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._works: dict[Receipt, KeptWork | _SpilledWork] = {}
        self._file = TensorFile()
        self.used_bytes = 0  # bytes in memory

    def __contains__(self, receipt: Receipt) -> bool:
        return receipt in self._works

    def keep(self, receipt: Receipt, work: KeptWork) -> None:
        """Keep the work on a microbatch."""
        structure, tensors = serialization.flatten((work.call.inputs, work.call.extras, work.gradients))
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self.used_bytes + num_bytes > self._max_bytes:
            try:
                places = self._file.write(tensors)
            except OSError as error:
                # Keep all further work in memory, because a server that cannot send its work is excluded from the step.
                self._max_bytes = sys.maxsize
                _log.warning(
                    "No room in %s for work that audits may request. It stays in memory: %s", gettempdir(), error
                )
            else:
                call = replace(work.call, inputs=(), extras={})
                self._works[receipt] = _SpilledWork(KeptWork(call, (), work.claim), structure, places)
                return
        self.used_bytes += num_bytes
        self._works[receipt] = work

    def claim(self, receipt: Receipt) -> bytes:
        """Return the digests that this server claims for a microbatch."""
        work = self._works[receipt]
        return work.claim if isinstance(work, KeptWork) else work.without_tensors.claim

    def get(self, receipt: Receipt) -> KeptWork:
        """Return the work on a microbatch."""
        work = self._works[receipt]
        if isinstance(work, KeptWork):
            return work
        tensors = self._file.read(work.places)
        inputs, extras, gradients = serialization.unflatten(work.structure, tensors)
        kept = work.without_tensors
        return KeptWork(replace(kept.call, inputs=inputs, extras=extras), gradients, kept.claim)


def output_digest(result: ForwardResult) -> bytes:
    """Return the digest of a forward's output, as the next stage receives it."""
    return tree_digest(result.output, result.requires_grad)


def sum_digest(values: Tensor) -> bytes:
    """Return the BLAKE3 digest of a gradient sum, in floats or in fixed point."""
    return digest([values], b"sum;")


def sketch_of(stage_index: int, values: Tensor, seed: int, *, exact: bool) -> StageSketch:
    """Sketch a gradient sum, in floats or in fixed point."""
    if not exact:
        return StageSketch(stage_index=stage_index, values=project(values, seed).tolist())
    sketch = project(deterministic.quotient(values[:, :-1], 1.0), seed)
    if not deterministic.is_whole(values[:, -1]):  # a gradient did not fit, so the sum is incomplete
        sketch.fill_(math.nan)
    return StageSketch(stage_index=stage_index, values=sketch.tolist())
