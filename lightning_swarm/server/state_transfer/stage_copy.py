"""A stage's state as it travels to a joiner: copied at the donor, read in pieces, filled in at the joiner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.membership import FollowReply, TensorLayout
from lightning_swarm.protocol.messages.state import Snapshot
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.serialization import named
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.snapshots import copied


@dataclass(frozen=True, eq=False)
class StageCopy:
    """A copy of a stage's whole state, which records no longer change."""

    head: FollowReply  # says what the tensors are
    tensors: tuple[Tensor, ...]  # contiguous, on the CPU

    @classmethod
    def of(cls, stage: Stage, generation: int) -> StageCopy:
        """Copy a stage as it is now. On the compute thread, so that the copy falls between two records."""
        message = copied(stage, generation)
        tensors = tuple(tensor.contiguous() for tensor in message.tensors)
        layouts = [TensorLayout(shape=list(tensor.shape), dtype=_name(tensor)) for tensor in tensors]
        return cls(FollowReply(snapshot=decode(message.body, Snapshot), layouts=layouts), tensors)

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.head.snapshot.version

    def is_of(self, stage_index: int, version: int) -> bool:
        """Tell whether this is the copy of that stage at that version."""
        return (self.head.snapshot.stage_index, self.version) == (stage_index, version)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def piece(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The bytes from `start` to `stop` of all tensors, one after the other; shared memory, not copies."""
        return tuple(_overlaps(self.tensors, start, stop))


class IncomingSnapshot:
    """A snapshot that is filled in piece by piece.

    One that is none of `stage`, or larger than `max_bytes`, raises a `ProtocolError`, before anything is allocated.
    """

    def __init__(self, head: FollowReply, stage: Stage, *, max_bytes: int) -> None:
        own = [(list(tensor.shape), _name(tensor)) for tensor in stage.weights().values()]
        if [(layout.shape, layout.dtype) for layout in head.layouts[: len(head.snapshot.weights)]] != own:
            raise ProtocolError(f"the weights of a snapshot of stage {stage.index} are other tensors than the stage's")
        sizes = [math.prod(layout.shape) * _dtype(layout).itemsize for layout in head.layouts]
        self.num_bytes = sum(sizes)
        if self.num_bytes > max_bytes:
            raise ProtocolError(
                f"a stage's state is at most `Limits.max_message_bytes` = {max_bytes} bytes, got {self.num_bytes}. "
                "Raise it, or cut the model into more stages."
            )
        self.head = head
        self._tensors = [torch.empty(layout.shape, dtype=_dtype(layout)) for layout in head.layouts]

    def fill(self, start: int, parts: Sequence[Tensor], *, at_most: int) -> int:
        """Enter a piece; returns its bytes. One that was not asked for raises a `ProtocolError` and changes nothing."""
        num_bytes = sum(part.numel() for part in parts)
        if not 0 < num_bytes <= at_most or any(part.dtype != torch.uint8 or part.ndim != 1 for part in parts):
            raise ProtocolError(f"a piece has 1 to {at_most} bytes, got {num_bytes} elements in {len(parts)} tensors")
        places = list(_overlaps(self._tensors, start, start + num_bytes))
        if [place.numel() for place in places] != [part.numel() for part in parts]:
            raise ProtocolError(f"a piece from byte {start} on is cut where tensors end; this one is cut otherwise")
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)
        return num_bytes

    def values(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The weights and the optimizer's state by their names; a `ProtocolError` if they cannot be a stage's."""
        for tensor in self._tensors:
            # torch computes nonsense with a bool that is neither 0 nor 1.
            if tensor.dtype is torch.bool and tensor.numel() and int(_flat(tensor).max()) > 1:
                raise ProtocolError("a bool tensor of a snapshot holds a byte that is neither 0 nor 1")
        snapshot, count = self.head.snapshot, len(self.head.snapshot.weights)
        state = serialization.unflatten(snapshot.structure, self._tensors[count:])
        return named(snapshot.weights, self._tensors[:count]), named(snapshot.optimizer, state)


def _overlaps(tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """The bytes from `start` to `stop` of all tensors, one after the other."""
    first = 0
    for tensor in tensors:
        end = first + tensor.nbytes
        if first < stop and start < end:
            yield _flat(tensor)[max(start - first, 0) : min(stop, end) - first]
        first = end


def _flat(tensor: Tensor) -> Tensor:
    # Not `reshape`: a single row of a column is contiguous and keeps the column's stride, which no byte view allows.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(layout: TensorLayout) -> torch.dtype:
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex != layout.dtype.startswith("complex"):
        raise ProtocolError(f"a tensor of a snapshot has a dtype of torch's, got {layout.dtype!r}")
    return dtype
