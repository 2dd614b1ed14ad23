"""Copies of the open step's microbatches: a server that dies takes with it the gradients that it added."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lightning_swarm.model.tensor_file import TensorFile, TensorPlace
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import CallKey, ComputeMode, Direction, Receipt

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A microbatch as the trainer sends it through the stages."""

    key: CallKey
    num_rows: int
    inputs: tuple[Any, ...]  # positional inputs of the first stage, as they travel
    extras: Sequence[dict[str, Any]]  # for each stage, the keyword arguments that it takes
    modes: Sequence[ComputeMode]  # for each stage, with the modes of its modules; in all else they are alike
    weight: float  # of its batch
    first_trained: int = 0  # stages before this one train nothing, and get no gradient unless the input wants one

    @property
    def input_grad(self) -> bool:
        """True if the pipeline's own input wants a gradient."""
        return self.modes[0].input_grad


class GivenResult(NamedTuple):
    """What a server gave the trainer: who it was, and the digest of what came."""

    server: PeerId
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class ReplayCopy:
    """A microbatch that went forward and backward."""

    microbatch: Microbatch
    gradients: serialization.Tree  # for each tensor of the last stage's output its gradient or None, as they travel
    route: Sequence[PeerId]  # the peers that computed it, stage by stage: they may hold its activations still
    # In audited runs, what came out of the pipeline, and out of its backward if the trainer asked for that.
    given: Mapping[Direction, GivenResult] = field(default_factory=dict)
    replaced: Collection[tuple[int, PeerId]] = ()  # peers that failed before others took their places, with the stages


@dataclass(frozen=True)
class _SpilledCopy:
    """A copy whose tensors are in the file."""

    without_tensors: ReplayCopy
    structure: serialization.Structure
    places: Sequence[TensorPlace]


class ReplayBuffer:
    """Keeps copies by their keys: up to `max_bytes` of tensors in memory, the rest in a file that nobody else opens."""

    # Until the step is decided, the swarm's loop can send a microbatch again from its copy: no code of the user runs
    # for that. This outlives run generations, because a thread may be writing to its file; `clear` waits for that.
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_memory: dict[CallKey, tuple[ReplayCopy, int]] = {}  # with the bytes of their tensors
        self._spilled: dict[CallKey, _SpilledCopy] = {}
        # For audits, whatever becomes of the copy: what servers gave, and which of them failed.
        self._given: dict[CallKey, tuple[Mapping[Direction, GivenResult], Collection[tuple[int, PeerId]]]] = {}
        self._file = TensorFile()
        self._using_file = asyncio.Lock()
        self._decided = -1  # the newest decided step, as far as this trainer knows
        self.used_bytes = 0
        self.num_spilled = 0

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._spilled)

    def __contains__(self, key: CallKey) -> bool:
        return key in self._in_memory or key in self._spilled

    async def keep(self, copy: ReplayCopy) -> None:
        """Keep a copy until its step is decided, in place of an older one of its key."""
        key = copy.microbatch.key
        if key.step <= self._decided:
            return  # decided without this trainer: its batch was struck, or servers completed it
        self._forget(key)
        if copy.given or copy.replaced:
            self._given[key] = copy.given, copy.replaced
        microbatch = copy.microbatch
        structure, tensors = serialization.flatten((microbatch.inputs, list(microbatch.extras), copy.gradients))
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self.used_bytes + num_bytes <= self._max_bytes:
            self._in_memory[key] = copy, num_bytes
            self.used_bytes += num_bytes
            return
        self.num_spilled += 1
        without_tensors = replace(copy, microbatch=replace(microbatch, inputs=(), extras=()), gradients=())
        async with self._using_file:
            try:
                places = await asyncio.to_thread(self._file.write, tensors)
            except OSError as error:
                self._abandon_file(error)
            else:
                self._spilled[key] = _SpilledCopy(without_tensors, structure, places)

    async def find(self, key: CallKey) -> ReplayCopy | None:
        """Return a copy, if it is kept here."""
        if key in self._in_memory:
            return self._in_memory[key][0]
        async with self._using_file:
            spilled = self._spilled.get(key)
            return None if spilled is None else await asyncio.to_thread(self._read, spilled)

    def given(self, generation: int, step: int) -> dict[tuple[PeerId, Direction], dict[Receipt, bytes]]:
        """Return the digests of what servers gave in a step, whether the copies are there or lost."""
        found: defaultdict[tuple[PeerId, Direction], dict[Receipt, bytes]] = defaultdict(dict)
        for key, (given, _) in self._given.items():
            if (key.generation, key.step) == (generation, step):
                for direction, one in given.items():
                    found[one.server, direction][key.receipt] = one.digest
        return found

    def replaced(self, generation: int, step: int) -> dict[tuple[int, PeerId], set[Receipt]]:
        """Return which microbatches of a step peers failed in, and others took their places, by stage and peer."""
        found: defaultdict[tuple[int, PeerId], set[Receipt]] = defaultdict(set)
        for key, (_, replaced) in self._given.items():
            if (key.generation, key.step) == (generation, step):
                for place in replaced:
                    found[place].add(key.receipt)
        return found

    async def release(self, step: int) -> None:
        """Forget the copies of `step` and of all steps before it, which are decided."""
        self._decided = max(self._decided, step)
        for key in [key for key in (*self._in_memory, *self._spilled, *self._given) if key.step <= step]:
            self._forget(key)
        await self._shrink()

    async def clear(self) -> None:
        """Forget all copies, and begin again with any step: the run rolled back, or is void."""
        self._decided = -1
        for key in (*self._in_memory, *self._spilled, *self._given):
            self._forget(key)
        await self._shrink()

    def close(self) -> None:
        """Close the file."""
        self._in_memory.clear()
        self._spilled.clear()
        self._given.clear()
        self.used_bytes = 0
        self._file.close()

    def _forget(self, key: CallKey) -> None:
        _, num_bytes = self._in_memory.pop(key, (None, 0))
        self.used_bytes -= num_bytes
        self._spilled.pop(key, None)
        self._given.pop(key, None)

    async def _shrink(self) -> None:
        """Empty the file when no copy is in it, which happens often: steps are released whole."""
        async with self._using_file:
            if not self._spilled:
                self._file.clear()

    def _abandon_file(self, error: OSError) -> None:
        """Go on without the copies in a file that cannot be written to: batches that need one run again."""
        _log.warning(
            "No room for copies of microbatches in %s: %s. If a server dies, their batches run again. Make room there, "
            "or raise `Limits.cache_bytes`.",
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
