"""Surveys receive the numbers that the lead logs, with their steps, and after a takeover those of the new lead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import Unreachable
from lightning_swarm.dashboard.overview import Overview
from lightning_swarm.dashboard.watch import Board
from lightning_swarm.monitor import survey
from lightning_swarm.monitor.swarm_report import SwarmReport, summarize
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.messages.reports import MAX_LOGGED
from lightning_swarm.strategy import logged_numbers
from lightning_swarm.testing import InMemoryStrategy
from tests.features.test_trainers import Lines
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, digits, loader
from tests.parity.standbys import Swarm


@pytest.fixture(autouse=True)
def _each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_numbers, "_INTERVAL_S", 0.0)


class Logging(DigitsMLP):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


class Validating(Logging):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", DigitsMLP.training_step(self, batch, batch_idx))


def look(runtime: Any, network: MemoryNetwork, asked: str) -> SwarmReport:
    try:
        transport = network.find(PeerId("stranger"))
    except Unreachable:
        transport = network.transport("stranger")
    return summarize(runtime.run(survey.ask_all(transport, PeerId(asked), asked, timeout=9.0)))


class Looking(L.Callback):
    """Surveys the run after each batch, and keeps the reports."""

    def __init__(self, look: Callable[[], SwarmReport]) -> None:
        self.look = look
        self.reports: list[SwarmReport] = []

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.reports.append(self.look())


def test_a_survey_has_what_loggers_get_with_the_step_of_each_number() -> None:
    lines = Lines()
    strategy = InMemoryStrategy(num_stages=2)
    looking = Looking(lambda: look(strategy.peers[0].runtime, strategy.network, "peer-1"))
    options: dict[str, Any] = {"max_steps": 7, "val_check_interval": 3, "log_every_n_steps": 1, "logger": lines}
    trainer = L.Trainer(**{**QUIET, **options, "devices": 2}, strategy=strategy, callbacks=[looking])
    trainer.fit(Validating(), loader(digits()), loader(digits()))
    assert looking.reports[0].logged == ()
    losses = [line["train_loss"] for line in lines.lines if "train_loss" in line]
    validated = [line["val_loss"] for line in lines.lines if "val_loss" in line]
    for step, report in enumerate(looking.reports[1:], 1):  # Lightning reads a batch's numbers after this hook
        found = {number.name: (number.value, number.step) for number in report.logged}
        assert found["train_loss"] == (pytest.approx(losses[step - 1]), step)
        assert ("val_loss" in found) == (step >= 3)
        if step >= 3:
            assert found["val_loss"] == (pytest.approx(validated[step // 3 - 1]), step // 3 * 3)
    assert strategy.peers[0].logged() == []  # the run is over


def test_curves_continue_with_the_next_lead_if_the_lead_is_killed() -> None:
    board = Board("127.0.0.1:1/x")
    found: list[Overview] = []

    class Watching(L.Callback):
        @override
        def on_train_batch_end(self, *_: Any) -> None:
            report = look(swarm.runtime, swarm.network, "server-0")
            found.append(board.add(report, time.time()))

    swarm = Swarm(1, 1, Logging, {5: "lead"}, lambda _: [Watching()], options={"max_steps": 10})
    swarm.fit()
    assert swarm.leads == ["lead", "standby-0"]
    assert swarm.killed == ["lead"]
    newest = found[-1]
    steps = [int(step) for step in newest.logged.begins]
    # No survey may have asked between the last step and the lead's death, which waits for a standby on a busy machine.
    assert len({*range(1, 10)} - {*steps}) <= 1
    assert newest.logged.series["train_loss"] == pytest.approx([swarm.losses[step - 1] for step in steps], rel=1e-5)
    leads = [peer.peer_id for peer in newest.report.peers if not isinstance(peer.problem, str) and peer.lead]
    assert leads == ["standby-0"]


def test_names_and_numbers_that_no_report_may_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            for name, value in (("", 1.0), ("x" * 101, 1.0), ("nan", float("nan")), ("inf", float("inf"))):
                self.log(name, value)
            for place in range(2 * MAX_LOGGED):
                self.log(f"number_{place}", torch.tensor(float(place)))
            return super().training_step(batch, batch_idx)

    strategy = InMemoryStrategy(num_stages=2)
    looking = Looking(lambda: look(strategy.peers[0].runtime, strategy.network, "peer-0"))
    trainer = L.Trainer(**{**QUIET, "max_steps": 3, "devices": 2}, strategy=strategy, callbacks=[looking])
    trainer.fit(Hostile(), loader(digits()))
    names = [number.name for number in looking.reports[-1].logged]
    assert names == [f"number_{place}" for place in range(MAX_LOGGED)]
