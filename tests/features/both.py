"""Trains twice, with the plain Trainer and with a swarm of two stages, each with its own callbacks and loggers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET, Run, SwarmRun, assert_exact, quiet_warnings, run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader

STEPS = 9

Make = Callable[[], Any]


class Trained(DigitsMLP):
    """Logs in the usual ways."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Evaluated(Trained):
    """Validates, tests and predicts as well."""

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    @override
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    @override
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.net(batch[0])
        return logits


@dataclass(frozen=True)
class Both:
    """Two runs that must have equal results."""

    plain: Run
    swarm: SwarmRun

    @property
    def trainers(self) -> tuple[Any, Any]:
        return self.plain.trainer, self.swarm.trainer

    def logged(self) -> dict[str, float]:
        """Return the plain Trainer's `callback_metrics`; check that the swarm's are equal."""
        plain, swarm = ({name: float(value) for name, value in one.callback_metrics.items()} for one in self.trainers)
        assert swarm == approx(plain)
        return plain


def fit_both(
    make_module: Callable[[], L.LightningModule] = Trained,
    *validation: Any,
    data: Make = lambda: loader(digits()),
    made: dict[str, Callable[[str], Any]] | None = None,
    exact: bool = True,
    swarm: dict[str, Any] | None = None,
    **options: Any,
) -> Both:
    """Train twice.

    Args:
        make_module: Builds the module.
        validation: At most one loader.
        data: Makes the training data.
        made: Makes arguments of the Trainer that the runs must not share; called with ``"plain"`` and ``"swarm"``.
        exact: Every loss and weight must be equal up to rounding in float64.
        swarm: Arguments of `run_swarm` alone.
        options: Further arguments of the Trainer.
    """
    runs: list[Any] = []
    for name, run in (("plain", run_plain), ("swarm", partial(run_swarm, **(swarm or {})))):
        own = {key: make(name) for key, make in (made or {}).items()}
        runs.append(run(make_module, data(), *validation, **options, **own))
    if exact:
        assert_exact(runs[1], runs[0])
    return Both(*runs)


def trainers(microbatch_size: int = 3, **options: Any) -> tuple[L.Trainer, L.Trainer]:
    """Return a plain Trainer and one with a swarm, for methods other than `fit`."""
    swarm = InMemoryStrategy(num_stages=2, microbatch_size=microbatch_size)
    with quiet_warnings():
        return (
            L.Trainer(**{**QUIET, "devices": 1, **options}),
            L.Trainer(**{**QUIET, "devices": 2, **options}, strategy=swarm),
        )


def evaluate_both(fn: str, data: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return the results of ``Trainer.<fn>``, plain and through a swarm."""
    results = []
    for trainer in trainers(**options):
        torch.manual_seed(0)
        with quiet_warnings():
            results.append(getattr(trainer, fn)(Evaluated(), data or loader(digits())))
    return results[0], results[1]


def approx(values: Any) -> Any:
    """Return a value that compares equal up to rounding in float64."""
    return pytest.approx(values, rel=1e-9, nan_ok=False)
