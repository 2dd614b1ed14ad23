"""Repeated batches, without a swarm."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swarm.strategy.loop_counters import CompletedBatches, LoopBatch
from lightning_swarm.strategy.optimization_loop import SwarmOptimization


@pytest.mark.parametrize(("lease", "num_restored"), [(7, 1), (None, 0)], ids=["here", "at another trainer"])
def test_a_lost_batch_changes_nothing_that_was_logged(
    monkeypatch: pytest.MonkeyPatch, lease: int | None, num_restored: int
) -> None:
    restored: list[int] = []
    loop: Any = object.__new__(SwarmOptimization)
    loop._completed = CompletedBatches()
    loop._completed.lost = {3: LoopBatch(0, OrderedDict(), 1)}
    loop.logs = SimpleNamespace(begin_batch=lambda *_: None, restore=lambda: restored.append(1))
    monkeypatch.setattr(SwarmOptimization, "_lease_for", lambda *_: lease)
    monkeypatch.setattr(SwarmOptimization, "_train_here", lambda *_: {})
    loop._train_lost()
    assert not loop._completed.lost
    assert len(restored) == num_restored, "what is restored is what was there before the newest batch that ran here"
