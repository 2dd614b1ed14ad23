"""Computes deadlines of peers, as a multiple of the usual duration of their work. Pure: durations in, deadlines out.

Until durations are measured, only the run's limits apply, because a first step may compile, load or allocate. Later
deadlines never exceed these limits.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

MIN_DEADLINE_S: Final = 4.0
"""The shortest deadline, because other work on a peer's machine or a garbage collection may delay it."""

MIN_UNFAMILIAR_S: Final = 30.0
"""The shortest deadline for inputs whose shape is new to a peer, because it may have to compile code."""

DEADLINE_FACTOR: Final = 8.0
"""A deadline is this multiple of the usual duration."""

MAX_SLOWDOWN: Final = 4.0
"""The largest multiple of the usual deadline that a slow peer gets in a run with untrusted peers."""

_MAX_KEPT: Final = 32  # newest durations that are kept
_MAX_STRETCH: Final = 2.0**20  # exceeds all limits, so larger values would change nothing
_MIN_DURATION_S: Final = 1e-9  # avoids a division by zero
_MIN_FOR_MEDIAN: Final = 3


def deadline_s(usual_s: float, *, longest_s: float, least_s: float = MIN_DEADLINE_S) -> float:
    """Return the seconds allowed for work that usually takes `usual_s`."""
    return min(max(least_s, DEADLINE_FACTOR * usual_s), longest_s)


@dataclass
class Durations:
    """Durations of one kind of work, over all peers. The median tolerates false reports from some of them."""

    # The median of the newest durations; None until enough were measured.
    usual_s: float | None = field(default=None, init=False)
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))
    _stretch: float = 1.0

    def add(self, took_s: float) -> None:
        """Add a duration, and reset the deadlines that `extend` has lengthened."""
        self._newest.append(took_s)
        if len(self._newest) >= _MIN_FOR_MEDIAN:
            self.usual_s = statistics.median(self._newest)
        self._stretch = 1.0

    def extend(self) -> None:
        """Double the next deadlines, because all peers may have become slower at once."""
        self._stretch = min(2.0 * self._stretch, _MAX_STRETCH)

    def deadline_s(self, *, longest_s: float, slowdown: float = 1.0) -> float:
        """Return the seconds allowed for a peer that takes `slowdown` times as long as usual."""
        usual_s = self.usual_s
        if usual_s is None:
            return longest_s
        return min(deadline_s(usual_s * slowdown, longest_s=longest_s) * self._stretch, longest_s)

    def slowdown(self, own: Durations) -> float:
        """Return the ratio of a peer's usual duration to all peers', between 1 and the maximum, which new peers get."""
        # A new peer's speed is unknown. It may hold more weights, or compute more slowly.
        if self.usual_s is None or own.usual_s is None:
            return MAX_SLOWDOWN
        return min(max(own.usual_s / max(self.usual_s, _MIN_DURATION_S), 1.0), MAX_SLOWDOWN)
