"""Values of user code that change while several trainers train are reported, wherever they are stored."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_swarm.strategy.own_values import OwnValues
from lightning_swarm.strategy.reachable_values import callable_stamps, stamp

COUNTED = [0]
HELD = types.SimpleNamespace(mean=0.0)


class Plain:
    of_class = 1.0

    def __init__(self) -> None:
        self.value = 1.0


class Mode(enum.Enum):
    TRAIN = 1
    TUNE = 2


class Single:
    """Its class holds it."""

    own: Any = None

    def __init__(self) -> None:
        self.value = 1
        Single.own = self


class Lazy(Mapping[str, int]):
    """Reading it fails."""

    def __getitem__(self, name: str) -> int:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.history: list[float] = []
        self.began_s = 0.0
        self.weight = 1.0


class Module(L.LightningModule):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        self.register_buffer("buffer", torch.zeros(2))
        self.queue: deque[float] = deque([0.0], maxlen=4)
        self.sums = {"loss": [0.0]}
        self.array = np.zeros(3)
        self.large = np.zeros(1 << 16)
        self.mean = torch.zeros(2)
        self._private = 0
        self.plain = Plain()
        self.never = float("nan")
        self.mode = Mode.TRAIN
        self.single = Single()
        self.lazy = Lazy()
        self.metrics = MetricCollection([MeanMetric(), SumMetric()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (recorder,) = (one for one in self.trainer.callbacks if isinstance(one, Recorder))  # type: ignore[attr-defined]
        return self.net(batch).sum() * recorder.weight * HELD.mean * COUNTED[0]


def count(module: Module) -> None:
    COUNTED[0] += 1


def hold(module: Module) -> None:
    HELD.mean += 1.0


def weigh(module: Module) -> None:
    recorder_of(module).weight += 1.0


def recorder_of(module: Module) -> Recorder:
    (recorder,) = (one for one in module.trainer.callbacks if isinstance(one, Recorder))  # type: ignore[attr-defined]
    return recorder


CHANGES: dict[str, list[Callable[[Module], Any]]] = {
    "queue": [lambda module: module.queue.append(len(module.queue))],
    "sums": [lambda module: module.sums["loss"].append(1.0), lambda module: module.sums.update(more=[])],
    "array": [lambda module: module.array.__setitem__(1, 1.0)],
    "large": [lambda module: module.large.__iadd__(1.0)],
    "mean": [lambda module: module.mean.add_(1.0), lambda module: setattr(module, "mean", module.mean * 1.0)],
    "_private": [lambda module: setattr(module, "_private", 1)],
    "plain.value": [lambda module: setattr(module.plain, "value", 2.0)],
    "plain.of_class": [lambda module: setattr(module.plain, "of_class", 2.0)],
    "factor": [lambda module: setattr(module, "factor", 2.0)],
    "net.1.p": [lambda module: setattr(module.net[1], "p", 0.2)],
    "COUNTED": [count],
    "HELD.mean": [hold],
    "Recorder.weight": [weigh],
    "mode": [lambda module: setattr(module, "mode", Mode.TUNE)],
    "single.value": [lambda module: setattr(module.single, "value", 2)],
}
HARMLESS: list[Callable[[Module], Any]] = [
    lambda module: module.get_buffer("buffer").add_(1.0),  # the run has separate rules for these
    lambda module: module.get_parameter("net.0.weight").data.add_(1.0),
    lambda module: module.eval(),
    lambda module: module.metrics.update(torch.ones(2)),
    lambda module: recorder_of(module).history.append(1.0),
    lambda module: setattr(recorder_of(module), "began_s", 1.0),  # no code of the module refers to it
]


@pytest.fixture
def module() -> Iterator[Module]:
    factor = Plain.of_class, Module.factor
    yield Module()
    Plain.of_class, Module.factor = factor


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == OwnValues.__module__]


def watched(module: Module, num_trainers: int = 2) -> OwnValues:
    trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[Recorder()])
    trainer.strategy.connect(module)
    module.trainer = trainer
    return OwnValues(trainer, lambda: num_trainers, lambda: True, is_lead=True)


@pytest.mark.parametrize(("name", "change"), [(name, one) for name, changes in CHANGES.items() for one in changes])
def test_what_changes_is_named_once(
    name: str, change: Callable[[Module], Any], module: Module, caplog: pytest.LogCaptureFixture
) -> None:
    values = watched(module)
    for _ in range(3):
        values.begin_batch()
        assert not said(caplog)
    change(module)
    values.begin_batch()
    (text,) = said(caplog)
    assert f"several trainers train: {name!r}. Each trainer has its own" in text
    change(module)
    values.begin_batch()
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("change", HARMLESS)
def test_what_the_run_takes_care_of_is_not_named(
    change: Callable[[Module], Any], module: Module, caplog: pytest.LogCaptureFixture
) -> None:
    values = watched(module)
    values.begin_batch()
    change(module)
    values.begin_batch()
    assert not said(caplog)


def test_one_trainer_has_the_plain_trainers_values(module: Module, caplog: pytest.LogCaptureFixture) -> None:
    values = watched(module, num_trainers=1)
    values.begin_batch()
    module.plain.value = 5.0
    values.begin_batch()
    assert not said(caplog)


class Numbers(Dataset[int]):
    def __init__(self) -> None:
        self.labels = np.zeros(3)

    def collate(self, rows: list[int]) -> list[int]:
        return rows


def test_a_collate_function_is_looked_into() -> None:
    data, around = Numbers(), Plain()

    def collate(factor: Plain, rows: list[int]) -> float:
        return around.value * factor.value

    assert [name for name, _ in callable_stamps("collate_fn", data.collate)] == ["collate_fn.labels"]
    before = dict(callable_stamps("collate_fn", partial(collate, Plain())))
    assert "around.value" in before
    around.value = 2.0
    assert dict(callable_stamps("collate_fn", partial(collate, Plain())))["around.value"] != before["around.value"]


def test_a_stamp_outlives_its_object() -> None:
    """Another tensor may get the memory of an old one."""
    tensor = torch.zeros(3)
    before = stamp(tensor)
    assert stamp(tensor) == before
    del tensor
    assert stamp(torch.zeros(3)) != before


def test_values_that_hold_themselves_end() -> None:
    own: list[Any] = []
    own.append(own)
    assert stamp(own) == stamp(own)
