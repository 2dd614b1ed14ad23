"""Weights that user code reads and writes during `fit`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from tests.features.both import STEPS, Trained, fit_both
from tests.features.mark import REFUSED, WORKS, feature
from tests.parity.harness import LOSS_TOLERANCE, run_swarm
from tests.parity.models import DigitsMLP, digits, loader
from tests.parity.test_written_weights import Hook, Momentum, clamp, load


@feature(
    "reading parameters, buffers and `state_dict()` in hooks",
    WORKS,
    "the first use after a step gathers the newest weights of all stages; hooks that read no weights cost nothing",
)
def test_reading_weights() -> None:
    seen: dict[str, list[float]] = {"plain": [], "swarm": []}

    def read(into: list[float], module: Any, step: int) -> None:
        into += [
            float(sum(one.norm() for one in module.parameters())),
            float(module.state_dict()["net.0.weight"][0, 9]),
        ]

    fit_both(made={"callbacks": lambda name: [Hook(partial(read, seen[name]))]}, max_steps=STEPS)
    assert len(set(seen["plain"])) == 2 * STEPS
    assert seen["swarm"] == pytest.approx(seen["plain"], rel=LOSS_TOLERANCE)


@feature(
    "weights and buffers, also frozen, that hooks write between two steps: `clamp_`, `.data = ...`, `load_state_dict`",
    WORKS,
    "the next step begins with them on all servers; with one trainer, without `delay_optimizer_step`",
)
def test_writing_weights() -> None:
    fit_both(made={"callbacks": lambda _: [Hook(clamp), Hook(load, "on_train_batch_start")]}, max_steps=STEPS)


@feature(
    "target networks updated with momentum, in hooks or in `training_step`",
    WORKS,
    "the target may be outside of the pipeline, where the trainer computes it",
)
def test_momentum_targets() -> None:
    fit_both(Momentum, swarm={"pipeline": "net"}, max_steps=STEPS)


class Target(DigitsMLP):
    """Has a target network, like a DQN's, that is trainable, in no optimizer, and copied in `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.target(batch[0])
        if batch_idx % 3 == 1:
            self.target.load_state_dict(self.net.state_dict())
        return super().training_step(batch, batch_idx) + F.mse_loss(self.net(batch[0]), wanted)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


@feature("a target network that is in no optimizer, and is copied in `training_step`", WORKS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_target_in_no_optimizer(accumulate: int) -> None:
    fit_both(Target, swarm={"pipeline": "net"}, max_steps=STEPS, accumulate_grad_batches=accumulate)


class Distilled(Trained):
    """Distills from its own weights of the epoch's start."""

    @override
    def on_train_epoch_start(self) -> None:
        self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.teacher[0].parameters():
                parameter.mul_(0.99)
        return super().training_step(batch, batch_idx) + F.mse_loss(self.net(batch[0]), self.teacher[0](batch[0]))


@feature("copies of the pipelined module, made in hooks", WORKS, "the trainer computes a copy, with the copy's weights")
def test_copies_of_the_pipelined_module() -> None:
    fit_both(Distilled, max_steps=STEPS)


class Pruned(Trained):
    """Prunes at each epoch's start."""

    @override
    def on_train_epoch_start(self) -> None:
        prune.l1_unstructured(self.net[0], "weight", amount=0.2)
        prune.remove(self.net[0], "weight")


@feature(
    "`torch.nn.utils.prune` in hooks, with `prune.remove` after it",
    WORKS,
)
def test_pruning() -> None:
    fit_both(Pruned, max_epochs=2)


@feature(
    "masks of `torch.nn.utils.prune` and parametrizations that hooks add to weights of blocks",
    REFUSED,
    "at the next batch; add them in `__init__`, or call `prune.remove` in the same hook",
)
def test_masks_that_hooks_leave() -> None:
    class Masked(DigitsMLP):
        @override
        def on_train_batch_end(self, *_: Any) -> None:
            prune.l1_unstructured(self.net[0], "weight", amount=0.2)

    with pytest.raises(ConfigError, match=r"'net\.0\.weight' was replaced"):
        run_swarm(Masked, loader(digits()), max_steps=STEPS)


@feature(
    "writing weights of blocks, or trained weights, in the middle of a step",
    REFUSED,
    "at their next use; write them in `on_train_batch_start` or `on_train_batch_end`, not within an "
    "accumulation window",
)
def test_writing_in_mid_step() -> None:
    with pytest.raises(ConfigError, match="only between two steps"):
        run_swarm(Trained, loader(digits()), callbacks=[Hook(clamp, "on_before_zero_grad")], max_steps=STEPS)


@feature(
    "parameters of blocks that hooks replace with other objects",
    REFUSED,
    "at the next call or step; write into them with `copy_` under `torch.no_grad()`",
)
def test_replaced_parameters() -> None:
    def replace(module: Any, step: int) -> None:
        module.net[0].weight = nn.Parameter(module.net[0].weight * 2)

    with pytest.raises(ConfigError, match="must stay the same objects"):
        run_swarm(Trained, loader(digits()), callbacks=[Hook(replace)], max_steps=STEPS)
