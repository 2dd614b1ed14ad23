"""Decides which peers move to which stages. Pure.

Rates are measured, so a move is planned only if it gains more than the rates' errors. `scatter` is the relative error
of one peer's rate, and `error` its absolute error. `squares` are the sums of the squared errors in each stage, and
`work_scatter` is the relative error of the ratio of two stages' work.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_swarm.network import PeerId

SCATTER: Final = 0.06  # smallest relative error that is assumed for a measured rate
_ROUNDING: Final = 1e-9  # relative error of floating-point sums of rates
_MAX_COUNTERPARTS: Final = 4  # peers of the slowest stage considered for an exchange, from the slowest to the fastest


class _Source(NamedTuple):
    """A stage that may give a peer to the target. A net rate is the mover's rate less that of the peer in exchange."""

    stage: int
    equalizing_rate: float  # the net rate that makes source and target equally fast
    max_net_rate: float  # a larger net rate could make the target faster than the source is now


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
    # Mean seconds lost by a change of the swarm that concerns a stage's only server. Most such changes lose nothing.
    lost_s: float = 0.0


@dataclass(frozen=True)
class _StagePeer:
    """A peer in a stage, with the arguments of `StageRates.put`."""

    stage: int
    samples_per_s: float
    arrived: bool
    movable: bool
    barred: Collection[int]
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
        self.work_scatter = work_scatter  # relative error of the ratio of two stages' work
        self.rates = [0.0] * num_stages  # samples/s of each stage, with peers on their way
        self.squares = [0.0] * num_stages  # sum of the squared errors of its peers' rates
        self.serving_rates = [0.0] * num_stages  # samples/s of the peers that have arrived
        self.num_peers = [0] * num_stages  # including peers on their way
        self._num_serving = [0] * num_stages  # peers that have arrived
        self._movable: list[list[tuple[float, PeerId]]] = [[] for _ in range(num_stages)]
        self._peers: dict[PeerId, _StagePeer] = {}

    def put(
        self,
        peer: PeerId,
        stage: int,
        samples_per_s: float,
        *,
        movable: bool = True,
        barred: Collection[int] = (),
        scatter: float = SCATTER,
    ) -> None:
        """Add or replace a peer that serves a stage; `samples_per_s` is its rate at a stage of work 1."""
        # The peer does not move to a `barred` stage: the stage is too large for it, or the peer left it since the last
        # change of the swarm. If it could return, two peers could change places forever, because a peer's measured rate
        # changes with its stage. `scatter` is the rate's relative error, and prevents moves for smaller gains.
        entry = _StagePeer(stage, samples_per_s, arrived=True, movable=movable, barred=barred, scatter=scatter)
        self._insert(peer, entry)

    def expect(self, peer: PeerId, stage: int, samples_per_s: float) -> None:
        """Add or replace a peer on its way to a stage, which cannot move until it arrives."""
        self._insert(peer, _StagePeer(stage, samples_per_s, arrived=False, movable=False, barred=(), scatter=SCATTER))

    def _insert(self, peer: PeerId, entry: _StagePeer) -> None:
        """Add a peer to a stage, and remove it from its former stage."""
        self.remove(peer)
        self._peers[peer] = entry
        self._count(entry, 1)
        if entry.movable:
            insort(self._movable[entry.stage], (entry.samples_per_s, peer))

    def remove(self, peer: PeerId) -> None:
        """Remove a peer, if it is there."""
        entry = self._peers.pop(peer, None)
        if entry is None:
            return
        self._count(entry, -1)
        if not self.num_peers[entry.stage]:
            self.rates[entry.stage] = self.squares[entry.stage] = 0.0  # without rounding errors
        if not self._num_serving[entry.stage]:
            self.serving_rates[entry.stage] = 0.0
        if entry.movable:
            movable = self._movable[entry.stage]
            del movable[bisect_left(movable, (entry.samples_per_s, peer))]

    def move(self, move: Move) -> None:
        """Apply a move."""
        before = self._peers[move.peer]
        self.put(move.peer, move.target, before.samples_per_s, barred=before.barred, scatter=before.scatter)

    def may_go(self, peer: PeerId, stage: int) -> bool:
        """Return whether a peer may move to a stage: the stage is not `barred` (see `put`)."""
        return stage not in self._peers[peer].barred

    def stage_of(self, peer: PeerId) -> int | None:
        """Return the stage that a peer serves, or is moving to."""
        return self._peers[peer].stage if peer in self._peers else None

    def rate(self, peer: PeerId) -> float:
        """Return a peer's rate at a stage of work 1."""
        return self._peers[peer].samples_per_s

    def error(self, peer: PeerId | None) -> float:
        """Return the largest likely error of a peer's rate; 0 without a peer."""
        return 0.0 if peer is None else self.rate(peer) * self._peers[peer].scatter

    def stays_ahead(self, move: Move) -> bool:
        """Return whether the source without the mover is faster than the target is now, so that peers do not swing."""
        mover_rate = self._peers[move.peer].samples_per_s / self.work[move.source]
        return self.rates[move.source] - mover_rate > self.rates[move.target]

    def movable(self, stage: int) -> Sequence[tuple[float, PeerId]]:
        """Return rates and ids of the peers of a stage that have arrived and can move, the slowest first."""
        return self._movable[stage]

    def num_serving(self, stage: int) -> int:
        """Return the number of a stage's peers that have arrived."""
        return self._num_serving[stage]

    def _count(self, entry: _StagePeer, sign: int) -> None:
        """Add a peer to the sums of its stage, or subtract it if `sign` is -1."""
        rate = entry.samples_per_s / self.work[entry.stage]
        self.rates[entry.stage] += sign * rate
        self.squares[entry.stage] += sign * (rate * entry.scatter) ** 2
        self.num_peers[entry.stage] += sign
        if entry.arrived:
            self.serving_rates[entry.stage] += sign * rate
            self._num_serving[entry.stage] += sign


def stage_for(stages: StageRates) -> int:
    """Choose the stage to which a newcomer is most useful."""
    return min(range(len(stages.rates)), key=stages.rates.__getitem__)


def plan(stages: StageRates, costs: MoveCosts) -> list[Move]:
    """Plan the moves that pay, or none. No stage is left without a peer that serves it."""
    # A pipeline is as fast as its slowest stage, so that stage gets a peer. The best move maximizes the rate of the
    # slower of the two stages. If no move helps, the stage exchanges one of its peers for a faster one. This is
    # repeated until nothing is gained. Only the first of these moves are made, up to the highest mean rate, because a
    # mover computes nothing during its download. A move that costs the pipeline nothing is made even without a gain:
    # with more even stages, the next loss of a peer costs less.
    draft = _MovePlan(stages, costs)
    best: list[Move] = []
    best_mean_rate = draft.mean_rate()
    while moves := draft.find():
        for move, samples_per_s in moves:
            draft.make(move, samples_per_s)
        rate = draft.mean_rate()
        if rate >= best_mean_rate * (1.0 - _ROUNDING):
            best, best_mean_rate = list(draft.moves.values()), rate
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
        self._rates = list(stages.rates)  # rates when all movers have arrived
        self._meanwhile = list(stages.rates)  # rates until the movers arrive
        self._num_staying = [stages.num_serving(index) for index in range(len(stages.rates))]
        self._num_peers = list(stages.num_peers)  # when all movers have arrived

    def make(self, move: Move, samples_per_s: float) -> None:
        """Add a move; `samples_per_s` is the mover's rate at a stage of work 1."""
        work = self._stages.work
        self.moves[move.peer] = move
        self._rates[move.source] -= samples_per_s / work[move.source]
        self._meanwhile[move.source] -= samples_per_s / work[move.source]
        self._rates[move.target] += samples_per_s / work[move.target]
        self._num_staying[move.source] -= 1
        self._num_peers[move.source] -= 1
        self._num_peers[move.target] += 1

    def mean_rate(self) -> float:
        """Return the pipeline's mean rate until the swarm changes, which may be at any moment."""
        # Arrivals of movers divide the time. Each period's weight is the probability that the swarm changes in it.
        move_s, mean, p_unchanged = self._costs.move_s, 0.0, 1.0
        for until_s in sorted({move_s[move.target] for move in self.moves.values()}):
            p_later = math.exp(-until_s / self._costs.horizon_s)
            stage_rates = (
                after if arrival_s < until_s else before
                for before, after, arrival_s in zip(self._meanwhile, self._rates, move_s, strict=True)
            )
            mean += (p_unchanged - p_later) * min(stage_rates) * (1.0 - self._risk(self._num_staying))
            p_unchanged = p_later
        return mean + p_unchanged * min(self._rates) * (1.0 - self._risk(self._num_peers))  # all have arrived

    def _risk(self, num_peers: Sequence[int]) -> float:
        """Return the share of time lost by stages with a single server, which each change may remove."""
        if not self._costs.lost_s:
            return 0.0
        lone = sum(number == 1 for number in num_peers)
        return min(lone * self._costs.lost_s / (sum(self._num_peers) * self._costs.horizon_s), 1.0) if lone else 0.0

    def find(self) -> list[tuple[Move, float]]:
        """Find the move that helps the slowest stage most, else an exchange; return moves with the movers' rates."""
        target = min(range(len(self._rates)), key=self._rates.__getitem__)
        sources = self._sources_for(target)
        moves = self._best_exchange(target, sources, [(0.0, None)])  # a move without a counterpart
        if moves or self._num_staying[target] < 2:
            return moves
        movable = self._stages.movable(target)
        candidates = movable[:: math.ceil(len(movable) / _MAX_COUNTERPARTS) or 1]
        counterparts = [(rate, peer) for rate, peer in candidates if peer not in self.moves]
        return self._best_exchange(target, sources, counterparts)

    def _sources_for(self, target: int) -> list[_Source]:
        """List the stages that may give a peer to the target, the fastest first."""
        target_rate, work, squares = self._rates[target], self._stages.work, self._stages.squares
        least_margin = math.sqrt(max(min(squares) + squares[target], 0.0))  # rounding may leave a negative sum
        sources = []
        for source in sorted(range(len(self._rates)), key=self._rates.__getitem__, reverse=True):
            ahead = self._rates[source] - target_rate
            if ahead <= least_margin:
                break  # within the errors, this stage and all slower ones may be no faster than the target
            margin = max(math.sqrt(max(squares[source] + squares[target], 0.0)), _ROUNDING * self._rates[source])
            if self._num_staying[source] >= 2 and ahead > margin:
                equalizing_rate = ahead / (1.0 / work[source] + 1.0 / work[target])
                sources.append(_Source(source, equalizing_rate, (ahead - margin) * work[target]))
        return sources

    def _best_exchange(
        self, target: int, sources: Sequence[_Source], counterparts: Sequence[tuple[float, PeerId | None]]
    ) -> list[tuple[Move, float]]:
        """Find the best move from one of the `sources` to the target; empty if no move helps.

        In exchange, the target gives one of the `counterparts`, which are (rate, peer); ``(0.0, None)`` is no peer.
        """
        # An example with work 1: the source has 16 samples/s and the target 10, so a net rate of 3 makes them equal. A
        # lone mover of rate 3 does so, and a mover of rate 5 in exchange for a counterpart of rate 2.
        target_rate, work = self._rates[target], self._stages.work
        slowest_counterpart = min((rate for rate, _ in counterparts), default=0.0)
        best: list[tuple[Move, float]] = []
        best_min = target_rate  # rate of the slower of the two stages after the best move so far
        for source, equalizing_rate, max_net_rate in sources:
            source_rate, movable = self._rates[source], self._stages.movable(source)
            if source_rate <= best_min:
                break  # no move from this stage or a slower one helps more
            fastest_mover = movable[-1][0] if movable else -math.inf
            largest_net_rate = min(fastest_mover - slowest_counterpart, equalizing_rate)
            if target_rate + largest_net_rate / work[target] <= best_min:
                continue
            wanted = min(max_net_rate, equalizing_rate)
            for counterpart_rate, counterpart in counterparts:
                if counterpart is not None and not self._stages.may_go(counterpart, source):
                    continue
                at = bisect_left(movable, (counterpart_rate + wanted,))
                # Usually no mover fits. If the two with the nearest rates do not fit, none does.
                above = movable[at][0] - counterpart_rate if at < len(movable) else math.inf
                below = movable[at - 1][0] - counterpart_rate if at else 0.0
                fits_above = above < max_net_rate and source_rate - above / work[source] > best_min
                fits_below = below > self._stages.error(counterpart) and target_rate + below / work[target] > best_min
                if not (fits_above or fits_below):
                    continue
                for mover_rate, mover in self._near(movable, at, target):
                    net_rate = mover_rate - counterpart_rate
                    slower_rate = min(source_rate - net_rate / work[source], target_rate + net_rate / work[target])
                    error = self._stages.error(mover)
                    if counterpart is not None:
                        # The mover may only seem faster than its counterpart, because a sample costs less at its stage.
                        # A mover without a counterpart speeds up the target in any case.
                        scatter = self._stages.work_scatter(source, target)
                        error = math.hypot(error, self._stages.error(counterpart), mover_rate * scatter)
                    if error < net_rate < max_net_rate and slower_rate > best_min:
                        best_min, best = slower_rate, [(Move(mover, source, target), mover_rate)]
                        if counterpart is not None:
                            best.append((Move(counterpart, target, source), counterpart_rate))
        return best

    def _near(self, movable: Sequence[tuple[float, PeerId]], at: int, target: int) -> Iterator[tuple[float, PeerId]]:
        """Yield the nearest peers below and above an index that are free to move to the target."""
        for indices in (range(at - 1, -1, -1), range(at, len(movable))):
            for index in indices:
                peer = movable[index][1]
                if peer not in self.moves and self._stages.may_go(peer, target):
                    yield movable[index]
                    break


def plan_as_paper(queued: Sequence[float], queues: Sequence[Mapping[PeerId, float]]) -> list[Move]:
    """Plan by the paper's rule: a peer moves from the stage with the shortest queue to the stage with the longest."""
    # Source: SWARM, arXiv:2301.11913, appendix D. The paper has no rule to stop; `StageRates.stays_ahead` is ours.
    # `queued` has the samples that wait at each stage, and `queues` those that wait at each of its peers.
    movable = [index for index, peers in enumerate(queues) if len(peers) > 1]
    if not movable:
        return []
    source = min(movable, key=queued.__getitem__)
    target = max(range(len(queued)), key=queued.__getitem__)
    if queued[source] >= queued[target]:
        return []
    return [Move(min(queues[source], key=queues[source].__getitem__), source, target)]


_MANY: Final = 20  # from this many peers per stage on, the fastest-first rule alone is within 0.1 % of the optimum


def best_rate(rates: Iterable[float], num_stages: int) -> float:
    """Return the rate of the slowest stage under an assignment of peers that is as good as can be found quickly."""
    # Each peer goes to the slowest stage, the fastest peer first. If there are fewer than `_MANY` peers per stage, they
    # then move as long as `plan` gains by it. The result is exact for equal peers. For unequal peers it is at least
    # three quarters of the optimum, and close to the optimum with six peers per stage.
    # Source: the greedy rule for machine covering, Deuermeyer, Friesen and Langston, 1982.
    ordered = sorted(rates, reverse=True)
    if ordered and ordered[0] == ordered[-1]:
        return len(ordered) // num_stages * ordered[0]
    if len(ordered) < _MANY * num_stages:
        return min(assign(ordered, num_stages).rates)
    totals = [0.0] * num_stages
    for rate in ordered:
        heapq.heapreplace(totals, totals[0] + rate)
    return totals[0]


def assign(rates: Sequence[float], num_stages: int) -> StageRates:
    """Assign peers to stages: the fastest first, each to the slowest stage, then moves as in a run. Ids are indices."""
    totals = [(0.0, index) for index in range(num_stages)]
    stages = StageRates(num_stages)
    for number in sorted(range(len(rates)), key=rates.__getitem__, reverse=True):
        total, index = totals[0]
        heapq.heapreplace(totals, (total + rates[number], index))
        stages.put(PeerId(str(number)), index, rates[number], scatter=0.0)
    free = MoveCosts([0.0] * num_stages, horizon_s=1.0)
    while moves := plan(stages, free):
        for move in moves:
            stages.move(move)
    return stages


# A peer may give up one stage of several. Each peer of a stage gets microbatches in proportion to its rate there, even
# if it also computes other stages. So a peer with several stages slows down newcomers in each, until it leaves one.
@dataclass(frozen=True)
class StageRelease:
    """The release of one peer from a stage, while it stays in other stages."""

    peer: PeerId
    stage: int


def plan_shedding(
    rates: Sequence[Mapping[PeerId, float]],  # stage -> peer -> samples/s if it computed nothing else
    *,
    kept: Collection[int] = (),  # stages that no peer gives up
    leaving: Collection[PeerId] = (),  # peers that will leave, so they must not be a stage's only server
    lone_costs: float = 0.0,  # mean share of the run's time that is lost while a stage has a single server
) -> list[StageRelease]:
    """Plan releases that clearly reduce the work of the busiest peer in the released stage."""
    held = [dict(stage) for stage in rates]
    releases: list[StageRelease] = []
    while choices := _gainful_releases(held, {*kept, *(release.stage for release in releases)}, leaving, lone_costs):
        _, best = min(choices, key=lambda choice: choice[0])
        releases.append(best)
        del held[best.stage][best.peer]
    return releases


def _gainful_releases(
    held: Sequence[Mapping[PeerId, float]], kept: Collection[int], leaving: Collection[PeerId], lone_costs: float
) -> list[tuple[float, StageRelease]]:
    """Return the releases with a gain, each with the share of the busiest peer's work that remains."""
    choices = []
    num_held = Counter(peer for stage in held for peer in stage)
    for index, stage in enumerate(held):
        for peer in stage:
            staying = stage.keys() - {peer, *leaving}
            if index in kept or num_held[peer] < 2 or not staying:
                continue
            reduced_stage = {other: rate for other, rate in stage.items() if other != peer}
            released = [*held[:index], reduced_stage, *held[index + 1 :]]
            before = max(_seconds(member, held) for member in stage)
            after = max(_seconds(member, released) for member in stage)
            if after * (1.0 + SCATTER) < before * (1.0 - (lone_costs if len(staying) == 1 else 0.0)):
                choices.append((after / before, StageRelease(peer, index)))
    return choices


def _seconds(peer: PeerId, held: Sequence[Mapping[PeerId, float]]) -> float:
    """Return the seconds for which a peer computes per sample of the run, in all its stages."""
    # Its share of a stage's samples is its share of the stage's rate. So its own rate cancels out.
    return math.fsum(1.0 / math.fsum(stage.values()) for stage in held if peer in stage)
