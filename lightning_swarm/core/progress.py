"""The progress of a long wait, as a user sees it: its present state and, for a download, the bytes so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning_swarm.core.readable import size_text

_FIRST_PAUSE_S: Final = 10.0  # between the first two lines about one state; doubles each time
_LAST_PAUSE_S: Final = 300.0


@dataclass(frozen=True)
class Progress:
    """The present state of a wait."""

    state: str
    detail: str = ""
    num_bytes: int = 0  # bytes downloaded so far
    total_bytes: int = 0  # 0: the state is no download

    def __str__(self) -> str:
        detail = f"{size_text(self.num_bytes)} of {size_text(self.total_bytes)}" if self.total_bytes else self.detail
        return f"{self.state}: {detail}" if detail else self.state


# Receives lines, which stay on the terminal, and the states between them.
Report: TypeAlias = Callable[[str | Progress], None]


class ProgressLines:
    """Reports lines and progress as lines: each new state at once, then its progress after growing pauses."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._state = ""
        self._due_s = 0.0  # time of the next line about this state
        self._pause_s = 0.0

    def __call__(self, news: str | Progress) -> None:
        """Write a line, or a progress that is due."""
        at_s = time.monotonic()
        if isinstance(news, Progress):
            if news.state != self._state:
                self._state, self._pause_s = news.state, _FIRST_PAUSE_S
            elif at_s < self._due_s:
                return
            else:
                self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            self._due_s = at_s + self._pause_s
        self._write(f"{news}." if isinstance(news, Progress) else news)
