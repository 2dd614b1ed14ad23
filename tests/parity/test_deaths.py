"""Servers die or fall silent in the middle of a run, and the curve remains the plain Trainer's."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_swarm.testing import FaultPlan, Phase
from tests.parity.harness import Run, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader

STEPS = 6
STEP = 2
"""The step with the fault."""
VICTIM = "peer-3"
"""One of two servers of the second stage. The first peer trains and coordinates."""


def digits_net() -> Net:
    return DigitsMLP(Recipe(optimizer="adamw", schedule="onecycle"))


def options() -> dict[str, Any]:
    return {"max_steps": STEPS, "max_epochs": -1, "gradient_clip_val": 0.5}


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_plain(digits_net, loader(digits()), **options())


def assert_unchanged(plan: FaultPlan, plain: Run, *, num_gone: int = 1, num_servers: int = 4) -> None:
    settings = {"num_servers": num_servers, "num_gone": num_gone, "faults": plan, "latency_s": 0.001, **options()}
    try:
        run = run_swarm(digits_net, loader(digits()), **settings)
    finally:
        plan.check()
    assert_exact(run, plain)
    assert run.num_clipped > 0
    assert [record.outcome for record in run.records] == ["apply"] * STEPS


@pytest.mark.first_cells(6)
@pytest.mark.parametrize(
    "phase",
    [
        Phase.FORWARD,
        Phase.FORWARD_ACCEPTED,
        Phase.FORWARD_DONE,
        Phase.SEND_OUTPUT,
        Phase.BACKWARD,
        Phase.BACKWARD_ACCEPTED,
        Phase.BACKWARD_DONE,
        Phase.RECEIPT_SEEN,
    ],
)
def test_a_server_that_dies(plain: Run, phase: Phase) -> None:
    assert_unchanged(FaultPlan().kill(VICTIM, at=phase, step=STEP), plain)


@pytest.mark.parametrize("phase", [Phase.FORWARD_ACCEPTED, Phase.BACKWARD_DONE])
def test_a_server_that_falls_silent_for_good(plain: Run, phase: Phase) -> None:
    assert_unchanged(FaultPlan().freeze(VICTIM, for_s=1e6, at=phase, step=STEP), plain)


def test_a_server_of_each_stage_dies_in_the_same_step(plain: Run) -> None:
    plan = FaultPlan().kill(VICTIM, at=Phase.BACKWARD_DONE, step=STEP)
    assert_unchanged(plan.kill("peer-2", at=Phase.FORWARD_DONE, step=STEP), plain, num_gone=2)


def test_servers_die_step_after_step(plain: Run) -> None:
    plan = FaultPlan().kill("peer-3", at=Phase.FORWARD_DONE, step=1).kill("peer-5", at=Phase.RECEIPT_SEEN, step=2)
    plan.kill("peer-2", at=Phase.BACKWARD_ACCEPTED, step=3)
    assert_unchanged(plan, plain, num_gone=3, num_servers=6)
