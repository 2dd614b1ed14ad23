"""CenteredClip: a robust mean that no peer can move far. It differs from the mean that one machine computes.

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
    AS_THEY_ARE,
    AveragingResult,
    AveragingState,
    Compute,
    Group,
    for_joiners,
    squared_norm,
    take_reduced,
    taken,
)
from lightning_swarm.server.averaging.averager import Averager

_NUM_ITERATIONS: Final = 20


def centered_clip(vectors: Sequence[Tensor]) -> Tensor:
    """Return a point ``[n]`` near most of the vectors ``[n]``.

    All vectors have equal weight. Each pulls the point by its distance from the point, but at most by the median of
    these distances. If all vectors are equal, the point is equal to them.
    """
    stacked = torch.stack([torch.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0) for one in vectors])
    center = stacked.median(dim=0).values
    # Measured once: malicious vectors that move the center would also enlarge the radius.
    radius = _distances(stacked, center).sort().values[(len(vectors) - 1) // 2]
    for _ in range(_NUM_ITERATIONS):
        distances = _distances(stacked, center)
        shares = torch.where(distances > radius, radius / distances, 1.0)
        center = center + ((stacked - center) * shares.to(center.dtype)[:, None]).mean(dim=0)
    return center


def _distances(stacked: Tensor, center: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(stacked - center, dim=1, dtype=torch.float64)
    return found


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
        own = await self.compute(lambda: vector / (self.weight or 1.0))
        for i in others:
            group.offer(f"part{i}", await AS_THEY_ARE.to_message(torch.cat([own[bounds[i]], weight])), i)
        mine = torch.cat([own[bounds[rank]], weight])
        length = len(mine) - 1
        pieces = await gather(taken(group, i, f"part{rank}", like=vector, length=length + 1) for i in others)

        def reduce() -> tuple[Tensor, float]:
            held = [piece for piece in (*pieces, mine) if bool(piece[-1] > 0) and bool(piece[-1].isfinite())]
            if not held:
                return vector.new_zeros(length), 0.0
            scale = math.fsum(float(piece[-1]) for piece in held) / total_weight
            part = centered_clip([piece[:-1] for piece in held]) * scale
            return part, squared_norm(part)

        reduced, norm = await self.compute(reduce)
        group.offer(f"reduced{rank}", for_joiners(reduced))
        mean = torch.empty_like(vector)
        mean[bounds[rank]] = reduced
        await take_reduced(mean, group, rank)
        return AveragingResult(mean, norm, carried)
