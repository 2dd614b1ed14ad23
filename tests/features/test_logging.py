"""Logging and profiling."""

from __future__ import annotations

import csv
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from tensorboardX.proto.event_pb2 import Event
from torch import Tensor
from typing_extensions import override

from lightning_swarm import SwarmMonitor
from lightning_swarm.testing import FaultPlan, Phase
from tests.features.both import STEPS, Evaluated, Trained, approx, fit_both
from tests.features.mark import WORKS, feature
from tests.parity.harness import run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader


def table(folder: Path) -> list[dict[str, float]]:
    """Return the rows that a CSVLogger wrote."""
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def assert_same_tables(folder: Path) -> list[dict[str, float]]:
    plain, swarm = table(folder / "plain"), table(folder / "swarm")
    assert len(swarm) == len(plain)
    for ours, theirs in zip(swarm, plain, strict=True):
        assert ours == approx(theirs)
    return plain


@feature(
    "`CSVLogger`, `log_every_n_steps`",
    WORKS,
    "with a `SwarmMonitor()`, it also contains the run's own numbers, `swarm/...`",
)
def test_csv_logger(tmp_path: Path) -> None:
    fit_both(
        Evaluated,
        loader(digits()),
        made={"logger": lambda name: CSVLogger(tmp_path, "", name)},
        log_every_n_steps=3,
        max_epochs=3,
    )
    rows = assert_same_tables(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [2, 5, 8, 11, 14, 17, 20]
    assert len([row for row in rows if "val_loss" in row]) == 3


def events(folder: Path) -> list[tuple[str, int, float]]:
    """Return the numbers that a TensorBoardLogger wrote: name, step, value."""
    (file,) = folder.glob("events.out.tfevents.*")
    data = file.read_bytes()
    found = []
    while data:  # a record is its length in 8 bytes, a checksum in 4, its bytes, and a checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        found += [(one.tag, event.step, one.simple_value) for one in event.summary.value if one.tag != "hp_metric"]
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"made": {"logger": lambda name: TensorBoardLogger(Path(), "runs", name)}},
            marks=feature("`TensorBoardLogger`", WORKS),
        ),
        pytest.param(
            {"logger": True},
            marks=feature(
                "`Trainer(logger=True)`, `default_root_dir`", WORKS, "TensorBoard if it is installed, else CSV"
            ),
        ),
    ],
)
def test_tensorboard(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithHyperparameters(Evaluated):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    monkeypatch.chdir(tmp_path)
    both = fit_both(WithHyperparameters, loader(digits()), log_every_n_steps=3, max_epochs=2, **options)
    plain, swarm = (events(Path(trainer.log_dir)) for trainer in both.trainers)
    swarm = [one for one in swarm if not one[0].startswith("swarm/")]  # without the run's own numbers
    assert [one[:2] for one in swarm] == [one[:2] for one in plain]
    assert [one[2] for one in swarm] == approx([one[2] for one in plain])
    assert [step for name, step, _ in plain if name == "loss"] == [2, 5, 8, 11]
    assert [step for name, step, _ in plain if name == "val_loss"] == [6, 13]
    for trainer in both.trainers:
        assert "width: 3" in (Path(trainer.log_dir) / "hparams.yaml").read_text(encoding="utf-8")


@feature("the run's own numbers, `swarm/...`, in any logger: samples/s, traffic, peers, deaths", WORKS)
def test_numbers_of_the_run(tmp_path: Path) -> None:
    """Of a run in which a server dies in the eighth step."""
    loggers = [CSVLogger(tmp_path, "", "csv"), TensorBoardLogger(tmp_path, "", "board")]
    faults = FaultPlan().kill("peer-2", at=Phase.BACKWARD, step=7)
    options: dict[str, Any] = {"logger": loggers, "callbacks": [SwarmMonitor()], "log_every_n_steps": 4}
    options |= {"max_steps": 12, "max_epochs": -1, "num_servers": 3, "num_gone": 1, "faults": faults}
    run_swarm(Trained, loader(digits()), **options)
    assert faults.fired == 1
    in_csv = [
        (name, int(row["step"]), value)
        for row in table(tmp_path / "csv")
        for name, value in row.items()
        if name.startswith("swarm/")
    ]
    on_board = [one for one in events(tmp_path / "board") if one[0].startswith("swarm/")]
    assert sorted(on_board) == [(name, step, pytest.approx(value, rel=1e-6)) for name, step, value in sorted(in_csv)], (
        "TensorBoard's numbers have 32 bits"
    )
    found = {name: [value for other, _, value in in_csv if other == name] for name, _, _ in in_csv}
    assert found["swarm/deaths"] == [0.0, 1.0, 1.0]
    assert found["swarm/gone"] == [1.0]
    assert found["swarm/peers"][0] == 3.0
    assert found["swarm/peers"][-1] == 2.0
    for name in ("samples_per_s", "step_s", "sent_bytes_per_s", "received_bytes_per_s"):
        assert min(found[f"swarm/{name}"]) > 0.0


@feature("`self.log(on_step, on_epoch, prog_bar, reduce_fx)`, `self.log_dict`", WORKS)
def test_ways_of_logging() -> None:
    class Logs(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("highest", loss, on_epoch=True, on_step=False, reduce_fx="max")
            self.log_dict({"double": 2 * loss, "index": float(batch_idx)}, on_epoch=True, on_step=False)
            return loss

    logged = fit_both(Logs, max_epochs=2).logged()
    assert logged["highest"] > logged["loss_epoch"] == approx(logged["double"] / 2)


@feature(
    "`self.log(sync_dist=True)`",
    WORKS,
    "one trainer: the value itself, which covers all data; several trainers: see below",
)
def test_sync_dist() -> None:
    class Synced(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("synced", loss, sync_dist=True, on_epoch=True, on_step=False)
            self.log("local", loss, on_epoch=True, on_step=False)
            return loss

    logged = fit_both(Synced, max_epochs=2).logged()
    assert logged["synced"] == approx(logged["local"])


@feature("`torchmetrics` objects in `self.log`", WORKS)
def test_torchmetrics() -> None:
    class Measured(DigitsMLP):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
            self.mean = torchmetrics.MeanMetric()

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

        @override
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.accuracy(self.net(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

    logged = fit_both(Measured, loader(digits(), 20), max_epochs=3).logged()
    assert 0.0 < logged["accuracy"] < 1.0
    assert logged["mean"] > 0.0


@feature(
    "`self.all_gather`",
    WORKS,
    "one trainer: the value itself; several: refused in `training_step`, where you log with `sync_dist=True` instead",
)
def test_all_gather() -> None:
    class Gathers(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("gathered", torch.as_tensor(self.all_gather(loss.detach())).mean())
            return loss

    assert "gathered" in fit_both(Gathers, max_steps=STEPS).logged()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(SimpleProfiler, marks=feature("`SimpleProfiler`", WORKS, "profiles the trainer's process")),
        pytest.param(AdvancedProfiler, marks=feature("`AdvancedProfiler`", WORKS, "profiles the trainer's process")),
    ],
)
def test_profilers(make: Any, tmp_path: Path) -> None:
    fit_both(made={"profiler": lambda name: make(dirpath=tmp_path, filename=name)}, max_steps=STEPS)
    plain, swarm = ((tmp_path / f"fit-{name}.txt").read_text(encoding="utf-8") for name in ("plain", "swarm"))
    for action in ("run_training_batch", ".training_step", ".backward", ".optimizer_step", ".on_before_optimizer_step"):
        assert action in plain
        assert action in swarm


@pytest.mark.first_cells(2)
@feature("`Trainer(profiler='simple')`, `'advanced'`, `'pytorch'`", WORKS, "profiles the trainer's process")
@pytest.mark.parametrize(
    ("kind", "action"),
    [("simple", ".training_step"), ("advanced", ".training_step"), ("pytorch", "run_training_batch")],
)
def test_profilers_by_name(
    kind: str, action: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it writes trace files
    reports = []
    for run in run_plain, run_swarm:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run(Trained, loader(digits()), profiler=kind, max_steps=6)
        reports.append(next(text for text in caplog.messages if text.startswith("FIT Profiler Report")))
    assert all(action in report for report in reports)


@feature("`PyTorchProfiler`", WORKS, "profiles the trainer's process")
def test_torch_profiler(tmp_path: Path) -> None:
    def make(name: str) -> PyTorchProfiler:
        return PyTorchProfiler(dirpath=tmp_path, filename=name)

    fit_both(made={"profiler": make}, max_steps=6)
    plain, swarm = (next(tmp_path.glob(f"fit-{name}-*.json")).read_text() for name in ("plain", "swarm"))
    for action in ("run_training_batch", "SingleDeviceStrategy.training_step", "aten::addmm"):
        assert action in plain
        assert action.replace("SingleDevice", "InMemory") in swarm
