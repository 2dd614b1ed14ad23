"""What batches add to metric objects, between two trainers that are not there."""

from __future__ import annotations

import pytest
import torchmetrics
from torch import nn

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.strategy.metrics import SharedMetrics
from tests.unit.strategy.test_metric_states import batch

OPTIONS = {"task": "multiclass", "num_classes": 3, "average": "macro"}


class Module(nn.Module):
    """Precision and recall share their states; torchmetrics updates those of the first one only."""

    def __init__(self) -> None:
        super().__init__()
        both = {"precision": torchmetrics.Precision(**OPTIONS), "recall": torchmetrics.Recall(**OPTIONS)}
        self.both = torchmetrics.MetricCollection(both)


def train(module: Module, shared: SharedMetrics, seed: int) -> None:
    shared.begin_batch(seed)
    module.both.update(*batch(seed))
    shared.follow(module.both["recall"])


def values(module: Module) -> dict[str, float]:
    return {name: value.item() for name, value in module.both.compute().items()}


def whole(*seeds: int) -> dict[str, float]:
    module = Module()
    for seed in seeds:
        module.both.update(*batch(seed))
    return values(module)


def test_one_metric_of_a_collection_brings_those_that_share_its_states() -> None:
    lead, other = Module(), Module()
    of_lead, of_other = SharedMetrics(lead, {}, max_bytes=None), SharedMetrics(other, {}, max_bytes=1000)
    for first in (0, 3):
        sent = []
        for seed, counts in ((first, True), (first + 1, False)):
            train(other, of_other, seed)
            sent.append(of_other.finish_batch(counts=counts))
        assert sent[1] == ([], [])
        train(lead, of_lead, first + 2)
        assert of_lead.finish_batch(counts=True) == ([], [])
        of_lead.decide([sent[0]])
        of_lead.replay()
    assert values(lead) == whole(0, 2, 3, 5) != whole(0, 1, 2, 3, 5)
    assert values(other) == whole(0, 3), "in its own epoch's end it finds its own batches"


def test_the_lead_may_hear_of_a_metric_before_it_logs_it() -> None:
    lead, other = Module(), Module()
    of_lead, of_other = SharedMetrics(lead, {}, max_bytes=None), SharedMetrics(other, {}, max_bytes=1000)
    train(other, of_other, 0)
    of_lead.decide([of_other.finish_batch(counts=True)])
    train(lead, of_lead, 1)
    of_lead.finish_batch(counts=True)
    of_lead.replay()
    assert values(lead) == whole(0, 1)

    train(other, of_other, 2)
    states, tensors = of_other.finish_batch(counts=True)
    with pytest.raises(ProtocolError, match=r"another trainer logged the metric 'both.\w+', and there is none here"):
        SharedMetrics(nn.Linear(1, 1), {}, max_bytes=None).decide([(states, tensors)])


def test_a_batch_that_failed_leaves_nothing_behind() -> None:
    module = Module()
    shared = SharedMetrics(module, {}, max_bytes=None)
    train(module, shared, 0)
    shared.finish_batch(counts=True)
    train(module, shared, 1)
    shared.replay()
    assert values(module) == whole(0)


def test_a_metric_that_the_module_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"by its place in the LightningModule, where this SumMetric has none\. Make"):
        SharedMetrics(Module(), {}, max_bytes=None).follow(torchmetrics.SumMetric())


def test_what_a_batch_adds_has_a_limit() -> None:
    module = Module()
    shared = SharedMetrics(module, {}, max_bytes=191)
    train(module, shared, 0)
    with pytest.raises(ConfigError, match=r"`Limits.max_metric_bytes` = 191 bytes, got 192"):
        shared.finish_batch(counts=True)
