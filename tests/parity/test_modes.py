"""Modes and plain attributes that hooks set on modules of blocks reach the servers, as on one machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.testing import FaultPlan, Phase
from tests.parity.harness import assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Recipe, digits, loader
from tests.parity.standbys import Swarm
from tests.parity.test_failover import assert_same

STEPS = 9
pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")
OPTIONS = {"max_steps": STEPS, "max_epochs": -1}


class Scaled(nn.Module):
    """A block whose output depends on attributes."""

    default = 1.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.temperature = 2
        self.rates = [0.5, (1, None)]
        self.kind: str | None = None
        self._skips = False
        self.scales = torch.ones(2)
        self.config = SimpleNamespace(scale=1.0)

    @property
    def skips(self) -> bool:
        """Return whether the block does nothing."""
        return self._skips

    @skips.setter
    def skips(self, value: bool) -> None:
        self._skips = value

    def forward(self, x: Tensor) -> Tensor:
        if self.skips:
            return x
        out: Tensor = torch.tanh(self.linear(x) / self.temperature) * self.rates[0] * self.default
        return F.relu(out) if self.kind == "relu" else out


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.net = nn.Sequential(first, Scaled(8), nn.Tanh(), Scaled(8), nn.Linear(8, 10))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


class Frozen(Net):
    """Its first layers are frozen, and in eval mode whenever the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[0][1].running_mean.normal_()
        self.train()

    @override
    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        if hasattr(self, "net"):
            self.net[0].eval()
        return self


class HalfFrozen(Frozen):
    """One stage has a norm in eval mode and one in train mode, whose momentum changes."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size
        self.net[0].append(nn.BatchNorm1d(8, momentum=0.3))

    @override
    def train(self, mode: bool = True) -> HalfFrozen:
        super().train(mode)
        if hasattr(self, "net") and len(self.net[0]) > 2:
            self.net[0][2].train(mode)
        return self

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0][2].momentum = 0.1 * (1 + batch_idx % 3)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        parts = batch[0].split(self.size or len(batch[0]))
        return F.cross_entropy(torch.cat([self.net(part) for part in parts]), batch[1])


class Annealed(Frozen):
    """Changes attributes in every hook where a module can, also back to their first values."""

    @override
    def setup(self, stage: str) -> None:
        self.net[1].temperature = 1.5

    @override
    def on_fit_start(self) -> None:
        self.net[3].rates[0] = 0.75

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[1].temperature = 0.9 ** (batch_idx % 4)
        self.net[1].default = 1.0 + batch_idx % 2
        self.net[3].kind = "relu" if batch_idx % 3 == 1 else None

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net.eval()
            teacher = self.net(batch[0])
            self.net.train()
            self.net[0].eval()
        self.net[3].temperature = 3.0
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.net[3].temperature = 2
        self.net[3].skips = batch_idx % 2 == 1
        return loss + F.mse_loss(self.net(batch[0]), teacher)


CASES: list[tuple[type[Net], int, dict[str, Any]]] = [
    (Frozen, 1, {}),
    (Frozen, 4, {}),
    (Annealed, 1, {}),
    (Annealed, 3, {"limits": Limits(cache_bytes=1 << 12)}),
]


@pytest.mark.parametrize(("make", "num_servers", "options"), CASES)
def test_modes_and_attributes(make: Callable[[], Net], num_servers: int, options: dict[str, Any]) -> None:
    plain = run_plain(make, loader(digits()), **OPTIONS)
    assert_exact(run_swarm(make, loader(digits()), num_servers=num_servers, **OPTIONS, **options), plain)


@pytest.mark.parametrize("num_servers", [1, 4])
def test_a_norm_in_eval_mode_beside_one_that_sees(num_servers: int) -> None:
    plain = run_plain(partial(HalfFrozen, 4), loader(digits()), **OPTIONS)
    run = run_swarm(HalfFrozen, loader(digits()), num_servers=num_servers, microbatch_size=4, **OPTIONS)
    assert_exact(run, plain)
    assert run.weights["net.0.1.num_batches_tracked"] == 0


def test_a_death_changes_nothing() -> None:
    """Recomputation uses the attributes of the first computation, even if they have changed since."""
    plan = FaultPlan().kill("peer-3", at=Phase.BACKWARD_DONE, step=2)
    plain = run_plain(Annealed, loader(digits()), **OPTIONS)
    run = run_swarm(Annealed, loader(digits()), num_servers=4, num_gone=1, faults=plan, latency_s=0.001, **OPTIONS)
    plan.check()
    assert_exact(run, plain)


def _replaced(module: Any) -> None:
    module.net[2] = nn.ReLU()


def _inside(module: Any) -> None:
    module.net[0][1] = nn.Identity()


def _object(module: Any) -> None:
    module.net[3].temperature = torch.tensor(3.0)


def _new(module: Any) -> None:
    module.net[3].scale = 2.0


def _tensor(module: Any) -> None:
    module.net[3].scales.mul_(2)


def _config(module: Any) -> None:
    module.net[3].config.scale = 2.0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_replaced, "a ReLU, took the place of block '2', a Tanh"),
        (_inside, "`1` of '0' became a Identity"),
        (_object, "`temperature` of '3' became a Tensor"),
        (_new, "`scale` of '3' became a float"),
        (_tensor, "`scales` of '3' was changed in place"),
        (_config, "`config.scale` of '3' was changed in place"),
    ],
)
def test_what_cannot_travel_is_refused(change: Callable[[Any], None], found: str) -> None:
    class Changing(Frozen):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                change(self)

    with pytest.raises(ConfigError, match=found):
        run_swarm(Changing, loader(digits()), **OPTIONS)


class Cooling(DigitsMLP):
    """Its temperature falls with each batch."""

    class Cooled(nn.Tanh):
        temperature = 1.0

        @override
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.temperature

    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw"))
        self.net[1] = self.Cooled()
        self.net[1].temperature = 1.0
        self.seen = 0

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.net[1].temperature *= 0.9
        self.seen += 1


def test_attributes_are_those_of_the_step_after_the_lead_died() -> None:
    swarm = Swarm(1, 1, Cooling, {4: "lead"}, options={"max_steps": 9}).fit()
    assert swarm.leads == ["lead", "standby-0"]
    plain = run_plain(Cooling, loader(digits()), max_steps=9, max_epochs=-1)
    assert_same(swarm, plain)
    led = swarm.modules["standby-0"]
    assert isinstance(led, Cooling)
    assert (led.seen, led.net[1].temperature) == (9, pytest.approx(0.9**9))
