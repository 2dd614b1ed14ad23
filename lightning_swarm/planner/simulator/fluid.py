"""A swarm as rates: peers come, go and move, and in between its pipeline runs as its slowest stage does.

Microbatches, queues and steps are not there; who moves is decided by the policy of real swarms.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_swarm.coordinator.rebalancing.balancer import ChurnEstimate
from lightning_swarm.coordinator.rebalancing.policy import (
    Move,
    MoveCosts,
    StageRates,
    best_rate,
    plan,
    plan_as_paper,
    stage_for,
)
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Rebalancing


@dataclass(frozen=True)
class Change:
    """A peer comes, or goes.

    Args:
        at_s: When.
        peer: Which one.
        samples_per_s: What it computes from then on; 0: it is gone.
    """

    at_s: float
    peer: PeerId
    samples_per_s: float


@dataclass(frozen=True)
class Scenario:
    """What happens to a swarm.

    Args:
        num_stages: Of its pipeline.
        changes: In the order of their times. Those of the first time are there, and serve, as it begins.
        end_s: When it ends.
        rule: Who moves.
        interval_s: Between two looks, at the latest.
        offset_s: After the beginning, the first of these intervals begins: looks need not fall on the changes.
        move_s: For how long who moves computes nothing.
        join_s: Likewise for who comes.
    """

    num_stages: int
    changes: Sequence[Change]
    end_s: float
    rule: Rebalancing = "gain"
    interval_s: float = 300.0
    offset_s: float = 0.0
    move_s: float = 30.0
    join_s: float = 30.0


@dataclass(frozen=True)
class Span:
    """A time in which nothing changed.

    Args:
        begin_s: From then.
        end_s: To then.
        samples_per_s: Of the slowest stage.
        best: Of the slowest stage, if the peers that are alive were assigned as well as can be.
        num_moves: That began with it.
        fewest: Peers that serve some stage.
        most: Likewise.
        queued: Jobs that wait at a peer, on the average. None: not simulated.
        sent_bytes: By all peers. None: not simulated.
    """

    begin_s: float
    end_s: float
    samples_per_s: float
    best: float
    num_moves: int
    fewest: int
    most: int
    queued: float | None = None
    sent_bytes: int | None = None

    @property
    def sent_mb_per_s(self) -> float | None:
        """By all peers."""
        return None if self.sent_bytes is None else self.sent_bytes / (self.end_s - self.begin_s) / 1e6


def simulate(scenario: Scenario) -> list[Span]:
    """What comes of it, in order."""
    swarm = _Swarm(scenario)
    spans = []
    begin_s = scenario.changes[0].at_s
    while begin_s < scenario.end_s:
        num_moves = swarm.advance(begin_s)
        end_s = min(swarm.next_s, scenario.end_s)
        spans.append(Span(begin_s, end_s, swarm.samples_per_s, swarm.best, num_moves, *swarm.serving))
        begin_s = end_s
    return spans


def share_of_best(spans: Iterable[Span], begin_s: float = -math.inf, end_s: float = math.inf) -> float:
    """Samples in a time, as a share of those under the best assignments; NaN where these have none."""
    done = best = 0.0
    for span in spans:
        length_s = max(0.0, min(span.end_s, end_s) - max(span.begin_s, begin_s))
        done += length_s * span.samples_per_s
        best += length_s * span.best
    return done / best if best else math.nan


def best_of(rates: Iterable[float], num_stages: int) -> float:
    """Of the slowest stage, if peers of these rates were assigned as well as can be."""
    return _best_rate(tuple(sorted(rates)), num_stages)


@functools.lru_cache(maxsize=1024)  # rules are compared on the same peers
def _best_rate(rates: tuple[float, ...], num_stages: int) -> float:
    return best_rate(rates, num_stages)


class _Swarm:
    """At one moment."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._begin_s = scenario.changes[0].at_s
        self._changes = deque(scenario.changes)
        self._stages = StageRates(scenario.num_stages)
        self._alive: dict[PeerId, float] = {}  # with their rates
        self._arrivals: dict[PeerId, float] = {}  # when those that are on their way to a stage serve it
        self._left: dict[PeerId, set[int]] = {}  # from where they moved since the last change
        self._look_s = self._begin_s + scenario.offset_s + scenario.interval_s
        self._pace = ChurnEstimate(self._begin_s)
        self.best = 0.0

    @property
    def samples_per_s(self) -> float:
        """Of the slowest stage, by those that have arrived."""
        return min(self._stages.serving_rates)

    @property
    def serving(self) -> tuple[int, int]:
        """How few and how many peers serve a stage."""
        numbers = [self._stages.num_serving(index) for index in range(self._scenario.num_stages)]
        return min(numbers), max(numbers)

    @property
    def next_s(self) -> float:
        """When something happens next."""
        return min([self._look_s, *self._arrivals.values(), *(one.at_s for one in itertools.islice(self._changes, 1))])

    def advance(self, now_s: float) -> int:
        """Have happen what is due. Returns how many moves begin."""
        arrived = self._arrive(now_s)
        changed = False
        while self._changes and self._changes[0].at_s <= now_s:
            self._change(self._changes.popleft())
            changed = True
        if changed:
            self._pace.note_change(now_s)
            self._forget_what_was_left()
            self.best = best_of(self._alive.values(), self._scenario.num_stages)
        looks = now_s >= self._look_s
        if looks:
            self._look_s = now_s + self._scenario.interval_s
        moves = self._decide(now_s, seen=changed or arrived, looks=looks)
        for move in moves:
            self._left.setdefault(move.peer, set()).add(move.source)
            self._send(move.peer, move.target, now_s + self._scenario.move_s)
        return len(moves)

    def _arrive(self, now_s: float) -> bool:
        arrived = [peer for peer, at_s in self._arrivals.items() if at_s <= now_s]
        for peer in arrived:
            del self._arrivals[peer]
            stage = self._stages.stage_of(peer)
            assert stage is not None
            self._stages.put(peer, stage, self._alive[peer], left=self._left.get(peer, ()))
        return bool(arrived)

    def _forget_what_was_left(self) -> None:
        for peer in sorted(self._left.keys() & self._alive.keys() - self._arrivals.keys()):
            stage = self._stages.stage_of(peer)
            assert stage is not None
            self._stages.put(peer, stage, self._alive[peer])
        self._left.clear()

    def _change(self, change: Change) -> None:
        peer = change.peer
        if change.samples_per_s == 0.0:
            self._alive.pop(peer, None)
            self._arrivals.pop(peer, None)
            self._stages.remove(peer)
            return
        there = self._stages.stage_of(peer)
        self._alive[peer] = change.samples_per_s
        if there is not None:
            put = self._stages.expect if peer in self._arrivals else self._stages.put
            put(peer, there, change.samples_per_s)
        elif change.at_s == self._begin_s:  # dealt out, from the last stage on: nobody's rate is known yet
            self._stages.put(peer, -len(self._alive) % self._scenario.num_stages, change.samples_per_s)
        else:
            self._send(peer, self._stage_for_newcomer(), change.at_s + self._scenario.join_s)

    def _stage_for_newcomer(self) -> int:
        if self._scenario.rule == "none":  # where nobody moves, rates are not asked for
            return min(range(self._scenario.num_stages), key=self._stages.num_peers.__getitem__)
        return stage_for(self._stages)

    def _send(self, peer: PeerId, stage: int, arrives_s: float) -> None:
        self._stages.expect(peer, stage, self._alive[peer])
        self._arrivals[peer] = arrives_s

    def _decide(self, now_s: float, *, seen: bool, looks: bool) -> list[Move]:
        if self._scenario.rule == "gain" and (seen or looks):
            move_s = [self._scenario.move_s] * self._scenario.num_stages
            return plan(self._stages, MoveCosts(move_s, self._pace.horizon_s(now_s)))
        if self._scenario.rule == "paper" and looks:
            return self._paper()
        return []

    def _paper(self) -> list[Move]:
        """By queues as they are where each stage gets what the slowest one passes on: as long as it is slow."""
        queues = [
            {peer: 1.0 / rate for rate, peer in self._stages.serving(index)}
            for index in range(self._scenario.num_stages)
        ]
        queued = [1.0 / rate if rate else math.inf for rate in self._stages.rates]
        return list(filter(self._stages.stays_ahead, plan_as_paper(queued, queues)))
