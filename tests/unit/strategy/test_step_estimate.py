"""The number of steps of a whole fit, if a step is a number of samples."""

from __future__ import annotations

import itertools
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from typing_extensions import override

from lightning_swarm.strategy.step_estimate import count_steps, expected_steps
from tests.parity.harness import run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader


def counted(sizes: list[int], num_epochs: int, target_batch_size: int) -> int:
    """Count the steps one batch after the other."""
    steps, have = 0, 0
    for size in sizes * num_epochs:
        have += size
        if have >= target_batch_size:
            steps, have = steps + 1, 0
    return steps + (have > 0)


def test_steps_are_those_of_one_batch_after_the_other() -> None:
    for num, size, last, epochs in itertools.product((1, 2, 3, 7, 10), (1, 4, 5), (1, 3, 4), (1, 2, 5)):
        for target in (1, 3, 4, 5, 8, 12, 13, 40, 1000):
            sizes = [size] * (num - 1) + [last]
            found = count_steps(num, size, last, num_epochs=epochs, target_batch_size=target)
            assert found == counted(sizes, epochs, target), (sizes, epochs, target)
    assert count_steps(0, 4, 4, num_epochs=3, target_batch_size=8) == 0


class Knows:
    """A Trainer with only the attributes that are read."""

    def __init__(self, max_epochs: int, max_steps: int = -1) -> None:
        self.max_epochs, self.max_steps = max_epochs, max_steps


def of(made: Any, num_batches: float, target: int, *limits: int) -> int | None:
    return expected_steps(cast(L.Trainer, Knows(*limits)), made, num_batches, target)


def test_sizes_come_from_the_loader() -> None:
    data = TensorDataset(torch.zeros(10, 1))
    assert of(DataLoader(data, 4), 3, 8, 2) == counted([4, 4, 2], 2, 8)
    assert of(DataLoader(data, 4, drop_last=True), 2, 8, 3) == counted([4, 4], 3, 8)
    assert of(DataLoader(data, 4), 2, 8, 3) == counted([4, 4], 3, 8), "the last one is left out"
    assert of(DataLoader(data, 4), 3, 8, 2, 1) == 1
    lists = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, drop_last=False))
    assert of(lists, 2, 10, 3) == 3
    assert of(DataLoader(data, batch_sampler=[[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]), 3, 5, 1) == 2, "by their mean"
    assert of(DataLoader(data, batch_size=None), 10, 8, 2) is None
    assert of(DataLoader(data, 4), float("inf"), 8, 2) is None
    assert of([data], 3, 8, 2) is None


class Cycle(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        self.expected = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.expected)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


@pytest.mark.parametrize("swarm", [{}, {"num_stages": 1, "microbatch_size": None}], ids=["cut", "whole"])
def test_a_schedule_runs_over_all_steps(swarm: dict[str, Any]) -> None:
    data = loader(digits(), 13)  # four batches
    plain = run_plain(Cycle, data, max_epochs=2, max_steps=-1, accumulate_grad_batches=2)
    found = run_swarm(Cycle, data, num_servers=2, max_epochs=2, max_steps=-1, target_batch_size=26, **swarm)
    assert found.trainer is not None
    assert plain.trainer is not None
    assert found.trainer.lightning_module.expected == plain.trainer.lightning_module.expected
    assert found.trainer.global_step == found.trainer.lightning_module.expected
    rates = [one.trainer.optimizers[0].param_groups[0]["lr"] for one in (found, plain) if one.trainer is not None]
    assert rates[0] == pytest.approx(rates[1])
