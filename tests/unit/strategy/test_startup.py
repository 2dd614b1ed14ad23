"""A run whose setup fails leaves module, loop and callbacks as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, digits, loader

REPLACED = {"reset", "on_run_start", "on_advance_end", "on_save_checkpoint", "on_load_checkpoint"}


class _BreaksOff(Exception):
    """A part of the setup fails."""


@pytest.mark.parametrize(
    "part",
    [
        "startup.intercept",
        "startup.SwarmOptimization",
        "rollback.rollback.DataPosition",
        "startup.WeightSync",
        "startup.CheckpointFiles",
    ],
)
def test_a_setup_that_fails_can_be_run_again(part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise _BreaksOff

    strategy = InMemoryStrategy(num_stages=2)
    trainer = L.Trainer(
        **{**QUIET, "callbacks": [ModelCheckpoint(tmp_path)], "enable_checkpointing": True},
        strategy=strategy,
        max_steps=2,
    )
    module, callbacks, dtype = DigitsMLP(), list(trainer.callbacks), torch.get_default_dtype()
    with monkeypatch.context() as patch:
        patch.setattr(f"lightning_swarm.strategy.{part}", fail)
        with pytest.raises(_BreaksOff):
            trainer.fit(module, loader(digits()))

    assert trainer.callbacks == callbacks
    assert not any("_save_checkpoint" in vars(callback) for callback in callbacks)
    assert not REPLACED & (vars(trainer.fit_loop).keys() | vars(trainer.fit_loop.epoch_loop).keys())
    assert torch.get_default_dtype() == dtype
    assert strategy.peer is None
    assert "forward" not in vars(module.net)
    assert module.net(digits().tensors[0].double()).requires_grad

    trainer.fit(module, loader(digits()))
    assert trainer.global_step == 2
    assert trainer.callbacks == callbacks
