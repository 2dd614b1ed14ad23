"""The view of a swarm for users: in a terminal, and in plain output."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch import Tensor
from typing_extensions import override

from lightning_swarm import SwarmView, pytorch_lightning
from lightning_swarm.client.status import PeerStatus, StageStatus, SwarmStatus
from lightning_swarm.monitor.view.history import (
    PeerPresence,
    RateWindow,
    newer_than,
)
from lightning_swarm.monitor.view.panel import SwarmPanel
from lightning_swarm.monitor.view.scene import (
    PeerRow,
    Scene,
)
from lightning_swarm.monitor.view.texts import (
    WORDS,
    duration_text,
    event_line,
    plain_line,
    sparkline,
)
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import Event
from lightning_swarm.protocol.messages.reports import EVENT_KINDS
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase, local_swarm
from tests.parity.harness import quiet_warnings
from tests.parity.models import DigitsMLP, digits, loader

LONG = "12D3KooWQ8vYJ3h2m6kTn1cB9rXwFgLpZsUeVdAo5iHqNyM"


def peer(end: str, done: int = 0, rate: float = 0.0, queued: int = 0, failures: int = 0) -> PeerStatus:
    return PeerStatus(PeerId(LONG + end), done, rate, queued, failures)


def status_with(*stages: list[PeerStatus], events: tuple[Event, ...] = ()) -> SwarmStatus:
    return SwarmStatus(
        step=7,
        stages=tuple(StageStatus(index, tuple(peers)) for index, peers in enumerate(stages)),
        run_id="night",
        peer_id=PeerId(LONG + "aaaaa"),
        coordinator=PeerId(LONG + "bbbbb"),
        trainers=(PeerId(LONG + "aaaaa"),),
        num_samples=32,
        events=events,
    )


EVENTS = (
    Event("ban", LONG + "ccccc", 1, 100, f"the connection to {LONG}ccccc broke off"),
    Event("gone", LONG + "ccccc", None, 100, "it does not answer"),
    Event("joined", LONG + "ddddd", 1, 121),
)
SCENE = Scene(
    status=status_with(events=EVENTS),
    step=123,
    max_steps=300,
    progress=0.41,
    metrics={"train_loss": 2.3456, "val_loss": 2.501},
    losses=[5.0 / (1 + step) for step in range(123)],
    samples_per_s=211.3,
    elapsed_s=83.0,
    stages=[
        [
            PeerRow(peer("aaaaa", 812, 411.0, 2), "serving"),
            PeerRow(peer("bbbbb", 101, 80.0), "serving"),
        ],
        [PeerRow(peer("ddddd", 1), "joining"), PeerRow(peer("ccccc", 90, 122.0), "gone")],
        [],
    ],
)


def drawn(scene: Scene, *, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True, force_terminal=True)
    console.print(SwarmPanel(scene, num_events=6))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_names_what_one_wants_to_know(width: int) -> None:
    lines = drawn(SCENE, width=width)
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    for word in ("night", "step 123/300", "training", "1:23", "train_loss 2.346", "val_loss 2.501", "211 samples/s"):
        assert word in text
    assert "▁" in text
    rows = {end: next(line for line in lines if "M" + end in line) for end in ("aaaaa", "bbbbb", "ccccc", "ddddd")}
    assert re.search(r"0 +Maaaaa +trains +411 +━+ +2 +812 +● serving", rows["aaaaa"])
    assert re.search(r"Mbbbbb +coord\S+ +80 +━.* 0 +101 +● serving", rows["bbbbb"])
    assert re.search(r"1 +Mddddd +0 .* 0 +1 +● joining", rows["ddddd"])
    assert re.search(r"Mccccc +90 +● gone", rows["ccccc"])
    assert any(re.search(r"2 +nobody", line) for line in lines)
    assert any(re.search(r"\d\d:\d\d:\d\d +Mccccc +gone +step 100 +it does", line) for line in lines)
    assert any(re.search(r"Mddddd +joined +stage 1, step 121", line) for line in lines)


def test_a_crowd_does_not_push_the_headline_off_the_screen() -> None:
    crowd = [[PeerRow(peer(f"{i:05}", i, 10.0), "serving") for i in range(40)] for _ in range(2)]
    lines = drawn(Scene(status_with(events=EVENTS * 4), crowd, step=3, max_steps=9))
    assert len(lines) < 24
    assert "step 3/9" in lines[1]
    assert sum("more" in line for line in lines) == 2
    assert any("joined" in line for line in lines)


def test_a_plain_run_has_a_panel_without_peers() -> None:
    lines = drawn(Scene(step=3, epoch=1, metrics={"loss": 1.0}, steps_per_s=2.5))
    assert len(lines) == 4
    assert "step 3, epoch 1" in lines[1]
    assert "2.5 steps/s" in lines[2]


def test_the_same_in_a_line_of_text() -> None:
    head = "step 123/300  train_loss 2.346  val_loss 2.501  211 samples/s"
    assert plain_line(SCENE) == f"{head}   peers per stage: 2 + 1 + 0, 1 gone"
    small = replace(SCENE, metrics={}, samples_per_s=None, stages=[*SCENE.stages[1:]])
    assert plain_line(small) == "step 123/300   stage 0: Mddddd joining, Mccccc gone   stage 1: nobody"
    assert plain_line(Scene(step=1)) == "step 1, epoch 0"
    lines = [event_line(event)[10:] for event in EVENTS]
    assert lines == [
        "peer Mccccc avoided for a while (stage 1, step 100): the connection to Mccccc broke off",
        "peer Mccccc gone (step 100): it does not answer",
        "peer Mddddd joined (stage 1, step 121)",
    ]
    assert set(WORDS) == set(EVENT_KINDS)
    assert (duration_text(59), duration_text(3661)) == ("0:59", "1:01:01")


def test_the_curve_keeps_its_shape_whatever_its_length() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0] * 50, 4) == "▁▁▁▁"
    assert sparkline([1.0, float("nan"), float("inf")], 8) == ""
    assert sparkline([None, *range(8)], 8) == "▁▂▃▄▅▆▇█"


def test_rates_are_those_of_the_last_seconds() -> None:
    rates = RateWindow()
    assert rates.current is None
    for second in range(21):
        step = second if second <= 10 else 10 + 3 * (second - 10)
        rates.tick(float(second), step, num_samples=32 * step)
    assert rates.current == (3.0, 96.0)
    rates.pause()  # validation takes an hour
    assert rates.current == (3.0, 96.0)
    rates.tick(3600.0, step=40, num_samples=1280)
    rates.tick(3602.0, step=42, num_samples=1344)
    assert rates.current == (1.0, 32.0)
    for second in range(3603, 3620):  # no step is decided
        rates.tick(float(second), step=42, num_samples=1344)
    assert rates.current == (0.0, 0.0)
    rates.tick(3620.0, step=40, num_samples=0)  # after a rollback
    rates.tick(3622.0, step=42, num_samples=64)
    assert rates.current == (1.0, 32.0)


def test_a_line_of_text_fits_whatever_the_swarm() -> None:
    head = "step 123/300  train_loss 2.346  val_loss 2.501  211 samples/s"
    crowd = [[PeerRow(peer(f"{i:05}", i, 10.0), "serving") for i in range(3)] for _ in range(40)]
    assert plain_line(replace(SCENE, stages=crowd)) == f"{head}   3 peers in 40 stages"
    many = replace(SCENE, metrics={f"metric_{i}": 0.1 for i in range(20)})
    assert len(plain_line(many)) == 100
    assert plain_line(many).endswith("…")
    small = replace(SCENE, metrics={}, samples_per_s=None, stages=SCENE.stages[:2])
    assert plain_line(small) == (
        "step 123/300   stage 0: Maaaaa 411/s, Mbbbbb 80/s   stage 1: Mddddd joining, Mccccc gone"
    )


def test_trainers_of_a_model_that_is_not_cut_wait_for_nothing() -> None:
    """No microbatch is routed to them, so their rate is unknown."""
    status = replace(status_with([peer("aaaaa"), peer("bbbbb")]), is_whole=True)
    scene = Scene(status, PeerPresence().update(status, now_s=0.0), step=7, max_steps=9)
    assert plain_line(scene) == "step 7/9   model: Maaaaa, Mbbbbb"
    crowd = [[PeerRow(peer(f"{i:05}"), "serving") for i in range(30)]]
    assert plain_line(replace(scene, stages=crowd)) == "step 7/9   30 peers"
    text = "\n".join(drawn(scene))
    assert all(word in text for word in ("model", "Maaaaa", "serving"))
    assert "joining" not in text


def test_an_event_of_a_lost_connection_is_one_short_line() -> None:
    gone = f"{LONG}ccccc"
    refused = (
        f"peer {gone}, which holds stage 0, is gone (Cannot open a stream to {gone}: failed to dial: failed to dial "
        f"{gone}: all dials failed\n  * [/ip4/127.0.0.1/tcp/42661] dial tcp4 127.0.0.1:42661: connect: connection "
        "refused.)"
    )
    line = event_line(Event("gone", gone, None, 66, refused))
    assert line[10:] == "peer Mccccc gone (step 66): it held stage 0 (connection refused)"
    broken = f"The connection to {gone} broke: [Errno 104] Connection reset by peer."
    line = event_line(Event("retry", gone, 0, 66, broken))
    assert line[10:] == "peer Mccccc failed, request repeated (stage 0, step 66): Connection reset by peer."
    assert len(event_line(Event("pause", None, 0, 66, "; ".join([refused] * 3)))) == 100


def test_a_peer_that_moved_is_not_gone() -> None:
    presence = PeerPresence()
    mover, other = peer("aaaaa", 5, 10.0), peer("bbbbb", 5, 10.0)
    presence.update(status_with([mover], [other]), now_s=0.0)
    rows = presence.update(status_with([], [other]), now_s=1.0)
    assert [row.state for row in rows[0]] == ["gone"], "between the two stages it is in none"
    rows = presence.update(status_with([], [other, mover]), now_s=2.0)
    assert rows[0] == []


def test_who_is_gone_is_shown_for_a_minute() -> None:
    presence = PeerPresence()
    first, second = peer("aaaaa", 5, 10.0), peer("bbbbb", 5, 10.0, failures=2)
    (rows,) = presence.update(status_with([first, second]), now_s=0.0)
    assert [row.state for row in rows] == ["serving", "failing"]
    (rows,) = presence.update(status_with([first, peer("ccccc")]), now_s=10.0)
    assert [row.state for row in rows] == ["serving", "joining", "gone"]
    (rows,) = presence.update(status_with([first, second]), now_s=20.0)
    assert [row.state for row in rows] == ["serving", "failing", "gone"]
    (rows,) = presence.update(status_with([first, second]), now_s=90.0)
    assert [row.state for row in rows] == ["serving", "failing"]


def test_each_event_is_new_once() -> None:
    twice = (*EVENTS, Event("joined", LONG + "ddddd", 1, 121))
    assert newer_than(None, twice) == twice
    assert newer_than(EVENTS[-1], twice) == twice[3:]
    assert newer_than(twice[-1], twice) == ()
    assert newer_than(Event("pause"), twice) == twice


# ---------------------------------------------------------------------- in a run


class Net(DigitsMLP):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx), prog_bar=True)

    def val_dataloader(self) -> Any:
        return loader(digits(), 20)


class At(L.Callback):
    """Calls a function after a step."""

    def __init__(self, step: int, work: Callable[[L.Trainer], None]) -> None:
        self.step = step
        self.work = work

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.work(trainer)


def join(trainer: L.Trainer) -> None:
    assert isinstance(trainer.strategy, InMemoryStrategy)
    trainer.strategy.join()


def fit(*callbacks: L.Callback, faults: FaultPlan | None = None, **settings: Any) -> L.Trainer:
    with local_swarm(4, num_stages=2, faults=faults, **settings) as swarm, quiet_warnings():
        trainer = swarm.trainer(
            max_steps=12,
            max_epochs=-1,
            enable_progress_bar=True,
            val_check_interval=6,
            check_val_every_n_epoch=None,
            limit_val_batches=2,
            callbacks=list(callbacks),
        )
        trainer.fit(Net(), loader(digits(), 20))
    return trainer


KILL = {"at": Phase.BACKWARD, "step": 3}


class OnTerminal(SwarmView):
    """Draws for a terminal that keeps all its output."""

    def __init__(self) -> None:
        super().__init__(refresh_per_second=1000.0)
        self.file = io.StringIO()

    def _console(self) -> Console | None:
        return Console(file=self.file, force_terminal=True, width=100, height=40)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.file.getvalue())

    @property
    def cursor(self) -> list[str]:
        return re.findall(r"\x1b\[\?25([lh])", self.file.getvalue())


@pytest.fixture
def terminal() -> OnTerminal:
    return OnTerminal()


@pytest.mark.thorough
def test_without_a_terminal_a_line_now_and_then_and_one_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    fit(SwarmView(plain_interval_s=3600.0), At(5, join), faults=FaultPlan().kill("peer-3", **KILL))
    lines = capsys.readouterr().out.splitlines()
    assert [line[10:] for line in lines if "peer-3 gone (" in line or " joined (" in line] == [
        next(line[10:] for line in lines if "peer peer-3 gone (step 3): it held stage " in line),
        next(line[10:] for line in lines if "peer peer-4 joined (stage 0, step" in line),
    ]
    plain = [line for line in lines if line.startswith("step ")]
    assert plain[0].startswith("step 1/12  train_loss ")
    assert "2 + 2" in plain[0] or "stage 1: peer-0 " in plain[0]
    assert plain[-1].startswith("step 12/12  ")
    assert "val_loss" in plain[-1]
    assert len(plain) == 2
    assert "\x1b" not in "".join(lines)


def test_a_trainer_hears_who_joins_though_another_peer_coordinates(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(SwarmView(), At(2, join), role="trainer")
    assert isinstance(trainer.strategy, InMemoryStrategy)
    assert capsys.readouterr().out.count("peer peer-4 joined (stage 0") == 1
    assert not trainer.strategy.peers[0].events.counts  # the coordinator counts it


def test_on_a_terminal_a_panel_takes_the_place_of_the_progress_bar(
    terminal: OnTerminal, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    stdout = sys.stdout
    logger = logging.getLogger("of_the_user")
    logger.addHandler(handler)
    stream = handler.stream
    try:

        def say(_: L.Trainer) -> None:
            print("printed by the user")
            logger.warning("logged by the user")

        trainer = fit(terminal, At(5, join), At(7, say), faults=FaultPlan().kill("peer-3", **KILL))
    finally:
        logger.removeHandler(handler)
    assert trainer.progress_bar_callback is terminal
    assert terminal.cursor == ["l", "h"]
    assert sys.stdout is stdout
    assert handler.stream is stream
    text = terminal.text
    last = text[text.rindex("╭") :]
    for word in ("step 12/12", "done", "train_loss", "val_loss", "peer-4", "● serving", "● gone", "joined"):
        assert word in last
    # Messages appear above the panel, not in it, and not past it.
    assert text.index("printed by the user") < text.index("logged by the user")
    assert "by the user" not in last
    assert "by the user" not in "".join(capsys.readouterr())


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("error", [RuntimeError("of the user"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_run_that_breaks_off_leaves_the_terminal_as_it_was(terminal: OnTerminal, error: BaseException) -> None:
    def fail(_: L.Trainer) -> None:
        raise error

    stdout = sys.stdout
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit(terminal, At(4, fail))
    assert terminal.cursor == ["l", "h"]
    assert sys.stdout is stdout
    assert ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed") in terminal.text


def _broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a bug of the view")


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("place", ["panel.SwarmPanel.__rich_console__", "_progress", "PeerPresence.update"])
def test_a_view_that_fails_does_not_end_the_run(
    terminal: OnTerminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    monkeypatch.setattr(f"lightning_swarm.view.{place}", _broken)
    assert fit(terminal).global_step == 12
    assert terminal.cursor == ["l", "h"]
    assert len([record for record in caplog.records if "a bug of the view" in record.getMessage()]) == 1


def test_a_view_that_fails_without_a_terminal_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_swarm.monitor.view.plain_line", _broken)
    assert fit(SwarmView()).global_step == 12
    assert "a bug of the view" in caplog.text


def test_without_rich_the_lines_are_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    fit(SwarmView())
    assert "step 12/12  train_loss" in capsys.readouterr().out
    assert caplog.text.count("pip install rich") == 1


def test_the_curve_is_the_loss_and_not_the_version_of_a_logger(tmp_path: Path) -> None:
    """Lightning's metrics of a progress bar begin with the version of its logger, often a number."""
    view = SwarmView()
    with quiet_warnings():
        trainer = L.Trainer(
            accelerator="cpu", max_steps=3, logger=CSVLogger(tmp_path), enable_checkpointing=False, callbacks=[view]
        )
        trainer.fit(Net(), loader(digits(), 20))
    assert next(iter(view.get_metrics(trainer, trainer.lightning_module))) == "v_num"
    losses = view._scene().losses
    assert losses
    assert min(losses) > 1.0


def test_it_shows_a_plain_trainer_too(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet_warnings():
        trainer = L.Trainer(
            accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, callbacks=[SwarmView()]
        )
        trainer.fit(Net(), loader(digits(), 20), loader(digits(), 20))
        trainer.test(Evaluated(), loader(digits(), 20), verbose=False)
    assert "step 3/3  train_loss" in capsys.readouterr().out


class Evaluated(Net):
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", super().training_step(batch, batch_idx))


def test_both_import_trees_have_one() -> None:
    import pytorch_lightning as pl

    view = pytorch_lightning.SwarmView()
    assert pl.Trainer(accelerator="cpu", logger=False, callbacks=[view]).progress_bar_callback is view
