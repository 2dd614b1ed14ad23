"""Optimizers that step copies of the parameters on the CPU. Here both are on CPUs; `tests/gpu` has one on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm.model.partition import find_blocks
from lightning_swarm.server import stage_builder as server_model
from lightning_swarm.server.optimizer import StageOptimizer
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel
from tests.parity.harness import SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, NanoGPT, Recipe, digits, loader, sentences
from tests.parity.test_resume import EPOCH, Matrices, adam_8bit, go

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


@pytest.fixture
def _offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU, where the parameters are on another device than the copies that are stepped."""

    def make(*args: Any, **options: Any) -> StageOptimizer:
        return StageOptimizer(*args, **{**options, "offload": True})

    monkeypatch.setattr(server_model, "StageOptimizer", make)


def assert_offloaded(swarm: SwarmRun) -> None:
    for server in swarm.strategy.servers:
        for stage in server.steps.sums.stages.values():
            stepped = [one for group in stage.optimizer.torch_optimizer.param_groups for one in group["params"]]
            assert stepped
            assert not set(stepped) & set(stage.parameters.values())
            assert set(stage.optimizer.torch_optimizer.state) <= set(stepped)


@pytest.mark.usefixtures("_offloaded")
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}])
def test_training_is_the_same(options: dict[str, Any]) -> None:
    def make() -> DigitsMLP:
        return DigitsMLP(Recipe(schedule="onecycle"))

    plain = run_plain(make, loader(digits()), max_steps=12, **options)
    swarm = run_swarm(make, loader(digits()), max_steps=12, num_servers=4, **options)
    assert_exact(swarm, plain)
    assert_offloaded(swarm)


@pytest.mark.usefixtures("_offloaded")
def test_what_stands_around_the_pipeline_is_the_same() -> None:
    plain = run_plain(NanoGPT, loader(sentences()), max_steps=9)
    swarm = run_swarm(NanoGPT, loader(sentences()), max_steps=9, num_servers=3, pipeline="transformer.h")
    assert_exact(swarm, plain)
    assert_offloaded(swarm)


class Unfreezes(L.Callback):
    """Trains the first layer from the fourth step on."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.get_submodule("net.0").requires_grad_(False)

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        pl_module.get_submodule("net.0").requires_grad_(trainer.global_step >= 4)


@pytest.mark.usefixtures("_offloaded")
def test_parameters_may_begin_to_train_later() -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=9, callbacks=[Unfreezes()])
    swarm = run_swarm(DigitsMLP, loader(digits()), max_steps=9, callbacks=[Unfreezes()])
    assert_exact(swarm, plain)
    assert_offloaded(swarm)


@pytest.mark.first_cells(1)
@pytest.mark.usefixtures("_offloaded")
@pytest.mark.parametrize("optimizer", [adam_8bit, torch.optim.Adagrad, torch.optim.AdamW])
def test_a_file_goes_on(optimizer: Callable[..., Optimizer], tmp_path: Path) -> None:
    """Adagrad has state before its first step."""

    def make() -> L.LightningModule:
        return Matrices(optimizer).double()

    plain = run_plain(make, loader(digits()), max_epochs=2)
    go(run_swarm, make, digits(), tmp_path, 1)
    swarm = go(run_swarm, make, digits(), tmp_path, 2, num_servers=3)
    assert swarm.losses == pytest.approx(plain.losses[EPOCH:], rel=1e-11)
    torch.testing.assert_close(swarm.weights, plain.weights, rtol=0.0, atol=1e-10)
    assert isinstance(swarm, SwarmRun)
    assert_offloaded(swarm)


@pytest.mark.parametrize(("device", "offload", "offloads"), [("cuda", True, True), ("cuda", False, False)])
def test_a_gpus_optimizer_is_on_the_cpu_if_that_is_asked_for(device: str, offload: bool, offloads: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    blocks = find_blocks(module, None)
    settings = ComputeSettings(torch.device(device), offload=offload)
    model = PeerModel(module, blocks, lambda _: Optimizer([], {}), settings)
    assert model.offloads == offloads


def test_a_cpus_optimizer_steps_the_parameters_themselves() -> None:
    swarm = run_swarm(DigitsMLP, loader(digits()), max_steps=2, offload_optimizer=True)
    for server in swarm.strategy.servers:
        for stage in server.steps.sums.stages.values():
            assert set(stage.optimizer.torch_optimizer.state) == set(stage.parameters.values())
