"""Audited runs roll back to before a malicious server's first counted work, with the weights of an honest run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from lightning_swarm import Trust
from lightning_swarm.coordinator.audit.policy import Standing
from lightning_swarm.coordinator.audit.step_audits import StepAudits
from lightning_swarm.core.errors import ConfigError, SwarmError, from_wire
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.queries import by_preference
from lightning_swarm.strategy.rollback.loop_state import LoopStates
from lightning_swarm.testing import InMemoryStrategy
from tests.adversaries.adversary import Adversary
from tests.faults.test_audited import NUM_STEPS, audited, events_of, honest_weights

SINCE = 2  # the run's first snapshot contains the step before
SMALL = {"strength": 1.0001}  # within the rounding noise of honest sums


def draw(monkeypatch: pytest.MonkeyPatch, is_drawn: Callable[[int], bool]) -> None:
    """Audit all work of some steps, and none of the other steps."""
    monkeypatch.setattr(Standing, "is_drawn", lambda _self, _peer, step, *_: is_drawn(step))


def went_back(strategy: InMemoryStrategy) -> list[int]:
    """Return the versions that the run rolled back to."""
    return [one.step or 0 for one in strategy.peers[0].events.newest if one.kind == "went_back"]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("attack", "stages"), [("scaled_sum", 1), ("noisy_output", 2)])
def test_what_counted_of_a_liar_is_undone(monkeypatch: pytest.MonkeyPatch, attack: str, stages: int) -> None:
    expected = honest_weights(6, num_stages=stages)
    draw(monkeypatch, lambda step: step == NUM_STEPS - 2)
    liar = Adversary("peer-3", attack, since=SINCE, **(SMALL if attack == "scaled_sum" else {}))
    found, strategy = audited(6 * stages, liar, num_stages=stages, on_conviction="go_back")
    assert set(liar.lies) == {*range(SINCE, NUM_STEPS - 1)}
    assert went_back(strategy) == [1]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_the_run_goes_on_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = honest_weights(6, num_stages=1)
    draw(monkeypatch, lambda step: step == NUM_STEPS - 2)
    found, strategy = audited(6, Adversary("peer-3", "scaled_sum", since=SINCE, **SMALL), num_stages=1)
    assert events_of(strategy, "convicted") == {"peer-3"}
    assert not went_back(strategy)
    assert not torch.equal(found, expected)


def test_a_liar_in_the_last_step_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = honest_weights(6, num_stages=1)
    draw(monkeypatch, lambda step: step == NUM_STEPS - 1)
    liar = Adversary("peer-3", "scaled_sum", since=SINCE, **SMALL)
    found, strategy = audited(6, liar, num_stages=1, on_conviction="go_back")
    assert went_back(strategy) == [1]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_several_liars_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one becomes malicious after the first is excluded."""
    expected = honest_weights(6, num_stages=1)
    first = Adversary("peer-3", "scaled_sum", since=SINCE, **SMALL)
    second = Adversary("peer-4", "scaled_sum", since=SINCE, **SMALL)
    second.lies_in = lambda step: (  # type: ignore[method-assign]
        first.struck >= 3 and step >= SINCE and (step < max(first.lies) or second.struck > 0)
    )
    draw(monkeypatch, lambda step: step == NUM_STEPS - 2)
    found, strategy = audited(8, first, second, num_stages=1, on_conviction="go_back")
    assert min(second.lies) == SINCE, "it lies as soon as the run has gone back"
    assert went_back(strategy) == [1, 2]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_who_was_audited_in_each_step_costs_no_step() -> None:
    """Otherwise a newcomer could roll a run back as often as it has invitations."""
    expected = honest_weights(6, num_stages=2)
    liar = Adversary("peer-3", "scaled_sum", since=SINCE, **SMALL)
    found, strategy = audited(6, liar, num_stages=2, on_conviction="go_back")
    assert events_of(strategy, "convicted") == {"peer-3"}
    assert not went_back(strategy)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_what_is_older_than_the_snapshot_takes_no_run_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback would undo audited steps only."""
    draw(monkeypatch, lambda step: step >= 1)
    liar = Adversary("peer-3", "sign_flip", since=NUM_STEPS - 1, strength=1000.0)
    _, strategy = audited(6, liar, num_stages=1, on_conviction="go_back")
    assert events_of(strategy, "convicted") == {"peer-3"}
    assert not went_back(strategy)


def test_what_an_accomplice_has_audited_is_undone() -> None:
    standing = Standing()
    standing.note_counted(PeerId("a"), 5, PeerId("b"))
    assert not standing.has_counted(PeerId("a"), 4, {PeerId("a")})
    assert standing.has_counted(PeerId("a"), 5, {PeerId("a"), PeerId("b")})
    assert not standing.has_counted(PeerId("a"), 6, {PeerId("a"), PeerId("b")})
    standing.note_counted(PeerId("a"), 7, None)
    assert standing.has_counted(PeerId("a"), 7, {PeerId("a")})


def test_whom_a_liar_audited_is_as_new() -> None:
    standing = Standing(passed=Counter({PeerId("a"): 30, PeerId("c"): 30}))
    standing.note_counted(PeerId("a"), 5, PeerId("b"))
    standing.note_counted(PeerId("c"), 5, PeerId("a"))
    standing.reset_audited_by(PeerId("b"))
    assert standing.passed == {PeerId("c"): 30}


def test_a_run_that_has_nothing_to_go_back_to_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, a hook that computes with weights as a checkpoint is made prevents snapshots."""
    draw(monkeypatch, lambda step: step == NUM_STEPS - 2)
    monkeypatch.setattr(LoopStates, "save", lambda *_: None)
    liar = Adversary("peer-3", "scaled_sum", since=SINCE, **SMALL)
    _, strategy = audited(6, liar, num_stages=1, on_conviction="go_back")
    assert events_of(strategy, "convicted") == {"peer-3"}
    assert "no snapshot for a rollback: work of convicted servers counts" in caplog.text


@pytest.mark.thorough
def test_fellows_of_a_liar_are_watched_after_going_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepAudits, "watch_fellows", lambda own, _: own._standing.watch({"peer-4"}, own._step.step))
    drawn: list[tuple[int, bool]] = []

    def is_drawn(self: Standing, peer: PeerId, step: int, *_: object) -> bool:
        drawn.append((step, "peer-4" in self.watched))
        return step == NUM_STEPS - 2

    monkeypatch.setattr(Standing, "is_drawn", is_drawn)
    liar = Adversary("peer-3", "scaled_sum", since=SINCE, **SMALL)
    _, strategy = audited(6, liar, num_stages=1, on_conviction="go_back")
    assert went_back(strategy)
    convicted_at = drawn.index((NUM_STEPS - 2, False))
    assert all(is_watched for step, is_watched in drawn[convicted_at:] if step < NUM_STEPS - 2)


def test_no_other_peer_takes_the_run_back_by_an_answer() -> None:
    assert type(from_wire("FalseWorkCounted", "x")) is SwarmError


def test_old_snapshots_are_tried_first() -> None:
    assert by_preference([5, 20, 60, 40], sound=45) == [40, 20, 5, 60]
    assert by_preference([20, 60, 40], sound=10) == [20, 40, 60]
    assert by_preference([20, 60, 40], sound=None) == [60, 40, 20]


def test_what_needs_audits_and_snapshots_says_so() -> None:
    limits = Limits(snapshot_interval=None)
    with pytest.raises(ConfigError, match="snapshot_interval=None"):
        InMemoryStrategy(trust="audited", limits=limits)
    InMemoryStrategy(trust=Trust("audited", on_conviction="go_on"), limits=limits)
    with pytest.raises(ConfigError, match="'go_back'"):
        InMemoryStrategy(trust=Trust("audited", on_conviction="stop"))  # type: ignore[arg-type]
