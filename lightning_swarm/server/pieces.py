"""A stage's state at one version, cut into pieces: all members hold the same bytes, so each may send some of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_swarm import trees
from lightning_swarm.clock import now_s
from lightning_swarm.errors import ProtocolError
from lightning_swarm.server.loading import named
from lightning_swarm.server.snapshots import copied
from lightning_swarm.server.stage import Stage
from lightning_swarm.types.joining import FollowReply, TensorLayout
from lightning_swarm.types.snapshots import Snapshot
from lightning_swarm.types.wire import decode


@dataclass(frozen=True, eq=False)
class Copy:
    """All that a stage is, apart from the stage: records go on changing that.

    Args:
        head: Says what the tensors are.
        tensors: Contiguous, on the CPU.
    """

    head: FollowReply
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, stage: Stage, generation: int) -> Copy:
        """As the stage is now. On the compute thread, so that it falls between two records."""
        message = copied(stage, generation)
        tensors = tuple(tensor.contiguous() for tensor in message.tensors)
        layouts = [TensorLayout(shape=list(one.shape), dtype=_name(one)) for one in tensors]
        return cls(FollowReply(snapshot=decode(message.body, Snapshot), layouts=layouts), tensors)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.head.snapshot.version

    def is_of(self, stage_index: int, version: int) -> bool:
        """Whether it is what somebody asks for."""
        return (self.head.snapshot.stage_index, self.version) == (stage_index, version)

    @property
    def num_bytes(self) -> int:
        """Of all tensors, one after the other."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def piece(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The bytes from `start` to `stop` of all tensors, one after the other. Shared, not copied."""
        return tuple(_overlaps(self.tensors, start, stop))


class Blank:
    """What a snapshot is to become, piece by piece.

    Args:
        head: Of the snapshot.
        stage: That takes it.
        max_bytes: The largest that is allocated.

    Raises:
        ProtocolError: It is no snapshot of the stage, or too large. Nothing was allocated.
    """

    def __init__(self, head: FollowReply, stage: Stage, *, max_bytes: int) -> None:
        own = [(list(one.shape), _name(one)) for one in stage.weights().values()]
        if [(one.shape, one.dtype) for one in head.layouts[: len(head.snapshot.weights)]] != own:
            raise ProtocolError(f"the weights of a snapshot of stage {stage.index} are other tensors than the stage's")
        sizes = [math.prod(one.shape) * _dtype(one).itemsize for one in head.layouts]
        self.num_bytes = sum(sizes)
        if self.num_bytes > max_bytes:
            raise ProtocolError(
                f"a stage's state is at most `Limits.max_message_bytes` = {max_bytes} bytes, got {self.num_bytes}. "
                "Raise it, or cut the model into more stages."
            )
        self.head = head
        self._tensors = [torch.empty(one.shape, dtype=_dtype(one)) for one in head.layouts]

    def fill(self, start: int, parts: Sequence[Tensor], *, at_most: int) -> int:
        """Enter a piece. Returns how many bytes it has.

        Raises:
            ProtocolError: It is no piece that was asked for. Nothing was entered.
        """
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
        """Weights, and the optimizer's state, by their names.

        Raises:
            ProtocolError: The names are not as many as the values, or a bool is none.
        """
        for tensor in self._tensors:
            # torch computes nonsense with a bool that is neither 0 nor 1.
            if tensor.dtype is torch.bool and tensor.numel() and int(_flat(tensor).max()) > 1:
                raise ProtocolError("a bool tensor of a snapshot holds a byte that is neither 0 nor 1")
        snapshot, count = self.head.snapshot, len(self.head.snapshot.weights)
        state = trees.unflatten(snapshot.structure, self._tensors[count:])
        return named(snapshot.weights, self._tensors[:count]), named(snapshot.optimizer, state)


class Throttle:
    """Bytes a second, on the average; who comes first is served first.

    Args:
        bytes_per_s: At most.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when all that was promised is through

    async def take(self, num_bytes: int) -> None:
        """Wait until they may be sent."""
        at_s = now_s()
        wait_s = max(self._free_s - at_s, 0.0)
        self.charge(num_bytes)
        if wait_s:
            await asyncio.sleep(wait_s)

    def charge(self, num_bytes: int) -> None:
        """They are sent at once, whatever was promised to others: those wait for longer."""
        at_s = now_s()
        self._free_s = max(self._free_s, at_s) + num_bytes / self._bytes_per_s


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
