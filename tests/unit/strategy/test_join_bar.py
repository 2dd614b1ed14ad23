"""What a joining peer waits for: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import termios
from collections.abc import Iterator

import pytest

from lightning_swarm.core import progress
from lightning_swarm.core.progress import Progress, ProgressLines, Report
from lightning_swarm.peer.process import _RANK
from lightning_swarm.strategy.join_bar import JoinBar, reporting_join

GB = 10**9
STATE = "Downloading stage 1 from 2 peers"


def act(report: Report) -> None:
    """Report as a joiner does, with a warning of another module."""
    report(Progress("Asking for a run"))
    report(Progress("Asking for a run"))
    report(Progress("Waiting to download stage 1", "2 wait before this peer"))
    report(Progress(STATE, num_bytes=0, total_bytes=43 * GB // 10))
    if isinstance(report, JoinBar):
        assert report._bar is not None
        report._bar.mininterval = 0.0  # otherwise a bar that is redrawn this soon is skipped
    logging.getLogger("lightning_swarm.other").warning("A peer is slow.")
    report(Progress(STATE, num_bytes=12 * GB // 10, total_bytes=43 * GB // 10))
    report("In run 'swarm' from step 7 on.")


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make standard error a terminal; its output is in the list afterwards."""
    outside, inside = os.openpty()
    termios.tcsetwinsize(inside, (24, 120))
    attributes = termios.tcgetattr(inside)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(inside, termios.TCSANOW, attributes)
    found: list[str] = []
    with os.fdopen(inside, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr("lightning_swarm.strategy.join_bar.rank_zero_info", lambda line: print(line, file=stderr))
        monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(stderr)])
        yield found
    with os.fdopen(outside, "rb", buffering=0) as output, contextlib.suppress(OSError):  # its end is an error
        while piece := output.read(1 << 16):
            found.append(piece.decode())


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end."""
    return [line.rpartition("\r")[2] for line in written.split("\n") if line.rpartition("\r")[2].strip()]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as found, reporting_join() as report:
        act(report)
    written = "".join(found)
    assert re.search(r"Asking for a run \(00:00\)", written)
    assert "Waiting to download stage 1: 2 wait before this peer (00:00)" in written
    assert re.search(rf"{STATE}: 0 bytes of 4\.3 GB   0% \|", written)
    assert re.search(rf"{STATE}: 1\.2 GB of 4\.3 GB  28% \|.*B/s, \d\d:\d\d left", written), written
    assert screen(written) == ["A peer is slow.", "In run 'swarm' from step 7 on."]


@pytest.mark.parametrize("repeated", [False, True])
def test_lines_elsewhere(repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if repeated:
        monkeypatch.setattr(progress, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines: list[str] = []
    monkeypatch.setattr("lightning_swarm.strategy.join_bar.rank_zero_info", lines.append)
    with reporting_join() as report:
        act(report)
    assert isinstance(report, ProgressLines)
    assert lines == [
        *["Asking for a run."] * (1 + repeated),
        "Waiting to download stage 1: 2 wait before this peer.",
        f"{STATE}: 0 bytes of 4.3 GB.",
        *[f"{STATE}: 1.2 GB of 4.3 GB."] * repeated,
        "In run 'swarm' from step 7 on.",
    ]


def test_a_state_that_lasts_is_repeated_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[int] = []
    lasting = ProgressLines(lambda _: lines.append(second))
    for second in range(2000):
        monkeypatch.setattr(progress.time, "monotonic", lambda: float(second))  # noqa: B023 - called at once
        lasting(Progress("Asking for a run"))
    assert lines == [0, 10, 30, 70, 150, 310, 610, 910, 1210, 1510, 1810]


def test_only_the_first_peer_of_a_machine_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_RANK, "1")
    with terminal(monkeypatch), reporting_join() as report:
        assert isinstance(report, ProgressLines)
        print("end", file=sys.stderr)
