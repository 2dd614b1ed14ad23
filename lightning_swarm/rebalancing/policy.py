"""Which peers move to which stages. Pure.

A pipeline is as fast as its slowest stage. So the slowest one gets a peer, the one after whose move the slower of the
two, giver and taker, is fastest. That is repeated until nothing is gained, and of these moves as many are made as pay:
who moves computes nothing while it downloads its new stage.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_swarm.network import PeerId


@dataclass(frozen=True)
class Move:
    """A peer is to leave one stage for another.

    Args:
        peer: Which one.
        source: Index of the stage that it serves.
        target: Of the stage that it is to serve.
    """

    peer: PeerId
    source: int
    target: int


@dataclass(frozen=True)
class Costs:
    """What a move costs, and for how long its gain lasts.

    Args:
        move_s: Seconds in which who moves computes nothing, by stage that it moves to.
        horizon_s: After how many seconds the swarm has changed so much that nothing is left of a gain.
        min_gain: Share by which a plan must raise the pipeline's rate: more than measured rates scatter, or peers would
            move to and fro.
    """

    move_s: Sequence[float]
    horizon_s: float
    min_gain: float = 0.03


class Stages:
    """Who serves which stage, and how fast: kept sorted, so that a decision looks at a few peers of each stage.

    Rates are in samples/s. A peer on its way to a stage counts there, but cannot be moved again until it has arrived.

    Args:
        num_stages: Of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self.rates = [0.0] * num_stages
        self._movable: list[list[tuple[float, PeerId]]] = [[] for _ in range(num_stages)]
        self._where: dict[PeerId, tuple[int, float, bool]] = {}

    def put(self, peer: PeerId, stage: int, samples_per_s: float, *, arrived: bool = True) -> None:
        """A peer serves a stage, or is on its way there. Takes the place of what was known of it."""
        self.remove(peer)
        self._where[peer] = (stage, samples_per_s, arrived)
        self.rates[stage] += samples_per_s
        if arrived:
            insort(self._movable[stage], (samples_per_s, peer))

    def remove(self, peer: PeerId) -> None:
        """It is gone. Nothing happens if it was not there."""
        known = self._where.pop(peer, None)
        if known is None:
            return
        stage, samples_per_s, arrived = known
        self.rates[stage] -= samples_per_s
        if arrived:
            there = self._movable[stage]
            del there[bisect_left(there, (samples_per_s, peer))]
            if not there and all(other != stage for other, _, _ in self._where.values()):
                self.rates[stage] = 0.0  # and not what rounding has left

    def stage_of(self, peer: PeerId) -> int | None:
        """Where a peer is, or is going."""
        return self._where[peer][0] if peer in self._where else None

    def serving(self, stage: int) -> Sequence[tuple[float, PeerId]]:
        """Rate and identity of those that have arrived, the slowest first."""
        return self._movable[stage]


def stage_for(stages: Stages) -> int:
    """The stage that a newcomer is of most use to."""
    return min(range(len(stages.rates)), key=stages.rates.__getitem__)


def plan(stages: Stages, costs: Costs) -> list[Move]:
    """The moves that pay, or none. No stage is left without a peer that serves it."""
    rates, left = list(stages.rates), [len(stages.serving(index)) for index in range(len(stages.rates))]
    moved: dict[PeerId, Move] = {}
    now = min(rates)
    if sum(rates) / len(rates) <= now * (1.0 + costs.min_gain):  # no assignment is better than even
        return []
    best: list[Move] = []
    best_gain = costs.min_gain * now * costs.horizon_s
    longest_s = 0.0
    meanwhile = list(rates)  # while those that move compute nothing
    while True:
        found = _next(stages, rates, left, moved)
        if found is None:
            return best
        move, rate = found
        moved[move.peer] = move
        rates[move.source] -= rate
        rates[move.target] += rate
        meanwhile[move.source] -= rate
        left[move.source] -= 1
        longest_s = max(longest_s, costs.move_s[move.target])
        gain = (min(rates) - now) * (costs.horizon_s - longest_s) - (now - min(meanwhile)) * longest_s
        if gain > best_gain:
            best, best_gain = list(moved.values()), gain


def _next(
    stages: Stages, rates: Sequence[float], left: Sequence[int], moved: Collection[PeerId]
) -> tuple[Move, float] | None:
    """The move that helps the slowest stage most, and the rate of who makes it. None helps: None."""
    target = min(range(len(rates)), key=rates.__getitem__)
    low = rates[target]
    best: tuple[Move, float] | None = None
    best_after = low * (1.0 + 1e-9), math.inf  # more than rounding
    for source, rate in enumerate(rates):
        if source == target or left[source] < 2 or rate <= low:
            continue
        for one, peer in _near(stages.serving(source), (rate - low) / 2, moved):
            after = min(rate - one, low + one), rate - one  # of two such, who is spared more easily
            if after > best_after:
                best, best_after = (Move(peer, source, target), one), after
    return best


def _near(
    serving: Sequence[tuple[float, PeerId]], rate: float, moved: Collection[PeerId]
) -> Iterable[tuple[float, PeerId]]:
    """Those whose rates are next to `rate`, from below and from above, and that do not move already."""
    at = bisect_left(serving, (rate, PeerId("")))
    below = next((i for i in range(at - 1, -1, -1) if serving[i][1] not in moved), None)
    above = next((i for i in range(at, len(serving)) if serving[i][1] not in moved), None)
    return [serving[i] for i in (below, above) if i is not None]


def plan_as_paper(queued: Sequence[float], queues: Sequence[Mapping[PeerId, float]]) -> list[Move]:
    """The paper's rule: of the stage with the shortest queue, the peer with the shortest moves to the longest one.

    Args:
        queued: Samples that wait, by stage.
        queues: Likewise by peer that serves it.

    Source: SWARM, arXiv:2301.11913, appendix D.
    """
    movable = [index for index, peers in enumerate(queues) if len(peers) > 1]
    if not movable:
        return []
    source = min(movable, key=queued.__getitem__)
    target = max(range(len(queued)), key=queued.__getitem__)
    if queued[source] >= queued[target]:
        return []
    return [Move(min(queues[source], key=queues[source].__getitem__), source, target)]


def best_rate(rates: Iterable[float], num_stages: int) -> float:
    """The slowest stage's rate under an assignment of peers that is as good as the fastest-first rule finds it.

    Exact for equal peers; else at least three quarters of the optimum.
    Source: the greedy rule for machine covering, Deuermeyer, Friesen and Langston, 1982.
    """
    totals = [0.0] * num_stages
    for rate in sorted(rates, reverse=True):
        heapq.heapreplace(totals, totals[0] + rate)
    return totals[0]
