"""Finetuning: what trains changes from step to step."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from typing_extensions import override

from tests.features.both import Trained, fit_both
from tests.features.mark import WORKS, feature
from tests.parity.harness import SwarmRun, run_plain
from tests.parity.models import digits, loader

EPOCH = 7


class Backbone(L.LightningModule):
    """A backbone and a head, as `BackboneFinetuning` needs them; their norms begin with equal values."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.backbone = nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 10))

    def configure_stages(self) -> list[nn.Module]:
        return [*self.backbone, *self.head]

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def unfreezing(_: str = "") -> list[L.Callback]:
    return [BackboneFinetuning(1, lambda _: 1.5, backbone_initial_ratio_lr=0.2, should_align=True)]


def reselections(run: SwarmRun) -> dict[int, int]:
    """Return the steps whose record changes the trained parameters, with the number of groups."""
    return {
        record.step: record.change.selection.num_groups for record in run.records if record.change.selection is not None
    }


@pytest.mark.first_cells(1)
@feature("`BackboneFinetuning`", WORKS, "the weights are gathered in the trainer's module at the start of each epoch")
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_backbone_finetuning(num_stages: int) -> None:
    both = fit_both(Backbone, made={"callbacks": unfreezing}, max_epochs=4, swarm={"num_stages": num_stages})
    assert reselections(both.swarm) == {EPOCH: 2}
    start = run_plain(Backbone, loader(digits()), max_steps=0).weights
    moved = {name for name, weight in both.swarm.weights.items() if not torch.equal(weight, start[name])}
    assert moved == start.keys(), "a part of the backbone never trained"


class Phases(BaseFinetuning):
    """Trains the head; then the middle, faster; then the rest, with its own weight decay."""

    @override
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[:7])  # type: ignore[index]

    @override
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[3:7], optimizer, lr=0.05)
        if epoch == 3:
            self.make_trainable(pl_module.net[:3])
            rest = list(pl_module.net[:3].parameters())
            optimizer.add_param_group({"params": rest, "lr": 0.01, "weight_decay": 0.1, "momentum": 0.5})


class Filtered(Trained):
    @override
    def configure_optimizers(self) -> Any:
        trained = filter(lambda parameter: parameter.requires_grad, self.parameters())
        return torch.optim.AdamW(trained, lr=3e-3) if self.adam else torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    adam = False


def in_phases(_: str = "") -> list[L.Callback]:
    return [Phases()]


@pytest.mark.first_cells(1)
@feature("`BaseFinetuning`", WORKS, "servers are notified of the trained parameters when a step begins")
@pytest.mark.parametrize("options", [{}, {"num_stages": 3, "num_servers": 6}, {"role": "trainer"}])
def test_phases(options: dict[str, Any]) -> None:
    both = fit_both(Filtered, made={"callbacks": in_phases}, max_epochs=5, gradient_clip_val=0.5, swarm=options)
    assert reselections(both.swarm) == {EPOCH: 2, 3 * EPOCH: 3}
    assert both.swarm.num_clipped > 0


class Alternating(Filtered):
    """Freezes a block for an epoch, with its optimizer state."""

    adam = True

    @override
    def on_train_epoch_start(self) -> None:
        self.net[2].requires_grad_(self.current_epoch != 1)
        self.net[0].requires_grad_(self.current_epoch != 2)


@feature("`requires_grad` changed in hooks", WORKS, "applies when a step begins; refused in mid-step")
def test_frozen_for_an_epoch() -> None:
    both = fit_both(Alternating, max_epochs=4)
    assert reselections(both.swarm) == {EPOCH: 1, 2 * EPOCH: 1, 3 * EPOCH: 1}
