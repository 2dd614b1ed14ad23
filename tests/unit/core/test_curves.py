"""Curves keep a run's whole time in bounded memory, and the rate of steps follows the run."""

from __future__ import annotations

import math
import tracemalloc

import pytest

from lightning_swarm.core.curves import MAX_POINTS, History, StepRate

MONTH_S = 30 * 86400


def test_a_month_takes_no_more_memory_than_a_day_and_keeps_its_ends_and_means() -> None:
    history, sizes = History(), []
    tracemalloc.start()
    try:
        for day in range(30):
            for second in range(day * 86400, (day + 1) * 86400, 60):
                history.add(1e9 + second, {"rate": second / MONTH_S, "step": None})
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes[1:]) < 2 * sizes[0]
    curves = history.curves()
    assert MAX_POINTS / 2 <= len(curves.begins) <= MAX_POINTS
    assert curves.begins[0] <= 1e9
    assert 1e9 + MONTH_S - curves.width <= curves.begins[-1] <= 1e9 + MONTH_S
    rates = curves.series["rate"]
    assert "step" not in curves.series  # it was never known
    assert None not in rates
    assert list(rates) == sorted(rates, key=float)
    assert math.fsum(map(float, rates)) / len(rates) == pytest.approx(0.5, abs=0.01)


def test_a_pause_leaves_a_gap_and_a_clock_that_goes_back_none() -> None:
    history = History()
    for now_s in (1000.0, 1001.0, 1100.0, 900.0):
        history.add(now_s, {"rate": now_s})
    assert history.curves().begins == (1000.0, 1001.0, 1100.0)
    assert history.curves().series == {"rate": (1000.0, 1001.0, 1000.0)}
    history.add(1000.0 + 100 * MONTH_S, {"rate": 1.0})  # a machine that slept
    assert len(history.curves().begins) == 2


def test_a_curve_over_steps_forgets_the_steps_that_a_run_lost() -> None:
    history = History()
    for step in range(1000):
        history.truncate(step)
        history.add(step, {"loss": step})
    assert history.curves().begins == tuple(range(0, 1000, 8))
    history.truncate(500)
    assert history.curves().begins == tuple(range(0, 504, 8))
    assert history.curves().series["loss"][-1] == 499.5  # steps 496 to 503
    history.truncate(-1)
    assert history.curves().begins == ()


def test_the_rate_of_steps_is_right_for_fast_and_slow_runs_and_falls_during_a_stop() -> None:
    for step_s in (0.5, 4.0, 300.0):
        rate = StepRate()
        found = [rate.add(1e6 + now_s, int(now_s / step_s)) for now_s in range(2000)]
        assert found[0] is None
        assert found[-1] == pytest.approx(60 / step_s, rel=0.25)
    stopped = [rate.add(1e6 + now_s, int(2000 / step_s)) for now_s in range(2000, 6000)]
    assert stopped[-1] is not None
    assert stopped[-1] < 0.2 * 60 / step_s
    assert rate.add(1e6 + 6001, 2) is None  # the run went back
    assert rate.add(1e6 + 6002, None) is None


def test_a_slow_step_that_began_before_the_dashboard_is_no_fast_step() -> None:
    rate = StepRate()
    found = [rate.add(1e6 + second, (second + 299) // 300) for second in range(700)]
    assert found[:301] == [None] * 301  # a step ended after 1 s, but it may have begun any time before
    assert found[301:] == pytest.approx([0.2] * 399)
    assert rate.add(1e6 + 700, None) is None
    assert rate.add(1e6 + 701, 3) == pytest.approx(0.2)  # a survey without a coordinator loses no earlier step
