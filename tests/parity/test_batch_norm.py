"""A ResNet with batch norms in its stages equals a plain loop over the same microbatches, also when servers die.

The reference is the plain Trainer with a module whose network runs over each batch in the swarm's microbatches.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase
from tests.parity.harness import QUIET, Run, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import digits, loader
from tests.parity.test_joining import Joining

STEPS = 8
NUM_MICROBATCHES = 6 * 3 + 2 + 3
MICROBATCH = 3
"""Batches of 8, the last one of 4: microbatches of 3, 3, 2 and of 3, 1."""


class Residual(nn.Module):
    def __init__(self, width: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width, momentum=momentum) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](hidden)))


class ResNet(L.LightningModule):
    """Cuts each batch into microbatches of `size` in its own forward, or leaves that to a swarm."""

    def __init__(self, size: int | None = None, width: int = 4, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.size = size
        self.net = nn.Sequential(
            nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
            ),
            Residual(width, momentum),
            Residual(width),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.size is None or not self.training:
            logits: Tensor = self.net(x)
            return logits
        return torch.cat([self.net(part) for part in x.split(self.size)])

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def options(**others: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "max_epochs": -1, **others}


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_plain(partial(ResNet, MICROBATCH), loader(digits()), **options())


def swarm(**others: Any) -> SwarmRun:
    return run_swarm(ResNet, loader(digits()), **options(microbatch_size=MICROBATCH, **others))


def assert_counted(run: Run, num: int) -> None:
    counts = {name: int(value) for name, value in run.weights.items() if name.endswith("num_batches_tracked")}
    assert set(counts.values()) == {num}
    assert len(counts) == 5


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(("num_stages", "num_servers"), [(1, 1), (2, 2), (2, 4), (3, 4), (4, 7)])
def test_running_statistics_are_those_of_a_plain_loop(plain: Run, num_stages: int, num_servers: int) -> None:
    run = swarm(num_stages=num_stages, num_servers=num_servers)
    assert_exact(run, plain)
    assert_counted(run, NUM_MICROBATCHES)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_servers", [1, 4])
def test_cumulative_averages(num_servers: int) -> None:
    """`momentum=None` weighs all microbatches equally, so their number matters."""
    make = partial(ResNet, momentum=None)
    plain = run_plain(partial(make, MICROBATCH), loader(digits()), **options())
    run = run_swarm(make, loader(digits()), num_servers=num_servers, **options(microbatch_size=MICROBATCH))
    assert_exact(run, plain)


class Uncounted(ResNet):
    """Makes train-mode calls without backward, or with a backward to the input only; these update no statistics."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(self(images), batch[1]), images)
        with torch.no_grad():
            target = self(batch[0].flip(1))
        return F.mse_loss(self(batch[0] + gradient), target + self(batch[0]).detach())


@pytest.mark.thorough
def test_forwards_without_a_backward_that_counts() -> None:
    plain = run_plain(partial(Uncounted, MICROBATCH), loader(digits()), **options())
    run = run_swarm(Uncounted, loader(digits()), num_servers=4, **options(microbatch_size=MICROBATCH))
    assert_exact(run, plain)
    assert_counted(run, 4 * NUM_MICROBATCHES)


class InAHook(ResNet):
    @override
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])


class WithoutLoss(ResNet):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Reestimated(ResNet):
    """Re-estimates the statistics with the trained weights, as `update_bn` does for averaged weights."""

    @override
    def on_train_end(self) -> None:
        torch.optim.swa_utils.update_bn([torch.ones(4, 64, dtype=torch.float64)], self.net)


@pytest.mark.parametrize("module", [InAHook, Reestimated])
def test_statistics_change_in_training_step_only(module: type[ResNet]) -> None:
    with pytest.raises(ConfigError, match=r"in another hook, with '0\.2' in train mode.*a copy"):
        run_swarm(module, loader(digits()), **options(microbatch_size=MICROBATCH))


class ByCopy(ResNet):
    """Re-estimates the statistics with a copy of the model at the end of each epoch."""

    @override
    def on_train_epoch_end(self) -> None:
        copied = copy.deepcopy(self.net)
        images = torch.linspace(0, 1, 6 * 64, dtype=torch.float64).reshape(6, 64)
        torch.optim.swa_utils.update_bn([images[:3], images[3:].flip(1)], copied)
        self.net.load_state_dict(copied.state_dict())


def test_statistics_are_estimated_by_a_copy() -> None:
    plain = run_plain(partial(ByCopy, MICROBATCH), loader(digits()), **options())
    assert_exact(run_swarm(ByCopy, loader(digits()), **options(microbatch_size=MICROBATCH)), plain)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_warning_says_which_forwards_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    run_swarm(WithoutLoss, loader(digits()), **options(microbatch_size=MICROBATCH))
    assert "running statistics do not count that" in caplog.text


# Peers 0 and 2 hold the first stage, 1 and 3 the second. Peer 0 trains and coordinates.
@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("plan", "num_gone"),
    [
        (FaultPlan().kill("peer-3", at=Phase.BACKWARD_DONE, step=2), 1),
        (FaultPlan().kill("peer-2", at=Phase.RECEIPT_SEEN, step=2), 1),
        (FaultPlan().kill("peer-3", at=Phase.AVERAGE, of="peer-3", step=3), 1),
        (FaultPlan().kill("peer-2", at=Phase.AVERAGE_REDUCE, of="peer-2", step=3), 1),
        (FaultPlan().freeze("peer-3", for_s=1e6, at=Phase.BACKWARD_DONE, step=1), 1),
        (FaultPlan().drop("peer-2", at=Phase.BACKWARD_DONE, step=2), 0),
        (FaultPlan().kill("peer-2", at=Phase.FORWARD_DONE, step=2).kill("peer-3", at=Phase.CLOSE, step=4), 2),
    ],
    ids=["after a backward", "its receipt seen", "averaging", "in a part", "freezes", "an answer is lost", "both"],
)
def test_each_microbatch_counts_once_whatever_dies(plain: Run, plan: FaultPlan, num_gone: int) -> None:
    try:
        run = swarm(num_servers=4, num_gone=num_gone, faults=plan, latency_s=0.001)
    finally:
        plan.check()
    assert_exact(run, plain)
    assert_counted(run, NUM_MICROBATCHES)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("count", [1, 2])
def test_servers_that_join(plain: Run, count: int) -> None:
    run = swarm(callbacks=[Joining(at=1, count=count)], num_joiners=count, latency_s=0.001)
    assert_exact(run, plain)


def test_what_is_computed_again_is_seen_once(plain: Run) -> None:
    """No graph is kept, so each backward computes the forward again, which must not update the statistics twice."""
    run = swarm(limits=Limits(cache_bytes=1 << 14))
    assert run.num_dropped_graphs > 0
    assert_exact(run, plain)
    assert_counted(run, NUM_MICROBATCHES)


class Frozen(ResNet):
    """Freezes the first stage's parameters; its statistics are still updated."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__(size)
        self.net[:2].requires_grad_(False)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.05)


@pytest.mark.thorough
def test_a_stage_that_trains_nothing_keeps_its_statistics() -> None:
    plain = run_plain(partial(Frozen, MICROBATCH), loader(digits()), **options())
    run = run_swarm(Frozen, loader(digits()), num_servers=4, **options(microbatch_size=MICROBATCH, split=["2"]))
    assert_exact(run, plain)
    assert_counted(run, NUM_MICROBATCHES)


class Evaluated(ResNet):
    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


def test_validation_reads_them_and_changes_nothing() -> None:
    seen = []
    for run in (
        run_plain(partial(Evaluated, MICROBATCH), loader(digits()), loader(digits()), **options(max_steps=7)),
        run_swarm(Evaluated, loader(digits()), loader(digits()), **options(max_steps=7, microbatch_size=MICROBATCH)),
    ):
        assert run.trainer is not None
        seen.append(run.trainer.callback_metrics["val_loss"].item())
    assert seen[1] == pytest.approx(seen[0], rel=1e-11)


def test_one_warning_says_what_they_mean(caplog: pytest.LogCaptureFixture) -> None:
    swarm(max_steps=2)
    (said,) = [one.message for one in caplog.records if "BatchNorm" in one.message]
    assert said.startswith("Blocks of the pipeline contain 5 BatchNorm modules (0.2, 1.norms.0,")
    assert "each microbatch (of 3 samples) by the statistics of this microbatch" in said


class InEval(ResNet):
    """Keeps its batch norms in eval mode, with statistics from elsewhere, while it trains."""

    @override
    def train(self, mode: bool = True) -> InEval:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    @override
    def on_train_epoch_start(self) -> None:
        self.train()


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_no_warning_of_norms_in_eval_mode(caplog: pytest.LogCaptureFixture) -> None:
    plain = run_plain(InEval, loader(digits()), max_steps=3)
    assert_exact(run_swarm(InEval, loader(digits()), max_steps=3), plain)
    assert not [one.message for one in caplog.records if "BatchNorm" in one.message]


def test_no_warning_of_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    trainer = L.Trainer(**{**QUIET, "devices": 1, "max_steps": 2}, strategy=InMemoryStrategy(num_stages=2))
    trainer.fit(ResNet().double(), loader(digits()))
    assert not [one.message for one in caplog.records if "BatchNorm" in one.message]


class Twice(ResNet):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].norms[1] = self.net[1].norms[0]


def test_a_norm_that_is_used_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be used once for each sample"):
        run_swarm(Twice, loader(digits()), **options())


class Shared(ResNet):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].norms[1] = self.net[1].norms[0]


def test_a_norm_in_two_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be in one stage only, which keeps its running statistics: got 1 in"):
        run_swarm(Shared, loader(digits()), **options(split=["2"]))
