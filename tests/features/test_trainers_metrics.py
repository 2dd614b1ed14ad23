"""Several trainers: torchmetrics objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.strategy.metrics import SharedMetrics
from tests.features.mark import PARTLY, REFUSED, WORKS, feature
from tests.features.test_trainers import Lines
from tests.parity.models import DigitsMLP, digits
from tests.parity.trainers import LIMITS, Place, Seen, assert_exact, default_dtype, place_of, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets"),
]


class Averaged(torchmetrics.Metric):
    """The mean over batches, computed from all its states at once, which is torchmetrics' default."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")

    @override
    def update(self, losses: Tensor) -> None:
        self.average += (losses.mean() - self.average) / self._update_count

    @override
    def compute(self) -> Tensor:
        assert isinstance(self.average, Tensor)
        return self.average


def of_classes(**more: torchmetrics.Metric) -> torchmetrics.MetricCollection:
    """Return sums, which precision and recall share. A prefix makes their logged names differ from their attributes."""
    options: dict[str, Any] = {"task": "multiclass", "num_classes": 10}
    return torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.Accuracy(**options),
            "precision": torchmetrics.Precision(**options, average="macro"),
            "recall": torchmetrics.Recall(**options, average="macro"),
            **more,
        },
        prefix="of_",
    )


def of_losses() -> nn.ModuleDict:
    """Return metrics of one loss per sample."""
    return nn.ModuleDict(
        {
            "mean": torchmetrics.MeanMetric(),
            "sum": torchmetrics.SumMetric(),
            "max": torchmetrics.MaxMetric(),
            "everything": torchmetrics.CatMetric(),
            "mean of means": Averaged(),
        }
    )


def confusion() -> torchmetrics.Metric:
    return torchmetrics.ConfusionMatrix("multiclass", num_classes=10)


def spearman() -> torchmetrics.Metric:
    return torchmetrics.SpearmanCorrCoef()


class OfObjects(DigitsMLP):
    """Logs metric objects; withdraws some batches, with their updates."""

    def __init__(self, seen: Seen, *, choosy: bool = False) -> None:
        super().__init__()
        self.seen = seen
        self.choosy = choosy
        self.outputs: dict[Place, tuple[Tensor, Tensor]] = {}
        self.computed: list[dict[str, Tensor]] = []  # one per epoch, at its end
        self.of_classes, self.of_losses = of_classes(), of_losses()
        self.confusion, self.spearman = confusion(), spearman()
        self.own = torchmetrics.SumMetric()

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        both: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        x, y = batch
        outputs = self.net(x)
        losses = F.cross_entropy(outputs, y, reduction="none")
        self.outputs[place_of(self)] = outputs.detach(), y
        self.of_classes(outputs, y)
        self.log_dict(self.of_classes, **both)  # type: ignore[arg-type]
        for name, metric in self.of_losses.items():
            metric(losses)
            if name != "everything":
                self.log(name, metric, **both)  # type: ignore[arg-type]
        self.confusion.update(outputs, y)
        self.log("confusion", self.confusion, on_step=False, on_epoch=True, logger=False, sync_dist=True)
        self.spearman(outputs[:, 0], outputs[:, 1])
        self.log("spearman", self.spearman, on_step=False, on_epoch=True, sync_dist=True)  # type: ignore[arg-type]
        self.own(losses)
        self.log("own", self.own, on_step=False, on_epoch=True)
        if self.choosy and batch_idx % 3 == self.trainer.global_rank:
            self.seen.withdrawn.add(place_of(self))
            return None
        return losses.mean()

    @override
    def on_train_epoch_end(self) -> None:
        self.computed.append({"confusion": self.confusion.compute(), "sum": self.of_losses["sum"].compute()})


def expected(batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the metrics that one machine computes from these batches."""
    with default_dtype(torch.float64):
        classes, losses, ranks = of_classes(), of_losses(), spearman()
        for outputs, y in batches:
            classes.update(outputs, y)
            ranks.update(outputs[:, 0], outputs[:, 1])
            for metric in losses.values():
                metric.update(F.cross_entropy(outputs, y, reduction="none"))
        computed = {name: one.compute() for name, one in [*losses.items(), ("spearman", ranks)]} | classes.compute()
    return {name: value.item() for name, value in computed.items() if value.dim() == 0}


def trained(make_module: Callable[[Seen], OfObjects] = OfObjects, **options: Any) -> tuple[Seen, Lines]:
    lines = [Lines(), Lines()]
    loggers = iter(lines)
    arguments = {"max_steps": -1, "max_epochs": 1, "log_every_n_steps": 1, "swarm": {"target_batch_size": 10}}
    seen = train(2, make_module, each={"logger": lambda: next(loggers)}, **{**arguments, **options})
    assert_exact(seen, DigitsMLP, digits(), num_trainers=2, target_batch_size=1)
    return seen, lines[0]


def outputs_of(seen: Seen, places: list[Place]) -> list[tuple[Tensor, Tensor]]:
    known = {place: outputs for module in seen.modules.values() for place, outputs in module.outputs.items()}  # type: ignore[union-attr]
    return [known[place] for place in places]


def counted(seen: Seen) -> list[tuple[Tensor, Tensor]]:
    return outputs_of(seen, [place for step in seen.steps for place in step])


def assert_epoch(seen: Seen, lines: Lines) -> None:
    """Check the lead's values against one machine's from the counted batches only."""
    whole = expected(counted(seen))
    confused = confusion()
    for outputs, y in counted(seen):
        confused.update(outputs, y)
    (computed,) = seen.modules[0].computed  # type: ignore[union-attr]
    assert torch.equal(computed["confusion"], confused.compute())  # type: ignore[arg-type]
    assert torch.equal(seen.trainers[0].callback_metrics["confusion"], confused.compute())
    for name, value in whole.items():
        logged = "spearman" if name == "spearman" else f"{name}_epoch"
        assert lines.column(logged) == pytest.approx([value], rel=1e-12), name


def assert_steps(seen: Seen, lines: Lines) -> None:
    steps = [expected(outputs_of(seen, step)) for step in seen.steps]
    if len(lines.column("sum_step")) < len(steps):
        del steps[
            -2
        ]  # at its last batch the lead found a step decided, and then closed the last one: one line for both
    for name in steps[0].keys() - {"spearman"}:
        assert lines.column(f"{name}_step") == pytest.approx([one[name] for one in steps], rel=1e-12), name


@pytest.mark.first_cells(1)
@feature(
    "`self.log(sync_dist=True)` of metrics in `training_step`, `log_dict` of a `MetricCollection`",
    WORKS,
    "over the batches of all trainers in a step or epoch, by each state's `dist_reduce_fx`",
)
@pytest.mark.parametrize("choosy", [False, True])
def test_objects(choosy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, lines = trained(lambda seen: OfObjects(seen, choosy=choosy))
    assert_epoch(seen, lines)
    assert_steps(seen, lines)
    assert {seen.batches[place][0] for place in seen.withdrawn} == ({0, 1} if choosy else set())

    monkeypatch.setattr(SharedMetrics, "receive", lambda self, others: None)
    with pytest.raises(AssertionError):  # the check can fail
        assert_epoch(*trained())


@feature("epochs of the lead", WORKS, "a batch of another trainer counts in the epoch in which its step ends")
def test_epochs() -> None:
    seen, lines = trained(max_epochs=3, swarm={"target_batch_size": 14})
    sums = lines.column("sum_epoch")
    assert len(sums) == 3
    assert sum(sums) == pytest.approx(expected(counted(seen))["sum"], rel=1e-12)
    assert [one["sum"].item() for one in seen.modules[0].computed] == sums  # type: ignore[union-attr]


@feature(
    "metrics without `sync_dist`", PARTLY, "only the lead's own batches; `ddp` combines all trainers' batches even then"
)
def test_own() -> None:
    seen, lines = trained()
    own = [place for step in seen.steps for place in step if seen.batches[place][0] == 0]
    assert lines.column("own") == pytest.approx([expected(outputs_of(seen, own))["sum"]], rel=1e-12)


class Refused(OfObjects):
    """Logs one more metric."""

    def __init__(self, seen: Seen, metric: torchmetrics.Metric) -> None:
        super().__init__(seen)
        self.metric = metric

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        self.log("metric", self.metric, sync_dist=True)
        return super().training_step(batch, batch_idx)


def assert_refused(make_module: Callable[[Seen], OfObjects], words: str, **swarm: Any) -> None:
    # This is the lead's error, or the one that ended another trainer.
    with pytest.raises((ConfigError, StepError), match=words):
        trained(make_module, swarm={"target_batch_size": 10, **swarm})


@feature(
    "metrics with a custom reduction (`PearsonCorrCoef`)", REFUSED, "log the value that they compute for the batch"
)
def test_own_reduction() -> None:
    assert_refused(
        lambda seen: Refused(seen, torchmetrics.PearsonCorrCoef()),
        r"by their `dist_reduce_fx`, which must be 'sum'.*state 'mean_x' of the PearsonCorrCoef 'metric' has another",
    )


@feature(
    "metrics that consist of other metrics (`MinMaxMetric`, `metric + metric`)",
    REFUSED,
    "log these other metrics directly",
)
def test_wrapper() -> None:
    words = r"must have states, and no other metrics in it: got a MinMaxMetric as 'metric'"
    assert_refused(lambda seen: Refused(seen, torchmetrics.MinMaxMetric(torchmetrics.SumMetric())), words)


@feature("the size of the updates that a step's batches add to metrics", PARTLY, "at most `Limits.max_metric_bytes`")
def test_size() -> None:
    limits = Limits(**{**vars(LIMITS), "max_metric_bytes": 1000})
    words = r"the contents that a batch adds to metrics.*`Limits.max_metric_bytes` = 1000 bytes, got \d{4}\. Raise"
    assert_refused(OfObjects, words, limits=limits)
