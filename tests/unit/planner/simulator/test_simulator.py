"""`lightning-swarm simulate`: the contents of a scenario's file, and the results."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from lightning_swarm import cli
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.planner import report
from lightning_swarm.planner.simulator.fluid import Span, simulate
from lightning_swarm.planner.simulator.scenario import ScenarioRuns

TRACE = "0,a,2\n0,b,2\n0,c,2\n0,d,2\n3600,a,0\n3600,c,1\n7200,b,2\n"


def write(folder: Path, text: str, trace: str = TRACE) -> Path:
    (folder / "trace.csv").write_text(trace)
    path = folder / "scenario.yaml"
    path.write_text(text)
    return path


PEERS = "stages: 4\nhours: 100\npeers: {number: 40, samples_per_s: [1, 10], stay_hours: 5, back_minutes: 30}\n"


def test_made_up_peers_are_as_the_file_says(tmp_path: Path) -> None:
    runs = ScenarioRuns(write(tmp_path, PEERS))
    [none, paper, gain] = [scenario for _, scenario in runs.scenarios(0)]
    assert none.changes is paper.changes is gain.changes
    assert none.offset_s == gain.offset_s < 300.0
    rates = [change.samples_per_s for change in none.changes if change.samples_per_s]
    assert min(rates) >= 1.0
    assert max(rates) <= 10.0
    assert sorted(rates)[len(rates) // 2] == pytest.approx(10.0**0.5, rel=0.2)
    assert sum(change.at_s == 0.0 for change in none.changes) == 40
    assert len(rates) == pytest.approx(40 * 100 / 5.5, rel=0.15)
    others = next(scenario for _, scenario in runs.scenarios(1)).changes
    assert others != none.changes


def test_peers_that_stay_for_good_are_no_more_and_no_fewer(tmp_path: Path) -> None:
    runs = ScenarioRuns(write(tmp_path, "{stages: 2, hours: 1, peers: {number: 6}, rules: [gain]}"))
    [(rule, scenario)] = runs.scenarios(0)
    assert rule == "gain"
    assert [(span.samples_per_s, span.best) for span in simulate(scenario)] == [(3.0, 3.0)] * len(simulate(scenario))


def test_a_trace_is_what_happened(tmp_path: Path) -> None:
    """Two stages of two peers each; one peer of a stage leaves, and the other becomes slow."""
    runs = ScenarioRuns(write(tmp_path, "{stages: 2, trace: trace.csv, rules: [none, gain], join_s: 0}"))
    none, gain = (simulate(scenario) for _, scenario in runs.scenarios(0))
    assert (none[0].begin_s, none[-1].end_s) == (0.0, 7200.0)
    assert [span.samples_per_s for span in none if span.begin_s in (0.0, 3600.0)] == [4.0, 1.0]
    assert none[-1].best == gain[-1].best == 2.0
    assert (none[-1].fewest, none[-1].most) == (1, 2)
    longer = ScenarioRuns(write(tmp_path, "{stages: 2, trace: trace.csv, rules: [none], hours: 5}"))
    assert [simulate(scenario)[-1].end_s for _, scenario in longer.scenarios(0)] == [5 * 3600.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{stages: 2", "a scenario must be YAML"),
        ("stages: two\n", "Expected `int`, got `str` - at `$.stages`"),
        ("{stages: 2, hour: 1}", "unknown field `hour`"),
        (
            "{stages: 2, hours: 1, peers: {nunber: 3}}",
            "`peers` has the keys number, samples_per_s, stay_hours, back_minutes",
        ),
        ("{stages: 2, rules: [best], trace: trace.csv}", "Invalid enum value 'best'"),
        ("{stages: 2}", "either `peers` or `trace`"),
        ("{stages: 2, peers: {number: 4}, trace: trace.csv}", "either `peers` or `trace`"),
        ("{stages: 2, peers: {number: 4}}", "`hours` must be above 0"),
        ("{stages: 4, hours: 1, peers: {number: 3}}", "`peers.number` must be 4 or more, got 3"),
        ("{stages: 2, hours: 1, peers: {number: 3, samples_per_s: 0}}", "`peers.samples_per_s` must be 1e-06 or more"),
        ("{stages: 2, hours: 1, peers: {number: 3, samples_per_s: [2, 1]}}", "must be 2 or more, got 1"),
        ("{stages: 2, hours: .inf, peers: {number: 3}}", "`hours` must be 0 or more, got inf"),
        ("{stages: 2, trace: trace.csv, move_s: -1}", "`move_s` must be 0 or more, got -1"),
        ("{stages: 2, trace: trace.csv, rules: []}", "`rules` must be 1 or more"),
        ("{stages: 2, trace: no.csv}", "no.csv: No such file"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        ScenarioRuns(write(tmp_path, text))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("0,a,1\n5,b\n", "line 2: a line must be `seconds,peer,samples_per_s`"),
        ("0,a,1\n5,b,fast\n", "line 2"),
        ("5,a,1\n0,b,1\n", "line 2: times must not decrease"),
        ("0,a,1\n5,b,-1\n", "line 2: times must not decrease, and rates must be from 0 to 1e+12"),
        ("0,a,1\n5,b,nan\n", "line 2"),
        ("nan,a,1\n5,b,1\n", "line 1"),
        ("0,a,-1\n5,b,1\n", "line 1"),
        ("0,a,1\n0,b,1\n", "lines of at least two times"),
        ("", "lines of at least two times"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(trace: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        ScenarioRuns(write(tmp_path, "{stages: 2, trace: trace.csv}", trace))
    assert said in str(refused.value)


def test_the_table_has_means_over_the_seeds() -> None:
    def run(*rates: float) -> list[Span]:
        return [Span(7200.0 * i, 7200.0 * (i + 1), rate, 2.0, 3, 1, 2) for i, rate in enumerate(rates)]

    head, line = report.span_table({"gain": [run(2.0, 0.5), run(2.0, 1.5)]}).splitlines()
    assert line.split() == ["gain", "1.50", "75.0", "100.0", "50.0", "1.5", "1.00"]
    assert len(head) == len(line)
    nothing = [Span(0.0, 60.0, 0.0, 0.0, 0, 0, 0)]
    assert report.span_table({"none": [nothing]}).splitlines()[1].split()[1:3] == ["0.00", "-"]


def test_curves_are_averages_over_equal_parts() -> None:
    spans = [Span(100.0, 300.0, 1.0, 2.0, 1, 1, 3), Span(300.0, 4100.0, 2.0, 2.0, 4, 2, 3)]
    hours, curves = report.curves(spans)
    assert hours[0] == pytest.approx(5.0 / 3600.0)
    assert curves["samples_per_s"][:21] == pytest.approx([1.0] * 20 + [2.0])
    assert curves["best"] == pytest.approx([2.0] * len(hours))
    assert curves["moves"][19:21] == [1.0, 5.0]
    assert math.fsum(curves["samples_per_s"]) * 10.0 == pytest.approx(200.0 + 2.0 * 3800.0)


def call(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-swarm", "simulate", *words])
        return cli.main()


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "{stages: 2, trace: trace.csv, rules: [none, gain], seeds: 1}")
    assert call(str(path), "--picture", str(tmp_path / "out.png")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["rule", "none", "gain"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "{stages: 2, trace: trace.csv, rules: [none], seeds: 1}")
    assert call(str(tmp_path / "none.yaml")) == 2
    assert "a scenario must be a readable file" in capsys.readouterr().err
    assert call(str(path), "--picture", str(tmp_path / "none" / "out.png")) == 2
    assert "Name another" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert call(str(path), "--picture", str(tmp_path / "out.png")) == 2
    assert 'pip install "lightning-swarm[demo]"' in capsys.readouterr().err
