"""Computes deadlines of peers, as a multiple of the usual duration of their work. Pure: durations in, deadlines out.

Until durations are measured, only the run's limits apply, because a first step may compile, load or allocate. These
limits bound all waits.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

LEAST_S: Final = 4.0
"""The shortest deadline, because other work on a peer's machine or a garbage collection may hold it up."""

UNFAMILIAR_S: Final = 30.0
"""The shortest deadline with a shape that is new to a peer, because it may have to compile for it."""

TIMES: Final = 8.0
"""A deadline is this multiple of the usual duration."""

MOST_SLOWER: Final = 4.0
"""A slow peer gets at most this multiple of the usual deadline in a run with untrusted peers."""

_KEPT: Final = 32  # newest durations
_MOST_STRETCHED: Final = 2.0**20  # beyond all limits
_SHORTEST_S: Final = 1e-9
_ENOUGH: Final = 3  # fewest durations for a median


def deadline_s(usual_s: float, *, longest_s: float, least_s: float = LEAST_S) -> float:
    """Return the seconds allowed for work that usually takes `usual_s`."""
    return min(max(least_s, TIMES * usual_s), longest_s)


@dataclass
class Durations:
    """Durations of one kind of work, over all peers. The median tolerates false reports from some of them."""

    # The median of the newest durations; None until enough was measured.
    usual_s: float | None = field(default=None, init=False)
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _stretch: float = 1.0

    def note(self, took_s: float) -> None:
        """Add a duration, and end the extension of deadlines by `note_late`."""
        self._newest.append(took_s)
        if len(self._newest) >= _ENOUGH:
            self.usual_s = statistics.median(self._newest)
        self._stretch = 1.0

    def note_late(self) -> None:
        """Double the next deadlines, because all peers may have become slower at once."""
        self._stretch = min(2.0 * self._stretch, _MOST_STRETCHED)

    def deadline_s(self, *, longest_s: float, times_slower: float = 1.0) -> float:
        """Return the seconds allowed for a peer `times_slower` than usual; `longest_s` until enough was measured."""
        usual_s = self.usual_s
        if usual_s is None:
            return longest_s
        return min(deadline_s(usual_s * times_slower, longest_s=longest_s) * self._stretch, longest_s)

    def times_slower(self, own: Durations) -> float:
        """Return a peer's usual duration relative to all peers', from 1 to `MOST_SLOWER`, the latter for a new peer."""
        # A new peer's speed is unknown. It may hold more weights, or compute more slowly.
        if self.usual_s is None or own.usual_s is None:
            return MOST_SLOWER
        return min(max(own.usual_s / max(self.usual_s, _SHORTEST_S), 1.0), MOST_SLOWER)
