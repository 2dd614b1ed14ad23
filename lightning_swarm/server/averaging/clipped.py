"""CenteredClip: a robust mean that no single peer can move far. It differs from the plain mean of one machine.

Source: Karimireddy et al. 2021, arXiv:2012.10333; per part of a butterfly: Gorbunov et al. 2022, arXiv:2106.11257.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.tasks import gather
from lightning_swarm.server.averaging.all_reduce import (
    UNENCODED,
    AveragingResult,
    AveragingState,
    Compute,
    Group,
    fetch_part,
    fetch_reduced,
    message_for_joiners,
    squared_norm,
)
from lightning_swarm.server.averaging.averager import Averager

_NUM_ITERATIONS: Final = 20


def centered_clip(vectors: Sequence[Tensor]) -> Tensor:
    """Return a point ``[n]`` near most of the vectors ``[n]``.

    All vectors have equal weight. Each pulls the point by its distance from the point, clipped to the median of these
    distances. If all vectors are equal, the point equals them.
    """
    stacked = torch.stack([torch.nan_to_num(vector, nan=0.0, posinf=0.0, neginf=0.0) for vector in vectors])
    center = stacked.median(dim=0).values
    # Measured only once, because malicious vectors that move the center would also enlarge a later radius.
    radius = _distances(stacked, center).sort().values[(len(vectors) - 1) // 2]
    for _ in range(_NUM_ITERATIONS):
        distances = _distances(stacked, center)
        shares = torch.where(distances > radius, radius / distances, 1.0)
        center = center + ((stacked - center) * shares.to(center.dtype)[:, None]).mean(dim=0)
    return center


def _distances(stacked: Tensor, center: Tensor) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(stacked - center, dim=1, dtype=torch.float64)
    return distances


@dataclass(frozen=True)
class ClippedAverager(Averager):
    """A butterfly all-reduce in which each reducer clips vectors far from the center of its part.

    A peer sends each part of its mean gradient, followed by the weight of its microbatches. The weights scale the
    result, and exclude peers without microbatches. No peer verifies the weights.
    """

    weight: float  # sum over this peer's microbatches; only ratios matter
    compute: Compute

    @override
    async def average(
        self, vector: Tensor, total_weight: float, group: Group, rank: int, carried: AveragingState
    ) -> AveragingResult:
        bounds, others = group.bounds(len(vector)), group.others(rank)
        weight = vector.new_tensor([self.weight])
        own_mean = await self.compute(lambda: vector / (self.weight or 1.0))
        for i in others:
            group.offer(f"part{i}", await UNENCODED.to_message(torch.cat([own_mean[bounds[i]], weight])), i)
        own_piece = torch.cat([own_mean[bounds[rank]], weight])
        length = len(own_piece) - 1
        pieces = await gather(fetch_part(group, i, f"part{rank}", like=vector, length=length + 1) for i in others)

        def reduce() -> tuple[Tensor, float]:
            weighted = [piece for piece in (*pieces, own_piece) if bool(piece[-1] > 0) and bool(piece[-1].isfinite())]
            if not weighted:
                return vector.new_zeros(length), 0.0
            scale = math.fsum(float(piece[-1]) for piece in weighted) / total_weight
            part = centered_clip([piece[:-1] for piece in weighted]) * scale
            return part, squared_norm(part)

        reduced, norm = await self.compute(reduce)
        group.offer(f"reduced{rank}", message_for_joiners(reduced))
        mean = torch.empty_like(vector)
        mean[bounds[rank]] = reduced
        await fetch_reduced(mean, group, rank)
        return AveragingResult(mean, norm, carried)
