"""At a round's end: the gradients of what several stages hold, added up over these stages.

The mean of a stage is the same on all of its members, so each other stage asks one of them for its share. Shares are
added in the order of the stages, so all have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from torch import Tensor

from lightning_swarm.core.tasks import gather
from lightning_swarm.protocol.compression import to_message
from lightning_swarm.protocol.messages.run import TiedTensors
from lightning_swarm.server.averaging.all_reduce import Compute, Group, squared_norm, taken, withhold
from lightning_swarm.server.averaging.averager import AveragingResult

_SHARE: Final = "tied"

_PATIENCE: Final = 2.0
"""Times that of an exchange: the other stage may be in the middle of its own two."""

Shares: TypeAlias = dict[int, dict[str, Tensor]]
"""By stage, what it has of each parameter that others hold, too."""


class TiedMeans:
    """Of one round.

    Args:
        ties: Of the run.
        trained: What trains in the step.
        group: Who averages a stage.
        compute: Runs what takes long elsewhere than on the loop.
        exact: The norm must not depend on how many parts there are: the first of a roster has it of all of them.
    """

    def __init__(
        self,
        ties: TiedTensors,
        trained: Collection[str],
        group: Callable[[int], Group],
        compute: Compute,
        *,
        exact: bool = False,
    ) -> None:
        self._ties = ties
        self._trained = trained
        self._group = group
        self._compute = compute
        self._exact = exact

    async def averaged(
        self, found: Mapping[int, AveragingResult], places: Mapping[int, int]
    ) -> dict[int, AveragingResult]:
        """What the stages of a member end the round with.

        Args:
            found: By stage, what its own round ended with. Its means stay as they are: they may be on their way still.
            places: This peer's index in the roster of each.

        Raises:
            RoundFailed: A share did not come.
        """
        own = self._shares({index: one.mean for index, one in found.items()})
        for index, share in own.items():
            group = self._group(index)
            group.tickets.offer(f"{group.prefix}/{_SHARE}", to_message(torch.cat(list(share.values()))))
        shares = await self._with_others(own, min(places.values()))

        def end() -> dict[int, AveragingResult]:
            ended = dict(found)
            for index in own:
                mean = self._added_up(index, found[index].mean, shares)
                norm = self._whole_norm if self._exact else self._squared_norm
                ended[index] = found[index]._replace(mean=mean, squared_norm=norm(index, mean, places[index]))
            return ended

        result: dict[int, AveragingResult] = await self._compute(end)
        return result

    async def collected(self, index: int, mean: Tensor, asked: int) -> Tensor:
        """The mean of a stage for who has no part in the round.

        Args:
            index: Of the stage.
            mean: As its members averaged it.
            asked: At which place is who is asked for another stage's share.

        Raises:
            RoundFailed: A share did not come.
        """
        own = self._shares({index: mean})
        if not own:
            return mean
        shares = await self._with_others(own, asked)
        total: Tensor = await self._compute(lambda: self._added_up(index, mean, shares))
        return total

    def refuse(self, indices: Collection[int], reason: str) -> None:
        """Give no share of these stages, unless it was given by now."""
        for index in indices:
            withhold(self._group(index), [_SHARE], reason)

    def _shares(self, means: Mapping[int, Tensor]) -> Shares:
        found = {}
        for index, mean in means.items():
            places = self._ties.places(index, self._trained)
            if places:
                found[index] = {name: mean[place] for name, place in places.items()}
        return found

    async def _with_others(self, own: Shares, asked: int) -> Shares:
        """Of all stages that have something in common with these, in their order."""
        partners = {partner for index in own for partner in self._ties.partners(index, self._trained)}
        others = sorted(partners - own.keys())
        like = next((one for share in own.values() for one in share.values()), torch.empty(0))
        fetched = await gather(self._taken(index, asked, like) for index in others)
        return dict(sorted({**own, **dict(zip(others, fetched, strict=True))}.items()))

    async def _taken(self, index: int, asked: int, like: Tensor) -> dict[str, Tensor]:
        sizes = {name: place.stop - place.start for name, place in self._ties.places(index, self._trained).items()}
        group = self._group(index)
        patient = replace(group, timeout=_PATIENCE * group.timeout)
        share = await taken(patient, asked % len(group.roster), _SHARE, like=like, length=sum(sizes.values()))
        return dict(zip(sizes, share.to(like.device).split(list(sizes.values())), strict=True))

    def _added_up(self, index: int, mean: Tensor, shares: Shares) -> Tensor:
        total = mean.clone()
        for name, place in self._ties.places(index, self._trained).items():
            total[place] = 0.0
            for share in shares.values():
                if name in share:
                    total[place] += share[name]
        return total

    def _whole_norm(self, index: int, mean: Tensor, place: int) -> float:
        """Squared, of what counts with this stage; with the first of its roster."""
        if place != 0:
            return 0.0
        return math.fsum(squared_norm(mean[one]) for one in self._ties.counted(index, self._trained))

    def _squared_norm(self, index: int, mean: Tensor, place: int) -> float:
        """Of a part, and there of what counts with this stage."""
        part = self._group(index).bounds(len(mean))[place]
        total = 0.0
        for one in self._ties.counted(index, self._trained):
            begin, end = max(one.start, part.start), min(one.stop, part.stop)
            if begin < end:
                total += squared_norm(mean[begin:end])
        return total
