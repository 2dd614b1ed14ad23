"""A swarm modelled as rates: peers that join, leave and move."""

from __future__ import annotations

import math
import random

import pytest

from lightning_swarm.network import PeerId
from lightning_swarm.planner.simulator.fluid import Change, Scenario, share_of_best, simulate
from lightning_swarm.protocol.settings import RebalancingRule


def changes(*rows: tuple[float, str, float]) -> list[Change]:
    return [Change(at_s, PeerId(peer), rate) for at_s, peer, rate in rows]


def run(rule: RebalancingRule, *rows: tuple[float, str, float], end_s: float = 1000.0, num_stages: int = 2) -> float:
    return share_of_best(simulate(Scenario(num_stages, changes(*rows), end_s, rule=rule)))


LOSS = (*((0.0, f"p{i}", 1.0) for i in range(6)), (100.0, "p0", 0.0), (100.0, "p2", 0.0))
"""Two peers of the first of two stages leave, which had p0, p2 and p4."""


def test_a_loss_is_mended_as_soon_as_a_peer_has_moved() -> None:
    """The rate is 3 of 3 before, 1 of 2 until the move is over, then 2 of 2."""
    assert run("gain", *LOSS) == pytest.approx((100 * 3 + 30 * 1 + 870 * 2) / (100 * 3 + 900 * 2))
    assert run("none", *LOSS) == pytest.approx((100 * 3 + 900 * 1) / (100 * 3 + 900 * 2))


def test_the_papers_rule_waits_for_its_interval() -> None:
    assert run("paper", *LOSS) == pytest.approx((100 * 3 + 230 * 1 + 670 * 2) / (100 * 3 + 900 * 2))


def test_who_comes_serves_when_it_has_joined() -> None:
    rows = [(0.0, "p0", 1.0), (0.0, "p1", 1.0), (100.0, "p2", 1.0), (100.0, "p3", 1.0)]
    assert run("none", *rows) == pytest.approx((130 * 1 + 870 * 2) / (100 * 1 + 900 * 2))


def test_who_goes_while_it_moves_is_replaced() -> None:
    spans = simulate(Scenario(2, changes(*LOSS, (110.0, "p1", 0.0), (110.0, "p5", 0.0)), 1000.0))
    assert spans[-1].samples_per_s == spans[-1].best == 1.0


def test_a_peer_that_becomes_slow_is_relieved() -> None:
    rows = [(0.0, f"p{i}", 1.0) for i in range(8)]
    spans = simulate(Scenario(2, changes(*rows, *((50.0, f"p{i}", 0.1) for i in (0, 2, 4))), 1000.0))
    assert spans[-1].samples_per_s > 0.9 * spans[-1].best


def test_a_stage_gets_a_peer_as_soon_as_one_arrives_that_can_be_spared() -> None:
    """No peer could move when the first stage lost its only peer, but one was about to join the other stage."""
    rows = [(0.0, "p0", 1.0), (0.0, "p1", 1.0), (100.0, "p2", 1.0), (110.0, "p0", 0.0)]
    spans = simulate(Scenario(2, changes(*rows), 1000.0))
    assert share_of_best(spans, 0.0, 110.0) == share_of_best(spans, 160.0, 1000.0) == 1.0


def test_looks_need_not_fall_on_the_changes() -> None:
    spans = simulate(Scenario(2, changes(*LOSS), 1000.0, rule="paper", offset_s=150.0))
    assert [span.begin_s for span in spans if span.num_moves] == [450.0]


def churn(seed: int, fastest: float) -> list[Change]:
    """Return three hours of sixteen peers, each of which stays for an hour and is replaced; not on whole minutes."""
    rng = random.Random(seed)
    found = []
    for place in range(16):
        comes_s = 0.0
        while comes_s < 10_000.0:
            peer, goes_s = PeerId(f"{place} from {comes_s}"), comes_s + rng.expovariate(1 / 3600.0)
            found += [Change(comes_s, peer, fastest ** rng.random()), Change(goes_s, peer, 0.0)]
            comes_s = goes_s + rng.expovariate(1 / 300.0)
    return sorted((change for change in found if change.at_s < 10_000.0), key=lambda change: change.at_s)


@pytest.mark.parametrize(("fastest", "at_least"), [(1.0, 0.99), (10.0, 0.92)])
@pytest.mark.parametrize("interval_s", [60.0, 300.0])
def test_what_moves_gain_is_more_than_by_the_papers_rule(fastest: float, at_least: float, interval_s: float) -> None:
    shares: dict[RebalancingRule, list[float]] = {"none": [], "paper": [], "gain": []}
    for seed in range(6):
        made = churn(seed, fastest)
        for rule, found in shares.items():
            spans = simulate(Scenario(4, made, 10_000.0, rule, interval_s, offset_s=interval_s / 3, join_s=0.0))
            found.append(share_of_best(spans))
    assert all(gain > max(none, paper) for none, paper, gain in zip(*shares.values(), strict=True))
    assert math.fsum(shares["gain"]) / 6 > at_least
