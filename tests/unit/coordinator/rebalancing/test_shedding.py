"""Servers of several stages that give one up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from lightning_swarm.coordinator.rebalancing.balancer import Balancer, ReportedLoad
from lightning_swarm.coordinator.rebalancing.policy import StageRelease, plan_shedding
from lightning_swarm.network import PeerId


def rates(*stages: Mapping[str, float]) -> list[dict[PeerId, float]]:
    return [{PeerId(peer): rate for peer, rate in stage.items()} for stage in stages]


def planned(*stages: Mapping[str, float], kept: Sequence[int] = (), leaving: str = "") -> list[tuple[str, int]]:
    found = plan_shedding(rates(*stages), kept=kept, leaving=[PeerId(peer) for peer in leaving])
    return [(shed.peer, shed.stage) for shed in found]


def test_who_holds_several_leaves_one_to_a_newcomer() -> None:
    assert planned({"a": 1, "b": 1}, {"a": 1}, {"a": 1}) == [("a", 0)]
    assert planned({"a": 1, "b": 1}, {"a": 1, "c": 1}) == [], "all are as busy, and each stage has two copies"
    assert planned({"a": 1, "b": 1}, {"a": 1, "c": 1}, {"a": 1}) == [("a", 0), ("a", 1)]


def test_each_gives_up_what_helps_it_whoever_is_slowest() -> None:
    found = planned({"a": 1, "x": 1}, {"a": 1}, {"a": 1}, {"b": 1, "y": 1}, {"b": 1})
    assert sorted(found) == [("a", 0), ("b", 3)]


def test_a_slow_newcomer_is_not_left_alone() -> None:
    assert planned({"a": 10, "b": 1}, {"a": 10}) == []
    assert planned({"a": 10, "b": 1, "c": 9}, {"a": 10}) == [("a", 0)]


def test_a_stage_is_left_to_one_server_only_for_more_than_its_death_would_cost() -> None:
    stages = rates({"a": 1, "b": 1}, {"a": 1})
    assert plan_shedding(stages, lone_costs=0.2) == [StageRelease(PeerId("a"), 0)]
    assert plan_shedding(stages, lone_costs=0.4) == []
    assert plan_shedding(rates({"a": 1, "b": 1, "c": 1}, {"a": 1}), lone_costs=0.4) == [StageRelease(PeerId("a"), 0)]


def test_in_a_swarm_that_changes_often_nobody_is_left_alone() -> None:
    a, b = PeerId("a"), PeerId("b")
    balance = Balancer("gain", 60.0, [1, 1], now_s=0.0)
    balance.take_loads(
        {a: {0: ReportedLoad(10.0, busy_share=0.5), 1: ReportedLoad(10.0, busy_share=0.5)}, b: {0: ReportedLoad(10.0)}}
    )
    assert balance.releases([[a, b], [a]], leaving=[], joining={}, now_s=1.0) == [StageRelease(a, 0)]
    for at_s in range(1, 100):  # servers join and leave meanwhile
        balance.moves([[a, b], [a, PeerId("c")] if at_s % 2 else [a]], fixed=[], joining={}, now_s=float(at_s))
    assert balance.releases([[a, b], [a]], leaving=[], joining={}, now_s=100.0) == []


@pytest.mark.parametrize("stages", [({"a": 1}, {"a": 1}), ({"a": 1, "b": 1}, {"c": 1})], ids=["alone", "one each"])
def test_nobody_gives_up_its_only_stage_nor_the_only_copy(stages: Sequence[Mapping[str, float]]) -> None:
    assert planned(*stages) == []


def test_nobody_relies_on_who_leaves_nor_gives_up_what_is_being_sent() -> None:
    stages: Sequence[Mapping[str, float]] = ({"a": 1, "b": 1}, {"a": 1})
    assert planned(*stages, leaving="b") == []
    assert planned(*stages, kept=[0]) == []


@pytest.mark.parametrize(
    ("rule", "share", "measured", "sheds"),
    [
        ("gain", 0.9, True, [StageRelease(PeerId("a"), 0)]),
        ("gain", 0.1, True, []),  # this stage takes little time, and two copies are safer than one
        ("gain", 0.9, False, []),
        ("none", 0.9, True, []),
        ("paper", 0.9, True, []),
    ],
)
def test_stages_are_given_up_where_computing_limits(
    rule: str, share: float, measured: bool, sheds: list[StageRelease]
) -> None:
    balance = Balancer(rule, 60.0, [1, 1, 1], now_s=0.0)  # type: ignore[arg-type]
    of_b = ReportedLoad(10.0 if measured else None, busy_share=0.1)
    balance.take_loads({
        PeerId("a"): {index: ReportedLoad(10.0, busy_share=share / 3) for index in range(3)},
        PeerId("b"): {0: of_b},
    })  # fmt: skip
    a, b = PeerId("a"), PeerId("b")
    assert balance.releases([[a, b], [a], [a]], leaving=[], joining={}, now_s=1.0) == sheds
    assert balance.releases([[a], [a], [a]], leaving=[], joining={}, now_s=1.0) == []
    assert balance.releases([[a, b], [a], [a]], leaving=[], joining={PeerId("c"): 0}, now_s=1.0) == []
