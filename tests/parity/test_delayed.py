"""`delay_optimizer_step`: each step computes on the weights before the newest ones, as in a plain loop that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_swarm.steps.coordinator import Coordinator
from lightning_swarm.steps.policy import OpenStep
from lightning_swarm.testing import FaultPlan, Phase
from tests.parity.harness import Run, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import (
    DigitsMLP,
    Recipe,
    TinyGPTWithLosses,
    digits,
    loader,
    make_optimizer,
    make_schedule,
    sentences,
)

STEPS = 12
PHASES = [
    Phase.FORWARD,
    Phase.FORWARD_DONE,
    Phase.BACKWARD_ACCEPTED,
    Phase.BACKWARD_DONE,
    Phase.RECEIPT_SEEN,
    Phase.CLOSE,
    Phase.CLOSE_DONE,
    Phase.AVERAGE,
    Phase.AVERAGE_SEND,
    Phase.AVERAGE_DONE,
    Phase.APPLY,
    Phase.APPLY_DONE,
]


def run_late(
    make_module: Callable[[], Any], data: DataLoader[Any], *, max_steps: int, gradient_clip_val: float | None = None
) -> Run:
    """Train with plain torch: every gradient but the first is of the weights one step before those it is applied to."""
    torch.manual_seed(0)
    module = make_module().double()
    optimizer = make_optimizer(module, module.recipe)
    schedule = make_schedule(optimizer, module.recipe)
    run = Run(module, None, [], [], [], [], {})
    newest = before = _copied(module)
    batches = [batch for _ in range(max_steps) for batch in data][:max_steps]
    for index, batch in enumerate(batches):
        module.load_state_dict(before)
        loss = module.training_step([one.double() if one.is_floating_point() else one for one in batch], index)
        loss.backward()
        module.load_state_dict(newest)
        highest = gradient_clip_val or float("inf")
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), highest)))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        before, newest = newest, _copied(module)
        run.losses.append(loss.item())
    run.weights = newest
    return run


def _copied(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_late(swarm: SwarmRun, late: Run) -> None:
    """As `assert_exact`; counters lag by a step, and are whole at the end."""
    swarm.global_steps, late.global_steps = [], []
    assert_exact(swarm, late)
    assert [record.step for record in swarm.records] == list(range(len(swarm.losses)))
    assert swarm.norms == pytest.approx(late.norms, rel=1e-9)


@contextmanager
def _lates() -> Iterator[list[int]]:
    """Steps whose records came while the steps after them took batches."""
    found: list[int] = []
    decide = Coordinator._decide_due

    async def noted(self: Coordinator, step: OpenStep) -> None:
        found.append(step.step)
        await decide(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "_decide_due", noted)
        yield found


def train(make: Callable[[], Any], data: DataLoader[Any], **options: Any) -> SwarmRun:
    return run_swarm(make, data, max_steps=STEPS, delay_optimizer_step=True, **options)


@pytest.mark.parametrize("num_servers", [2, 5])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}])
def test_gradients_are_one_step_late(num_servers: int, options: dict[str, Any]) -> None:
    def make() -> DigitsMLP:
        return DigitsMLP(Recipe(schedule="onecycle"))

    data = loader(digits())
    late = run_late(make, data, max_steps=STEPS, **options)
    with _lates() as lates:
        swarm = train(make, data, num_servers=num_servers, rebalancing="none", **options)
    assert_late(swarm, late)
    assert lates == list(range(1, STEPS - 1)), "but for the first, of which a snapshot is taken, and the last"
    assert swarm.losses != pytest.approx(run_plain(make, data, max_steps=STEPS, **options).losses, rel=1e-6)


VICTIM = "peer-3"
"""One of two servers of the second stage. The first peer trains, and coordinates."""


@pytest.fixture(scope="module")
def late() -> Run:
    return run_late(digits_net, loader(digits()), max_steps=STEPS, gradient_clip_val=0.5)


def digits_net() -> DigitsMLP:
    return DigitsMLP(Recipe(schedule="onecycle"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_dies(late: Run, phase: Phase) -> None:
    assert_unchanged(FaultPlan().kill(VICTIM, at=phase, step=3), late)


@pytest.mark.parametrize("phase", [Phase.FORWARD_ACCEPTED, Phase.AVERAGE_SEND])
def test_a_server_that_falls_silent_for_good(late: Run, phase: Phase) -> None:
    assert_unchanged(FaultPlan().freeze(VICTIM, for_s=1e6, at=phase, step=3), late)


def test_servers_die_step_after_step(late: Run) -> None:
    plan = FaultPlan().kill("peer-3", at=Phase.FORWARD_DONE, step=2).kill("peer-5", at=Phase.AVERAGE_SEND, step=3)
    plan.kill("peer-2", at=Phase.BACKWARD_ACCEPTED, step=4)
    assert_unchanged(plan, late, num_gone=3, num_servers=6)


def assert_unchanged(plan: FaultPlan, late: Run, *, num_gone: int = 1, num_servers: int = 4) -> None:
    with _lates() as lates:
        try:
            run = train(
                digits_net,
                loader(digits()),
                num_servers=num_servers,
                num_gone=num_gone,
                faults=plan,
                latency_s=0.001,
                gradient_clip_val=0.5,
                rebalancing="none",
            )
        finally:
            plan.check()
    assert_late(run, late)
    assert run.num_clipped > 0
    assert len(lates) > STEPS // 2


class Tied(TinyGPTWithLosses):
    def __init__(self) -> None:
        super().__init__(Recipe(schedule="onecycle"))
        self.net[3].out.weight = self.net[0].token.weight


@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_stages_that_hold_the_same_parameter(num_servers: int) -> None:
    late = run_late(Tied, loader(sentences()), max_steps=STEPS)
    swarm = train(Tied, loader(sentences()), num_servers=num_servers, rebalancing="none")
    assert_late(swarm, late)
