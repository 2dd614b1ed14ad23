"""`SwarmMonitor` logs the run's numbers, on all ranks and steps where it should."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_swarm import SwarmMonitor
from lightning_swarm.client.status import SwarmStatus
from lightning_swarm.core.errors import ConfigError
from tests.features.both import Evaluated, Trained
from tests.features.test_trainers import Lines
from tests.parity.harness import run_plain, run_swarm
from tests.parity.models import BATCH_SIZE, digits, loader

NAMES = {"samples_per_s", "step_s", "wait_s", "sent_bytes_per_s", "received_bytes_per_s", "peers", "deaths"}


def monitors(trainer: Any) -> list[Callback]:
    return [callback for callback in trainer.callbacks if type(callback).__name__ == "SwarmMonitor"]


def numbers(lines: Lines) -> list[dict[str, float]]:
    found = [
        {name.removeprefix("swarm/"): value for name, value in line.items() if "swarm/" in name} for line in lines.lines
    ]
    return [line for line in found if "step_s" in line]


class Looks(Callback):
    """Records the status and the time of validation at the end of batches after which `SwarmMonitor` logs."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.statuses: list[SwarmStatus] = []
        self.in_validation: list[SwarmStatus] = []

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.statuses.append(trainer.strategy.status())  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.statuses.append(trainer.strategy.status())  # type: ignore[attr-defined]

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.in_validation.append(trainer.strategy.status())  # type: ignore[attr-defined]

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.in_validation.append(trainer.strategy.status())  # type: ignore[attr-defined]


def test_its_numbers_are_the_status_from_one_line_to_the_next() -> None:
    lines, looks = Lines(), Looks(every=3)
    began_s = time.monotonic()
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 3, "callbacks": [looks]}
    run_swarm(Trained, loader(digits()), logger=lines, **options)
    took_s = time.monotonic() - began_s
    found = numbers(lines)
    assert [set(line) for line in found] == [NAMES] * 2
    assert lines.steps_of("swarm/step_s") == lines.steps_of("loss") == [2, 5]
    assert sum(3 * line["step_s"] for line in found) < took_s
    for line, (before, after) in zip(found, pairwise(looks.statuses), strict=True):
        interval_s = 3 * line["step_s"]
        assert 0.0 < line["wait_s"] < line["step_s"]
        assert line["samples_per_s"] * interval_s == pytest.approx(after.total_samples - before.total_samples)
        assert line["sent_bytes_per_s"] * interval_s == pytest.approx(after.sent_bytes - before.sent_bytes)
        assert line["received_bytes_per_s"] * interval_s == pytest.approx(after.received_bytes - before.received_bytes)
        assert line["wait_s"] * 3 == pytest.approx(after.waited_s - before.waited_s)
        assert line["peers"] == 2.0
    traffic = [status.sent_bytes for status in looks.statuses]
    assert traffic == sorted(set(traffic)), "each step sends something"
    assert [status.total_samples for status in looks.statuses] == [0, 3 * BATCH_SIZE, 6 * BATCH_SIZE]


def test_validation_counts_neither_as_time_nor_as_traffic() -> None:
    lines, looks = Lines(), Looks(every=6)
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 6, "val_check_interval": 3, "callbacks": [looks]}
    run_swarm(Evaluated, loader(digits()), loader(digits()), logger=lines, **options)
    (line,) = numbers(lines)
    start, end = looks.statuses
    before, after = looks.in_validation[:2]
    assert after.sent_bytes > before.sent_bytes, "validation goes through the swarm"
    sent = (before.sent_bytes - start.sent_bytes) + (end.sent_bytes - after.sent_bytes)
    assert line["sent_bytes_per_s"] * 6 * line["step_s"] == pytest.approx(sent)


def test_a_step_of_several_batches_is_one_step() -> None:
    lines = Lines()
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    run_swarm(Trained, loader(digits()), logger=lines, **options)
    found = numbers(lines)
    assert lines.steps_of("swarm/step_s") == [0, 1, 2, 3]
    sizes = [line["samples_per_s"] * line["step_s"] for line in found]
    assert sizes == pytest.approx([2 * BATCH_SIZE] * 3 + [BATCH_SIZE / 2])


def test_a_trainer_with_a_logger_has_one_before_its_checkpoints(tmp_path: Any) -> None:
    mine, saves = LambdaCallback(), ModelCheckpoint(tmp_path)
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": [mine, saves], "enable_checkpointing": True}
    swarm = run_swarm(Trained, loader(digits()), logger=Lines(), **options)
    kinds = [type(callback).__name__ for callback in swarm.trainer.callbacks]  # type: ignore[union-attr]
    assert kinds.index("LambdaCallback") < kinds.index("SwarmMonitor") < kinds.index("ModelCheckpoint")
    assert not monitors(run_swarm(Trained, loader(digits()), logger=False, max_epochs=1).trainer)
    assert not monitors(run_plain(Trained, loader(digits()), logger=Lines(), max_epochs=1).trainer)


@pytest.mark.parametrize(("metrics", "logged"), [([], set()), (["wait_s", "peers"], {"wait_s", "peers"})])
def test_a_user_s_own_takes_its_place(metrics: Any, logged: set[str]) -> None:
    lines, own = Lines(), SwarmMonitor(metrics)
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "callbacks": [own]}
    run = run_swarm(Trained, loader(digits()), logger=lines, **options)
    assert monitors(run.trainer) == [own]
    assert {name for line in lines.lines for name in line if "swarm/" in name} == {f"swarm/{name}" for name in logged}


@pytest.mark.parametrize("is_own", [False, True])
def test_only_a_user_s_own_adds_to_a_csv_file(tmp_path: Path, is_own: bool) -> None:
    files, lines = CSVLogger(tmp_path), Lines()
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "callbacks": [SwarmMonitor()] if is_own else []}
    run_swarm(Trained, loader(digits()), logger=[files, lines], **options)
    assert numbers(lines)
    assert ("swarm/peers" in (Path(files.log_dir) / "metrics.csv").read_text()) is is_own


def test_without_a_swarm_it_logs_nothing() -> None:
    lines = Lines()
    run_plain(Trained, loader(digits()), logger=lines, max_epochs=1, log_every_n_steps=1, callbacks=[SwarmMonitor()])
    assert lines.column("loss")
    assert not numbers(lines)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be among \['samples_per_s', .*got \['speed'\]\. Leave it out"):
        SwarmMonitor(["speed"])  # type: ignore[list-item]
