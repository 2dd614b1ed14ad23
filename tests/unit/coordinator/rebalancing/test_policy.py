"""Choice of moves: the policy, the paper's rule, and an exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

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

FREE = 1e-9
"""Seconds of a move that costs nothing."""


def stages_of(*rates: Sequence[float]) -> StageRates:
    """Return peers by stage, called ``s0p0``, ``s0p1``, and so on."""
    stages = StageRates(len(rates))
    for index, of_stage in enumerate(rates):
        for number, rate in enumerate(of_stage):
            stages.put(PeerId(f"s{index}p{number}"), index, rate)
    return stages


def made(stages: StageRates, *, move_s: float = FREE, horizon_s: float = 600.0) -> list[Move]:
    """Plan moves, and apply them."""
    moves = plan(stages, MoveCosts([move_s] * len(stages.rates), horizon_s))
    for move in moves:
        rate = next(rate for rate, peer in stages.movable(move.source) if peer == move.peer)
        stages.put(move.peer, move.target, rate)
    return moves


def test_a_peer_moves_to_the_stage_that_lost_one() -> None:
    assert made(stages_of([1, 1, 1], [1])) == [Move(PeerId("s0p0"), 0, 1)]


def test_nobody_moves_where_two_stages_would_but_change_places() -> None:
    assert made(stages_of([1, 1], [1])) == []


def test_several_move_at_once_where_one_alone_gains_nothing() -> None:
    moves = made(stages_of([1] * 4, [1] * 4, [1], [1]))
    assert sorted((move.source, move.target) for move in moves) == [(0, 2), (1, 3)]


def test_peers_that_fit_move() -> None:
    assert {move.peer for move in made(stages_of([8, 3, 1], [4]))} == {"s0p1", "s0p2"}  # 8 and 8


def test_no_stage_is_left_empty() -> None:
    stages = stages_of([10], [1, 1])
    assert made(stages) == []
    assert [len(stages.movable(index)) for index in range(2)] == [1, 2]


def test_an_empty_stage_gets_a_peer() -> None:
    assert [move.target for move in made(stages_of([1, 1], [1], []))] == [2]


def test_the_stages_are_evened_out_ahead_of_the_next_loss() -> None:
    """The slowest stage becomes no faster and the move costs nothing, but fewer deaths will hit a slowest stage."""
    assert made(stages_of([1] * 4, [1] * 2, [1] * 2)) == [Move(PeerId("s0p0"), 0, 1)]


def test_two_change_places_where_nobody_helps_alone() -> None:
    moves = made(stages_of([4, 4], [3, 1]))
    assert {(move.peer, move.target) for move in moves} in [{("s0p0", 1), ("s1p1", 0)}, {("s0p1", 1), ("s1p1", 0)}]


@pytest.mark.parametrize(("others", "moves"), [([2.0], 0), ([1.9, 0.1], 2)])
def test_the_last_one_of_a_stage_does_not_change_places(others: list[float], moves: int) -> None:
    stages = stages_of([3], others)
    stages.put(PeerId("fixed"), 0, 1.0, movable=False)
    assert len(made(stages)) == moves


def test_who_cannot_move_serves_all_the_same() -> None:
    stages = stages_of([1, 1], [0.1])
    stages.put(PeerId("fixed"), 0, 5.0, movable=False)
    assert {move.peer for move in made(stages)} == {"s0p0", "s0p1"}  # the stage keeps a server, if only one
    for peer in ("s0p0", "s0p1"):
        stages.put(PeerId(peer), 0, 1.0, movable=False)
    assert made(stages) == []


@pytest.mark.parametrize(("move_s", "moves"), [(300.0, 2), (500.0, 0)])
def test_a_move_that_costs_more_than_it_gains_is_not_made(move_s: float, moves: int) -> None:
    """During the move the rate is 3 and not 4, then 5 if the swarm still is the same: with a chance of 0.6, or 0.4."""
    assert len(made(stages_of([4, 4], [3, 1]), move_s=move_s, horizon_s=600.0)) == moves


@pytest.mark.parametrize(("horizon_s", "moves"), [(6000.0, 1), (60.0, 0)])
def test_a_stage_is_left_to_one_server_only_if_that_gains_more_than_its_death_would_cost(
    horizon_s: float, moves: int
) -> None:
    """A rate of 5 in place of 2; but in a swarm that changes each minute, that server dies in four on average."""
    for number, expected in ((2, moves), (3, 1)):
        stages = stages_of([5] * number, [])
        for name in "ab":
            stages.put(PeerId(name), 1, 1.0, movable=False)
        assert len(plan(stages, MoveCosts([FREE] * 2, horizon_s, lost_s=300.0))) == expected


def test_a_stage_that_takes_long_to_download_keeps_nobody_from_the_others() -> None:
    stages = stages_of([1] * 4, [1] * 4, [1], [1])
    moves = plan(stages, MoveCosts([30.0, 30.0, 1e6, 30.0], 600.0))
    assert 3 in [move.target for move in moves]


def test_what_is_lost_while_peers_move_is_won_back() -> None:
    """A stage may get several peers in exchange for a fast one: meanwhile it is slower than the slowest stage was."""
    rng = random.Random(0)
    num_slower = {1.0: 0, 300.0: 0}
    for _ in range(200):
        peers = [[rng.uniform(0.1, 10) for _ in range(rng.randrange(1, 6))] for _ in range(4)]
        for move_s in num_slower:
            stages = stages_of(*peers)
            before, meanwhile = min(stages.rates), list(stages.rates)
            for move in plan(stages, MoveCosts([move_s] * 4, 600.0)):
                meanwhile[move.source] -= next(rate for rate, peer in stages.movable(move.source) if peer == move.peer)
            num_slower[move_s] += min(meanwhile) < before
            made(stages, move_s=move_s)
            lasts = math.exp(-move_s / 600.0)
            assert min(meanwhile) * (1.0 - lasts) + min(stages.rates) * lasts >= before * (1.0 - 1e-9)
    assert num_slower[1.0] > num_slower[300.0]


def test_rates_that_scatter_move_nobody_back() -> None:
    rng = random.Random(0)
    stages = stages_of([1] * 9, [1], [1])
    assert made(stages)
    for _ in range(20):
        for index in range(3):
            for _, peer in list(stages.movable(index)):
                stages.put(peer, index, rng.uniform(0.97, 1.03))
        assert made(stages) == []


def test_two_of_sixty_are_more_than_rates_scatter() -> None:
    """Errors of many peers cancel, so large stages are balanced although the difference is relatively small."""
    assert len(made(stages_of([1] * 61, [1] * 59))) == 1


@pytest.mark.parametrize("num_peers", [8, 40, 200])
def test_swarms_that_are_measured_badly_settle(num_peers: int) -> None:
    rng = random.Random(0)
    rates = [rng.choice([1.0, 2.0, 5.0, 10.0]) for _ in range(num_peers)]
    stages = stages_of(rates, [], [], [])
    while made(stages):
        pass
    where = {PeerId(f"s0p{i}"): stages.stage_of(PeerId(f"s0p{i}")) for i in range(num_peers)}
    num_moves = 0
    for _ in range(20):
        seen = StageRates(4)
        for rate, (peer, stage) in zip(rates, where.items(), strict=True):
            assert stage is not None
            seen.put(peer, stage, rate * rng.uniform(0.98, 1.02))
        for move in made(seen):
            where[move.peer] = move.target
            num_moves += 1
    assert num_moves <= 2


def test_nobody_goes_back_to_a_stage_that_it_left() -> None:
    stages = stages_of([1, 1, 1], [1])
    for number in range(3):
        stages.put(PeerId(f"s0p{number}"), 0, 1.0, barred={1})
    assert made(stages) == []
    stages.put(PeerId("s0p2"), 0, 1.0)
    assert made(stages) == [Move(PeerId("s0p2"), 0, 1)]


def looks_with_moves(seed: int, *, remembers: bool) -> list[int]:
    """Return the looks with moves, for twelve unequal peers; some of the four stages cost up to three times more."""
    rng = random.Random(seed)
    speeds = [10.0 ** rng.random() for _ in range(12)]
    work = [3.0 ** rng.uniform(-0.5, 0.5) for _ in range(4)]
    where = [number % 4 for number in range(12)]
    left: list[set[int]] = [set() for _ in speeds]
    found = []
    for look in range(60):
        stages = StageRates(4)
        for number, stage in enumerate(where):
            rate = speeds[number] / work[stage]
            stages.put(PeerId(str(number)), stage, rate, barred=left[number] if remembers else ())
        for move in plan(stages, MoveCosts([30.0] * 4, 600.0)):
            where[int(move.peer)] = move.target
            left[int(move.peer)].add(move.source)
            found.append(look)
    return found


def test_stages_of_unequal_work_settle() -> None:
    assert all(max(looks_with_moves(seed, remembers=True), default=0) < 20 for seed in range(20))
    assert any(max(looks_with_moves(seed, remembers=False), default=0) == 59 for seed in range(20))


def test_who_is_on_its_way_counts_where_it_goes_and_stays_there() -> None:
    stages = stages_of([1, 1, 1], [1])
    stages.expect(PeerId("new"), 1, 1.0)
    assert stages.rates == [3.0, 2.0]
    assert made(stages) == []
    stages.remove(PeerId("new"))
    assert made(stages) != []


def test_a_newcomer_goes_to_the_slowest_stage_however_many_serve_it() -> None:
    assert stage_for(stages_of([1, 1, 1], [5])) == 0


def test_a_stage_that_is_left_by_all_has_no_rate() -> None:
    stages = stages_of([0.1, 0.2, 0.7], [1])
    for number in (1, 0, 2):
        stages.remove(PeerId(f"s0p{number}"))
    assert stages.rates[0] == 0.0
    assert stage_for(stages) == 0


def best_of_all(rates: Sequence[float], num_stages: int) -> float:
    """Return the best rate by trying all assignments."""
    return max(
        min(sum(rate for rate, at in zip(rates, where, strict=True) if at == stage) for stage in range(num_stages))
        for where in itertools.product(range(num_stages), repeat=len(rates))
    )


@pytest.mark.parametrize("seed", range(10))
def test_plans_come_near_the_best_assignment(seed: int) -> None:
    """Seven peers, up to ten times as fast as each other, from the worst assignment to three stages."""
    rng = random.Random(seed)
    rates = sorted(10.0 ** rng.random() for _ in range(7))
    best = best_of_all(rates, 3)
    assert 0.9 * best <= best_rate(rates, 3) <= best * (1.0 + 1e-9)
    stages = stages_of(rates[:1], rates[1:2], rates[2:])
    assert min(stages.rates) < 0.5 * best
    num_rounds = 0
    while made(stages, move_s=5.0):
        num_rounds += 1
    assert num_rounds < 10
    assert 0.9 * best <= min(stages.rates)


def test_the_yardstick_is_exact_for_equal_peers() -> None:
    assert best_rate([1.0] * 11, 3) == 3.0
    assert best_rate([1.0] * 2, 3) == 0.0


def test_the_yardstick_of_many_peers_is_near_the_even_share() -> None:
    rng = random.Random(0)
    rates = [10.0 ** rng.random() for _ in range(20 * 8)]
    assert 0.998 * sum(rates) / 8 <= best_rate(rates, 8) <= sum(rates) / 8


def test_the_papers_rule_moves_one_from_the_shortest_queue_to_the_longest() -> None:
    a, b, c = (PeerId(name) for name in "abc")
    assert plan_as_paper([1.0, 6.0], [{a: 0.7, b: 0.3}, {c: 6.0}]) == [Move(b, 0, 1)]
    assert plan_as_paper([1.0, 6.0], [{a: 1.0}, {c: 6.0}]) == []  # the last one
    assert plan_as_paper([6.0, 1.0], [{a: 3.0, b: 3.0}, {c: 1.0}]) == []  # no other peer can move


def test_a_decision_looks_at_few_of_many_peers() -> None:
    rng = random.Random(0)
    stages = stages_of(*([rng.uniform(1, scale) for _ in range(1000)] for scale in (10, 10, 10, 5)))
    looked_at: list[int] = []

    class Watched(list[tuple[float, PeerId]]):
        def __getitem__(self, at: Any) -> Any:
            looked_at.append(at)
            return super().__getitem__(at)

    stages._movable = [Watched(one) for one in stages._movable]
    moves = plan(stages, MoveCosts([30.0] * 4, 600.0))
    assert 0 < len(looked_at) < 300 * (1 + len(moves))


def test_a_gain_lasts_as_long_as_a_swarm_stays_the_same() -> None:
    busy, quiet = ChurnEstimate(0.0), ChurnEstimate(0.0)
    assert busy.horizon_s(0.0) == 600.0
    for number in range(1, 200):
        busy.note_change(number * 60.0)
    assert 60.0 < busy.horizon_s(12000.0) < 70.0
    assert quiet.horizon_s(12000.0) > 12000.0
    assert busy.horizon_s(60000.0) > 10000.0  # old changes are forgotten
