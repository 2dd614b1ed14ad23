"""Blocks are measured as they will run, and the model is left as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import find_blocks, time_costs


class Clock:
    """A clock that shows the times that the blocks themselves report, in forward and in backward."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: Iterator[float]) -> Tensor:
        ctx.seconds = seconds
        CLOCK.now_s += next(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        CLOCK.now_s += next(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """Takes some milliseconds in each forward and each backward; the first time, more."""

    def __init__(self, *milliseconds: float) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.milliseconds = milliseconds
        self.num_calls = 0

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        self.num_calls += 1
        if not torch.is_grad_enabled():  # the run of the example, which is not measured
            return self.inner(x)
        x = nn.functional.dropout(self.inner(x), 0.5, self.training)
        spent = self.milliseconds[min(self.num_calls - 2, len(self.milliseconds) - 1)]
        return _Takes.apply(x, iter([spent * 1e-3, 2e-3 * spent]))  # type: ignore[no-any-return, no-untyped-call]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.h = nn.ModuleList([Block(100, 1), Block(100, 4), Block(100, 2, 9, 2, 9, 2)])
        self.frozen = nn.Sequential(Block(0, 5)).requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = self.norm(x)
        for block in self.h:
            x = block(x, mask=mask)
        return self.frozen(x)


@pytest.mark.parametrize(
    ("pipeline", "example", "expected"),
    [
        ("h", torch.randn(4, 3), (3e6, 12e6, 6e6)),
        ("h", {"x": torch.randn(4, 3), "mask": torch.ones(3)}, (3e6, 12e6, 6e6)),
        ("frozen", (torch.randn(4, 3), None), (15e6,)),
    ],
)
def test_the_median_of_forward_and_backward(pipeline: str, example: Any, expected: tuple[float, ...]) -> None:
    model = Model()
    model.h[0].eval()
    before = copy.deepcopy(model)
    generator = torch.get_rng_state()
    costs = time_costs(model, find_blocks(model, pipeline), example, clock=CLOCK)
    assert costs == pytest.approx(expected)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert [one.training for one in model.modules()] == [one.training for one in before.modules()]
    assert all(one.grad is None for one in model.parameters())
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_the_blocks_that_configure_stages_returns() -> None:
    model = Model()
    model.configure_stages = lambda: [model.norm, *model.h]  # type: ignore[assignment]
    before = copy.deepcopy(model.state_dict())
    costs = time_costs(model, find_blocks(model, None), torch.randn(4, 3), clock=CLOCK)
    assert costs == pytest.approx((0, 3e6, 12e6, 6e6))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_without_a_forward() -> None:
    model = nn.Module()
    model.net = nn.Sequential(Block(100, 1), Block(100, 2))
    assert time_costs(model, find_blocks(model, "net"), torch.randn(4, 3), clock=CLOCK) == pytest.approx((3e6, 6e6))
    model.h = nn.ModuleList([Block(1)])
    with pytest.raises(
        ConfigError, match=r"must go through 'h': 1 of its modules were not called\. Call them in `forward`"
    ):
        time_costs(model, find_blocks(model, "h"), torch.randn(4, 3), clock=CLOCK)
