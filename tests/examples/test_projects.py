"""Projects without code for a swarm have equal losses, weights and metrics if only the Trainer's strategy changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.testing import InMemoryStrategy
from tests.examples.projects import adversarial, byol, vae
from tests.parity.harness import LOSS_TOLERANCE, QUIET, WEIGHT_TOLERANCE, quiet_warnings

PROJECTS: dict[ModuleType, dict[str, Any]] = {
    byol: {"pipeline": "backbone"},
    vae: {"pipeline": "encoder"},
    adversarial: {},
}
EXPECTED = {
    byol: {"train/loss", "train/std", "momentum", "val/accuracy", "val/distance"},
    vae: {"train_kl", "train_act", "kl_weight", "val_rebuilt", "sampled_spread"},
    adversarial: {"loss_step", "robust_loss_epoch", "robust_accuracy", "val_pgd", "val_loss_fgsm"},
}


class Kept(DummyLogger):
    """Keeps all logged values except the swarm's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:  # type: ignore[override]
        if "swarm/peers" not in metrics:
            self.rows.append((step, dict(metrics)))


@dataclass
class Result:
    rows: list[tuple[int | None, dict[str, float]]]
    metrics: dict[str, float]
    weights: dict[str, Tensor] = field(repr=False)


def run(project: ModuleType, **options: Any) -> Result:
    """Run a project's script in float64."""
    kept = Kept()
    quiet = {name: value for name, value in QUIET.items() if name not in ("accelerator", "num_sanity_val_steps")}
    with quiet_warnings():
        trainer: L.Trainer = project.main(**{**quiet, "logger": kept, "log_every_n_steps": 1, **options})
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Result(kept.rows, metrics, trainer.lightning_module.state_dict())


plain = cache(run)


def assert_same(swarm: Result, plain: Result) -> None:
    assert [(step, row.keys()) for step, row in swarm.rows] == [(step, row.keys()) for step, row in plain.rows]
    for (step, ours), (_, theirs) in zip(swarm.rows, plain.rows, strict=True):
        assert ours == pytest.approx(theirs, rel=LOSS_TOLERANCE, abs=1e-15), f"logged at step {step}"
    assert swarm.metrics == pytest.approx(plain.metrics, rel=LOSS_TOLERANCE, abs=1e-15)
    torch.testing.assert_close(swarm.weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.__name__.rpartition(".")[2])
class TestProject:
    def test_trains_and_logs_what_it_should(self, project: ModuleType) -> None:
        found = plain(project)
        assert {name for _, row in found.rows for name in row} >= EXPECTED[project]
        assert all(tensor.dtype == torch.float64 for tensor in found.weights.values() if tensor.is_floating_point())
        assert "swarm" not in Path(str(project.__file__)).read_text()

    @pytest.mark.first_cells(1)
    def test_one_process(self, project: ModuleType) -> None:
        strategy = SwarmStrategy(num_stages=2, microbatch_size=5, **PROJECTS[project])
        assert_same(run(project, strategy=strategy, devices=1), plain(project))

    @pytest.mark.first_cells(1)
    @pytest.mark.parametrize("num_servers", [2, pytest.param(4, marks=pytest.mark.thorough)])
    def test_servers(self, project: ModuleType, num_servers: int) -> None:
        strategy = InMemoryStrategy(num_stages=2, microbatch_size=5, **PROJECTS[project])
        assert_same(run(project, strategy=strategy, devices=num_servers), plain(project))
        assert len(strategy.servers) == num_servers
        assert all(server.calls.num_forwards > 0 for server in strategy.servers)
