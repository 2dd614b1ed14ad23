"""Decides how long a peer may take: a multiple of what its work usually takes. Pure: durations in, deadlines out.

Nothing is late before something was measured: a first step may compile, load or allocate. The limits of the run hold
then, as they hold for all waits.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

LEAST_S: Final = 4.0
"""No peer is late earlier: other work on its machine, or a garbage collection, may have held it up."""

UNFAMILIAR_S: Final = 30.0
"""No peer is late earlier with a shape that is new to it: it may have to compile something for that."""

TIMES: Final = 8.0
"""A peer is late when it takes so many times as long as usual."""

_KEPT: Final = 32  # newest durations
_MOST_STRETCHED: Final = 2.0**20  # beyond all limits
_ENOUGH: Final = 3  # durations from which a usual one follows


def deadline_s(usual_s: float, *, longest_s: float, least_s: float = LEAST_S) -> float:
    """Return how long work may take that usually takes `usual_s`."""
    return min(max(least_s, TIMES * usual_s), longest_s)


@dataclass
class Durations:
    """Durations of one kind of work, by whichever peers. A share of the peers may report false ones: see the median."""

    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _stretch: float = 1.0

    def note(self, took_s: float) -> None:
        """Add a duration; work is as long as usual again."""
        self._newest.append(took_s)
        self._stretch = 1.0

    def note_late(self) -> None:
        """Double the next deadlines, for all peers may have become slower at once."""
        self._stretch = min(2.0 * self._stretch, _MOST_STRETCHED)

    @property
    def usual_s(self) -> float | None:
        """The median of the newest durations; None until enough was measured."""
        return statistics.median(self._newest) if len(self._newest) >= _ENOUGH else None

    def deadline_s(self, *, longest_s: float) -> float:
        """Return how long such work may take; `longest_s` until enough was measured."""
        usual_s = self.usual_s
        if usual_s is None:
            return longest_s
        return min(deadline_s(usual_s, longest_s=longest_s) * self._stretch, longest_s)
