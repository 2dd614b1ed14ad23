"""The swarm trains, counts and saves the same parameters as one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import lightning_swarm.nn
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.strategy.weight_sync import ModuleWeights
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET, assert_exact, quiet_warnings, run_plain, run_swarm
from tests.parity.models import Net, digits, loader

STEPS = 6


class Digits(Net):
    def __init__(self) -> None:
        super().__init__(self.build())

    def build(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class WithoutBiases(Digits):
    """Its optimizer has no biases."""

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for name, one in self.named_parameters() if "bias" not in name], lr=0.1)


def test_what_no_parameter_group_holds_is_not_in_the_norm() -> None:
    plain = run_plain(WithoutBiases, loader(digits()), max_steps=STEPS, gradient_clip_val=0.1)
    swarm = run_swarm(WithoutBiases, loader(digits()), max_steps=STEPS, gradient_clip_val=0.1)
    assert swarm.num_clipped == STEPS
    assert_exact(swarm, plain)


class Tied(Digits):
    """The last stage holds one weight under two names."""

    @override
    def build(self) -> nn.Sequential:
        net = nn.Sequential(
            nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)
        )
        net[4].weight = net[2].weight
        return net


def test_a_checkpoint_holds_what_was_trained_under_all_names_of_a_tied_parameter(tmp_path: Path) -> None:
    files = {}
    for name, run in (("plain", run_plain), ("swarm", run_swarm)):
        saving = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=STEPS)
        options: dict[str, Any] = {"split": ["2"]} if name == "swarm" else {}
        run(Tied, loader(digits()), max_steps=STEPS, callbacks=[saving], enable_checkpointing=True, **options)
        files[name] = torch.load(tmp_path / name / f"step={STEPS}.ckpt", weights_only=False)["state_dict"]
    assert files["swarm"].keys() == files["plain"].keys()
    assert torch.equal(files["swarm"]["net.2.weight"], files["swarm"]["net.4.weight"])
    for name, tensor in files["plain"].items():
        torch.testing.assert_close(files["swarm"][name], tensor, rtol=0, atol=1e-12)


class Transform(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.fft.fft(hidden)


class Magnitude(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.abs()


class Spectrum(Digits):
    """Complex numbers cross the stage boundary, and so do their gradients."""

    @override
    def build(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 16), Transform(), Magnitude(), nn.Linear(16, 10))


def test_complex_activations_between_stages() -> None:
    plain = run_plain(Spectrum, loader(digits()), max_steps=STEPS)
    swarm = run_swarm(Spectrum, loader(digits()), max_steps=STEPS, split=["2"])
    assert_exact(swarm, plain)


class Doubling(nn.Module):
    """Changes an extra in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.inner(hidden)) * mask.mul_(2)
        return out


class InPlace(Digits):
    @override
    def build(self) -> nn.Sequential:
        return lightning_swarm.nn.Sequential(nn.Linear(64, 16), Doubling(), nn.Linear(16, 10))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0], mask=torch.full((16,), 0.5, dtype=torch.float64)), batch[1])


@pytest.mark.parametrize("cache_bytes", [0, 1000, 1 << 30])
def test_an_extra_that_a_block_changes_reaches_the_next_microbatch_as_it_was(cache_bytes: int) -> None:
    plain = run_plain(InPlace, loader(digits()), max_steps=STEPS)
    options: dict[str, Any] = {"shared": ["mask"], "limits": Limits(cache_bytes=cache_bytes)}
    swarm = run_swarm(InPlace, loader(digits()), max_steps=STEPS, num_servers=1, **options)
    assert_exact(swarm, plain)


class Penalised(Digits):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = torch.stack([one.square().sum() for one in self.parameters()]).sum()
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class Foreign(Digits):
    """A layer in a plain list is no part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(10, 10)]

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden[0].parameters()], lr=0.1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Foreign, r"of the LightningModule only.*group 0 has others, of the shapes \[\(10, 10\), \(10,\)\]"),
        (Penalised, r"a loss may reach the pipeline's weights only through the .*\['net.0.weight', .*weight decay"),
    ],
)
def test_what_would_be_lost_without_a_word_is_refused(module: type[Digits], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(module, loader(digits()), max_steps=STEPS)


class LooksInside(Digits):
    """Calls one of its blocks directly, not through the pipeline."""

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            self.log("hidden", self.net[0](batch[0].flatten(1)).mean())


def test_a_block_with_old_weights_is_not_asked() -> None:
    module = LooksInside().double()
    with quiet_warnings():
        trainer = L.Trainer(**{**QUIET, "devices": 2, "max_epochs": 1}, strategy=InMemoryStrategy(num_stages=2))
        with pytest.raises(ConfigError, match=r"on their own.*got a call of Linear.*Call the whole pipelined module"):
            trainer.fit(module, loader(digits()), loader(digits()))
    module.net[0](torch.zeros(1, 64, dtype=torch.float64))  # allowed after the run


def test_a_broken_run_is_torn_down_whatever_can_be_gathered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(self: ModuleWeights, optimizer: Optimizer, *, timeout: float) -> None:
        raise KeyError("a name")

    monkeypatch.setattr(ModuleWeights, "gather_into_module", gather)
    strategy = InMemoryStrategy(num_stages=2)
    trainer = L.Trainer(**{**QUIET, "devices": 2, "max_steps": STEPS}, strategy=strategy)
    with pytest.raises(ConfigError, match="a loss may reach the pipeline"), quiet_warnings():
        trainer.fit(Penalised(), loader(digits()))
    assert "keeps older weights" in caplog.text
    assert strategy.peer is None
    assert all(peer._closed for peer in strategy.peers)
