"""A server's reports of its load by stage."""

from __future__ import annotations

import pytest

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.context import RunMembership
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.stage import StageLoad
from tests.unit.conftest import MakeSwarm


def test_the_busy_share_is_of_whole_steps_as_soon_as_there_are_some() -> None:
    load = StageLoad()
    load.start_step(now_s=100.0)
    assert load.busy_share(now_s=100.0) is None
    for _ in range(3):
        load.count_samples(4, busy_s=1.0, queued=0)
    assert load.busy_share(now_s=105.0) == pytest.approx(0.6)
    load.note_step(now_s=110.0)
    load.count_samples(4, busy_s=8.0, queued=0)
    assert load.busy_share(now_s=118.0) == pytest.approx(0.3)
    for step in range(1, 100):
        load.count_samples(4, busy_s=8.0, queued=0)
        load.note_step(now_s=110.0 + 10.0 * step)
    assert load.busy_share(now_s=2000.0) == pytest.approx(0.8)


def test_nobody_is_busier_than_always() -> None:
    load = StageLoad()
    load.start_step(now_s=0.0)
    load.count_samples(1, busy_s=10.0, queued=0)
    load.note_step(now_s=0.0)
    load.count_samples(1, busy_s=10.0, queued=0)
    load.note_step(now_s=1.0)
    assert load.busy_share(now_s=1.0) == 1.0


def test_who_comes_back_was_not_idle_in_between() -> None:
    load = StageLoad()
    load.start_step(now_s=0.0)
    load.count_samples(4, busy_s=8.0, queued=0)
    load.note_step(now_s=10.0)
    load.count_samples(4, busy_s=1.0, queued=0)  # belongs to a step that was decided without this server
    load.start_step(now_s=1000.0)
    load.count_samples(4, busy_s=8.0, queued=0)
    load.note_step(now_s=1010.0)
    assert load.busy_share(now_s=1010.0) == pytest.approx(0.8)


def test_a_stage_that_enters_a_run_again_was_not_idle_meanwhile(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    stage = swarm.servers[PeerId("a")].steps.stage(0)
    membership = RunMembership(Member(peer_id=PeerId("a"), boot_id=0))
    membership.enter_run(RunState(swarm.manifest))
    sums = GradientSums(membership)
    sums.enter_run({0: stage}, now_s=0.0)
    stage.load.count_samples(4, busy_s=8.0, queued=0)
    stage.load.note_step(now_s=10.0)
    sums.leave_run()
    sums.enter_run({0: stage}, now_s=1000.0)
    assert stage.load.busy_share(now_s=1000.0) == pytest.approx(0.8)
