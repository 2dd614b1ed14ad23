"""States of metrics, split into updates and combined again."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.retrieval import RetrievalMAP

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.protocol.messages.batches import MetricState
from lightning_swarm.strategy.metric_states import (
    MetricContents,
    check_metric,
    combine,
    computed_of,
    pack,
    put,
    take,
    unpack,
)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(6, 3, generator=generator), torch.randperm(6, generator=generator) % 3


METRICS = {
    "accuracy": lambda: torchmetrics.Accuracy("multiclass", num_classes=3),
    "confusion": lambda: torchmetrics.ConfusionMatrix("multiclass", num_classes=3),
    "auroc": lambda: torchmetrics.AUROC("multiclass", num_classes=3),
    "binned auroc": lambda: torchmetrics.AUROC("multiclass", num_classes=3, thresholds=5),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_parts_make_the_whole(name: str, order: list[int]) -> None:
    whole, other, lead = (METRICS[name]() for _ in range(3))
    parts = []
    for seed in range(3):
        whole.update(*batch(seed))
        other(*batch(seed))
        parts.append(pack("its name", take(other)))
        assert other.update_count == 0
        assert all(not torch.as_tensor(state).count_nonzero() for state in other.metric_state.values())
    for index in order:
        contents = unpack(lead, *parts[index])
        put(lead, combine(lead, take(lead), contents))
    assert lead.update_count == 3
    assert torch.equal(lead.compute(), whole.compute())
    assert torch.equal(computed_of(lead, unpack(lead, *parts[0])), _computed(METRICS[name](), 0))  # type: ignore[arg-type]
    assert torch.equal(lead.compute(), whole.compute())


def _computed(metric: torchmetrics.Metric, seed: int) -> Tensor:
    metric.update(*batch(seed))
    value = metric.compute()
    assert isinstance(value, Tensor)
    return value


@pytest.mark.parametrize(
    ("kind", "value"), [("Mean", 2.5), ("Sum", 10.0), ("Max", 4.0), ("Min", 1.0), ("Cat", [4.0, 1.0, 2.0, 3.0])]
)
def test_each_reduction(kind: str, value: Any) -> None:
    metric = getattr(torchmetrics, f"{kind}Metric")()
    metric.update(torch.tensor([4.0]))
    first = take(metric)
    metric.update(torch.tensor([1.0, 2.0, 3.0]))
    put(metric, combine(metric, first, take(metric)))
    assert metric.compute().tolist() == value


def test_a_mean_of_states_weighs_them_by_their_updates() -> None:
    metric = torchmetrics.SumMetric()
    metric.add_state("sum_value", torch.tensor(0.0), dist_reduce_fx="mean")
    parts = [MetricContents(1, {"sum_value": torch.tensor(1.0)}), MetricContents(3, {"sum_value": torch.tensor(5.0)})]
    assert combine(metric, *parts) == MetricContents(4, {"sum_value": torch.tensor(4.0)})


def test_what_is_put_back_is_no_ones_else() -> None:
    """`update` and `reset` change states in place, so the restored state must be a copy."""
    metric = torchmetrics.CatMetric()
    metric.update(1.0)
    contents = take(metric)
    put(metric, contents)
    metric.reset()
    put(metric, contents)
    metric.update(2.0)
    assert len(contents.states["value"]) == 1
    assert metric.compute().tolist() == [1.0, 2.0]


def test_lists_without_a_reduction_are_put_one_after_the_other() -> None:
    whole, lead = RetrievalMAP(), RetrievalMAP()
    check_metric("map", lead)
    for query in range(2):
        scores, hits = torch.rand(4, generator=torch.Generator().manual_seed(query)), torch.tensor([1, 0, 1, 0])
        indexes = torch.full((4,), query)
        other = RetrievalMAP()
        for one in (whole, other):
            one.update(scores, hits, indexes=indexes)
        put(lead, combine(lead, take(lead), unpack(lead, *pack("map", take(other)))))
    assert torch.equal(lead.compute(), whole.compute())


@pytest.mark.parametrize(
    "metric",
    [torchmetrics.PearsonCorrCoef(), torchmetrics.MinMaxMetric(torchmetrics.SumMetric()), torchmetrics.SumMetric() + 1],
)
def test_what_cannot_be_put_together_is_refused(metric: torchmetrics.Metric) -> None:
    with pytest.raises(ConfigError, match=rf"{type(metric).__name__}.*Log "):
        check_metric("it", metric)


@pytest.mark.parametrize(
    ("lengths", "tensors"),
    [
        ([1, 1], [torch.zeros(3, 3).long(), torch.zeros(3, 3).long()]),
        ([2], [torch.zeros(3, 3).long(), torch.zeros(3, 3).long()]),
        ([0], []),
        ([1], [torch.zeros(3, 3)]),
        ([1], [torch.zeros(3, 4).long()]),
        ([1], [torch.zeros(1, 3, 3).long()]),
        ([1], [torch.tensor(1)]),
    ],
)
def test_states_of_another_metric_are_refused(lengths: list[int], tensors: list[Tensor]) -> None:
    confusion = METRICS["confusion"]()
    confusion.update(*batch(0))
    before = confusion.confmat.clone()  # type: ignore[operator, union-attr]
    with pytest.raises(ProtocolError, match="'it'"):
        unpack(confusion, MetricState(name="it", num_updates=1, lengths=lengths), tensors)
    assert torch.equal(confusion.confmat, before)  # type: ignore[arg-type]


def test_torchmetrics_still_has_the_private_names_that_we_rely_on() -> None:
    metric = torchmetrics.MeanMetric()
    metric.update(1.0)
    metric.compute()
    assert metric._update_count == metric.update_count == 1
    assert metric._computed is not None
    assert list(metric._defaults) == list(metric._reductions) == list(metric.metric_state)
    assert "copy_state" in inspect.signature(torchmetrics.MetricCollection.values).parameters
