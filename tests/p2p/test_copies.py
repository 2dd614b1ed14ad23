"""Trainers can be copied during training, as some checkpoint and tuning callbacks do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, digits

# Cold starts of peers in this file: 0: the peer is in the test's process.
pytestmark = pytest.mark.thorough


class CopiesAll(L.Callback):
    """Copies the Trainer and its callbacks in some hooks."""

    def __init__(self) -> None:
        self.trainer: L.Trainer | None = None  # a reference such as progress bars keep
        self.copies: list[L.Trainer] = []

    def copy(self, trainer: L.Trainer) -> None:
        copies, self.copies, self.trainer = self.copies, [], trainer
        copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
        self.copies = [*copies, copy.deepcopy(trainer)]

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.copy(trainer)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.copy(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.copy(trainer)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_copy_has_no_part_in_the_run(tmp_path: Path, num_stages: int) -> None:
    weights = []
    copies = CopiesAll()
    for callbacks in ([], [copies]):
        L.seed_everything(0, verbose=False)
        strategy = SwarmStrategy(num_stages=num_stages, pipeline="net", listen="127.0.0.1:0", trust="open")
        options = {**QUIET, "accelerator": "cpu", "devices": 1, "max_steps": 3, "default_root_dir": tmp_path}
        module = DigitsMLP()
        trainer = L.Trainer(strategy=strategy, callbacks=callbacks, **options)
        trainer.fit(module, DataLoader(digits(), batch_size=8))
        weights.append(list(module.parameters()))
        again = pickle.loads(pickle.dumps(trainer))
        assert again.global_step == 3
    assert len(copies.copies) == 5
    torch.testing.assert_close(weights[1], weights[0], rtol=0.0, atol=0.0)
    for one in copies.copies:
        assert isinstance(one.strategy, SwarmStrategy)
        assert one.strategy.run is None
