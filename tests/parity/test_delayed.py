"""`delay_optimizer_step`: each step computes on the weights before the newest ones, as in a plain loop that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.parity.harness import Run, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import (
    DigitsMLP,
    Recipe,
    digits,
    loader,
    make_optimizer,
    make_schedule,
)

STEPS = 12


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


def train(make: Callable[[], Any], data: DataLoader[Any], **options: Any) -> SwarmRun:
    return run_swarm(make, data, max_steps=STEPS, delay_optimizer_step=True, **options)


@pytest.mark.parametrize("num_servers", [2, 5])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05}])
def test_gradients_are_one_step_late(num_servers: int, options: dict[str, Any]) -> None:
    def make() -> DigitsMLP:
        return DigitsMLP(Recipe(schedule="onecycle"))

    data = loader(digits())
    late = run_late(make, data, max_steps=STEPS, **options)
    swarm = train(make, data, num_servers=num_servers, **options)
    assert_late(swarm, late)
    assert swarm.losses != pytest.approx(run_plain(make, data, max_steps=STEPS, **options).losses, rel=1e-6)
