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

MOST_SLOWER: Final = 4.0
"""A peer of a run with strangers is waited for as if it took at most so many times as long as others."""

_KEPT: Final = 32  # newest durations
_MOST_STRETCHED: Final = 2.0**20  # beyond all limits
_SHORTEST_S: Final = 1e-9
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

    def deadline_s(self, *, longest_s: float, times_slower: float = 1.0) -> float:
        """Return how long such work may take, if a peer is slower than others; `longest_s` until it was measured."""
        usual_s = self.usual_s
        if usual_s is None:
            return longest_s
        return min(deadline_s(usual_s * times_slower, longest_s=longest_s) * self._stretch, longest_s)

    def times_slower(self, own: Durations) -> float:
        """Return how many times as long as others a peer takes, by its own durations, within the believed bounds."""
        # Nothing is known of a new one. It may hold more weights than others, or compute slower.
        if self.usual_s is None or own.usual_s is None:
            return MOST_SLOWER
        return min(max(own.usual_s / max(self.usual_s, _SHORTEST_S), 1.0), MOST_SLOWER)
