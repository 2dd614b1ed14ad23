"""With `delay_optimizer_step`, gradients that `training_step` takes also use the weights of one step before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from tests.parity.harness import run_swarm
from tests.parity.models import DigitsMLP, Recipe, digits, loader
from tests.parity.test_delayed import STEPS, assert_late, run_late


class Net(DigitsMLP):
    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw"))

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)

    def logged(self, loss: Tensor) -> Tensor:
        self.log("loss", loss)
        return loss


class Adversarial(Net):
    """Trains on inputs moved along their gradients, with a penalty by a second derivative."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images = batch[0].clone().requires_grad_()
        loss = self.loss_of(images, batch[1])
        (gradient,) = torch.autograd.grad(loss, images, retain_graph=True)
        (again,) = torch.autograd.grad(2 * loss, images)
        assert torch.allclose(again, 2 * gradient)
        return self.logged(self.loss_of(images.detach() + 0.1 * gradient.sign(), batch[1]))


class Attacked(Net):
    """Freezes all weights while it computes the attack, and calls a `.backward()` whose gradients are cleared."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images = batch[0].clone().requires_grad_()
        self.requires_grad_(False)
        self.loss_of(images, batch[1]).backward()
        self.requires_grad_(True)
        assert images.grad is not None
        moved = batch[0] + 0.1 * images.grad.sign()
        return self.logged(self.loss_of(moved, batch[1]) + 0.5 * self.loss_of(batch[0], batch[1]))


class Imitating(Net):
    """Has targets from a call without gradients."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            targets = self.net(0.9 * batch[0]).softmax(1)
        return self.logged(self.loss_of(*batch) + F.cross_entropy(self.net(batch[0]), targets))


class Leaving(nn.Module):
    """Keeps a loss of its own for each sample."""

    penalty: Tensor

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        self.penalty = hidden.square().mean(1)
        return hidden


class Auxiliary(Net):
    """Adds a loss that a block keeps, and a loss of a part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, Leaving())

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(*batch)
        return self.logged(loss + 0.1 * self.net[2].penalty.mean())


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("make", [Adversarial, Attacked, Imitating, Auxiliary])
@pytest.mark.parametrize("window", [1, 2])
def test_gradients_in_training_step_are_one_step_late(make: type[Net], window: int) -> None:
    data = loader(digits())
    max_steps = STEPS if window == 1 else len(data) // window
    late = run_late(make, data, max_steps=max_steps, window=window)
    options: dict[str, Any] = {"num_servers": 3, "rebalancing": "none", "accumulate_grad_batches": window}
    swarm = run_swarm(make, data, max_steps=max_steps, delay_optimizer_step=True, **options)
    assert_late(swarm, late)
