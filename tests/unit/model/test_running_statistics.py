"""Running statistics of batch norms have one machine's order, even if batches are lost or repeated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_swarm.model.partition import build_stages, find_blocks
from lightning_swarm.model.running_statistics import RunningStatistics
from lightning_swarm.protocol.messages.calls import PLACES, Receipt


def test_a_batch_that_was_granted_again_keeps_its_place() -> None:
    """For example, its trainer died after the next batch had been counted."""
    norm, rows = nn.BatchNorm1d(2).double(), torch.randn(2, 4, 2, dtype=torch.float64)
    model = nn.Sequential(norm)
    (stage,) = build_stages(model, find_blocks(model, None), [range(1)])
    statistics = RunningStatistics(stage)
    firsts = (3 * PLACES, 4)
    seen: dict[Receipt, Tensor] = {}
    for first, batch in zip(firsts, rows, strict=True):
        with statistics.unchanged() as found:
            model(batch)
        assert found.values is not None
        seen[first, 0, 0] = found.values
    statistics.set(statistics.merged(seen), 0)
    plain = nn.BatchNorm1d(2).double()
    for batch in rows:
        plain(batch)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict(), rtol=0.0, atol=1e-15)
