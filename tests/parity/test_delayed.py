"""`delay_optimizer_step`: each step computes with weights that are one step old, as a plain loop does with a delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.coordinator.coordinator import CoordinatorGeneration
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.testing import FaultPlan, Phase
from tests.parity import trainers
from tests.parity.harness import Run, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import (
    DigitsMLP,
    NanoGPT,
    Recipe,
    TinyGPTWithLosses,
    digits,
    loader,
    make_optimizer,
    make_schedule,
    sentences,
)
from tests.parity.test_tied import Repeated

STEPS = 12
PHASES = [
    Phase.FORWARD_DONE,
    Phase.BACKWARD_DONE,
    Phase.CLOSE_DONE,
    Phase.AVERAGE_SEND,
    Phase.APPLY,
    Phase.APPLY_DONE,
]


@dataclass
class LateRun(Run):
    """A run with the weights before each step and after the last."""

    history: list[dict[str, Tensor]] = field(default_factory=list)


def run_late(
    make_module: Callable[[], Any],
    data: DataLoader[Any],
    *,
    max_steps: int = STEPS,
    gradient_clip_val: float | None = None,
    window: int = 1,
) -> LateRun:
    """Train with plain torch, where each gradient but the first is computed with weights that are one step old.

    Args:
        make_module: As in `run_plain`.
        data: As in `run_plain`.
        max_steps: As in `run_plain`.
        gradient_clip_val: As in `run_plain`.
        window: Batches per step.
    """
    torch.manual_seed(0)
    module = make_module().double()
    optimizer = make_optimizer(module, module.recipe)
    schedule = make_schedule(optimizer, module.recipe)
    run = LateRun(module, None, [], [], [], [], {})
    module.log = lambda *_, **__: None  # there is no Trainer here
    newest = before = trainers.copied(module)
    per_epoch = list(data)[: len(data) // window * window]
    batches = [batch for _ in range(max_steps * window) for batch in per_epoch]
    for step in range(max_steps):
        run.history.append(newest)
        module.load_state_dict(before)
        for batch in batches[step * window : (step + 1) * window]:
            loss = module.training_step([one.double() if one.is_floating_point() else one for one in batch], step)
            loss = loss / window
            loss.backward()
            run.losses.append(loss.item())
        module.load_state_dict(newest)
        highest = gradient_clip_val or float("inf")
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), highest)))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        before, newest = newest, trainers.copied(module)
    run.weights = newest
    run.history.append(newest)
    return run


def assert_late(swarm: SwarmRun, late: Run) -> None:
    """Compare as `assert_exact` does; counters lag by a step, and are complete at the end."""
    num_steps = len(late.norms)
    assert swarm.global_steps[-1] == num_steps
    swarm.global_steps, late.global_steps = [], []
    assert_exact(swarm, late)
    assert [record.step for record in swarm.records] == list(range(num_steps))
    assert swarm.norms == pytest.approx(late.norms, rel=1e-9)


@contextmanager
def _lates() -> Iterator[list[int]]:
    """Collect the steps whose records came while later steps took batches."""
    found: list[int] = []
    decide = CoordinatorGeneration._decide_late

    async def noted(self: CoordinatorGeneration, step: OpenStep) -> None:
        found.append(step.step)
        await decide(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoordinatorGeneration, "_decide_late", noted)
        yield found


def train(make: Callable[[], Any], data: DataLoader[Any], **options: Any) -> SwarmRun:
    return run_swarm(make, data, max_steps=STEPS, delay_optimizer_step=True, **options)


@pytest.mark.first_cells(1)
@pytest.mark.each_value
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
"""One of two servers of the second stage. Peer 0 trains and coordinates."""


@pytest.fixture(scope="module")
def late() -> Run:
    return run_late(digits_net, loader(digits()), max_steps=STEPS, gradient_clip_val=0.5)


def digits_net() -> DigitsMLP:
    return DigitsMLP(Recipe(schedule="onecycle"))


@pytest.mark.first_cells(1)
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


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_stages_that_hold_the_same_parameter(num_servers: int) -> None:
    late = run_late(Tied, loader(sentences()), max_steps=STEPS)
    swarm = train(Tied, loader(sentences()), num_servers=num_servers, rebalancing="none")
    assert_late(swarm, late)


def test_what_stands_around_the_pipeline_is_late_too() -> None:
    late = run_late(NanoGPT, loader(sentences()))
    assert_late(train(NanoGPT, loader(sentences()), num_servers=4, pipeline="transformer.h"), late)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_servers", [1, 3, 5])
def test_what_every_stage_has_is_late_in_all(num_servers: int) -> None:
    """A shared tensor is delayed in all three stages of one server, which holds a single object for it."""
    late = run_late(Repeated, loader(sentences()))
    assert_late(train(Repeated, loader(sentences()), num_stages=3, num_servers=num_servers), late)


class Validated(DigitsMLP):
    """Records losses in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []  # (global step, loss)

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append((self.trainer.global_step, self.training_step(batch, batch_idx).item()))


def test_windows_validations_and_epochs() -> None:
    """Validation uses the weights of the counted steps; after an epoch all of its steps are counted."""
    data = loader(digits())
    late = run_late(Validated, data, max_steps=2 * (len(data) // 2), window=2)
    swarm = run_swarm(
        Validated,
        data,
        loader(digits()),
        max_epochs=2,
        accumulate_grad_batches=2,
        limit_train_batches=2 * (len(data) // 2),
        val_check_interval=3,
        limit_val_batches=1,
        num_servers=4,
        delay_optimizer_step=True,
    )
    assert_late(swarm, late)
    assert isinstance(swarm.module, Validated)
    per_epoch = len(data) // 2
    assert {per_epoch, 2 * per_epoch} <= {step for step, _ in swarm.module.seen} or (2 * per_epoch) % 3
    batch = [one.double() if one.is_floating_point() else one for one in next(iter(data))]
    for step, loss in swarm.module.seen:
        late.module.load_state_dict(late.history[step])
        expected = late.module.training_step(batch, 0).item()  # type: ignore[operator]
        assert loss == pytest.approx(expected, rel=1e-10), step


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_in_mid_epoch_lacks_no_batch(tmp_path: Path) -> None:
    """The saved loop stands before the batches of the step in progress; Lightning's own Trainer can resume from it."""
    data, at = loader(digits()), 5
    assert at < len(data)
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=at, save_top_k=-1)
    late = run_late(digits_net, data)
    swarm = train(digits_net, data, enable_checkpointing=True, callbacks=[saving])
    assert_late(swarm, late)
    path = tmp_path / f"step={at}.ckpt"
    found = torch.load(path, weights_only=False)
    assert found["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == at
    for name, tensor in late.history[at].items():
        torch.testing.assert_close(found["state_dict"][name], tensor, rtol=0.0, atol=1e-10)
    options = {"ckpt_path": path, "enable_checkpointing": True, "callbacks": [saving]}
    resumed, plain = train(digits_net, data, **options), run_plain(digits_net, data, max_steps=STEPS, **options)
    assert len(resumed.losses) == len(plain.losses) == STEPS - at
    # The second step computes with the same weights as the first, because a delay begins anew.
    assert resumed.losses[0] == pytest.approx(plain.losses[0], rel=1e-10)
    assert resumed.losses[1] != pytest.approx(plain.losses[1], rel=1e-6)


def test_several_trainers_are_refused() -> None:
    with pytest.raises(ConfigError, match="must have only one trainer"):
        trainers.train(2, swarm={"delay_optimizer_step": True})


def test_16_mixed_is_refused() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match="must know whether a step's gradients overflowed"):
        train(digits_net, loader(digits()), precision=None, plugins=plugin)
