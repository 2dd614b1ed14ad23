"""The lead's messages about peers that join and leave: once each, visible in the terminal, and silent on request."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_swarm import SwarmView
from lightning_swarm.strategy.run_log import _TerminalHandler
from lightning_swarm.testing import FaultPlan, Phase
from tests.parity.harness import run_swarm
from tests.parity.models import digits, loader
from tests.parity.test_joining import ComingAndGoing, Joining, swarm
from tests.parity.test_rollback import Fit, Killing, make_digits

NAME = "lightning_swarm.membership"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.name == NAME]


def with_a_death(**options: Any) -> None:
    """Train with two servers for each of two stages, one of which is killed. The lead also coordinates."""
    plan = FaultPlan().kill("peer-2", at=Phase.BACKWARD, step=2)
    swarm_of: dict[str, Any] = {"num_servers": 4, "num_gone": 1, "latency_s": 0.001, "max_steps": 6}
    run_swarm(make_digits, loader(digits()), faults=plan, max_epochs=-1, **swarm_of, **options)
    plan.check()


@contextmanager
def as_in_a_script() -> Iterator[None]:
    """Remove the handlers that pytest gives the root logger."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_a_peer_that_dies_makes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_swarm.events"):
        with_a_death()
    (line,) = lines(caplog)
    assert line == "Peer peer-2 died or was cut off: stage 1 has 1 server left, 3 peers in all"
    levels = {one.levelno for one in caplog.records if one.message.startswith("gone: ")}
    assert levels == {logging.INFO}, "not a second time by default"


def test_a_peer_that_joins_and_leaves_makes_two(caplog: pytest.LogCaptureFixture) -> None:
    swarm(ComingAndGoing(leave_at=6), num_joiners=0)
    joined, left = lines(caplog)
    assert joined.startswith(left.split()[0])
    assert joined.endswith("joined: stage 0 now has 2 servers, 3 peers in all")
    assert left.endswith("left: stage 0 has 1 server left, 2 peers in all")


def test_a_peer_whose_death_rolls_the_run_back_makes_one(caplog: pytest.LogCaptureFixture) -> None:
    killing = Killing([5], [[1]])
    Fit(killing)
    assert killing.num_killed == 1
    (line,) = lines(caplog)
    assert line.startswith("Peer peer-1 ")
    assert "died or was cut off" in line


def test_a_quiet_run_makes_none(caplog: pytest.LogCaptureFixture) -> None:
    run_swarm(make_digits, loader(digits()), max_epochs=1)
    assert lines(caplog) == []


def test_swarm_view_shows_it_instead(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with_a_death(callbacks=[SwarmView()], enable_progress_bar=True)
    assert lines(caplog) == []
    assert capsys.readouterr().out.count("peer peer-2 gone") == 1


@pytest.mark.parametrize("is_silenced", [False, True])
def test_it_is_seen_without_any_setting_and_silenced_like_lightning(
    is_silenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", seen)
    package = logging.getLogger("lightning_swarm")
    monkeypatch.setattr(package, "level", logging.ERROR if is_silenced else logging.NOTSET)
    package.manager._clear_cache()  # type: ignore[attr-defined]
    with as_in_a_script():
        swarm(Joining())
    package.manager._clear_cache()  # type: ignore[attr-defined]
    assert seen.getvalue().count("joined: stage 0 now has 2 servers") == (not is_silenced)
    assert logging.getLogger(NAME).level == logging.NOTSET
    assert logging.getLogger(NAME).handlers == []


def test_a_line_does_not_begin_behind_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bar(TQDMProgressBar):
        """Draws on the current stdout, as in a terminal."""

    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    with as_in_a_script():
        with_a_death(callbacks=[Bar()], enable_progress_bar=True)
    text = terminal.getvalue()
    assert "Epoch" in text, "there was a bar"
    (before, _) = text.split("Peer peer-2 ")
    assert before.rpartition("\r")[2].strip() == "", "the bar was wiped off"


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens in `python train.py 2>&1 | head`."""

    class Gone(io.StringIO):
        num_writes = 0

        def write(self, _: str) -> int:
            self.num_writes += 1
            raise BrokenPipeError

    terminal = Gone()
    handler = _TerminalHandler()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler.emit(logging.LogRecord(NAME, logging.INFO, __file__, 1, "Peer b left", (), None))
    assert terminal.num_writes
