"""Unusual kinds of projects have the plain Trainer's result on one, two and four servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.features.test_gradients import Forces, Free, adversarial, backward_before
from tests.features.test_models import Centred, Kept
from tests.features.test_optimization import Kept as KeptOptimizer
from tests.features.test_weights import Distilled
from tests.parity.harness import LOSS_TOLERANCE, Run, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Recipe, digits, loader
from tests.parity.test_leftovers import Hooked
from tests.parity.test_modes import Annealed as AnnealedAttributes
from tests.parity.test_modes import Frozen
from tests.parity.test_written_weights import Annealed as AnnealedWeights
from tests.parity.test_written_weights import Hook, Momentum, clamp, load

STEPS = 6
WHOLE = 8
"""Reshapes images into the rows of pixels."""

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")


class Renormed(DigitsMLP):
    """Shortens the rows of an embedding in a hook, in place of `max_norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(17, 4), nn.Flatten(), nn.Linear(4 * 64, 16), nn.Tanh(), nn.Linear(16, 10))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net((batch[0] * 16).long()), batch[1])

    @override
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].weight.renorm_(2, 0, 0.5)


class TimeFirst(L.LightningModule):
    """An encoder with time in dimension 0, torch's default."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0) for _ in range(2)))
        self.head = nn.Linear(8, 10)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rows = batch[0].view(-1, WHOLE, 8).transpose(0, 1)
        hidden = self.net(rows) + self.net(rows.flip(0))
        return F.cross_entropy(self.head(hidden.mean(0)), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Compared(Centred):
    """Its last block centres each of two views of a batch."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.net(batch[0].flip(1)), batch[1])


class Digits(L.LightningDataModule):
    """Knows the data's shape only after `setup`."""

    @override
    def setup(self, stage: str) -> None:
        images, labels = digits().tensors
        self.data, self.width = TensorDataset(images[:, ::2], labels), images[:, ::2].shape[1]

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=WHOLE)


class ShapedByData(DigitsMLP):
    """Creates its blocks from the shape that the data module reports."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential()

    @override
    def setup(self, stage: str) -> None:
        width = self.trainer.datamodule.width  # type: ignore[attr-defined]
        self.net = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 10)).double()


@dataclass(frozen=True)
class Kind:
    """A project, and the arguments of its swarm and of both Trainers."""

    make: Callable[[], L.LightningModule]
    swarm: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[L.Callback]] = list
    data: Callable[[], Any] = lambda: loader(digits())
    validates: bool = False


KINDS = {
    "a target that follows by momentum": Kind(Momentum, {"pipeline": "net"}),
    "a teacher copied in a hook": Kind(Distilled),
    "weights clamped in a hook": Kind(lambda: DigitsMLP(Recipe(optimizer="adamw")), callbacks=lambda: [Hook(clamp)]),
    "weights loaded in a hook": Kind(DigitsMLP, callbacks=lambda: [Hook(load, "on_train_batch_start")]),
    "buffers and frozen weights annealed": Kind(AnnealedWeights),
    "an embedding of limited norm": Kind(Renormed),
    "gradients by the input": Kind(lambda: Free(adversarial)),
    "a backward of one's own": Kind(lambda: Free(backward_before)),
    "gradients between batches": Kind(Forces, validates=True),
    "auxiliary losses and features": Kind(Kept),
    "hooks that observe": Kind(lambda: Hooked(on_start=True)),
    "time in dimension 0": Kind(TimeFirst, {"pipeline": "net", "microbatch_size": WHOLE}),
    "samples compared in a block": Kind(Compared, {"microbatch_size": WHOLE}),
    "a frozen part in eval mode": Kind(Frozen),
    "annealed attributes": Kind(AnnealedAttributes),
    "an optimizer made once": Kind(KeptOptimizer),
    "a shape from the data module": Kind(ShapedByData, {"pipeline": "net"}, data=Digits),
}


def train(run: Callable[..., Any], kind: Kind, **options: Any) -> Any:
    validation = [loader(digits(), 20)] if kind.validates else []
    options |= {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": 3, "inference_mode": False}
    return run(kind.make, kind.data(), *validation, callbacks=kind.callbacks(), **options)


@functools.cache
def plain(name: str) -> Run:
    found: Run = train(run_plain, KINDS[name])
    return found


@pytest.mark.first_cells(5)
@pytest.mark.parametrize("num_servers", [1, 2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_a_kind(name: str, num_servers: int) -> None:
    swarm = train(run_swarm, KINDS[name], num_servers=num_servers, **KINDS[name].swarm)
    assert_exact(swarm, plain(name))
    seen = [getattr(run.module, "seen", []) for run in (swarm, plain(name))]
    assert seen[0] == pytest.approx(seen[1], rel=LOSS_TOLERANCE)
