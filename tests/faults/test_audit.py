"""The audit can fail: it detects each forbidden behaviour when it is planted in a swarm."""

from __future__ import annotations

import pytest
from torch import Tensor

from lightning_swarm.network import Message
from lightning_swarm.protocol.tickets import with_key
from lightning_swarm.server.gradient_buffer import GradientSum
from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm
from tests.faults.plans import STAGES, TRAINERS, VOTERS


def audited(plan: FaultPlan, *, spoil: str = "") -> None:
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS)
    try:
        swarm.train()
        server = swarm.servers[swarm.manifest.coordinator]
        stage = server.steps.stage(0)
        if spoil == "ticket":
            server._tickets.offer("left", Message(), with_key(bytes(16)))
        elif spoil == "replica":
            next(iter(stage.parameters.values())).data.add_(1e-12)
        elif spoil == "buffer":
            next(stage.module.buffers()).add_(1e-12)
        elif spoil == "optimizer":
            next(iter(stage.optimizer.torch_optimizer.state.values()))["momentum_buffer"].add_(1e-12)
        elif spoil == "sample":
            swarm.books.done.add((swarm.trainer.peer_id, 1000))
        swarm.audit()
    finally:
        swarm.close()


def test_an_untouched_swarm_passes() -> None:
    audited(FaultPlan())


SPOILT = [
    ("ticket", "left"),
    ("replica", "weight"),
    ("buffer", "scale"),
    ("optimizer", "momentum_buffer"),
    ("sample", "not counted"),
]


@pytest.mark.parametrize(("spoil", "what"), SPOILT)
def test_what_was_spoilt_is_found(spoil: str, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        audited(FaultPlan(), spoil=spoil)


@pytest.mark.parametrize("times", [0, 2])
def test_a_gradient_that_does_not_count_once_is_found(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A receipt for a gradient that was lost, or that was added twice."""
    spoilt: list[GradientSum] = []
    add = GradientSum.add

    def adding(sum_: GradientSum, gradients: list[Tensor | None], weight: float) -> None:
        here = not spoilt
        spoilt.extend([sum_] * here)
        for _ in range(times if here else 1):
            add(sum_, gradients, weight)

    monkeypatch.setattr(GradientSum, "add", adding)
    with pytest.raises(AssertionError):
        audited(FaultPlan())
    assert spoilt
