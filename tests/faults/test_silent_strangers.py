"""In an audited run a peer that only answers pings delays no step for minutes; weights stay exact."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm import Trust
from lightning_swarm.coordinator.audit import step_audits
from lightning_swarm.protocol.patience import MIN_DEADLINE_S
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase, local_swarm
from tests.faults.test_audited import NUM_STEPS, Model, audited, data, events_of

SILENT = "peer-3"
SOON_S = 60.0
"""Virtual seconds that a step may take if a server falls silent."""


class Clock(L.Callback):
    """Records when each step is over."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, InMemoryStrategy)
        self.ends_s.append(trainer.strategy.virtual_loop.time())

    @property
    def longest_s(self) -> float:
        return max(end_s - begin_s for begin_s, end_s in zip(self.ends_s, self.ends_s[1:], strict=False))


def run(faults: FaultPlan, *, share: float) -> tuple[Tensor, InMemoryStrategy, Clock]:
    clock, module = Clock(), Model()
    settings: dict[str, Any] = {
        "num_stages": 2,
        "trust": Trust("audited", audit_share=share, on_conviction="go_on"),
        "microbatch_size": 4,
        "deterministic": True,
        "latency_s": 0.002,
        "microbatch_s": [0.01],
    }
    with local_swarm(6, faults=faults, **settings) as swarm:
        swarm.trainer(max_steps=NUM_STEPS, callbacks=[clock]).fit(module, data())
        (strategy,) = swarm.strategies
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]), strategy, clock


@pytest.fixture(scope="module")
def clean() -> Tensor:
    return audited(6, num_stages=2, microbatch_size=4)[0]


@pytest.mark.thorough
def test_an_auditor_that_never_answers_is_reported(clean: Tensor) -> None:
    faults = FaultPlan().delay(SILENT, by_s=400.0, at=Phase.AUDIT, times=None)
    weights, strategy, clock = run(faults, share=1.0)
    assert clock.longest_s < SOON_S
    assert SILENT in events_of(strategy, "disputed")
    assert not events_of(strategy, "convicted")
    assert torch.equal(weights, clean)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("phase", "soon_s"),
    [
        (Phase.CLOSE, SOON_S),
        (Phase.SKETCH, 3 * MIN_DEADLINE_S),
        (Phase.FINDINGS, 3 * MIN_DEADLINE_S),
        (Phase.AVERAGE, 3 * MIN_DEADLINE_S),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_server_that_answers_no_call_of_a_closing_step_is_left_out(
    clean: Tensor, phase: Phase, soon_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_audits, "_OWN_SHARE", 0.0)  # makes each server of the stage audit another one
    faults = FaultPlan().drop(SILENT, at=phase, times=None, step=NUM_STEPS - 2)
    weights, strategy, clock = run(faults, share=1.0)
    assert clock.longest_s < soon_s
    assert events_of(strategy, "gone") == {SILENT}
    assert torch.equal(weights, clean)


def test_a_server_that_is_late_with_each_microbatch_is_avoided(clean: Tensor) -> None:
    faults = FaultPlan().delay(SILENT, by_s=9.0, at=Phase.FORWARD, times=None)
    weights, _, clock = run(faults, share=0.0)
    late = [b - a for a, b in zip(clock.ends_s, clock.ends_s[1:], strict=False) if b - a > 1.0]
    assert len(late) <= 2
    assert clock.longest_s < SOON_S
    assert torch.equal(weights, clean)


def test_an_honest_server_behind_a_slow_link_is_not_convicted(clean: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_audits, "MAX_SILENCES", 0)
    slow_s = 8.0
    faults = FaultPlan().delay(SILENT, by_s=slow_s, at=Phase.KEPT_WORK, times=None)
    weights, strategy, clock = run(faults, share=1.0)
    assert clock.longest_s > slow_s, "the coordinator waited for what an auditor had not waited for"
    assert not events_of(strategy, "convicted")
    assert torch.equal(weights, clean)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("phase", [Phase.CLOSE, Phase.SKETCH], ids=lambda one: one.name)
def test_a_server_that_is_late_by_seconds_is_not_convicted(
    clean: Tensor, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_audits, "MAX_SILENCES", 0)
    late_s = 40.0 if phase is Phase.CLOSE else 9.0
    faults = FaultPlan().delay(SILENT, by_s=late_s, at=phase, times=None, step=NUM_STEPS - 2)
    weights, strategy, _ = run(faults, share=1.0)
    assert events_of(strategy, "gone") == {SILENT}
    assert not events_of(strategy, "convicted")
    assert torch.equal(weights, clean)
