"""Copies of undecided steps' microbatches, for replays when a server dies with the gradients that it had added."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from lightning_swarm.model.tensor_file import TensorFile, TensorPlace
from lightning_swarm.network import PeerId
from lightning_swarm.network.tensors import TensorSpec, spec_of
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import CallKey, ComputeMode, Direction, Receipt

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A microbatch as the trainer sends it through the stages."""

    key: CallKey
    num_rows: int
    inputs: tuple[Any, ...]  # positional inputs of the first stage, in wire form
    extras: Sequence[dict[str, Any]]  # keyword arguments of each stage
    modes: Sequence[ComputeMode]  # one per stage; they differ only in the modes and attributes of the stage's modules
    weight: float  # weight of its batch
    first_trained: int = 0  # the first stage that trains; earlier stages only pass the gradient on to the input

    @property
    def input_grad(self) -> bool:
        """True if the pipeline's input requires a gradient."""
        return self.modes[0].input_grad

    def own_input(self, stage: int) -> serialization.Tree:
        """Return the input that the trainer itself sends to a stage: extras, and for stage 0 the positional inputs."""
        return (None if stage else self.inputs, self.extras[stage])

    @cached_property
    def sent(self) -> Sequence[tuple[serialization.Structure, list[Tensor]]]:
        """Each stage's `own_input`, flattened once for all forwards that send it."""
        return [serialization.flatten(self.own_input(stage)) for stage in range(len(self.extras))]

    @cached_property
    def shape_hashes(self) -> Sequence[int]:
        """For each stage, a hash of shapes, dtypes and modes: if it is new, the stage's code may be compiled again."""
        inputs = _specs(self.inputs)  # the inputs of later stages follow from the first stage's
        return [
            hash((mode.training, mode.grad, mode.autocast, inputs + _specs(extras)))
            for mode, extras in zip(self.modes, self.extras, strict=True)
        ]


def _specs(tree: serialization.Tree) -> tuple[TensorSpec, ...]:
    leaves = serialization.leaves(tree)
    return tuple(leaf.spec if isinstance(leaf, serialization.Encoded) else spec_of(leaf) for leaf in leaves)


class ResultEvidence(NamedTuple):
    """A server, and the digest of a result that only this trainer received from it. Audits read it."""

    server: PeerId
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class ReplayCopy:
    """A microbatch whose backward is complete, kept for replays."""

    microbatch: Microbatch
    gradients: serialization.Tree  # one or None for each tensor of the last stage's output, in wire form
    route: Sequence[PeerId]  # peers that computed each stage; they may still hold its activations
    # For the pipeline's output, and the gradient of its input if the trainer requested it; see `ResultCheck`.
    evidence: Mapping[Direction, ResultEvidence] = field(default_factory=dict)
    replaced: Collection[tuple[int, PeerId]] = ()  # (stage, peer) that failed and was replaced


@dataclass(frozen=True)
class _SpilledCopy:
    """A copy whose tensors are in the temporary file."""

    without_tensors: ReplayCopy
    structure: serialization.Structure  # tree of (inputs, extras, gradients)
    places: Sequence[TensorPlace]


class ReplayBuffer:
    """Keeps copies by key: up to `max_bytes` of tensors in memory, the rest in a private temporary file."""

    # The event loop replays a microbatch from its copy, without running user code. One buffer serves all generations of
    # a run: a thread may still write to its file when a generation ends, and `clear` waits for it.
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_memory: dict[CallKey, tuple[ReplayCopy, int]] = {}  # key -> (copy, bytes of its tensors)
        self._spilled: dict[CallKey, _SpilledCopy] = {}
        # (evidence of results, replaced servers) of each microbatch, kept even if its copy is lost.
        self._notes: dict[CallKey, tuple[Mapping[Direction, ResultEvidence], Collection[tuple[int, PeerId]]]] = {}
        self._file = TensorFile()
        self._file_lock = asyncio.Lock()
        self._decided = -1  # the newest decided step, as far as this trainer knows
        self.used_bytes = 0  # bytes of tensors in memory
        self.num_spilled = 0  # copies that did not fit into memory, so far

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._spilled)

    def __contains__(self, key: CallKey) -> bool:
        return key in self._in_memory or key in self._spilled

    async def keep(self, copy: ReplayCopy) -> None:
        """Keep a copy until its step is decided. It replaces an older copy of the same key."""
        key = copy.microbatch.key
        if key.step <= self._decided:
            return  # decided without this trainer: its batch was struck, or servers completed it
        self._forget(key)
        if copy.evidence or copy.replaced:
            self._notes[key] = copy.evidence, copy.replaced
        microbatch = copy.microbatch
        structure, tensors = serialization.flatten((microbatch.inputs, list(microbatch.extras), copy.gradients))
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self.used_bytes + num_bytes <= self._max_bytes:
            self._in_memory[key] = copy, num_bytes
            self.used_bytes += num_bytes
            return
        self.num_spilled += 1
        without_tensors = replace(copy, microbatch=replace(microbatch, inputs=(), extras=()), gradients=())
        async with self._file_lock:
            try:
                places = await asyncio.to_thread(self._file.write, tensors)
            except OSError as error:
                self._abandon_file(error)
            else:
                self._spilled[key] = _SpilledCopy(without_tensors, structure, places)

    async def find(self, key: CallKey) -> ReplayCopy | None:
        """Return the copy of a microbatch; None if there is none."""
        if key in self._in_memory:
            return self._in_memory[key][0]
        async with self._file_lock:
            spilled = self._spilled.get(key)
            return None if spilled is None else await asyncio.to_thread(self._read, spilled)

    def result_digests(self, generation: int, step: int) -> dict[tuple[PeerId, Direction], dict[Receipt, bytes]]:
        """Return the digests of a step's results, by server and direction, even if the copies are lost."""
        digests: defaultdict[tuple[PeerId, Direction], dict[Receipt, bytes]] = defaultdict(dict)
        for key, (evidence, _) in self._notes.items():
            if (key.generation, key.step) == (generation, step):
                for direction, result in evidence.items():
                    digests[result.server, direction][key.receipt] = result.digest
        return digests

    def replaced(self, generation: int, step: int) -> dict[tuple[int, PeerId], set[Receipt]]:
        """Return the microbatches of a step in which peers failed and were replaced, by stage and peer."""
        receipts: defaultdict[tuple[int, PeerId], set[Receipt]] = defaultdict(set)
        for key, (_, replaced) in self._notes.items():
            if (key.generation, key.step) == (generation, step):
                for stage_and_peer in replaced:
                    receipts[stage_and_peer].add(key.receipt)
        return receipts

    async def release(self, step: int) -> None:
        """Drop the copies of `step` and all earlier steps, because they are decided."""
        self._decided = max(self._decided, step)
        for key in [key for key in (*self._in_memory, *self._spilled, *self._notes) if key.step <= step]:
            self._forget(key)
        await self._clear_unused_file()

    async def clear(self) -> None:
        """Drop all copies, because the run rolled back or is void; accept copies of any step again."""
        self._decided = -1
        for key in (*self._in_memory, *self._spilled, *self._notes):
            self._forget(key)
        await self._clear_unused_file()

    def close(self) -> None:
        """Drop all copies and close the file."""
        self._in_memory.clear()
        self._spilled.clear()
        self._notes.clear()
        self.used_bytes = 0
        self._file.close()

    def _forget(self, key: CallKey) -> None:
        _, num_bytes = self._in_memory.pop(key, (None, 0))
        self.used_bytes -= num_bytes
        self._spilled.pop(key, None)
        self._notes.pop(key, None)

    async def _clear_unused_file(self) -> None:
        """Empty the file if it holds no copy any more, as usual when a step is released."""
        async with self._file_lock:
            if not self._spilled:
                self._file.clear()

    def _abandon_file(self, error: OSError) -> None:
        """Drop the copies in the file, which cannot be written. Batches that would need them run again."""
        _log.warning(
            "Copies of microbatches cannot be written to %s: %s. If a server dies, their batches run again. Free space "
            "there, or raise `Limits.cache_bytes`.",
            tempfile.gettempdir(),
            error,
        )
        self._spilled.clear()
        self._file.close()

    def _read(self, spilled: _SpilledCopy) -> ReplayCopy:
        tensors = self._file.read(spilled.places)
        inputs, extras, gradients = serialization.unflatten(spilled.structure, tensors)
        microbatch = replace(spilled.without_tensors.microbatch, inputs=inputs, extras=extras)
        return replace(spilled.without_tensors, microbatch=microbatch, gradients=gradients)
