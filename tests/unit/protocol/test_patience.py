"""Timeouts for a peer: a multiple of the usual time, at least a moment, and at most the limits."""

from __future__ import annotations

import pytest

from lightning_swarm.protocol.patience import DEADLINE_FACTOR, MAX_SLOWDOWN, MIN_DEADLINE_S, Durations, deadline_s


@pytest.mark.parametrize(
    ("usual_s", "longest_s", "expected_s"),
    [
        pytest.param(10.0, 300.0, 10.0 * DEADLINE_FACTOR, id="a multiple"),
        pytest.param(0.001, 300.0, MIN_DEADLINE_S, id="at least a moment"),
        pytest.param(1000.0, 300.0, 300.0, id="at most the limit"),
        pytest.param(0.001, 2.0, 2.0, id="a limit below the moment"),
    ],
)
def test_a_deadline_is_within_its_bounds(usual_s: float, longest_s: float, expected_s: float) -> None:
    assert deadline_s(usual_s, longest_s=longest_s) == expected_s


def test_nothing_is_late_before_enough_was_measured() -> None:
    durations = Durations()
    for _ in range(2):
        durations.add(0.1)
        assert durations.deadline_s(longest_s=300.0) == 300.0
    durations.add(0.1)
    assert durations.deadline_s(longest_s=300.0) == MIN_DEADLINE_S


def test_a_slow_swarm_has_the_time_that_it_takes() -> None:
    durations = Durations()
    for _ in range(10):
        durations.add(20.0)
    assert durations.deadline_s(longest_s=300.0) == 20.0 * DEADLINE_FACTOR


def test_some_false_durations_move_no_deadline() -> None:
    durations = Durations()
    for took_s in (2.0, 1e-9, 2.0, 299.0, 2.0):
        durations.add(took_s)
    assert durations.deadline_s(longest_s=300.0) == 2.0 * DEADLINE_FACTOR


def test_where_all_are_late_the_next_deadlines_grow_to_the_limit_until_work_is_done_again() -> None:
    durations = Durations()
    for _ in range(3):
        durations.add(1.0)
    found = []
    for _ in range(7):
        found.append(durations.deadline_s(longest_s=300.0))
        durations.extend()
    assert found == [8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0]
    durations.add(1.0)
    assert durations.deadline_s(longest_s=300.0) == 8.0


def test_what_was_long_ago_does_not_count() -> None:
    durations = Durations()
    for took_s in [1.0] * 100 + [30.0] * 32:
        durations.add(took_s)
    assert durations.deadline_s(longest_s=3000.0) == 30.0 * DEADLINE_FACTOR


def test_a_peer_that_always_takes_longer_has_more_time_within_bounds() -> None:
    all_of_them, slow, liar = Durations(), Durations(), Durations()
    for _ in range(3):
        all_of_them.add(2.0)
        slow.add(5.0)
        liar.add(500.0)
    assert all_of_them.slowdown(slow) == 2.5
    assert all_of_them.slowdown(liar) == MAX_SLOWDOWN
    assert all_of_them.slowdown(Durations()) == MAX_SLOWDOWN, "nothing is known of it"
    assert slow.slowdown(all_of_them) == 1.0
    assert all_of_them.deadline_s(longest_s=1e3, slowdown=2.5) == DEADLINE_FACTOR * 5.0
