"""Decides which peers move to which stages. Pure."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning_swarm.network import PeerId

SCATTER: Final = 0.06  # least share by which a rate may be off
_ROUNDING: Final = 1e-9  # share of a rate that floating-point sums may be off by
_MOST_BACK: Final = 4  # peers of a stage that are considered for an exchange, evenly from the slowest to the fastest

# (stage that may give a peer, net rate whose transfer makes both stages equal, most net rate that it may give).
_Source: TypeAlias = tuple[int, float, float]


@dataclass(frozen=True)
class Move:
    """A move of one peer from the stage `source` to the stage `target`."""

    peer: PeerId
    source: int
    target: int


@dataclass(frozen=True)
class MoveCosts:
    """Costs of a move, and the time for which its gain lasts."""

    move_s: Sequence[float]  # target stage -> seconds in which a mover computes nothing
    horizon_s: float  # mean duration of a gain, until the swarm changes; see `ChurnEstimate`
    # Mean seconds lost by a change that concerns a stage's only server; most changes are harmless.
    lost_s: float = 0.0


@dataclass(frozen=True)
class _StagePeer:
    stage: int
    samples_per_s: float
    arrived: bool
    movable: bool
    left: Collection[int]
    scatter: float


class StageRates:
    """Peers and rates of each stage, kept sorted, so that a decision looks at a few peers of each stage."""

    def __init__(
        self,
        num_stages: int,
        work: Sequence[float] | None = None,  # cost of a sample at each stage, relative to other stages
        work_scatter: Callable[[int, int], float] = lambda source, target: 0.0,
    ) -> None:
        self.work = work or [1.0] * num_stages
        self.work_scatter = work_scatter  # share by which the work of one stage, relative to another's, may be off
        self.rates = [0.0] * num_stages  # samples/s of each stage
        self.squares = [0.0] * num_stages  # sum of the squared errors of its peers' rates
        self.serving_rates = [0.0] * num_stages  # like `rates`, of the peers that have arrived
        self.num_peers = [0] * num_stages  # including peers on their way
        self._num_serving = [0] * num_stages
        self._movable: list[list[tuple[float, PeerId]]] = [[] for _ in range(num_stages)]
        self._where: dict[PeerId, _StagePeer] = {}

    def put(
        self,
        peer: PeerId,
        stage: int,
        samples_per_s: float,
        *,
        movable: bool = True,
        left: Collection[int] = (),
        scatter: float = SCATTER,
    ) -> None:
        """Add or replace a peer that serves a stage; `samples_per_s` is its rate at a stage of work 1."""
        # It does not move to a stage in `left`: it left that stage since the last change of the swarm, or the stage is
        # too large for it. Its rate changes with the work of its stage, so two peers could otherwise change places
        # forever. `scatter` is the share by which its rate may be off; smaller gains would have peers move to and fro.
        # In a large stage, errors cancel.
        self._enter(peer, _StagePeer(stage, samples_per_s, arrived=True, movable=movable, left=left, scatter=scatter))

    def expect(self, peer: PeerId, stage: int, samples_per_s: float) -> None:
        """Add or replace a peer on its way to a stage, which cannot move until it arrives."""
        self._enter(peer, _StagePeer(stage, samples_per_s, arrived=False, movable=False, left=(), scatter=SCATTER))

    def _enter(self, peer: PeerId, place: _StagePeer) -> None:
        self.remove(peer)
        self._where[peer] = place
        self._count(place, 1)
        if place.movable:
            insort(self._movable[place.stage], (place.samples_per_s, peer))

    def remove(self, peer: PeerId) -> None:
        """Remove a peer, if it is there."""
        place = self._where.pop(peer, None)
        if place is None:
            return
        self._count(place, -1)
        if not self.num_peers[place.stage]:
            self.rates[place.stage] = self.squares[place.stage] = 0.0  # without rounding errors
        if not self._num_serving[place.stage]:
            self.serving_rates[place.stage] = 0.0
        if place.movable:
            there = self._movable[place.stage]
            del there[bisect_left(there, (place.samples_per_s, peer))]

    def move(self, move: Move) -> None:
        """Apply a move."""
        before = self._where[move.peer]
        self.put(move.peer, move.target, before.samples_per_s, left=before.left, scatter=before.scatter)

    def may_go(self, peer: PeerId, stage: int) -> bool:
        """Return whether a peer may move to a stage: the stage is not in the peer's `left` (see `put`)."""
        return stage not in self._where[peer].left

    def stage_of(self, peer: PeerId) -> int | None:
        """Return the stage that a peer serves, or is moving to."""
        return self._where[peer].stage if peer in self._where else None

    def rate(self, peer: PeerId) -> float:
        """Return a peer's rate at a stage of work 1."""
        return self._where[peer].samples_per_s

    def error(self, peer: PeerId | None) -> float:
        """Return the error that a peer's rate may have; 0 without a peer."""
        return 0.0 if peer is None else self.rate(peer) * self._where[peer].scatter

    def stays_ahead(self, move: Move) -> bool:
        """Return whether the source stays faster than the target: otherwise, the two would only change places."""
        brings = self._where[move.peer].samples_per_s / self.work[move.source]
        return self.rates[move.source] - brings > self.rates[move.target]

    def serving(self, stage: int) -> Sequence[tuple[float, PeerId]]:
        """Rates and ids of the peers of a stage that have arrived and can move, the slowest first."""
        return self._movable[stage]

    def num_serving(self, stage: int) -> int:
        """Return the number of a stage's peers that have arrived."""
        return self._num_serving[stage]

    def _count(self, place: _StagePeer, sign: int) -> None:
        rate = place.samples_per_s / self.work[place.stage]
        self.rates[place.stage] += sign * rate
        self.squares[place.stage] += sign * (rate * place.scatter) ** 2
        self.num_peers[place.stage] += sign
        if place.arrived:
            self.serving_rates[place.stage] += sign * rate
            self._num_serving[place.stage] += sign


def stage_for(stages: StageRates) -> int:
    """Choose the stage to which a newcomer is most useful."""
    return min(range(len(stages.rates)), key=stages.rates.__getitem__)


def plan(stages: StageRates, costs: MoveCosts) -> list[Move]:
    """Plan the moves that pay, or none. No stage is left without a peer that serves it."""
    # A pipeline is as fast as its slowest stage, so that stage gets a peer. The best move maximizes the rate of the
    # slower of the two stages. Or the stage exchanges one of its own peers for a faster one. This is repeated until
    # nothing is gained. Of these moves, as many are made as pay, because a mover computes nothing during its download.
    # A move that costs the pipeline nothing is made even without a gain: with more even stages, the next loss of a
    # peer costs less.
    draft = _MovePlan(stages, costs)
    best: list[Move] = []
    best_rate = draft.mean_rate()
    while found := draft.find():
        for move, samples_per_s in found:
            draft.make(move, samples_per_s)
        rate = draft.mean_rate()
        if rate >= best_rate * (1.0 - _ROUNDING):
            best, best_rate = list(draft.moves.values()), rate
    return best


def mean_rate(stages: StageRates, costs: MoveCosts, moves: Sequence[Move]) -> float:
    """Return the pipeline's rate with these moves, averaged over the time until the swarm changes."""
    draft = _MovePlan(stages, costs)
    for move in moves:
        draft.make(move, stages.rate(move.peer))
    return draft.mean_rate()


class _MovePlan:
    """A draft of moves, and the rates of the stages after them."""

    def __init__(self, stages: StageRates, costs: MoveCosts) -> None:
        self.moves: dict[PeerId, Move] = {}
        self._stages = stages
        self._costs = costs
        self._rates = list(stages.rates)
        self._meanwhile = list(stages.rates)  # rates until the movers arrive
        self._left = [stages.num_serving(index) for index in range(len(stages.rates))]
        self._num_peers = list(stages.num_peers)

    def make(self, move: Move, samples_per_s: float) -> None:
        work = self._stages.work
        self.moves[move.peer] = move
        self._rates[move.source] -= samples_per_s / work[move.source]
        self._meanwhile[move.source] -= samples_per_s / work[move.source]
        self._rates[move.target] += samples_per_s / work[move.target]
        self._left[move.source] -= 1
        self._num_peers[move.source] -= 1
        self._num_peers[move.target] += 1

    def mean_rate(self) -> float:
        """Return the pipeline's mean rate until the swarm changes, which may be at any moment."""
        move_s, mean, lasts = self._costs.move_s, 0.0, 1.0
        for until_s in sorted({move_s[move.target] for move in self.moves.values()}):
            still_lasts = math.exp(-until_s / self._costs.horizon_s)
            there = (
                after if needs_s < until_s else before
                for before, after, needs_s in zip(self._meanwhile, self._rates, move_s, strict=True)
            )
            mean += (lasts - still_lasts) * min(there) * (1.0 - self._risk(self._left))
            lasts = still_lasts
        return mean + lasts * min(self._rates) * (1.0 - self._risk(self._num_peers))  # all have arrived

    def _risk(self, num_peers: Sequence[int]) -> float:
        """Return the share of time lost by stages with a single server, which each change may remove."""
        if not self._costs.lost_s:
            return 0.0
        lone = sum(number == 1 for number in num_peers)
        return min(lone * self._costs.lost_s / (sum(self._num_peers) * self._costs.horizon_s), 1.0) if lone else 0.0

    def find(self) -> list[tuple[Move, float]]:
        """Find the move that helps the slowest stage most, else an exchange; with the rates of the movers."""
        target = min(range(len(self._rates)), key=self._rates.__getitem__)
        sources = self._richer(target)
        found = self._exchange(target, sources, [(0.0, None)])
        if found or self._left[target] < 2:
            return found
        there = self._stages.serving(target)
        candidates = there[:: math.ceil(len(there) / _MOST_BACK) or 1]
        return self._exchange(target, sources, [one for one in candidates if one[1] not in self.moves])

    def _richer(self, target: int) -> list[_Source]:
        """List the stages that may give a peer to the target, the fastest first."""
        low, work, squares = self._rates[target], self._stages.work, self._stages.squares
        least_margin = math.sqrt(max(min(squares) + squares[target], 0.0))  # rounding may leave less than nothing
        sources = []
        for source in sorted(range(len(self._rates)), key=self._rates.__getitem__, reverse=True):
            ahead = self._rates[source] - low
            if ahead <= least_margin:
                break  # this stage and all slower stages may be no faster in truth
            margin = max(math.sqrt(max(squares[source] + squares[target], 0.0)), _ROUNDING * self._rates[source])
            if self._left[source] >= 2 and ahead > margin:
                even = ahead / (1.0 / work[source] + 1.0 / work[target])
                sources.append((source, even, (ahead - margin) * work[target]))
        return sources

    def _exchange(
        self, target: int, sources: Sequence[_Source], back: Sequence[tuple[float, PeerId | None]]
    ) -> list[tuple[Move, float]]:
        low, work = self._rates[target], self._stages.work
        least = min((given for given, _ in back), default=0.0)
        best: list[tuple[Move, float]] = []
        best_after = low
        for source, even, spare in sources:
            rate, serving = self._rates[source], self._stages.serving(source)
            if rate <= best_after:
                break  # no move from this stage or a slower one helps more
            most = low + (serving[-1][0] - least) / work[target] if serving else 0.0
            if min(most, low + even / work[target]) <= best_after:
                continue
            wanted = min(spare, even)
            for given, giver in back:
                at = bisect_left(serving, (given + wanted,))
                # Most often no peer fits, which the nearest two peers already show.
                above = serving[at][0] - given if at < len(serving) else math.inf
                below = serving[at - 1][0] - given if at else 0.0
                is_above = above < spare and rate - above / work[source] > best_after
                is_below = below > self._stages.error(giver) and low + below / work[target] > best_after
                if not (is_above or is_below) or (giver is not None and not self._stages.may_go(giver, source)):
                    continue
                for taken, taker in self._near(serving, at, target):
                    more = taken - given
                    after = min(rate - more / work[source], low + more / work[target])
                    error = self._stages.error(taker)
                    if giver is not None:
                        # Of two peers to exchange, the faster one may only have less work at its own stage. A lone
                        # mover speeds up its target stage in any case.
                        scatter = self._stages.work_scatter(source, target)
                        error = math.hypot(error, self._stages.error(giver), taken * scatter)
                    if error < more < spare and after > best_after:
                        best_after, best = after, [(Move(taker, source, target), taken)]
                        best += [(Move(giver, target, source), given)] if giver is not None else []
        return best

    def _near(self, serving: Sequence[tuple[float, PeerId]], at: int, target: int) -> Iterator[tuple[float, PeerId]]:
        """Yield the nearest peers below and above a place that do not move yet, and may go to the target."""
        for places in (range(at - 1, -1, -1), range(at, len(serving))):
            for place in places:
                peer = serving[place][1]
                if peer not in self.moves and self._stages.may_go(peer, target):
                    yield serving[place]
                    break


def plan_as_paper(queued: Sequence[float], queues: Sequence[Mapping[PeerId, float]]) -> list[Move]:
    """Plan by the paper's rule: from the stage with the shortest queue a peer moves to the one with the longest."""
    # Source: SWARM, arXiv:2301.11913, appendix D. It does not say when to stop: see `StageRates.stays_ahead`.
    # `queued` has the samples that wait at each stage, `queues` the samples at each of its peers.
    movable = [index for index, peers in enumerate(queues) if len(peers) > 1]
    if not movable:
        return []
    source = min(movable, key=queued.__getitem__)
    target = max(range(len(queued)), key=queued.__getitem__)
    if queued[source] >= queued[target]:
        return []
    return [Move(min(queues[source], key=queues[source].__getitem__), source, target)]


_MANY: Final = 20  # peers per stage from which the fastest-first rule alone is within a thousandth


def best_rate(rates: Iterable[float], num_stages: int) -> float:
    """Return the rate of the slowest stage under an assignment of peers that is as good as can be found quickly."""
    # Each peer goes to the slowest stage, the fastest peer first. If there are fewer than `_MANY` peers per stage, they
    # then move as long as `plan` gains by it. Exact for equal peers; otherwise at least three quarters of the optimum,
    # and nearly all with six peers a stage.
    # Source: the greedy rule for machine covering, Deuermeyer, Friesen and Langston, 1982.
    ordered = sorted(rates, reverse=True)
    if ordered and ordered[0] == ordered[-1]:
        return len(ordered) // num_stages * ordered[0]
    totals = [(0.0, index) for index in range(num_stages)]
    chosen: list[int] = []
    for rate in ordered:
        total, index = totals[0]
        heapq.heapreplace(totals, (total + rate, index))
        chosen.append(index)
    if len(ordered) >= _MANY * num_stages:
        return totals[0][0]
    stages = StageRates(num_stages)
    for number, (rate, index) in enumerate(zip(ordered, chosen, strict=True)):
        stages.put(PeerId(str(number)), index, rate, scatter=0.0)
    free = MoveCosts([0.0] * num_stages, horizon_s=1.0)
    while moves := plan(stages, free):
        for move in moves:
            stages.move(move)
    return min(stages.rates)


# A peer may give up one stage of several. Each peer of a stage gets microbatches in proportion to its rate there, even
# if it computes other stages, too. So a peer with several stages delays the newcomers of each, until it leaves one.
@dataclass(frozen=True)
class StageRelease:
    """The release of one peer from a stage, while it stays in other stages."""

    peer: PeerId
    stage: int


def plan_shedding(
    rates: Sequence[Mapping[PeerId, float]],  # stage -> peer -> samples/s if it computed nothing else
    *,
    kept: Collection[int] = (),  # stages that no peer gives up
    leaving: Collection[PeerId] = (),  # peers that may not be the last of a stage
    lone_costs: float = 0.0,  # mean share of the run that is lost if a stage is left to one server
) -> list[StageRelease]:
    """Plan the releases after which the busiest peer of the stage clearly has less to do."""
    held = [dict(stage) for stage in rates]
    found: list[StageRelease] = []
    while choices := _choices(held, {*kept, *(one.stage for one in found)}, leaving, lone_costs):
        _, release = min(choices, key=lambda choice: choice[0])
        found.append(release)
        del held[release.stage][release.peer]
    return found


def _choices(
    held: Sequence[Mapping[PeerId, float]], kept: Collection[int], leaving: Collection[PeerId], lone_costs: float
) -> list[tuple[float, StageRelease]]:
    """Return the releases with a gain, each with the share of the busiest peer's work that remains."""
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
                choices.append((after / before, StageRelease(peer, index)))
    return choices


def _seconds(peer: PeerId, held: Sequence[Mapping[PeerId, float]]) -> float:
    """Return the seconds that a peer computes for each sample of the run."""
    return math.fsum(1.0 / math.fsum(stage.values()) for stage in held if peer in stage)
