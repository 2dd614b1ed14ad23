"""The time of moves, as far as the coordinator can estimate their benefit."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_swarm.coordinator.rebalancing import balancer
from lightning_swarm.coordinator.rebalancing.balancer import Balancer, ChurnEstimate, ReportedLoad
from lightning_swarm.coordinator.rebalancing.policy import Move
from lightning_swarm.network import PeerId

INTERVAL_S = 60.0
MB = 1_000_000


def peers(names: str) -> list[PeerId]:
    return [PeerId(name) for name in names]


def rosters(*stages: str) -> list[list[PeerId]]:
    return [peers(stage) for stage in stages]


def _load(rate: float | None, busy_share: float | None = 1.0) -> ReportedLoad:
    return ReportedLoad(rate, queued=0.0 if rate is None else 100.0 / rate, busy_share=busy_share)


def loads(**rates: float | None) -> dict[PeerId, dict[int, ReportedLoad]]:
    """Build loads by name and stage: ``a0=10.0``."""
    found: dict[PeerId, dict[int, ReportedLoad]] = {}
    for name, rate in rates.items():
        found.setdefault(PeerId(name[0]), {})[int(name[1])] = _load(rate)
    return found


def made(rule: Any = "gain", num_stages: int = 2, state_bytes: int = MB) -> Balancer:
    return Balancer(rule, INTERVAL_S, [state_bytes] * num_stages, now_s=0.0)


UNEVEN = loads(a0=1.0, b1=4.0, c1=4.0, d1=4.0)
HELD = rosters("a", "bcd")


def decide(
    balance: Balancer,
    now_s: float,
    held: Sequence[Sequence[PeerId]] = HELD,
    *,
    fixed: str = "",
    joining: Mapping[PeerId, int] | None = None,
) -> list[Move]:
    return balance.moves(held, fixed=peers(fixed), joining=joining or {}, now_s=now_s)


def test_it_decides_every_interval_and_not_before() -> None:
    balance = made()
    balance.take_loads(UNEVEN)
    assert decide(balance, 1.0) == []
    assert decide(balance, INTERVAL_S - 0.1) == []
    assert len(decide(balance, INTERVAL_S)) == 1
    assert decide(balance, INTERVAL_S + 1.0) == []


@pytest.mark.parametrize("held", [rosters("a", "bc"), rosters("a", "bcde")], ids=["gone", "come"])
def test_it_decides_at_once_when_peers_come_or_go(held: list[list[PeerId]]) -> None:
    balance = made()
    balance.take_loads(UNEVEN)
    assert decide(balance, 1.0) == []
    assert {(move.source, move.target) for move in decide(balance, 2.0, held)} == {(1, 0)}
    assert decide(balance, 3.0, held) == [], "and but once"


def test_it_waits_until_every_stage_was_measured() -> None:
    balance = made()
    balance.take_loads(loads(a0=None, b1=4.0, c1=4.0, d1=4.0))
    assert decide(balance, INTERVAL_S) == []
    balance.take_loads(UNEVEN)
    assert len(decide(balance, INTERVAL_S + 1.0)) == 1, "what was put off is made up for"


def test_who_is_on_its_way_counts_where_it_goes() -> None:
    balance = made()
    balance.take_loads(loads(a0=1.0, b1=4.0, c1=4.0, d1=4.0, e1=4.0))
    held = rosters("a", "bcde")
    (move,) = [move for move in decide(balance, INTERVAL_S, held) if move.peer in "bcde"][:1]
    balance.note_left(move.peer, 1, 0, now_s=INTERVAL_S)
    left = [held[0], [peer for peer in held[1] if peer != move.peer]]
    balance.take_loads({peer: load for peer, load in loads(a0=1.0, b1=4.0, c1=4.0, d1=4.0, e1=4.0).items()
                        if peer != move.peer})  # fmt: skip
    assert [one.target for one in decide(balance, INTERVAL_S + 1.0, left)] == [0], "5 and 12: one more"
    assert balance.stage_for(PeerId("x"), left, {}, now_s=INTERVAL_S + 1.0) == 0, "5 against 12"
    assert balance.stage_for(PeerId("x"), [["a"], ["b"]], {}, now_s=INTERVAL_S + 1.0) == 1, "5 against 4"  # type: ignore[list-item]


def test_who_does_not_arrive_is_not_waited_for_for_ever() -> None:
    balance = made()
    balance.take_loads(loads(a0=4.0, b1=4.0, c1=4.0))
    balance.note_left(PeerId("c"), 1, 0, now_s=0.0)
    held = rosters("a", "b")
    assert balance.stage_for(PeerId("x"), held, {}, now_s=1.0) == 1
    assert balance.stage_for(PeerId("x"), held, {}, now_s=1e4) == 0


def test_a_mover_is_not_in_its_own_way() -> None:
    balance = made()
    balance.take_loads(loads(a0=4.0, b1=4.0, c1=4.0))
    balance.note_left(PeerId("c"), 1, 0, now_s=0.0)
    assert balance.stage_for(PeerId("c"), rosters("a", "b"), {PeerId("c"): 0}, now_s=1.0) == 0


def test_who_cannot_move_stays_and_counts() -> None:
    balance = made()
    balance.take_loads(UNEVEN)
    assert {move.peer for move in decide(balance, INTERVAL_S, fixed="bc")} == {"d"}
    assert decide(balance, 2 * INTERVAL_S, fixed="bcd") == []
    # The last movable peer of a stage may leave it if another one stays that cannot move.
    balance.take_loads(loads(a0=1.0, b1=4.0, c1=4.0))
    assert {move.peer for move in decide(balance, 3 * INTERVAL_S, rosters("a", "bc"), fixed="b")} == {"c"}


def test_who_holds_several_stages_does_not_move() -> None:
    balance = made()
    balance.take_loads(loads(a0=8.0, a1=8.0, b1=9.0))
    assert decide(balance, INTERVAL_S, rosters("a", "ab")) == []
    balance.take_loads(loads(a0=2.0, a1=2.0, b1=9.0, c1=9.0))
    (move,) = decide(balance, 2 * INTERVAL_S, rosters("a", "abc"))
    assert move.peer in "bc"
    assert move.target == 0


def test_what_scatters_moves_nobody() -> None:
    balance = made()
    for turn in range(1, 30):
        wobble = 1.0 + 0.04 * (-1) ** turn
        balance.take_loads(loads(a0=10.0 * wobble, b0=10.0, c1=10.0 / wobble, d1=10.0))
        assert decide(balance, turn * INTERVAL_S, rosters("ab", "cd")) == []


def test_rates_that_scatter_widely_move_nobody() -> None:
    """Rates scatter widely if stages compute for milliseconds on a shared machine."""
    rng = random.Random(0)
    balance = made(num_stages=3)
    held = rosters("ab", "cd", "ef")
    stage_of = {peer: index for index, stage in enumerate(held) for peer in stage}
    for turn in range(1, 200):
        balance.take_loads({peer: {at: _load(10.0 * rng.lognormvariate(0.0, 0.3))} for peer, at in stage_of.items()})
        assert decide(balance, turn * INTERVAL_S, held) == []
    # The rates now differ: one stage's two peers are faster, and another stage has lost one.
    for turn in range(200, 300):
        rates = {peer: 20.0 if peer in held[2] else 10.0 for peer in stage_of if peer != "a"}
        balance.take_loads({peer: {stage_of[peer]: _load(rate)} for peer, rate in rates.items()})
        if moves := decide(balance, turn * INTERVAL_S, [held[0][1:], *held[1:]]):
            break
    assert [(move.source, move.target) for move in moves] == [(2, 0)]


def simulated(rng: random.Random, *, num_steps: int, scatter: float, correlated: bool) -> list[float]:
    """Return one peer's reports in so many steps, relative to its true rate."""
    if not correlated:
        return [1.0 + rng.uniform(-scatter, scatter) for _ in range(num_steps)]
    reports = [1.0 + rng.uniform(-scatter, scatter)]
    while len(reports) < num_steps:  # a server reports a moving average, so that one report is close to the next
        reports.append(reports[-1] + 0.25 * (1.0 + rng.uniform(-2.0, 2.0) * scatter - reports[-1]))
    return reports


def moves_in(
    stages: Sequence[str],
    rates: Mapping[str, float],
    seed: int,
    *,
    correlated: bool,
    scatter: float = 0.3,
    work: Sequence[float] = (1.0, 1.0, 1.0),
    joins: str = "",
) -> list[list[Move]]:
    """Return all decisions in 60 steps of 2 s: one every 10 s, and one when the peer `joins` comes in step eleven."""
    rng = random.Random(seed)
    series = {name: simulated(rng, num_steps=60, scatter=scatter, correlated=correlated) for name in sorted(rates)}
    balance = Balancer("gain", 10.0, [MB] * len(stages), now_s=0.0)
    held = rosters(*stages)
    found = []
    for step in range(60):
        at_s = 2.0 * (step + 1)
        there = [[peer for peer in stage if peer != joins or step >= 10] for stage in held]
        balance.take_loads({
            peer: {index: _load(rates[peer] * series[peer][step] / work[index])}
            for index, stage in enumerate(there) for peer in stage
        })  # fmt: skip
        found.append(decide(balance, at_s, there))
        for move in found[-1]:
            held[move.source].remove(move.peer)
            balance.note_left(move.peer, move.source, move.target, now_s=at_s)
            held[move.target].append(move.peer)
            balance.note_entered(move.peer, move.target, now_s=at_s)
    return found


@pytest.mark.parametrize("correlated", [False, True], ids=["each_report_by_itself", "moving_averages"])
@pytest.mark.parametrize(
    ("stages", "work"),
    [
        (["ab", "cd"], (1.0, 1.0)),
        (["ab", "cd"], (1.3, 1.0)),  # a sample costs more at one stage, so its peers seem slower
        (["ab", "cd"], (1.0, 1.3)),
        (["ab", "cde"], (1.0, 1.0)),
        (["ab", "cd", "ef"], (1.0, 1.0, 1.0)),
        (["abcd", "efgh"], (1.0, 1.0)),
    ],
)
def test_equal_peers_do_not_exchange_stages_whose_work_is_as_uneven_as_it_may_be(
    stages: list[str], work: Sequence[float], correlated: bool
) -> None:
    rates = dict.fromkeys("".join(stages), 10.0)
    for seed in range(10):
        assert not any(moves_in(stages, rates, seed, correlated=correlated, work=work))
        for moves in moves_in(stages, rates, seed, correlated=correlated, work=work, joins="d"):
            assert len(moves) <= 1, "before the fourth peer joins, a stage of one may get a second"


RECORDED = Path(__file__).with_name("equal_servers.jsonl")
"""Reports of four equal servers of two stages in 200 steps of `make demo`, in which one was killed and replaced.

Two cores shared them with a run of the tests and two busy loops, on 26 November 2026. A line has the seconds since the
first line and, by server and stage, the three values of `ReportedLoad`.
"""


def recorded_moves() -> list[Move]:
    """Return all moves for the recorded reports."""
    balance = Balancer("gain", 10.0, [MB, MB], now_s=-10.0)
    found = []
    for at_s, reports in map(json.loads, RECORDED.read_text().splitlines()):
        held: list[list[PeerId]] = [[], []]
        loads: dict[PeerId, dict[int, ReportedLoad]] = {}
        for place, report in reports.items():
            name, index = PeerId(place[0]), int(place[1])
            held[index].append(name)
            loads[name] = {index: ReportedLoad.from_report(*report)}
        balance.take_loads(loads)
        if len(loads) == 4:  # three servers leave a stage with one, which may get a second
            found += decide(balance, at_s, held)
    return found


def test_equal_servers_of_a_real_run_on_shared_cores_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded_moves() == []
    for name in ("SCATTER", "_SIGMAS", "_WORK_SCATTER"):
        monkeypatch.setattr(balancer, name, 0.0)
    assert recorded_moves() != [], "reports that may be believed as they are would show nothing"


@pytest.mark.parametrize("correlated", [False, True], ids=["each_report_by_itself", "moving_averages"])
@pytest.mark.parametrize("seed", range(10))
def test_unequal_peers_move_however_their_reports_scatter(seed: int, correlated: bool) -> None:
    found = moves_in(["a", "bcd"], {"a": 2.0, "b": 10.0, "c": 10.0, "d": 10.0}, seed, correlated=correlated)
    first = next(moves for moves in found if moves)
    assert [(move.source, move.target) for move in first] == [(1, 0)]


@pytest.mark.parametrize("correlated", [False, True], ids=["each_report_by_itself", "moving_averages"])
@pytest.mark.parametrize("seed", range(10))
def test_unequal_peers_exchange_their_stages_once_where_that_gains(seed: int, correlated: bool) -> None:
    """A rate of 20 and one of 10: one move would only swap the rates, an exchange makes both 15."""
    rates = {"a": 10.0, "b": 10.0, "c": 5.0, "d": 5.0}
    found = moves_in(["ab", "cd"], rates, seed, correlated=correlated, scatter=0.05)
    assert [sorted(move.target for move in moves) for moves in found if moves] == [[0, 1]]


@pytest.mark.parametrize("busy_share", [0.1, None])
def test_where_computing_is_not_what_takes_the_time_nobody_moves(busy_share: float | None) -> None:
    balance = made()

    def say(busiest: float | None) -> None:
        balance.take_loads({
            peer: {index: _load(load.samples_per_s, busiest if peer == "a" else 0.1)}
            for peer, stages in UNEVEN.items() for index, load in stages.items()
        })  # fmt: skip

    say(busy_share)
    assert decide(balance, INTERVAL_S) == []
    assert decide(balance, INTERVAL_S + 1.0, rosters("a", "bc")) == [], "nor because one is gone"
    held = rosters("ab", "c")
    assert balance.stage_for(PeerId("x"), held, {}, now_s=INTERVAL_S) == 1, "newcomers go where the fewest are"
    say(0.9)
    assert balance.stage_for(PeerId("x"), held, {}, now_s=INTERVAL_S) == 1
    assert balance.stage_for(PeerId("x"), HELD, {}, now_s=INTERVAL_S) == 0
    assert {move.target for move in decide(balance, INTERVAL_S + 2.0)} == {0}, "what was put off is made up for"


def test_who_was_not_measured_yet_is_not_moved() -> None:
    balance = made()
    balance.take_loads(loads(a0=1.0, b1=4.0, c1=None, d1=None))
    assert [move.peer for move in decide(balance, INTERVAL_S)] == ["b"]


@pytest.mark.parametrize(("step_s", "moves"), [(60.0, 2), (2000.0, 0)])
def test_a_move_takes_two_steps_at_the_least(step_s: float, moves: int) -> None:
    """A joiner enters with the next record. Meanwhile the rates are 4 and 6, and then 10 and 10."""
    balance, held = made(), rosters("ad", "bc")
    for _ in range(50):
        balance.take_loads(loads(a0=4.0, d0=4.0, b1=6.0, c1=6.0))
    assert decide(balance, 1.0, held) == []
    assert len(decide(balance, 1.0 + step_s, held)) == moves


def test_two_change_places_where_the_stages_are_small_and_a_measured_line_says_what_is_small() -> None:
    uneven = loads(a0=4.0, d0=4.0, b1=6.0, c1=6.0)  # 4 and 6 during the move, then 10 and 10
    held = rosters("ad", "bc")
    small, large = made(), made(state_bytes=100_000 * MB)
    for balance in (small, large):
        for _ in range(50):  # makes it known that the scatter is small
            balance.take_loads(uneven)
    assert sorted(move.target for move in decide(small, INTERVAL_S, held)) == [0, 1]
    assert decide(large, INTERVAL_S, held) == []
    large.note_left(PeerId("x"), 1, 0, now_s=0.0)
    large.note_entered(PeerId("x"), 0, now_s=10.0)  # a fast line
    assert sorted(move.target for move in decide(large, 2 * INTERVAL_S, held)) == [0, 1]


def test_nobody_moves_by_no_rule() -> None:
    balance = made("none")
    balance.take_loads(UNEVEN)
    assert decide(balance, INTERVAL_S) == []
    balance.take_loads(loads(a0=9.0, b1=1.0, c1=1.0))
    assert balance.stage_for(PeerId("x"), rosters("a", "bc"), {}, now_s=0.0) == 0, "newcomers go where the fewest are"


def test_by_the_papers_rule_the_queues_say_who_moves() -> None:
    balance = made("paper")
    balance.take_loads(UNEVEN)  # the slow one has the longest queue
    (move,) = decide(balance, INTERVAL_S)
    assert (move.source, move.target) == (1, 0)


def test_peers_of_a_stage_that_costs_more_are_not_taken_for_slow_ones_twice() -> None:
    """All peers are equal, but a sample costs twice as much at stage 0."""
    balance = made()
    held = rosters("ab", "cdef")
    cost = (2.0, 1.0)

    def measured(of: Sequence[Sequence[PeerId]]) -> dict[PeerId, dict[int, ReportedLoad]]:
        return {peer: {index: _load(10.0 / cost[index])} for index, stage in enumerate(of) for peer in stage}

    num_moves = 0
    for turn in range(1, 30):
        balance.take_loads(measured(held))
        moves = decide(balance, turn * INTERVAL_S, held)
        for move in moves:
            held[move.source].remove(move.peer)
            balance.note_left(move.peer, move.source, move.target, now_s=turn * INTERVAL_S)
            held[move.target].append(move.peer)
            balance.note_entered(move.peer, move.target, now_s=turn * INTERVAL_S + 5.0)
        num_moves += len(moves)
    assert list(map(len, held)) == [4, 2], "rates of 20 and 20"
    assert num_moves <= 4


@pytest.mark.parametrize("said", [5e-324, 1e-300, 1e200, 1e308])
def test_what_a_server_says_of_itself_harms_nobody(said: float) -> None:
    believed = ReportedLoad.from_report(said, 1e308, 1e308)
    assert believed.samples_per_s is None
    balance = made()
    for turn in range(1, 5):
        balance.take_loads({**UNEVEN, PeerId("e"): {turn % 2: believed}})
        held = [[*HELD[0]], [*HELD[1]]]
        held[turn % 2].append(PeerId("e"))
        for move in decide(balance, turn * INTERVAL_S, held):
            assert move.peer in "bcde"
    assert believed.busy_share == 1.0
    assert ReportedLoad.from_report(10.0, 2.0, 0.5) == ReportedLoad(10.0, 2.0, 0.5)


def test_a_calm_run_may_be_as_long_as_it_likes() -> None:
    pace = ChurnEstimate(0.0)
    pace.note_change(1.0)
    year_s = 365 * 86400.0
    assert pace.horizon_s(3600.0) < pace.horizon_s(86400.0) <= pace.horizon_s(year_s) < 1e7
    asked = ChurnEstimate(0.0)
    for second in range(1, 7200):
        asked.horizon_s(float(second))
    assert asked.horizon_s(7200.0) == pytest.approx(ChurnEstimate(0.0).horizon_s(7200.0))


def test_no_more_move_at_once_than_can_download() -> None:
    balance = made()
    names = [f"p{number}" for number in range(100)]
    balance.take_loads({PeerId("a"): {0: _load(1.0)}} | {PeerId(name): {1: _load(1.0)} for name in names})
    held = [peers("a"), [PeerId(name) for name in names]]
    assert len(decide(balance, INTERVAL_S, held)) == 3


def test_the_papers_rule_moves_one_at_a_time_and_looks_at_its_interval_only() -> None:
    balance = made("paper")
    balance.take_loads(UNEVEN)
    held = HELD
    (move,) = decide(balance, INTERVAL_S, held)
    balance.note_left(move.peer, 1, 0, now_s=INTERVAL_S)
    left = [held[0], [peer for peer in held[1] if peer != move.peer]]
    assert decide(balance, INTERVAL_S + 1.0, left) == []
    assert decide(balance, 2 * INTERVAL_S - 1.0, left) == []


def test_who_asked_to_join_is_waited_for() -> None:
    balance = made()
    balance.take_loads(loads(a0=4.0, b1=4.0, c1=4.0))
    balance.note_left(PeerId("c"), 1, 0, now_s=0.0)
    held = rosters("a", "b")
    assert balance.stage_for(PeerId("x"), held, {PeerId("c"): 0}, now_s=1e4) == 1


@pytest.mark.parametrize(
    ("held", "said", "leader", "movers"),
    [
        (rosters("ab", "cd"), loads(a0=6.0, b0=6.0, c1=1.0, d1=3.0), "a", "bc"),  # b is as fast
        # 10 and 3; the other peer's move gives 2 and 11
        (rosters("ab", "c"), loads(a0=10.0, b0=2.0, c1=1.0), "b", "b"),
        (rosters("ab", "c"), loads(a0=10.0, b0=2.0, c1=1.0), "c", "b"),
        (rosters("ab", "cd"), loads(a0=8.0, b0=4.0, c1=1.0, d1=1.0), "b", "ad"),  # 5 and 9, where 6 and 8 are possible
    ],
)
def test_who_coordinates_moves_only_if_that_gains_clearly_more(
    held: list[list[PeerId]], said: Any, leader: str, movers: str
) -> None:
    balance = made()
    for _ in range(50):
        balance.take_loads(said)
    moves = balance.moves(held, fixed=[], joining={}, coordinator=PeerId(leader), now_s=INTERVAL_S)
    assert sorted(move.peer for move in moves) == sorted(movers)
