"""Draws `SwarmView` on a terminal, with rich."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lightning_swarm.client.status import SwarmStatus
from lightning_swarm.core.readable import short_name
from lightning_swarm.monitor.view.scene import PeerRow, Scene, State
from lightning_swarm.monitor.view.texts import (
    WORDS,
    duration_text,
    location_text,
    rates_text,
    reason_text,
    sparkline,
    stage_name,
    steps_text,
    time_of_day,
)
from lightning_swarm.protocol.events import Event
from lightning_swarm.protocol.messages.reports import EventKind

_STATE_STYLES: Final[Mapping[State, str]] = {"serving": "green", "joining": "cyan", "failing": "yellow", "gone": "red"}
_EVENT_STYLES: Final[Mapping[EventKind, str]] = {
    "joined": "green",
    "resume": "green",
    "takeover": "cyan",
    "left": "magenta",
    "moves": "magenta",
    "sheds": "magenta",
    "gone": "bold red",
    "strike": "red",
    "unconfirmed": "bold red",
    "pause": "bold yellow",
    "went_back": "bold yellow",
}
_WIDE: Final = 100  # columns from which roles are written in full
_FEWEST_ROWS: Final = 2  # minimum rows shown of each stage, even if they do not fit the terminal
_FIXED_LINES: Final = 9  # border, headline, header of the table, and the lines between them


class Terminal:
    """Shows the result of `render`, which its own thread calls, until it is closed."""

    def __init__(
        self,
        console: Console,
        render: Callable[[], RenderableType],
        on_failure: Callable[[Exception], None],  # called with an error of `render` or of drawing; must not print
        *,
        refresh_per_second: float,
    ) -> None:
        self._render, self._on_failure = render, on_failure
        self._live = Live(self, console=console, refresh_per_second=refresh_per_second, vertical_overflow="crop")
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def open(self) -> None:
        """Occupy the terminal's last lines; later output and logs appear above them."""
        before = {id(sys.stdout), id(sys.stderr)}
        # The panel hides the cursor. Closing at exit shows it again, even without a call of `close`.
        atexit.register(self.close)
        self._live.start(refresh=True)
        loggers = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
        handlers = [handler for logger in (logging.root, *loggers) for handler in logger.handlers]
        for handler in handlers:
            if type(handler) is logging.StreamHandler and id(handler.stream) in before:
                # The handler would write to the former stream, and so into the panel.
                self._handlers.append((handler, handler.setStream(sys.stderr)))

    def close(self) -> None:
        """Release the lines; the panel's last picture stays."""
        atexit.unregister(self.close)
        handlers, self._handlers = self._handlers, []
        for handler, stream in handlers:
            handler.setStream(stream)
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            segments = list(console.render(self._render(), options))
        except Exception as error:  # noqa: BLE001 - an error would end the panel's thread, and freeze the panel
            self._on_failure(error)
            segments = [Segment("The view failed; the run continues.\n")]
        yield from segments


class SwarmPanel:
    """One moment of a run, as wide as the console and no higher, with at most `num_events` events."""

    def __init__(self, scene: Scene, *, num_events: int) -> None:
        self._scene = scene
        self._num_events = num_events

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scene = self._scene
        parts: list[RenderableType] = [_headline(scene), _numbers(scene, options.max_width)]
        # The cursor waits in the terminal's last line.
        free = options.size.height - 1 - _FIXED_LINES  # lines for peers and events
        events = scene.status.events[-self._num_events :] if self._num_events else ()
        if scene.stages:
            num_rows = sum(max(len(rows), 1) for rows in scene.stages)
            # Rows of peers come first: events get the lines that are left, but at least one.
            events = events[-max(min(self._num_events, free - num_rows), 1) :]
            max_rows = max((free - len(events)) // len(scene.stages), _FEWEST_ROWS)
            parts += [Text(), _peers(scene, max_rows, wide=options.max_width >= _WIDE)]
        if events:
            parts += [Text(), _events(events)]
        name = f"{scene.status.run_id} " if scene.status.run_id else ""
        title = Text.assemble((" lightning-swarm ", "bold"), (name, "cyan"))
        yield Panel(Group(*parts), title=title, title_align="left", border_style="blue", box=box.ROUNDED)


def _headline(scene: Scene) -> Table:
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True, justify="right")
    bar: RenderableType = Text()
    if scene.progress is not None:
        bar = ProgressBar(total=1.0, completed=scene.progress, complete_style="blue", finished_style="green")
    phase_style = "green" if scene.phase in ("training", "done") else "yellow"
    line.add_row(
        Text(steps_text(scene), "bold"), bar, Text(scene.phase, phase_style), Text(duration_text(scene.elapsed_s))
    )
    return line


def _numbers(scene: Scene, width: int) -> Text:
    """Return the metrics, the curve of the first metric and the rate, in as many lines as they need."""
    parts = [Text.assemble((f"{name} ", "dim"), (f"{value:.4g}", "bold")) for name, value in scene.metrics.items()]
    spark = sparkline(scene.losses, max(width // 4, 8))
    if spark and parts:
        parts[0] = Text.assemble(parts[0], " ", (spark, "blue"))
    speed, _, unit = rates_text(scene).partition(" ")
    parts += [Text.assemble((speed, "bold"), (f" {unit}", "dim"))] if speed else []
    return Text("   ").join(parts)


def _peers(scene: Scene, max_rows: int, *, wide: bool) -> Table:
    stages = scene.stages
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("peer", no_wrap=True)
    table.add_column("role", no_wrap=True, style="dim")
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column("queue", justify="right", no_wrap=True)
    table.add_column("done", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    fastest = max((row.peer.samples_per_s for rows in stages for row in rows), default=0.0)
    for index, rows in enumerate(stages):
        name = stage_name(scene, index).removeprefix("stage ")
        shown = rows if len(rows) <= max_rows else rows[: max_rows - 1]
        for number, row in enumerate(shown):
            table.add_row(name if number == 0 else "", *_cells(row, scene.status, fastest, wide=wide))
        if not rows:
            table.add_row(name, Text("nobody", "bold red"))
        if len(shown) < len(rows):
            table.add_row("", Text(f"and {len(rows) - len(shown)} more", "dim"))
    return table


def _cells(row: PeerRow, status: SwarmStatus, fastest: float, *, wide: bool) -> list[RenderableType]:
    peer, style = row.peer, _STATE_STYLES[row.state]
    roles = ["trains"] if peer.peer_id in status.trainers else []
    roles += ["coordinates" if wide else "coord."] if peer.peer_id == status.coordinator else []
    state = Text(f"● {row.state}", style)
    if row.state == "gone":
        done = Text(str(peer.num_microbatches), "dim")
        return [Text(short_name(peer.peer_id), "dim strike"), "", "", "", "", done, state]
    bar = ProgressBar(total=fastest or 1.0, completed=peer.samples_per_s, complete_style=style, finished_style=style)
    return [
        Text(short_name(peer.peer_id), "bold"),
        ", ".join(roles),
        # In a run that is not cut, servers serve without a rate, because each trainer computes the whole model.
        f"{peer.samples_per_s:.0f}" if peer.samples_per_s or row.state != "serving" else "",
        bar,
        str(peer.queued),
        str(peer.num_microbatches),
        state,
    ]


def _events(events: Sequence[Event]) -> Table:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for event in events:
        table.add_row(
            time_of_day(event),
            Text(short_name(event.peer) if event.peer is not None else "", "bold"),
            Text(WORDS[event.kind], _EVENT_STYLES.get(event.kind, "yellow")),
            location_text(event),
            Text(reason_text(event)),
        )
    return table
