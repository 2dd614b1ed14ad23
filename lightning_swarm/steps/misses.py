"""Rounds that joiners missed, and for how long who missed some may not join.

The time comes with each call, so it asks no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.network import PeerId

_MAX_MISSES: Final = 3
_MAX_MISSING: Final = 1024
_FIRST_EXCLUSION_S: Final = 5.0


@dataclass
class _Missed:
    count: int = 0
    until_s: float = 0.0  # it may not join before


@dataclass
class Misses:
    """Of each peer, however often it joined anew."""

    _missed: dict[PeerId, _Missed] = field(default_factory=dict)  # those with the latest miss last

    def add(self, peer: PeerId, *, now_s: float) -> None:
        """One more. After a few it may not join for a while, and with each further one for twice as long."""
        missed = self._missed[peer] = self._missed.pop(peer, _Missed())
        missed.count += 1
        if len(self._missed) > _MAX_MISSING:
            del self._missed[next(iter(self._missed))]
        if missed.count >= _MAX_MISSES:
            missed.until_s = now_s + _FIRST_EXCLUSION_S * 2 ** min(missed.count - _MAX_MISSES, 20)

    def count(self, peer: PeerId) -> int:
        """How many."""
        return self._missed.get(peer, _Missed()).count

    def wait_s(self, peer: PeerId, *, now_s: float) -> float:
        """In how many seconds it may join; not positive: it may."""
        return self._missed.get(peer, _Missed()).until_s - now_s

    def forget(self, peer: PeerId) -> None:
        """It is in."""
        self._missed.pop(peer, None)
