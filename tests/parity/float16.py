"""Training in ``precision="16-mixed"``, with a scale that starts too high and grows again soon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from typing_extensions import override

from tests.parity.harness import Run
from tests.parity.models import DigitsMLP, Recipe, digits, loader

INITIAL_SCALE = 2.0**24
HALF = 4
"""Rows of a microbatch, and of each of `InHalves`'s two calls, so that both trainings round and overflow alike."""


class InFloat16(DigitsMLP):
    """Computes its loss in float32. Uses SGD, because AdamW would cancel a wrong scale."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(recipe or Recipe(optimizer="sgd"))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])


class InHalves(InFloat16):
    """Computes each batch in two calls."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(torch.cat([self.net(part).float() for part in batch[0].split(HALF)]), batch[1])


@dataclass
class Scaled:
    """A run, and the scale after each of its batches."""

    run: Any
    scales: list[float]

    @property
    def num_skipped(self) -> int:
        """Count the reductions of the scale."""
        pairs = zip([INITIAL_SCALE, *self.scales], self.scales, strict=False)
        return sum(after < before for before, after in pairs)


def train(
    run: Callable[..., Run], make_module: Callable[[], L.LightningModule] = InHalves, *, factor: float = 2.0, **how: Any
) -> Scaled:
    """Train in float16.

    Args:
        run: `run_plain` or `run_swarm`.
        make_module: Builds the module.
        factor: Factor by which the scale grows after four steps, and backs off.
        how: Further arguments of `run`.
    """
    # Without the plugin Lightning would use bfloat16 on a CPU.
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=INITIAL_SCALE, growth_factor=factor, backoff_factor=1 / factor, growth_interval=4
    )
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    scales = []

    class Notes(L.Callback):
        @override
        def on_train_batch_end(self, *_: Any) -> None:
            scales.append(scaler.get_scale())

    callbacks = [*how.pop("callbacks", []), Notes()]
    done = run(make_module, loader(digits()), precision=None, plugins=[plugin], callbacks=callbacks, **how)
    return Scaled(done, scales)
