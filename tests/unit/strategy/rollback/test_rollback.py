"""Versions of the weights that belong to a loop between two batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from lightning_swarm.client.run_session import RunNews
from lightning_swarm.strategy.rollback.loop_state import LoopState, LoopStates, ResumePoint


def between(version: int, completed: Sequence[int] = (), news: int | None = None) -> ResumePoint:
    state = cast(LoopState, object())
    return ResumePoint(state, version, version, completed, RunNews(version), None if news is None else RunNews(news))


def versions(one: ResumePoint, *, is_lead: bool = False, counted: Collection[int] = ()) -> list[int]:
    """Return the versions, of 0 to 9, from which the loop can resume."""

    def counts(step: int, firsts: Collection[int]) -> bool:
        return step == one.version and set(firsts) <= set(counted)

    return [version for version in range(10) if one.fits(version, counts, is_lead=is_lead)]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (between(4, news=4), [4]),
        (between(4, news=7), [4, 5, 6, 7]),  # other trainers filled steps
        (between(4, [0], news=4), []),  # its batch is in no record as yet
        (between(4, [0], news=5), [5]),
        (between(4, [0], news=7), [5, 6, 7]),
        (between(4), [4, 5, 6, 7, 8, 9]),  # its next batch has no place, so later steps change nothing
        (between(4, [0]), []),
    ],
)
def test_from_its_last_step_to_that_of_its_next_batch(one: ResumePoint, expected: list[int]) -> None:
    assert versions(one) == expected


def test_what_its_server_knows_counts_before_it_has_heard() -> None:
    assert versions(between(4, [0, 8]), counted=[0, 4, 8]) == [5, 6, 7, 8, 9]
    assert versions(between(4, [0, 8]), counted=[0, 4]) == []


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (between(4, news=4), [4]),
        (between(4, news=7), [4, 7]),  # the other trainers' logs came for all steps together
        (between(4, [0], news=5), [5]),
        (between(4), [4]),
        (between(4, [0]), []),
    ],
)
def test_the_lead_needs_what_others_logged(one: ResumePoint, expected: list[int]) -> None:
    assert versions(one, is_lead=True, counted=[0]) == expected


def states(*kept: ResumePoint, is_lead: bool = False) -> LoopStates:
    found = LoopStates(cast(Any, None), (), is_lead=is_lead)
    found._points = kept
    return found


def test_it_goes_on_as_late_as_can_be() -> None:
    early, late = between(3, news=5), between(5)
    assert states(early, late).find(5) is late
    assert states(early, late).find(4) is early
    assert states(early, late).find(2) is None


def test_what_goes_with_no_snapshot_is_forgotten() -> None:
    one, two, three, newest = between(1, news=2), between(2, [0], news=3), between(3, [0], news=4), between(4)
    kept = states(one, two, three, newest)
    kept.prune([2, 4])
    assert kept._points == (one, newest)
    kept.prune([])
    assert kept._points == (newest,)


def test_the_lead_says_which_versions_it_has() -> None:
    assert set(states(between(1, news=2), between(2, [0], news=3), between(3, [0]), is_lead=True).versions) == {1, 2, 3}


def test_only_the_first_grant_after_it_is_news() -> None:
    kept = states(between(4, [0]))
    kept.record_grant(RunNews(6))
    kept.record_grant(RunNews(8))
    assert versions(kept._points[0]) == [5, 6]
