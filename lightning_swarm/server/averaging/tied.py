"""Sums the gradients of tied parameters over the stages that hold them, at the end of a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch
from torch import Tensor

from lightning_swarm.core.tasks import gather
from lightning_swarm.protocol.compression import to_message
from lightning_swarm.protocol.tied_tensors import TiedTensors
from lightning_swarm.server.averaging.all_reduce import (
    AveragingResult,
    Compute,
    Group,
    add_up,
    fetch_part,
    squared_norm,
)

_SHARE: Final = "tied"
_PATIENCE: Final = 2.0  # factor of the timeout, because the other stage may still be in its own two exchanges

Shares: TypeAlias = dict[int, dict[str, Tensor]]  # stage -> tied parameter -> gradient


@dataclass(frozen=True, eq=False)
class TiedMeans:
    """Sums the means of tied parameters in one round: each stage offers its share, and fetches the other stages'."""

    ties: TiedTensors
    trained: Collection[str]  # names of the parameters that train in the step
    group: Callable[[int], Group]  # stage -> the peers that average it
    compute: Compute
    exact: bool = False  # sums are in fixed point, so the first server of a roster computes the whole norm

    async def averaged(
        self, results: Mapping[int, AveragingResult], ranks: Mapping[int, int]
    ) -> dict[int, AveragingResult]:
        """Add other stages' shares to a server's means; `ranks` has the server's index in each stage's roster."""
        own_shares = self._shares({index: result.mean for index, result in results.items()})
        for index, share in own_shares.items():
            group = self.group(index)
            group.offer(_SHARE, to_message(torch.cat(list(share.values()))))
        shares = await self._fetch_others(own_shares, min(ranks.values()))

        def add_shares() -> dict[int, AveragingResult]:
            summed = dict(results)
            for index in own_shares:
                mean = self._with_shares(index, results[index].mean, shares)
                norm = self._squared_norm(index, mean, ranks[index])
                summed[index] = results[index]._replace(mean=mean, squared_norm=norm)
            return summed

        return await self.compute(add_shares)

    async def collected(self, index: int, mean: Tensor, replica: int) -> Tensor:
        """Add the other stages' shares, fetched from one replica of each, to a mean for a peer outside of the round."""
        own_shares = self._shares({index: mean})
        if not own_shares:
            return mean
        shares = await self._fetch_others(own_shares, replica)
        return await self.compute(lambda: self._with_shares(index, mean, shares))

    def refuse(self, indices: Collection[int], reason: str) -> None:
        """Withhold the shares of these stages, unless they are offered already."""
        for index in indices:
            self.group(index).withhold([_SHARE], reason)

    def _shares(self, means: Mapping[int, Tensor]) -> Shares:
        """Return the parts of these stages' means that belong to tied parameters, without stages that have none."""
        slices = {index: self.ties.slices(index, self.trained) for index in means}
        return {
            index: {name: means[index][part] for name, part in parts.items()}
            for index, parts in slices.items()
            if parts
        }

    async def _fetch_others(self, own_shares: Shares, replica: int) -> Shares:
        """Return the shares of all stages that are tied to these, in the order of the stages.

        All replicas of a stage have the same mean, so only one is asked: number `replica`, modulo their number. Raises
        `AveragingFailed` if its share does not come. All servers add in the same order, so they have the same bits.
        """
        partners = {partner for index in own_shares for partner in self.ties.partners(index, self.trained)}
        others = sorted(partners - own_shares.keys())
        like = next((tensor for share in own_shares.values() for tensor in share.values()), torch.empty(0))
        fetched = await gather(self._fetch_share(index, replica, like) for index in others)
        return dict(sorted({**own_shares, **dict(zip(others, fetched, strict=True))}.items()))

    async def _fetch_share(self, index: int, replica: int, like: Tensor) -> dict[str, Tensor]:
        sizes = {name: part.stop - part.start for name, part in self.ties.slices(index, self.trained).items()}
        group = self.group(index)
        patient = replace(group, timeout=_PATIENCE * group.timeout)
        share = await fetch_part(patient, replica % len(group.roster), _SHARE, like=like, length=sum(sizes.values()))
        return dict(zip(sizes, share.to(like.device).split(list(sizes.values())), strict=True))

    def _with_shares(self, index: int, mean: Tensor, shares: Shares) -> Tensor:
        """Return a copy of a stage's mean in which each tied parameter has the sum of its shares."""
        total = mean.clone()  # not in place, because the mean may still be in transit to other peers
        for name, part in self.ties.slices(index, self.trained).items():
            total[part] = 0.0
            for share in shares.values():
                if name in share:
                    total[part] += share[name]
        return total

    def _squared_norm(self, index: int, mean: Tensor, rank: int) -> float:
        """Return the squared norm in this server's part, of the parameters whose norm counts at this stage."""
        part = self.group(index).bounds(len(mean))[rank]
        if self.exact:
            part = slice(0, len(mean) if rank == 0 else 0)
        norms = []
        for counted in self.ties.counted(index, self.trained):
            begin, end = max(counted.start, part.start), min(counted.stop, part.stop)
            if begin < end:
                norms.append(squared_norm(mean[begin:end]))
        return add_up(norms)
