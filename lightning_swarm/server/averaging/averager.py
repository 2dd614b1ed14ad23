"""Ways to average the gradients of a stage: whole, or as products of thin matrices (PowerSGD)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.server.averaging import all_reduce
from lightning_swarm.server.averaging.all_reduce import (
    UNENCODED,
    AveragingResult,
    AveragingState,
    Compute,
    Group,
    PartEncoder,
    squared_norm,
)
from lightning_swarm.server.averaging.powersgd import LowRank


class Averager(ABC):
    """Averages vectors within a group. A single peer sends nothing and loses nothing."""

    @abstractmethod
    async def average(
        self, vector: Tensor, total_weight: float, group: Group, rank: int, carried: AveragingState
    ) -> AveragingResult:
        """Sum all peers' vectors and carried errors, and divide once by the weight; see `all_reduce.average`."""

    async def collect(self, like: Tensor, group: Group) -> tuple[Tensor, AveragingState]:
        """Fetch a round's mean for a peer outside of it, and make the peer's first state; see `all_reduce.collect`."""
        return await all_reduce.collect(like, group), AveragingState()


async def _average_alone(
    vector: Tensor, total_weight: float, group: Group, carried: AveragingState, compute: Compute | None
) -> AveragingResult:
    """Divide the only peer's vector and carried error by the weight, and offer the mean to joiners."""
    corrected = vector if carried.lost is None else torch.add(vector, carried.lost, alpha=total_weight)
    result = await all_reduce.average(corrected, total_weight, group, 0, encoder=PartEncoder(None, compute))
    return result._replace(carried=carried._replace(lost=None))


@dataclass(frozen=True)
class Butterfly(Averager):
    """Averages whole vectors, encoded by a codec or unencoded."""

    encoder: PartEncoder
    error_feedback: bool  # carry the codec's error to the next step

    @override
    async def average(
        self, vector: Tensor, total_weight: float, group: Group, rank: int, carried: AveragingState
    ) -> AveragingResult:
        if len(group.roster) == 1:
            return await _average_alone(vector, total_weight, group, carried, self.encoder.compute)
        lost = torch.zeros_like(vector) if self.error_feedback and carried.lost is None else carried.lost
        return await all_reduce.average(vector, total_weight, group, rank, encoder=self.encoder, carried=lost)

    @override
    async def collect(self, like: Tensor, group: Group) -> tuple[Tensor, AveragingState]:
        encoder = self.encoder if len(group.roster) > 1 else UNENCODED
        return await all_reduce.collect(like, group, encoder=encoder), AveragingState()


# Each peer carries the error of its own gradients, not of their mean. So the error needs no messages, and the death
# of a peer loses only that peer's share.
@dataclass(frozen=True)
class PowerSGD(Averager):
    """Averages thin matrices in two rounds: left, then right (arXiv:1905.13727, algorithm 2)."""

    low_rank: LowRank
    error_feedback: bool  # carry the products' error to the next step
    compute: Compute

    @override
    async def average(
        self, vector: Tensor, total_weight: float, group: Group, rank: int, carried: AveragingState
    ) -> AveragingResult:
        if len(group.roster) == 1:
            return await _average_alone(vector, total_weight, group, carried, self.compute)
        low_rank, left_group, right_group = self.low_rank, *_left_and_right(group)
        former = low_rank.initial_basis(vector) if carried.basis is None else carried.basis

        def project() -> tuple[Tensor, Tensor]:
            corrected = vector if carried.lost is None else torch.add(vector, carried.lost, alpha=total_weight)
            return corrected, low_rank.left(corrected, former)

        corrected, left_sum = await self.compute(project)
        left_mean = (await all_reduce.average(left_sum, total_weight, left_group, rank)).mean

        def project_again() -> tuple[Tensor, Tensor]:
            left = low_rank.orthonormal(left_mean)
            return left, low_rank.right(corrected, left)

        left, right_sum = await self.compute(project_again)
        right_mean = (await all_reduce.average(right_sum, total_weight, right_group, rank)).mean

        def reconstruct() -> AveragingResult:
            mean = low_rank.product(left, right_mean)
            part = mean[group.bounds(len(mean))[rank]]
            lost = low_rank.left_over(corrected, left, right_sum).div_(total_weight) if self.error_feedback else None
            return AveragingResult(mean, squared_norm(part), AveragingState(lost, low_rank.basis(right_mean, former)))

        return await self.compute(reconstruct)

    @override
    async def collect(self, like: Tensor, group: Group) -> tuple[Tensor, AveragingState]:
        if len(group.roster) == 1:
            return await super().collect(like, group)
        low_rank, left_group, right_group = self.low_rank, *_left_and_right(group)
        left_mean = await all_reduce.collect(like.new_empty(low_rank.left_length), left_group)
        right_mean = await all_reduce.collect(like.new_empty(low_rank.right_length), right_group)

        def reconstruct() -> tuple[Tensor, AveragingState]:
            mean = low_rank.product(low_rank.orthonormal(left_mean), right_mean)
            return mean, AveragingState(basis=low_rank.basis(right_mean, low_rank.initial_basis(like)))

        return await self.compute(reconstruct)


def refuse(group: Group, rank: int, reason: str) -> None:
    """Withdraw from a round of any averager, so that other peers neither wait for this peer nor exclude it."""
    for exchange in (group, *_left_and_right(group)):
        all_reduce.refuse(exchange, rank, reason)


def _left_and_right(group: Group) -> tuple[Group, Group]:
    """Return the groups of PowerSGD's two exchanges, left and right."""
    return replace(group, prefix=f"{group.prefix}/left"), replace(group, prefix=f"{group.prefix}/right")
