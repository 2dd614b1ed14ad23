"""How fast a swarm changes, and so for how long a gain lasts. Pure: it is told the time."""

from __future__ import annotations

import math
from typing import Final

_FEWEST: Final = 0.01
"""Changes that are thought of as remembered, however long nothing happens."""


class Pace:
    """For how long a swarm stays as it is, on the average: what it was like in the last hours counts.

    Args:
        now_s: On the caller's clock.
        first_s: What is thought until more is known.
        memory_s: After that time what was counts a third.
    """

    def __init__(self, now_s: float, *, first_s: float = 600.0, memory_s: float = 7200.0) -> None:
        self._now_s = now_s
        self._past_s = first_s
        self._num_changes = 1.0
        self._memory_s = memory_s

    def note_change(self, now_s: float) -> None:
        """Peers came, went or changed their rates; several at a time are one change."""
        self._advance(now_s)
        self._num_changes += 1.0

    def horizon_s(self, now_s: float) -> float:
        """Between two changes, on the average."""
        self._advance(now_s)
        return self._past_s / max(self._num_changes, _FEWEST)

    def _advance(self, now_s: float) -> None:
        kept = math.exp((self._now_s - now_s) / self._memory_s)
        self._past_s = kept * self._past_s + (1.0 - kept) * self._memory_s
        self._num_changes *= kept
        self._now_s = now_s
