"""Moves of servers of a served model: their benefit, and that no stage ever loses its last server."""

from __future__ import annotations

import heapq
import os
import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from lightning_swarm.network import PeerId
from lightning_swarm.serving.placement import Placed, choose_move, stage_rates
from lightning_swarm.serving.promises import Promises

GAIN = 1.3
ME, OTHER, THIRD = map(PeerId, ("me", "other", "third"))


def placed(*stages: tuple[int, int], rate: float = 1.0) -> list[Placed]:
    return [Placed(range(*of), rate) for of in stages]


@pytest.mark.parametrize(
    ("here", "others", "goes"),
    [
        ((0, 1), [(0, 1), (0, 1), (1, 2)], range(1, 2)),
        ((0, 1), [(0, 1), (1, 2)], None),  # the move would only swap the numbers
        ((0, 1), [(0, 1)], range(1, 2)),  # no server has the other stage
        ((0, 1), [(1, 2)], None),  # no other server has its stage
        ((0, 1), [(0, 1)] * 4 + [(1, 2)] * 4, None),  # 5 and 4: not worth it
    ],
)
def test_a_server_goes_where_one_is_missing(
    here: tuple[int, int], others: list[tuple[int, int]], goes: range | None
) -> None:
    assert choose_move([1, 1], 1, Placed(range(*here), 1.0), placed(*others), gain=GAIN) == goes


def test_who_holds_all_stages_stays() -> None:
    assert choose_move([1, 1], None, Placed(range(2), 1.0), placed((0, 1), (0, 1), (1, 2)), gain=GAIN) is None


def test_a_slow_server_is_worth_less() -> None:
    fast, slow = placed((1, 2)), placed((1, 2), rate=0.2)
    here, beside = Placed(range(1), 1.0), placed((0, 1), rate=0.9)
    assert choose_move([1, 1], 1, here, [*beside, *fast], gain=GAIN) is None
    assert choose_move([1, 1], 1, here, [*beside, *slow], gain=GAIN) == range(1, 2)


def test_a_server_does_not_go_back_for_a_while() -> None:
    here, others = Placed(range(1), 1.0), placed((0, 1), (0, 1))
    assert choose_move([1, 1, 1], 1, here, others, gain=GAIN, avoided=[range(1, 2)]) == range(2, 3)
    assert choose_move([1, 1], 1, here, others, gain=GAIN, avoided=[range(1, 2)]) is None


def test_a_promise_keeps_a_server_and_ends() -> None:
    own = Promises()
    assert own.give(OTHER, [0], [0, 1], now_s=0.0, for_s=10.0)
    assert not own.begin_leaving(5.0)
    assert not own.give(THIRD, [2], [0, 1], now_s=5.0, for_s=10.0), "it is not there"
    assert own.begin_leaving(10.0)
    assert not own.give(OTHER, [0], [0, 1], now_s=11.0, for_s=10.0), "it leaves itself"
    own.stay()
    assert own.give(OTHER, [0], [0, 1], now_s=12.0, for_s=10.0)


def test_a_promise_is_taken_back_by_whom_it_was_given_to() -> None:
    own = Promises()
    assert own.give(OTHER, [0], [0], now_s=0.0, for_s=10.0)
    own.give(THIRD, [], [0], now_s=1.0, for_s=10.0)
    assert not own.begin_leaving(2.0)
    own.give(OTHER, [], [0], now_s=3.0, for_s=10.0)
    assert own.begin_leaving(4.0)


# ---------------------------------------------------------------------- schedules

PROMISE_S = 60.0


@dataclass
class Server:
    """One of the simulated servers."""

    stages: range
    rate: float
    promises: Promises = field(default_factory=Promises)
    left: list[range] = field(default_factory=list)


class Schedule:
    """Servers that see outdated views of each other, at random times, and move like real servers."""

    def __init__(self, seed: int, *, asks: bool = True) -> None:
        self.rng = random.Random(seed)
        self.asks = asks
        self.sizes = [1] * self.rng.randint(2, 5)
        self.servers: dict[PeerId, Server] = {}
        self.emptied = self.moves = self.returns = 0
        self._now_s, self._order = 0.0, count()
        self._events: list[tuple[float, int, object]] = []
        self._history: list[tuple[float, dict[PeerId, range]]] = []
        for stage in range(len(self.sizes)):
            self._join(range(stage, stage + 1))
        for _ in range(self.rng.randint(1, 6)):
            first = self.rng.randrange(len(self.sizes))
            self._join(range(first, first + 1))

    def _join(self, stages: range) -> None:
        peer = PeerId(f"peer-{len(self.servers)}")
        self.servers[peer] = Server(stages, self.rng.uniform(0.5, 2.0))
        self._note()
        self._after(self.rng.uniform(0.0, 30.0), lambda: self._look(peer))

    def _after(self, delay_s: float, do: object) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._order), do))

    def _note(self) -> None:
        self._history.append((self._now_s, {peer: one.stages for peer, one in self.servers.items()}))

    def run(self, until_s: float) -> None:
        while self._events and self._now_s < until_s:
            self._now_s, _, do = heapq.heappop(self._events)
            do()  # type: ignore[operator]

    def _seen(self) -> dict[PeerId, range]:
        """Return a view that is up to a minute old."""
        at_s = self._now_s - self.rng.uniform(0.0, 60.0)
        return next((view for since_s, view in reversed(self._history) if since_s <= at_s), self._history[0][1])

    def _look(self, peer: PeerId) -> None:
        own, view = self.servers[peer], self._seen()
        self._after(self.rng.uniform(5.0, 90.0), lambda: self._look(peer))
        others = [Placed(stages, self.servers[one].rate) for one, stages in view.items() if one != peer and len(stages)]
        if own.promises.is_leaving or not own.stages:
            return
        wanted = choose_move(self.sizes, 1, Placed(own.stages, own.rate), others, avoided=own.left, gain=GAIN)
        if wanted is None:
            return
        if not self.asks:
            self._after(self.rng.uniform(0.0, 30.0), lambda: self._leave(peer, wanted, self._now_s + PROMISE_S, []))
        elif own.promises.begin_leaving(self._now_s):
            holders = [one for one, stages in view.items() if one != peer and set(own.stages) & set(stages)]
            self.rng.shuffle(holders)
            self._ask(peer, wanted, holders, self._now_s + PROMISE_S, [])

    def _ask(self, peer: PeerId, wanted: range, holders: list[PeerId], until_s: float, asked: list[PeerId]) -> None:
        if not holders:
            self._end(peer, asked)
            return
        holder, rest = holders[0], holders[1:]

        def arrives() -> None:
            own, other = self.servers[peer], self.servers[holder]
            stays = other.promises.give(peer, own.stages, other.stages, now_s=self._now_s, for_s=PROMISE_S)
            answer_s = self.rng.uniform(0.0, 2.0)
            if stays:
                self._after(
                    answer_s + self.rng.uniform(0.0, 30.0), lambda: self._leave(peer, wanted, until_s, [*asked, holder])
                )
            else:
                self._after(answer_s, lambda: self._ask(peer, wanted, rest, until_s, [*asked, holder]))

        self._after(self.rng.uniform(0.0, 2.0), arrives)

    def _leave(self, peer: PeerId, wanted: range, until_s: float, asked: list[PeerId]) -> None:
        own = self.servers[peer]
        if self._now_s >= until_s:
            self._end(peer, asked)
            return
        before, own.stages = own.stages, range(0)
        self.moves += 1
        self.returns += wanted in own.left
        own.left.append(before)
        self._note()
        self.emptied += any(not any(stage in one.stages for one in self.servers.values()) for stage in before)

        def loaded() -> None:
            own.stages = wanted
            self._note()
            self._end(peer, asked)

        self._after(self.rng.uniform(1.0, 20.0), loaded)

    def _end(self, peer: PeerId, asked: list[PeerId]) -> None:
        self.servers[peer].promises.stay()
        for holder in asked:
            other = self.servers[holder]
            other.promises.give(peer, [], other.stages, now_s=self._now_s, for_s=0.0)


NUM_SCHEDULES = 500 * max(1, int(os.environ.get("SWARM_TIMES", "1")))


def test_no_schedule_empties_a_stage() -> None:
    """``SWARM_TIMES=20`` runs 10,000 schedules."""
    moves = 0
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(seed)
        schedule.run(600.0)
        assert (schedule.emptied, schedule.returns) == (0, 0), seed
        moves += schedule.moves
        rates = stage_rates(len(schedule.sizes), [Placed(one.stages, one.rate) for one in schedule.servers.values()])
        assert all(rates), seed
    assert moves > NUM_SCHEDULES, "hardly anybody moves"


def test_without_promises_stages_are_emptied() -> None:
    """This shows that the schedules above would detect an empty stage."""
    emptied = 0
    for seed in range(NUM_SCHEDULES):
        schedule = Schedule(seed, asks=False)
        schedule.run(600.0)
        emptied += schedule.emptied
    assert emptied
