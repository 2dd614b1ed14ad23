"""Who gives up a stage of several: what a swarm of few peers begins with is shared out as others come. Pure.

Of a stage's microbatches each of its peers gets as many as it is fast, whatever other stages it has to compute. So who
holds several is what its newcomers wait for, until it leaves them one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_swarm.network import PeerId
from lightning_swarm.rebalancing.policy import SCATTER


@dataclass(frozen=True)
class Shed:
    """A peer is to give up a stage, and to stay in its others.

    Args:
        peer: Which one.
        stage: Index of that stage.
    """

    peer: PeerId
    stage: int


def plan_shedding(
    rates: Sequence[Mapping[PeerId, float]],
    *,
    kept: Collection[int] = (),
    leaving: Collection[PeerId] = (),
    lone_costs: float = 0.0,
) -> list[Shed]:
    """What is given up: where of those who share the stage the busiest has clearly less to do afterwards.

    Args:
        rates: Of each stage, how many samples/s its peers would compute there if they computed nothing else.
        kept: Stages that nobody is to give up now.
        leaving: On whom no stage can rely.
        lone_costs: Share of the run that is lost, on the average, where a stage is left to one server: it may die.

    Returns:
        Of each stage at most one copy less; each has still a peer that stays.
    """
    held = [dict(stage) for stage in rates]
    found: list[Shed] = []
    while choices := _choices(held, {*kept, *(one.stage for one in found)}, leaving, lone_costs):
        _, shed = min(choices, key=lambda choice: choice[0])
        found.append(shed)
        del held[shed.stage][shed.peer]
    return found


def _choices(
    held: Sequence[Mapping[PeerId, float]], kept: Collection[int], leaving: Collection[PeerId], lone_costs: float
) -> list[tuple[float, Shed]]:
    """What could be given up with a gain, and what is left then of the busiest one's work."""
    choices = []
    several = {peer for peer, number in Counter(peer for stage in held for peer in stage).items() if number > 1}
    for index, stage in enumerate(held):
        if index in kept:
            continue
        for peer in (one for one in stage if one in several):
            staying = stage.keys() - {peer, *leaving}
            if not staying:
                continue
            without = [{other: rate for other, rate in one.items() if at != index or other != peer}
                       for at, one in enumerate(held)]  # fmt: skip
            before = max(_seconds(one, held) for one in stage)
            after = max(_seconds(one, without) for one in stage)
            if after * (1.0 + SCATTER) < before * (1.0 - (lone_costs if len(staying) == 1 else 0.0)):
                choices.append((after / before, Shed(peer, index)))
    return choices


def _seconds(peer: PeerId, held: Sequence[Mapping[PeerId, float]]) -> float:
    """What a peer computes for each sample of the run."""
    return math.fsum(1.0 / math.fsum(stage.values()) for stage in held if peer in stage)
