"""What the lead was told of the peers' counts of events: of a thousand peers only what is new, and not all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_swarm.network import PeerId
from lightning_swarm.types.events import Noted

MAX_NEWS: Final = 1000
"""Peers in one answer: with all kinds of events these are four hundred kilobytes."""


class Told:
    """By one coordinator. What its lead has is known when that asks from a later version on."""

    def __init__(self) -> None:
        self._version = -1  # from which the lead asked last
        self._known: dict[PeerId, Noted] = {}  # who was told of last comes last
        self._sent: dict[PeerId, Noted] = {}  # since; the answer may have been lost

    def news(self, noted: Mapping[PeerId, Noted], *, version: int) -> dict[PeerId, Noted]:
        """What of `noted` the lead is told now, which asks from `version` on. Counts only grow, so late is no harm."""
        if version != self._version:
            told_before = {peer: one for peer, one in self._known.items() if peer not in self._sent}
            self._known = {peer: one for peer, one in (told_before | self._sent).items() if peer in noted}
            self._version, self._sent = version, {}
        places = {peer: place for place, peer in enumerate(self._known)}
        new = [peer for peer, one in noted.items() if one.counts and self._known.get(peer) != one]
        new.sort(key=lambda peer: places.get(peer, -1))
        self._sent = {peer: noted[peer] for peer in new[:MAX_NEWS]}
        return dict(self._sent)
