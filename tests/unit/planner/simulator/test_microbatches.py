"""A swarm simulated by microbatch on virtual time: rates, links, and peers that join, leave, move and change."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_swarm.network import PeerId
from lightning_swarm.network.simulated_link import Direction, FlowWindow, SimulatedLink
from lightning_swarm.planner.simulator import fluid
from lightning_swarm.planner.simulator.fluid import Change, Scenario, Span
from lightning_swarm.planner.simulator.microbatches import Work, simulate
from lightning_swarm.planner.simulator.scenario import ScenarioRuns
from lightning_swarm.protocol.settings import RebalancingRule

FEW_S = 15.0


def changes(*rows: tuple[float, str, float]) -> list[Change]:
    return [Change(at_s, PeerId(peer), rate) for at_s, peer, rate in rows]


def there(*rates: float) -> list[tuple[float, str, float]]:
    """Return peers that are there from the beginning, assigned from the last stage on."""
    return [(0.0, f"p{number}", rate) for number, rate in enumerate(rates)]


def run(
    work: Work,
    *rows: tuple[float, str, float],
    num_stages: int = 2,
    end_s: float = FEW_S,
    rule: RebalancingRule = "none",
) -> list[Span]:
    return simulate(Scenario(num_stages, changes(*rows), end_s, rule=rule, interval_s=2.0), work)


def lines(line: SimulatedLink, num_peers: int) -> dict[PeerId, partial[SimulatedLink]]:
    def fresh() -> SimulatedLink:
        return SimulatedLink(Direction(line.up.bytes_per_s), Direction(line.down.bytes_per_s), line.latency_s)

    return {PeerId(f"p{number}"): partial(fresh) for number in range(num_peers)}


@pytest.mark.thorough
@pytest.mark.parametrize("rates", [(20.0, 20.0), (20.0, 15.0, 5.0, 10.0, 15.0, 15.0)])
def test_it_agrees_with_a_swarm_of_rates(rates: tuple[float, ...]) -> None:
    """They agree after the router has measured all peers."""
    spans = run(Work(128), *there(*rates), end_s=20.0)
    (as_rates,) = fluid.simulate(Scenario(2, changes(*there(*rates)), 20.0, rule="none", interval_s=100.0))
    assert spans[-1].samples_per_s == pytest.approx(as_rates.samples_per_s, rel=0.05)
    assert spans[-1].best == pytest.approx(as_rates.best)


@pytest.mark.thorough
def test_a_thin_line_is_what_takes_the_time() -> None:
    """Each direction takes a tenth of a second per sample, in sequence: a batch's forwards come first."""
    line = SimulatedLink(Direction(1e6), Direction(1e6))
    spans = run(Work(32, boundary_bytes=100_000, lines=lines(line, 2)), *there(1e3, 1e3), end_s=20.0)
    assert spans[-1].samples_per_s == pytest.approx(5.0, rel=0.05)
    assert spans[-1].sent_bytes == pytest.approx(2 * 32 * 100_000, rel=0.05)


def test_a_line_is_shared_by_what_goes_over_it_at_once() -> None:
    """The first stage's only server sends to both servers of the second stage, and receives from both."""
    slow = SimulatedLink(Direction(1e6), Direction(1e6))
    work = Work(32, boundary_bytes=100_000, lines={PeerId("p1"): lambda: slow})
    spans = run(work, *there(1e3, 1e3, 1e3), end_s=20.0)
    assert spans[-1].samples_per_s == pytest.approx(5.0, rel=0.05)


@pytest.mark.thorough
def test_latency_is_hidden_by_other_microbatches() -> None:
    line = SimulatedLink(latency_s=0.05)
    spans = run(Work(64, lines=lines(line, 2)), *there(10.0, 10.0), end_s=20.0)
    assert spans[-1].samples_per_s > 7.0, "one after the other would be 4"


@pytest.mark.thorough
def test_a_long_message_waits_for_the_readers_word() -> None:
    window, leaves_s = FlowWindow(0.2), [0.0]
    for _ in range(16):
        leaves_s.append(window.send(1 << 16, leaves_s[-1]))
    assert leaves_s[1:] == [0.0] * 4 + [0.2] * 8 + [0.4] * 4
    taken_s = {}
    for latency_s in (0.0, 0.1):
        for boundary_bytes in (200_000, 500_000):
            work = Work(8, boundary_bytes=boundary_bytes, lines=lines(SimulatedLink(latency_s=latency_s), 2))
            span = run(work, *there(100.0, 100.0), end_s=2.0)[-1]
            taken_s[latency_s, boundary_bytes] = span.end_s - span.begin_s
    assert taken_s[0.0, 500_000] == pytest.approx(taken_s[0.0, 200_000], rel=1e-3)
    # 0.4 s from one server to the other and back, forward and backward.
    assert taken_s[0.1, 500_000] == pytest.approx(taken_s[0.1, 200_000] + 0.8, abs=0.05)


@pytest.mark.thorough
def test_who_goes_is_done_without_and_who_comes_takes_its_part() -> None:
    rows = [*there(10.0, 10.0, 10.0, 10.0), (6.0, "p0", 0.0), (22.0, "p4", 10.0)]
    spans = run(Work(64), *rows, end_s=40.0)
    assert [span.best for span in spans[:1] + spans[-1:]] == pytest.approx([20.0, 20.0])
    assert min(span.best for span in spans) == pytest.approx(10.0)
    assert min(span.fewest for span in spans) == 1
    assert spans[-1].fewest == 2
    assert spans[-1].samples_per_s == pytest.approx(20.0, rel=0.1)


@pytest.mark.thorough
def test_who_becomes_slow_gets_less() -> None:
    rows = [*there(10.0, 10.0, 10.0, 10.0), (10.0, "p0", 2.0)]
    spans = run(Work(64), *rows, end_s=40.0)
    assert spans[-1].best == 12.0
    assert spans[-1].samples_per_s == pytest.approx(12.0, rel=0.1)


@pytest.mark.thorough
def test_servers_move_to_where_they_are_needed() -> None:
    rows = there(10.0, 1.0, 10.0, 1.0, 10.0)
    spans = run(Work(64), *rows, rule="gain", end_s=120.0)
    assert sum(span.num_moves for span in spans) >= 1
    assert spans[0].samples_per_s < 2.5
    assert spans[-1].samples_per_s > 0.9 * spans[-1].best


@pytest.mark.thorough
def test_time_goes_on_when_a_stage_is_lost_and_the_run_goes_back() -> None:
    rows = [*there(10.0, 10.0), (20.0, "p1", 0.0), (60.0, "p2", 10.0)]
    spans = run(Work(16), *rows, end_s=120.0)
    assert all(span.end_s > span.begin_s for span in spans)
    assert all(after.begin_s == before.end_s for before, after in itertools.pairwise(spans))
    assert max(span.end_s - span.begin_s for span in spans) > 35.0, "nobody had the stage"
    assert spans[-1].samples_per_s > 6.0
    assert spans[-1].end_s >= 120.0
    assert spans[-1].best == 10.0


def test_who_is_gone_as_it_begins_is_not_there() -> None:
    spans = run(Work(8), *there(5.0, 7.0, 3.0), (0.0, "p2", 0.0), (0.0, "p9", 0.0), end_s=2.0)
    assert (spans[-1].best, spans[-1].most) == (5.0, 1)


def test_a_seed_repeats_a_run() -> None:
    """A run neither depends on the global generator nor changes it."""
    work = Work(16, lines=lines(SimulatedLink(Direction(1e6), Direction(1e6)), 3))
    found = []
    for drawn in (1, 1 << 60):
        torch.manual_seed(drawn)
        found.append(run(work, *there(5.0, 7.0, 3.0), end_s=5.0))
        assert torch.initial_seed() == drawn
    assert found[0] == found[1]


def test_a_scenario_names_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        "{stages: 2, hours: 1, peers: {number: 3}, rules: [gain], microbatches: {per_step: 8, mbit: [8, 80], "
        "latency_ms: 3, stage_mb: 2}}"
    )
    work = ScenarioRuns(path).work(seed=0)
    assert work is not None
    assert (work.per_step, work.size, work.stage_bytes) == (8, 1, 2_000_000)
    found = [work.line(PeerId(f"peer-{number}")) for number in range(3)]
    assert all(1e6 <= line.up.bytes_per_s == line.down.bytes_per_s <= 1e7 for line in found)
    assert {line.latency_s for line in found} == {0.003}
    assert len({line.up.bytes_per_s for line in found}) == 3
