"""Updates of metric objects by batches, exchanged between two simulated trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn

from lightning_swarm.client.run_generation import Metrics
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.messages.batches import LoggedValue, MetricState
from lightning_swarm.strategy import metrics
from lightning_swarm.strategy.metrics import SharedLogs, SharedMetrics
from tests.unit.strategy.test_metric_states import batch

OPTIONS = {"task": "multiclass", "num_classes": 3, "average": "macro"}


class Module(nn.Module):
    """Precision and recall share their states; torchmetrics only updates precision's."""

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
        of_lead.receive([sent[0]])
        of_lead.add_received()
    assert values(lead) == whole(0, 2, 3, 5) != whole(0, 1, 2, 3, 5)
    assert values(other) == whole(0, 3), "in its own epoch's end it finds its own batches"


def test_the_lead_may_hear_of_a_metric_before_it_logs_it() -> None:
    lead, other = Module(), Module()
    of_lead, of_other = SharedMetrics(lead, {}, max_bytes=None), SharedMetrics(other, {}, max_bytes=1000)
    train(other, of_other, 0)
    of_lead.receive([of_other.finish_batch(counts=True)])
    train(lead, of_lead, 1)
    of_lead.finish_batch(counts=True)
    of_lead.add_received()
    assert values(lead) == whole(0, 1)


class Growing(nn.Module):
    """A metric with growing states, one whose states are sums, and one that learns its shape from data."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()
        self.bootstrapped = torchmetrics.BootStrapper(torchmetrics.MeanMetric())
        self.validation = torchmetrics.SumMetric()

    def compute(self) -> dict[str, Any]:
        return {name: getattr(self, name).compute().tolist() for name in ("auroc", "accuracy", "mean")}


def train_growing(module: Growing, shared: SharedMetrics, seed: int) -> Metrics:
    shared.begin_batch(seed)
    for metric in (module.auroc, module.accuracy):
        metric.update(*batch(seed))
        shared.follow(metric)
    module.mean.update(float(seed))
    shared.follow(module.mean)
    return shared.finish_batch(counts=True)


def of_one_process(*seeds: int) -> dict[str, Any]:
    module = Growing()
    for seed in seeds:
        train_growing(module, SharedMetrics(module, {}, max_bytes=1000), seed)
    return module.compute()


def state(name: str, *lengths: int, num_updates: int = 1) -> MetricState:
    return MetricState(name=name, num_updates=num_updates, lengths=list(lengths))


X = torch.rand(6, 3)
Y = torch.zeros(6, dtype=torch.int64)
FORGED: dict[str, Metrics] = {
    "of no metric": ([state("accuracy2", 1)], [X]),
    "of a module": ([state("", 1)], [X]),
    "of a metric made of others": ([state("bootstrapped", 1)], [X]),
    "of too few states": ([state("auroc", 1)], [X]),
    "of no states": ([state("auroc")], []),
    "of too many states": ([state("mean", 1, 1, 1)], [X, X, X]),
    "of fewer tensors than it says": ([state("auroc", 2, 1)], [X]),
    "of another dtype": ([state("mean", 1, 1)], [torch.tensor(1j), torch.tensor(1.0)]),
    "of another shape": ([state("accuracy", 1, 1, 1, 1)], [torch.zeros(4, dtype=torch.int64)] * 4),
    "of a shape where there is a number": ([state("mean", 1, 1)], [torch.ones(2), torch.ones(2)]),
    "a list in place of a number": ([state("mean", 2, 1)], [torch.tensor(1.0)] * 3),
    "of other rows": ([state("auroc", 1, 1)], [torch.rand(6, 4), Y]),
    "of targets that are no numbers of classes": ([state("auroc", 1, 1)], [X, torch.zeros(6)]),
    "of unequal lengths": ([state("auroc", 1, 1)], [X, Y[:4]]),
    "of more predictions than targets": ([state("auroc", 2, 1)], [X, X, Y]),
    "of a metric that is not logged in training": ([state("validation", 1)], [torch.tensor(1e9)]),
}


@pytest.mark.parametrize("forged", FORGED, ids=lambda one: one.replace(" ", "-"))
def test_what_no_metric_can_have_added_is_left_out(forged: str, caplog: pytest.LogCaptureFixture) -> None:
    """The lead continues, and the updates of honest trainers count."""
    lead, other = Growing(), Growing()
    of_lead, of_other = SharedMetrics(lead, {}, max_bytes=None), SharedMetrics(other, {}, max_bytes=1000)
    for seed in (0, 2, 4):
        train_growing(lead, of_lead, seed)
        of_lead.receive([FORGED[forged], train_growing(other, of_other, seed + 1), FORGED[forged]])
        of_lead.add_received()
    assert lead.compute() == of_one_process(*range(6))
    assert lead.validation.update_count == 0
    assert len([one for one in caplog.records if "does not count contents" in one.message]) == (
        "training" not in forged
    )


def of_other(name: str, **changes: Any) -> LoggedValue:
    fields = {"reduce": "mean", "value": 4.0, "on_step": True, "on_epoch": True, "prog_bar": False, "logger": True}
    return LoggedValue(name=name, batch_size=2, **{**fields, **changes})


@pytest.mark.parametrize(
    ("sent", "mean"),
    [
        ({}, 3.0),
        ({"on_step": False}, 2.0),
        ({"prog_bar": True}, 2.0),
        ({"reduce": "max"}, 2.0),
    ],
)
def test_how_the_lead_logs_a_name_goes_before_how_others_did_earlier(sent: dict[str, Any], mean: float) -> None:
    results = _ResultCollection(training=True)
    logs = SharedLogs(nn.Linear(1, 1), results, SharedMetrics(nn.Linear(1, 1), {}, max_bytes=None))
    for name in (None, "rare"):
        logs.begin_batch(2, 0)
        if name is not None:
            options = {"on_step": True, "on_epoch": True, "sync_dist": True, "batch_size": 2}
            results.log("training_step", name, torch.tensor(2.0), **options)
        logs.finish_batch()
        logs.receive([] if name else [of_other("rare", **sent), of_other("step", value=float("nan"))], [])
        logs.add_received()
    logs.release()
    assert list(results) == ["training_step.rare"]
    assert results["training_step.rare"].compute() == mean


def test_a_metric_of_the_leads_takes_the_place_of_a_number_of_others() -> None:
    results, module = _ResultCollection(training=True), Growing()
    logs = SharedLogs(module, results, SharedMetrics(module, results, max_bytes=None))
    logs.begin_batch(2, 0)
    logs.finish_batch()
    logs.receive([of_other("mean")], [])
    logs.add_received()
    logs.begin_batch(2, 1)
    module.mean.update(2.0)
    results.log("training_step", "mean", module.mean, on_step=True, on_epoch=True, sync_dist=True, batch_size=2)
    logs.finish_batch()
    logs.release()
    assert results["training_step.mean"].value is module.mean


def test_what_comes_before_the_leads_own_is_judged_with_it() -> None:
    lead, other = Growing(), Growing()
    of_lead, of_other = SharedMetrics(lead, {}, max_bytes=None), SharedMetrics(other, {}, max_bytes=1000)
    of_lead.receive([train_growing(other, of_other, 1), FORGED["of unequal lengths"]])
    train_growing(lead, of_lead, 0)
    of_lead.add_received()
    assert lead.compute() == of_one_process(0, 1)


def test_what_is_held_for_metrics_that_the_lead_never_logs_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_WAITING_BYTES", 10)
    shared = SharedMetrics(Growing(), {}, max_bytes=None)
    for _ in range(5):
        shared.receive([([state("validation", 1)], [torch.tensor(1.0)])])
        shared.add_received()
    assert len(shared._waiting) == 2


def test_a_batch_that_failed_leaves_nothing_behind() -> None:
    module = Module()
    shared = SharedMetrics(module, {}, max_bytes=None)
    train(module, shared, 0)
    shared.finish_batch(counts=True)
    train(module, shared, 1)
    shared.add_received()
    assert values(module) == whole(0)


def test_a_metric_that_the_module_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be in the LightningModule.*this SumMetric is not\. Make"):
        SharedMetrics(Module(), {}, max_bytes=None).follow(torchmetrics.SumMetric())


def test_what_a_batch_adds_has_a_limit() -> None:
    module = Module()
    shared = SharedMetrics(module, {}, max_bytes=191)
    train(module, shared, 0)
    with pytest.raises(ConfigError, match=r"`Limits.max_metric_bytes` = 191 bytes, got 192"):
        shared.finish_batch(counts=True)
