"""A swarm without a cut: each trainer computes the whole model itself, and the curve is one machine's, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from tests.parity.harness import assert_exact, run_plain, run_swarm
from tests.parity.models import Net, Recipe, digits, loader
from tests.parity.test_trainers_come import LATE, come, trainers_of
from tests.parity.trainers import assert_exact as assert_same
from tests.parity.trainers import train

WHOLE: dict[str, Any] = {"num_stages": 1, "microbatch_size": None}


class Branches(Net):
    """No chain of blocks: two branches, and a parameter that belongs to the module itself."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 12), nn.Tanh()), recipe)
        self.side = nn.Linear(64, 12, bias=False)
        self.head = nn.Linear(12, 10)
        self.temperature = nn.Parameter(torch.ones(()))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        mixed = self.net(images) * self.side(images).sigmoid()
        centred = mixed - mixed.mean(0)  # compares samples
        return F.cross_entropy(self.head(centred) / self.temperature, labels)


class Images(Net):
    """Batch norms, one of which each sample goes through twice."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), recipe
        )
        self.twice = nn.BatchNorm1d(144, momentum=0.3)
        self.average = nn.BatchNorm1d(10, momentum=None)
        self.head = nn.Linear(144, 10, bias=False)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        found = self.net(images.view(-1, 1, 8, 8))
        found = self.twice(self.twice(found).relu())
        return F.cross_entropy(self.average(self.head(found)), labels)


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_batch_norms(num_trainers: int) -> None:
    # AdamW makes much of the rounding of gradients that are zero, and batches of four of any rounding.
    recipe = Recipe(optimizer="sgd")
    seen = train(num_trainers, lambda seen: Images(recipe), max_steps=8, swarm=WHOLE)
    assert_same(seen, lambda: Images(recipe), digits(), num_trainers=num_trainers)


def test_buffers_that_each_trainer_would_have_for_itself_are_refused() -> None:
    class Counting(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.seen += 1
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigError, match=r"buffers may change while it trains.*'seen'.*role='both'"):
        run_swarm(Counting, loader(digits()), num_servers=1, max_steps=2, **WHOLE)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_one_trainer(num_batches: int) -> None:
    recipe = Recipe(schedule="onecycle")
    options: dict[str, Any] = {"max_steps": 50, "accumulate_grad_batches": num_batches, "gradient_clip_val": 0.5}
    plain = run_plain(lambda: Branches(recipe), loader(digits()), **options)
    swarm = run_swarm(lambda: Branches(recipe), loader(digits()), num_servers=1, **WHOLE, **options)
    assert_exact(swarm, plain)
    assert swarm.num_clipped > 0


@pytest.mark.parametrize("num_trainers", [2, 4])
def test_several_trainers(num_trainers: int) -> None:
    seen = train(num_trainers, lambda seen: Branches(), max_steps=20, swarm=WHOLE)
    assert_same(seen, lambda: Branches(), digits(), num_trainers=num_trainers)


def test_a_trainer_joins_a_run_under_way() -> None:
    seen, _ = come(lambda seen: Branches(), swarm=WHOLE)
    assert [LATE] in trainers_of(seen)
    assert_same(seen, lambda: Branches(), digits(), num_trainers=2)
