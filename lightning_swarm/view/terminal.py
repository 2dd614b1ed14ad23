"""A panel that stays at the bottom of the terminal while lines go by above it. Whoever imports this needs rich."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment


class Terminal:
    """Shows what `render` returns, until it is closed.

    Args:
        console: Where.
        render: Called some times a second, on a thread of its own.
        on_failure: Called there with what `render`, or what it returned, raised. It must not print.
        refresh_per_second: How often.
    """

    def __init__(
        self,
        console: Console,
        render: Callable[[], RenderableType],
        on_failure: Callable[[Exception], None],
        *,
        refresh_per_second: float,
    ) -> None:
        self._live = Live(
            _Careful(render, on_failure),
            console=console,
            refresh_per_second=refresh_per_second,
            vertical_overflow="crop",
        )
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def open(self) -> None:
        """Take the terminal's last lines. What is printed or logged from now on stands above them."""
        before = {id(sys.stdout), id(sys.stderr)}
        # However the process ends, it leaves a cursor.
        atexit.register(self.close)
        self._live.start(refresh=True)
        for handler in _stream_handlers():
            if id(handler.stream) in before:
                # It has kept the stream, whose place the panel's own has taken since.
                self._handlers.append((handler, handler.setStream(sys.stderr)))

    def close(self) -> None:
        """Give them back. The panel's last picture stays."""
        atexit.unregister(self.close)
        handlers, self._handlers = self._handlers, []
        for handler, stream in handlers:
            handler.setStream(stream)
        self._live.stop()


class _Careful:
    """An exception would end the panel's thread, and the panel would stand still."""

    def __init__(self, render: Callable[[], RenderableType], on_failure: Callable[[Exception], None]) -> None:
        self._render = render
        self._on_failure = on_failure

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        try:
            segments = list(console.render(self._render(), options))
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            self._on_failure(error)
            segments = [Segment("The view failed; the run goes on.\n")]
        yield from segments


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    for logger in loggers:
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:
                yield handler
