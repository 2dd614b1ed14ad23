"""Which machine holds which stage, as the policy of the swarm itself would have it. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_swarm.network import PeerId
from lightning_swarm.rebalancing.policy import Costs, Stages, plan


def assign(rates: Sequence[float], num_stages: int) -> list[list[int]]:
    """Machines by stage, so that the slowest stage is about as fast as can be; as `rebalancing.optimum` does.

    Args:
        rates: Samples/s of each machine at a stage, all of them above 0. The first one is the starter's.
        num_stages: At most as many as there are machines. They take equally long.

    Returns:
        Places in `rates`, by stage. The starter is in the last stage, as in a run.
    """
    totals = [(0.0, index) for index in range(num_stages)]
    stages = Stages(num_stages)
    for number in sorted(range(len(rates)), key=rates.__getitem__, reverse=True):
        total, index = totals[0]
        heapq.heapreplace(totals, (total + rates[number], index))
        stages.put(PeerId(str(number)), index, rates[number], scatter=0.0)
    free = Costs([0.0] * num_stages, horizon_s=1.0)
    while moves := plan(stages, free):
        for move in moves:
            stages.move(move)
    held: list[list[int]] = [[] for _ in range(num_stages)]
    for number in range(len(rates)):
        place = stages.stage_of(PeerId(str(number)))
        assert place is not None  # it was put there above
        held[place].append(number)
    starters = next(index for index, numbers in enumerate(held) if 0 in numbers)
    held[starters], held[-1] = held[-1], held[starters]
    return held
