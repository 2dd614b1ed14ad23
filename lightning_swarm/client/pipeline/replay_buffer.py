"""What a trainer keeps of the microbatches of the open step, so that any of them can be computed again.

Servers die with what they added. Until the step is decided, a microbatch can be sent again from its copy, by nobody but
the swarm's loop: no code of the user runs, and the main thread may wait for the record meanwhile.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import torch
from torch import Tensor

from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import CallKey, ComputeMode


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What a trainer sends through the stages.

    Args:
        key: Names it.
        num_rows: Its size along dimension 0.
        inputs: Positional inputs of the first stage, as they travel.
        extras: For each stage, the keyword arguments that it takes.
        mode: The trainer's mode.
        weight: Of its batch.
        first_trained: The stages before this one train nothing, and get no gradient unless the input wants one.
    """

    key: CallKey
    num_rows: int
    inputs: tuple[Any, ...]
    extras: Sequence[dict[str, Any]]
    mode: ComputeMode
    weight: float
    first_trained: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplayCopy:
    """A microbatch that went forward and backward.

    Args:
        microbatch: As it was sent.
        gradients: For each tensor of the last stage's output its gradient or None, as they travel.
        route: Who computed it, stage by stage. They may hold its activations still.
    """

    microbatch: Microbatch
    gradients: serialization.Tree
    route: Sequence[PeerId]


@dataclass(frozen=True)
class _SpilledCopy:
    """A copy whose tensors are in the file."""

    hull: ReplayCopy  # without its tensors
    structure: serialization.Structure
    places: Sequence[tuple[int, torch.dtype, torch.Size]]  # where each begins


class ReplayBuffer:
    """Copies by their keys: in memory up to a budget, beyond it in a file that nobody else can open.

    Args:
        max_bytes: Of tensors in memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[CallKey, ReplayCopy] = {}
        self._spilled: dict[CallKey, _SpilledCopy] = {}
        self._file: IO[bytes] | None = None
        self._using_file = asyncio.Lock()
        self._decided = -1  # the newest step that is, as far as this trainer knows
        self.used_bytes = 0
        self.num_spilled = 0

    def __len__(self) -> int:
        return len(self._kept) + len(self._spilled)

    def __contains__(self, key: CallKey) -> bool:
        return key in self._kept or key in self._spilled

    async def keep(self, copy: ReplayCopy) -> None:
        """Keep a copy until its step is decided; the newer one where there is one of its key already."""
        key = copy.microbatch.key
        if key.step <= self._decided:
            return  # without it: its batch was struck, or its servers completed it
        self._forget(key)
        num_bytes = _num_bytes(copy)
        if self.used_bytes + num_bytes <= self._max_bytes:
            self._kept[key] = copy
            self.used_bytes += num_bytes
            return
        self.num_spilled += 1
        async with self._using_file:
            self._spilled[key] = await asyncio.to_thread(self._write, copy)

    async def find(self, key: CallKey) -> ReplayCopy | None:
        """A copy, if it is kept here."""
        if (copy := self._kept.get(key)) is not None:
            return copy
        async with self._using_file:
            spilled = self._spilled.get(key)
            return None if spilled is None else await asyncio.to_thread(self._read, spilled)

    async def release(self, step: int) -> None:
        """Forget the copies of `step` and of all before it: they are decided."""
        self._decided = max(self._decided, step)
        for key in [key for key in (*self._kept, *self._spilled) if key.step <= step]:
            self._forget(key)
        await self._shrink()

    async def clear(self) -> None:
        """Forget all: what is open will not be decided, and steps that were will be open again."""
        self._decided = -1
        for key in (*self._kept, *self._spilled):
            self._forget(key)
        await self._shrink()

    def close(self) -> None:
        """Give the file back."""
        self._kept.clear()
        self._spilled.clear()
        self.used_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _forget(self, key: CallKey) -> None:
        if (copy := self._kept.pop(key, None)) is not None:
            self.used_bytes -= _num_bytes(copy)
        self._spilled.pop(key, None)

    async def _shrink(self) -> None:
        """Steps are released whole, so the file is empty again and again."""
        async with self._using_file:
            if self._file is not None and not self._spilled:
                self._file.truncate(0)

    def _write(self, copy: ReplayCopy) -> _SpilledCopy:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lightning_swarm-")  # noqa: SIM115 - closed by `close`
        structure, tensors = serialization.flatten(_tensors_of(copy))
        at = self._file.seek(0, 2)
        places = []
        for tensor in tensors:
            places.append((at, tensor.dtype, tensor.shape))
            at += self._file.write(_bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous()))
        microbatch = replace(copy.microbatch, inputs=(), extras=())
        return _SpilledCopy(replace(copy, microbatch=microbatch, gradients=()), structure, places)

    def _read(self, spilled: _SpilledCopy) -> ReplayCopy:
        assert self._file is not None
        tensors = []
        for at, dtype, shape in spilled.places:
            tensor = torch.empty(shape, dtype=dtype)
            self._file.seek(at)
            self._file.readinto(_bytes_of(tensor))  # type: ignore[attr-defined]  # binary files have it
            tensors.append(tensor)
        inputs, extras, gradients = serialization.unflatten(spilled.structure, tensors)
        microbatch = replace(spilled.hull.microbatch, inputs=inputs, extras=extras)
        return replace(spilled.hull, microbatch=microbatch, gradients=gradients)


def _tensors_of(copy: ReplayCopy) -> tuple[Any, ...]:
    return copy.microbatch.inputs, list(copy.microbatch.extras), copy.gradients


def _num_bytes(copy: ReplayCopy) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in serialization.flatten(_tensors_of(copy))[1])


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
