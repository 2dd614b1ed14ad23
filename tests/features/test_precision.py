"""Precision and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from tests.features.both import STEPS, fit_both
from tests.features.mark import REFUSED, WORKS, feature
from tests.features.refused import assert_refused
from tests.parity.float16 import HALF, train
from tests.parity.harness import assert_same_curve, run_plain, run_swarm
from tests.parity.models import DigitsMLP


class LossInFloat32(DigitsMLP):
    """Computes its loss in float32, because bfloat16 would have two digits only."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        pytest.param(
            "32-true",
            torch.float32,
            5e-6,
            marks=feature("`precision='32-true'`", WORKS, "losses within 5e-6 of the plain Trainer's"),
        ),
        pytest.param(
            "bf16-mixed",
            torch.float32,
            1e-2,
            marks=feature("`precision='bf16-mixed'`", WORKS, "losses within 1e-2"),
        ),
        pytest.param(
            "bf16-true",
            torch.bfloat16,
            1e-2,
            marks=feature("`precision='bf16-true'`", WORKS, "losses within 1e-2; gradients are summed in float32"),
        ),
    ],
)
def test_precisions(precision: Any, dtype: torch.dtype, tolerance: float) -> None:
    both = fit_both(LossInFloat32, precision=precision, max_steps=30, exact=False)
    assert_same_curve(both.swarm, both.plain, loss=tolerance)
    assert both.swarm.losses != both.plain.losses, "compared to itself?"
    assert {tensor.dtype for tensor in both.swarm.weights.values()} == {dtype}
    assert both.plain.losses[-1] < 0.9 * both.plain.losses[0], "nothing was learned"
    sums = {
        server.steps.stage(i).next_sum.values.dtype
        for server in both.swarm.strategy.servers
        for i in server.steps.stages
    }
    assert sums == {torch.float32}


@feature("`precision='64-true'`", WORKS, "losses within 1e-11, weights within 1e-10")
def test_float64() -> None:
    assert {tensor.dtype for tensor in fit_both(max_steps=STEPS).swarm.weights.values()} == {torch.float64}


@feature(
    "`Trainer(deterministic=True)`",
    WORKS,
    "deterministic kernels; to get [the same bits](how_it_works.md#the-same-bits-again) with any peers, also "
    "set `SwarmStrategy(deterministic=True)`",
)
def test_deterministic() -> None:
    try:
        fit_both(deterministic=True, max_steps=STEPS)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@feature(
    "`precision='16-mixed'`",
    WORKS,
    "losses within 1e-6, same scales and skipped steps, if the plain Trainer computes parts of the same size. "
    "Whole batches overflow in float16 slightly sooner than microbatches, which are summed in float32",
)
def test_float16() -> None:
    plain = train(run_plain, max_steps=30)
    swarm = train(run_swarm, max_steps=30, microbatch_size=HALF)
    assert swarm.scales == plain.scales
    assert plain.num_skipped > 5
    assert_same_curve(swarm.run, plain.run, loss=1e-6, weight=1e-6)
    assert plain.run.losses[-1] < 0.9 * plain.run.losses[0], "nothing was learned"


@pytest.mark.first_cells(1)
@feature("`precision='16-mixed'` with `gradient_clip_val`", WORKS, "clips the unscaled gradient, by norm or by value")
@pytest.mark.parametrize(("algorithm", "tolerance"), [("norm", 1e-2), ("value", 1e-6)])
def test_float16_clipped(algorithm: str, tolerance: float) -> None:
    clip = {"max_steps": 20, "gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    plain, swarm = train(run_plain, **clip), train(run_swarm, **clip, microbatch_size=HALF)
    assert swarm.scales == plain.scales
    assert_same_curve(swarm.run, plain.run, loss=tolerance, weight=tolerance)
    assert swarm.run.losses != pytest.approx(train(run_swarm, max_steps=20, microbatch_size=HALF).run.losses, rel=1e-2)


@feature("`precision='16-true'`", REFUSED, "use `bf16-true`")
def test_float16_weights() -> None:
    assert_refused(r"`precision` must be one of .*bf16-true.*got '16-true'", precision="16-true")


@feature("`Trainer(num_nodes=2)`", REFUSED, "leave it out; a swarm has peers, not nodes")
def test_nodes() -> None:
    assert_refused(r"`num_nodes` must be 1.*got 2.*Leave it out", num_nodes=2)
