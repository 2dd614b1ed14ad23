"""A server in the same process as user code computes with copies of the user's modules."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.model.partition import find_blocks, twin_of


class Block(nn.Module):
    """Refers to itself in ways that a shallow copy does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.bound: Callable[[Tensor], Tensor] = self.compute
        self.partial = functools.partial(call, self)
        self.listed = [self.inner]
        self.lock = threading.Lock()
        self.left = self.inner.weight * 2  # belongs to a graph
        self.counts: list[int] = []

    def compute(self, x: Tensor) -> Tensor:
        self.counts.append(1)
        return self.inner(x) + self.partial(x) + self.listed[0](x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.bound(x)


def call(block: Any, x: Tensor) -> Tensor:
    found: Tensor = block.inner(x)
    return found


def test_what_refers_to_a_module_refers_to_its_twin() -> None:
    model = nn.Sequential(Block(), Block())
    model.data = object()  # type: ignore[assignment]
    found: list[str] = []
    own = model[1].forward
    model[1].forward = lambda x: own(x)  # type: ignore[method-assign]  # a closure
    model[0].register_forward_hook(lambda *_: found.append("called"))
    twin, blocks = twin_of(model, find_blocks(model, None))
    assert blocks.modules == tuple(twin)
    assert blocks.root is twin
    assert twin.data is model.data
    assert list(map(id, twin.parameters())) == list(map(id, model.parameters()))
    x = torch.ones(1, 2)
    expected = model(x)
    for block in blocks.modules:
        for name in ("weight", "bias"):
            block.inner._parameters[name] = nn.Parameter(torch.zeros_like(getattr(block.inner, name)))  # type: ignore[union-attr, operator]
    assert twin(x).tolist() == [[0.0, 0.0]]
    assert torch.equal(model(x), expected)
    assert found == ["called"] * 3, "a hook collects as before"
    assert [len(block.counts) for block in (*model, *blocks.modules)] == [2, 2, 1, 1]  # type: ignore[arg-type]
    twin.eval()
    assert model[0].inner.training  # type: ignore[union-attr]
