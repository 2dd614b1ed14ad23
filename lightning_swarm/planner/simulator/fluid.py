"""Simulates a swarm as rates, with the real rebalancing policy; its speed is the rate of the slowest stage."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from lightning_swarm.coordinator.rebalancing import policy
from lightning_swarm.coordinator.rebalancing.balancer import ChurnEstimate
from lightning_swarm.coordinator.rebalancing.policy import Move, StageRates
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.settings import RebalancingRule


@dataclass(frozen=True)
class Change:
    """A peer joins, changes its rate, or leaves."""

    at_s: float
    peer: PeerId
    samples_per_s: float  # the peer's rate after the change; 0: the peer is gone


@dataclass(frozen=True)
class Scenario:
    """The events and settings of a simulated swarm."""

    num_stages: int
    changes: Sequence[Change]  # ordered by time; peers of the first time serve from the beginning
    end_s: float
    rule: RebalancingRule = "gain"
    interval_s: float = 300.0  # maximum time between two decisions about moves
    offset_s: float = 0.0  # time before the first interval, so that intervals need not begin at changes
    move_s: float = 30.0  # a peer that moves computes nothing for this time
    join_s: float = 30.0  # a peer that joins computes nothing for this time


@dataclass(frozen=True)
class Span:
    """An interval in which nothing changed."""

    begin_s: float
    end_s: float
    samples_per_s: float  # rate of the slowest stage
    best: float  # rate of the slowest stage if the live peers were assigned optimally
    num_moves: int  # moves that began with the span
    fewest: int  # number of peers at the stage that has the fewest
    most: int  # number of peers at the stage that has the most
    queued: float | None = None  # mean number of waiting jobs at a peer; None: not simulated
    sent_bytes: int | None = None  # sum over all peers; None: not simulated

    @property
    def length_s(self) -> float:
        """The length in seconds."""
        return self.end_s - self.begin_s

    @property
    def sent_mb_per_s(self) -> float | None:
        """The MB/s that all peers sent."""
        return None if self.sent_bytes is None else self.sent_bytes / self.length_s / 1e6


def simulate(scenario: Scenario) -> list[Span]:
    """Simulate a scenario, and return its spans in order."""
    swarm = _Swarm(scenario)
    spans = []
    begin_s = scenario.changes[0].at_s
    while begin_s < scenario.end_s:
        num_moves = swarm.advance(begin_s)
        end_s = min(swarm.next_s, scenario.end_s)
        spans.append(Span(begin_s, end_s, swarm.samples_per_s, swarm.best, num_moves, *swarm.fewest_and_most))
        begin_s = end_s
    return spans


def share_of_best(spans: Iterable[Span], begin_s: float = -math.inf, end_s: float = math.inf) -> float:
    """Return the samples computed between two times, divided by those of the best assignments; NaN if that is 0."""
    done = best = 0.0
    for span in spans:
        length_s = max(0.0, min(span.end_s, end_s) - max(span.begin_s, begin_s))
        done += length_s * span.samples_per_s
        best += length_s * span.best
    return done / best if best else math.nan


def best_of(rates: Iterable[float], num_stages: int) -> float:
    """Return the slowest stage's rate if peers of these rates were assigned optimally."""
    return _cached_best_rate(tuple(sorted(rates)), num_stages)


_cached_best_rate = functools.lru_cache(maxsize=1024)(policy.best_rate)  # all rules are simulated with the same peers


class _Swarm:
    """The state of a simulated swarm."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._begin_s = scenario.changes[0].at_s
        self._changes = deque(scenario.changes)
        self._stages = StageRates(scenario.num_stages)
        self._alive: dict[PeerId, float] = {}  # live peers -> rates
        self._arrivals: dict[PeerId, float] = {}  # joining or moving peers -> time at which they begin to serve
        self._left: dict[PeerId, set[int]] = {}  # peer -> stages that it left since the last change
        self._decision_s = self._begin_s + scenario.offset_s + scenario.interval_s
        self._churn = ChurnEstimate(self._begin_s)
        self.best = 0.0

    @property
    def samples_per_s(self) -> float:
        """The rate of the slowest stage, by peers that have arrived."""
        return min(self._stages.serving_rates)

    @property
    def fewest_and_most(self) -> tuple[int, int]:
        """The fewest and the most peers that serve a stage."""
        numbers = [self._stages.num_serving(index) for index in range(self._scenario.num_stages)]
        return min(numbers), max(numbers)

    @property
    def next_s(self) -> float:
        """The time of the next event."""
        next_changes = (change.at_s for change in itertools.islice(self._changes, 1))
        return min([self._decision_s, *self._arrivals.values(), *next_changes])

    def advance(self, now_s: float) -> int:
        """Process the events that are due, and return the number of moves that begin."""
        arrived = self._arrive(now_s)
        has_changed = False
        while self._changes and self._changes[0].at_s <= now_s:
            self._apply_change(self._changes.popleft())
            has_changed = True
        if has_changed:
            self._churn.note_change(now_s)
            for peer in sorted(self._left.keys() & (self._alive.keys() - self._arrivals.keys())):
                self._put(peer)  # nothing is `barred`: after a change, a peer may return to stages that it left
            self._left.clear()
            self.best = best_of(self._alive.values(), self._scenario.num_stages)
        is_regular = now_s >= self._decision_s
        if is_regular:
            self._decision_s = now_s + self._scenario.interval_s
        moves = self._decide(now_s, has_news=has_changed or arrived, is_regular=is_regular)
        for move in moves:
            self._left.setdefault(move.peer, set()).add(move.source)
            self._send(move.peer, move.target, now_s + self._scenario.move_s)
        return len(moves)

    def _arrive(self, now_s: float) -> bool:
        arrived = [peer for peer, at_s in self._arrivals.items() if at_s <= now_s]
        for peer in arrived:
            del self._arrivals[peer]
            self._put(peer, barred=self._left.get(peer, ()))
        return bool(arrived)

    def _put(self, peer: PeerId, barred: Collection[int] = ()) -> None:  # `barred`: stages to which it may not move
        stage = self._stages.stage_of(peer)
        assert stage is not None
        self._stages.put(peer, stage, self._alive[peer], barred=barred)

    def _apply_change(self, change: Change) -> None:
        peer = change.peer
        if change.samples_per_s == 0.0:
            self._alive.pop(peer, None)
            self._arrivals.pop(peer, None)
            self._stages.remove(peer)
            return
        stage = self._stages.stage_of(peer)
        self._alive[peer] = change.samples_per_s
        if stage is not None:
            put = self._stages.expect if peer in self._arrivals else self._stages.put
            put(peer, stage, change.samples_per_s)
        elif change.at_s == self._begin_s:  # stages in turn, from the last one on, because no rate is known yet
            self._stages.put(peer, -len(self._alive) % self._scenario.num_stages, change.samples_per_s)
        else:
            if self._scenario.rule == "none":  # without moves, rates are not measured
                stage = min(range(self._scenario.num_stages), key=self._stages.num_peers.__getitem__)
            else:
                stage = policy.stage_for(self._stages)
            self._send(peer, stage, change.at_s + self._scenario.join_s)

    def _send(self, peer: PeerId, stage: int, arrives_s: float) -> None:
        self._stages.expect(peer, stage, self._alive[peer])
        self._arrivals[peer] = arrives_s

    def _decide(self, now_s: float, *, has_news: bool, is_regular: bool) -> list[Move]:
        rule = self._scenario.rule
        if rule == "none":
            return []
        if rule == "paper":
            return self._plan_as_paper() if is_regular else []
        if rule != "gain":
            assert_never(rule)
        if not (has_news or is_regular):
            return []
        move_s = [self._scenario.move_s] * self._scenario.num_stages
        return policy.plan(self._stages, policy.MoveCosts(move_s, self._churn.horizon_s(now_s)))

    def _plan_as_paper(self) -> list[Move]:
        """Plan by the SWARM paper's rule; queue lengths are in proportion to a stage's or peer's time for a sample."""
        queues = [
            {peer: 1.0 / rate for rate, peer in self._stages.movable(index)}
            for index in range(self._scenario.num_stages)
        ]
        queued = [1.0 / rate if rate else math.inf for rate in self._stages.rates]
        return list(filter(self._stages.stays_ahead, policy.plan_as_paper(queued, queues)))
