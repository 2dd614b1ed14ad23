"""Repeated calls, replays and rollbacks are reported to the Trainer's loggers."""

from __future__ import annotations

from typing import Any

from lightning_swarm.testing import FaultPlan, Phase
from tests.features.test_trainers import Lines
from tests.parity.harness import run_swarm
from tests.parity.models import digits, loader
from tests.parity.test_rollback import Fit, Killing, make_digits

COORDINATOR = "peer-1"
"""Settings of these runs, in which the first peer trains only."""


def trained(plan: FaultPlan) -> Lines:
    lines = Lines()
    options: dict[str, Any] = {"num_servers": 4, "num_gone": 1, "role": "trainer", "latency_s": 0.001, "max_steps": 6}
    run_swarm(make_digits, loader(digits()), faults=plan, logger=lines, max_epochs=-1, **options)
    plan.check()
    return lines


def test_a_takeover_and_what_is_replayed() -> None:
    lines = trained(FaultPlan().kill(COORDINATOR, at=Phase.CLOSE, step=2))
    assert lines.column("swarm/takeover") == [1.0]
    assert sum(lines.column("swarm/replay")) > 0.0
    assert lines.column("swarm/peers") == [3.0]


def test_a_run_that_went_back() -> None:
    """The rollback is logged once, though the Trainer's function runs twice."""
    lines = Lines()
    killing = Killing([5], [[1]])
    Fit(killing, logger=lines)
    assert killing.num_killed == 1
    assert lines.column("swarm/went_back") == [1.0]
    assert sum(lines.column("swarm/pause")) == 1.0
