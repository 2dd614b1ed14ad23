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

SCATTER: Final = 0.06  # smallest relative error that is assumed for a measured rate
_ROUNDING: Final = 1e-9  # relative error of floating-point sums of rates
_MOST_RETURNS: Final = 4  # peers of a stage that are considered for an exchange, evenly from the slowest to the fastest

# (stage that may give a peer, net rate whose transfer makes both stages equal, largest net rate that it may give).
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
    # Mean seconds lost by a change that may hit a stage's only server, the many harmless changes included.
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
        self._where: dict[PeerId, _StagePeer] = {}

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
        # It does not move to a `barred` stage: the stage is too large for it, or the peer left it since the last change
        # of the swarm. Otherwise two peers could change places forever, because a peer's measured rate changes with its
        # stage. `scatter` is the relative error of its rate; smaller gains would have peers move to and fro. In a large
        # stage, errors cancel.
        self._enter(
            peer, _StagePeer(stage, samples_per_s, arrived=True, movable=movable, barred=barred, scatter=scatter)
        )

    def expect(self, peer: PeerId, stage: int, samples_per_s: float) -> None:
        """Add or replace a peer on its way to a stage, which cannot move until it arrives."""
        self._enter(peer, _StagePeer(stage, samples_per_s, arrived=False, movable=False, barred=(), scatter=SCATTER))

    def _enter(self, peer: PeerId, entry: _StagePeer) -> None:
        """Put a peer into a stage, out of its former stage."""
        self.remove(peer)
        self._where[peer] = entry
        self._count(entry, 1)
        if entry.movable:
            insort(self._movable[entry.stage], (entry.samples_per_s, peer))

    def remove(self, peer: PeerId) -> None:
        """Remove a peer, if it is there."""
        entry = self._where.pop(peer, None)
        if entry is None:
            return
        self._count(entry, -1)
        if not self.num_peers[entry.stage]:
            self.rates[entry.stage] = self.squares[entry.stage] = 0.0  # without rounding errors
        if not self._num_serving[entry.stage]:
            self.serving_rates[entry.stage] = 0.0
        if entry.movable:
            there = self._movable[entry.stage]
            del there[bisect_left(there, (entry.samples_per_s, peer))]

    def move(self, move: Move) -> None:
        """Apply a move."""
        before = self._where[move.peer]
        self.put(move.peer, move.target, before.samples_per_s, barred=before.barred, scatter=before.scatter)

    def may_go(self, peer: PeerId, stage: int) -> bool:
        """Return whether a peer may move to a stage, which is not `barred` to it (see `put`)."""
        return stage not in self._where[peer].barred

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
    # repeated until nothing is gained. Of these moves, as many are made as pay, because a mover computes nothing during
    # its download. A move that costs the pipeline nothing is made even without a gain: with more even stages, the next
    # loss of a peer costs less.
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
        # A period ends when some movers arrive. Weigh its rate by the probability that the swarm changes in it.
        move_s, mean, p_unchanged = self._costs.move_s, 0.0, 1.0
        for until_s in sorted({move_s[move.target] for move in self.moves.values()}):
            p_later = math.exp(-until_s / self._costs.horizon_s)
            stage_rates = (
                after if needs_s < until_s else before
                for before, after, needs_s in zip(self._meanwhile, self._rates, move_s, strict=True)
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
        """Find the move that helps the slowest stage most, else an exchange; with the rates of the movers."""
        target = min(range(len(self._rates)), key=self._rates.__getitem__)
        sources = self._richer(target)
        found = self._exchange(target, sources, [(0.0, None)])
        if found or self._num_staying[target] < 2:
            return found
        movable = self._stages.movable(target)
        candidates = movable[:: math.ceil(len(movable) / _MOST_RETURNS) or 1]
        return self._exchange(target, sources, [one for one in candidates if one[1] not in self.moves])

    def _richer(self, target: int) -> list[_Source]:
        """List the stages that may give a peer to the target, the fastest first."""
        target_rate, work, squares = self._rates[target], self._stages.work, self._stages.squares
        least_margin = math.sqrt(max(min(squares) + squares[target], 0.0))  # rounding may leave less than nothing
        sources = []
        for source in sorted(range(len(self._rates)), key=self._rates.__getitem__, reverse=True):
            ahead = self._rates[source] - target_rate
            if ahead <= least_margin:
                break  # this stage and all slower stages may be no faster in truth
            margin = max(math.sqrt(max(squares[source] + squares[target], 0.0)), _ROUNDING * self._rates[source])
            if self._num_staying[source] >= 2 and ahead > margin:
                evening_rate = ahead / (1.0 / work[source] + 1.0 / work[target])
                sources.append((source, evening_rate, (ahead - margin) * work[target]))
        return sources

    def _exchange(
        self, target: int, sources: Sequence[_Source], returns: Sequence[tuple[float, PeerId | None]]
    ) -> list[tuple[Move, float]]:
        """Find the best move from one of the `sources` to the target; empty if no move helps.

        In return, the target may give one of `returns`, which are (rate, peer); ``(0.0, None)`` is nothing.
        """
        target_rate, work = self._rates[target], self._stages.work
        smallest_return = min((rate for rate, _ in returns), default=0.0)
        best: list[tuple[Move, float]] = []
        best_rate = target_rate  # rate of the slower of the two stages after the best move so far
        for source, evening_rate, most_given in sources:
            source_rate, movable = self._rates[source], self._stages.movable(source)
            if source_rate <= best_rate:
                break  # no move from this stage or a slower one helps more
            reachable = target_rate + (movable[-1][0] - smallest_return) / work[target] if movable else 0.0
            if min(reachable, target_rate + evening_rate / work[target]) <= best_rate:
                continue
            wanted = min(most_given, evening_rate)
            for return_rate, returned in returns:
                at = bisect_left(movable, (return_rate + wanted,))
                # Most often no peer fits, which the nearest two peers already show.
                above = movable[at][0] - return_rate if at < len(movable) else math.inf
                below = movable[at - 1][0] - return_rate if at else 0.0
                is_above = above < most_given and source_rate - above / work[source] > best_rate
                is_below = below > self._stages.error(returned) and target_rate + below / work[target] > best_rate
                if not (is_above or is_below) or (returned is not None and not self._stages.may_go(returned, source)):
                    continue
                for mover_rate, mover in self._near(movable, at, target):
                    net_rate = mover_rate - return_rate
                    slower_rate = min(source_rate - net_rate / work[source], target_rate + net_rate / work[target])
                    error = self._stages.error(mover)
                    if returned is not None:
                        # Of two peers to exchange, the faster one may only have less work at its own stage. A lone
                        # mover speeds up its target stage in any case.
                        scatter = self._stages.work_scatter(source, target)
                        error = math.hypot(error, self._stages.error(returned), mover_rate * scatter)
                    if error < net_rate < most_given and slower_rate > best_rate:
                        best_rate, best = slower_rate, [(Move(mover, source, target), mover_rate)]
                        best += [(Move(returned, target, source), return_rate)] if returned is not None else []
        return best

    def _near(self, movable: Sequence[tuple[float, PeerId]], at: int, target: int) -> Iterator[tuple[float, PeerId]]:
        """Yield the nearest peers below and above an index that do not move yet, and may go to the target."""
        for indices in (range(at - 1, -1, -1), range(at, len(movable))):
            for index in indices:
                peer = movable[index][1]
                if peer not in self.moves and self._stages.may_go(peer, target):
                    yield movable[index]
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
