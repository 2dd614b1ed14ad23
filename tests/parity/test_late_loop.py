"""With delayed steps, the loop still saves, validates, freezes and fails between and within batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from typing_extensions import override

from lightning_swarm.client.step_client import StepClient
from lightning_swarm.server.pending_work import IdleLinkWait
from tests.parity.harness import SwarmRun, run_swarm
from tests.parity.models import DigitsMLP, NanoGPT, digits, loader, sentences
from tests.parity.test_delayed import assert_late, run_late

STEPS = 8


def train(make: Any, data: Any, *validation: Any, **options: Any) -> SwarmRun:
    return run_swarm(make, data, *validation, **{"max_steps": STEPS, "delay_optimizer_step": True, **options})


class Reassigning(torch.optim.Optimizer):
    """Assigns new tensors to `data`, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:
        closure()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.data = one.data - group["lr"] * one.grad


class Reassigned(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        return Reassigning(self.parameters())


def test_an_optimizer_that_gives_parameters_other_memory() -> None:
    torch.manual_seed(0)
    begin = {name: one.clone().double() for name, one in Reassigned().state_dict().items()}
    swarm = train(Reassigned, loader(digits()))
    assert any(float((swarm.weights[name] - one).abs().max()) > 1e-6 for name, one in begin.items())


@pytest.mark.parametrize("late", [False, True])
def test_only_averaging_that_is_late_waits_for_a_lull(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[IdleLinkWait] = []
    wait = IdleLinkWait.wait

    async def noted(self: IdleLinkWait) -> None:
        waits.append(self)
        await wait(self)

    monkeypatch.setattr(IdleLinkWait, "wait", noted)
    train(DigitsMLP, loader(digits()), delay_optimizer_step=late)
    assert (len(waits) >= STEPS) if late else not waits, "of two servers, in all steps that are late"


def test_a_checkpoint_between_windows_lacks_no_batch(tmp_path: Path) -> None:
    """A record is counted in the middle of the next window, whose first batch is in no saved update."""
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 6, "max_steps": 3}
    train(DigitsMLP, loader(digits()), enable_checkpointing=True, callbacks=[saving], **options)
    found = {}
    for path in tmp_path.glob("*.ckpt"):
        state = torch.load(path, weights_only=False)
        found[state["global_step"]] = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
    assert len(found) > 1
    assert found == {step: 2 * step for step in found}


class Saving(Callback):
    """Saves after each batch; records where each checkpoint resumes, and the late batches at epoch ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[tuple[int, int]] = []
        self.late_at_ends: list[int] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = self.folder / f"{len(self.found)}.ckpt"
        trainer.save_checkpoint(path)
        progress = torch.load(path, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        self.found.append((batch_idx, progress["current"]["ready"]))

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.late_at_ends.append(trainer.strategy.run.loop.num_late_batches)


def test_steps_that_cross_epochs(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    options = {"target_batch_size": 18, "max_steps": -1, "max_epochs": 3, "limit_train_batches": 4}
    train(DigitsMLP, loader(digits()), callbacks=[saving], **options)
    assert len(saving.found) == 12
    assert all(0 <= ready <= batch_idx + 1 for batch_idx, ready in saving.found)
    assert any(ready < batch_idx + 1 for batch_idx, ready in saving.found)
    assert saving.late_at_ends == [0, 0, 0]


class Freezing(Callback):
    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            next(iter(pl_module.parameters())).requires_grad_(False)


def test_what_trains_changes_in_mid_epoch() -> None:
    swarm = train(DigitsMLP, loader(digits()), callbacks=[Freezing()])
    assert [record.step for record in swarm.records if record.change.selection is not None] == [4]
    assert len(swarm.losses) == STEPS


class Around(NanoGPT):
    """Records step and loss in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.trainer.global_step, self.training_step(batch, batch_idx).item()))


def test_validation_between_batches_of_a_window_with_parameters_around() -> None:
    data = loader(sentences(), 3)
    late = run_late(Around, [batch for _, batch in zip(range(15), data, strict=False)], max_steps=3, window=5)
    options = {"accumulate_grad_batches": 5, "limit_train_batches": 15, "val_check_interval": 1, "max_steps": 3}
    swarm = train(Around, data, data, pipeline="transformer.h", limit_val_batches=1, **options)
    assert_late(swarm, late)
    assert isinstance(swarm.module, Around)
    assert {0, 1, 3} <= {step for step, _ in swarm.module.seen}
    batch = [one.double() if one.is_floating_point() else one for one in next(iter(data))]
    for step, loss in swarm.module.seen:
        late.module.load_state_dict(late.history[step])
        assert loss == pytest.approx(late.module.training_step(batch, 0).item(), rel=1e-10), step  # type: ignore[operator]


class Reading(Callback):
    """Reads weights in the middle of a batch, whether or not the previous step's record has come."""

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.strategy.lightning_module_state_dict()


def test_weights_are_read_in_a_batch() -> None:
    swarm = train(DigitsMLP, loader(digits()), callbacks=[Reading()])
    assert [record.step for record in swarm.records] == list(range(STEPS))


class Failing(Callback):
    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 5:
            raise RuntimeError("of the user's own")


def test_what_was_learnt_is_in_the_module_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="user's own"):
        train(DigitsMLP, loader(digits()), callbacks=[Failing()], latency_s=0.001)
    assert "keeps older weights" not in caplog.text


def test_a_lead_asks_once_for_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[tuple[int, bool]] = Counter()
    until = StepClient._wait_for_end

    async def noted(self: StepClient, step: int, *, decided: bool) -> bool:
        asked[step, decided] += 1
        return await until(self, step, decided=decided)

    monkeypatch.setattr(StepClient, "_wait_for_end", noted)
    options = {"accumulate_grad_batches": 10, "limit_train_batches": 20, "microbatch_size": 1, "max_steps": 4}
    train(DigitsMLP, loader(digits(), 2), max_epochs=-1, **options)
    assert max(asked.values()) == 1
