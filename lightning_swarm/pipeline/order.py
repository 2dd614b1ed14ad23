"""Peers kept in order, so that the first is found, and one put elsewhere, without a walk over all of them. Pure."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from lightning_swarm.network import PeerId


class Order:
    """Places and whose they are, the smallest first. Several may have the same place."""

    def __init__(self) -> None:
        self._places: list[tuple[float, PeerId]] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def first(self) -> tuple[float, PeerId] | None:
        """The smallest place, and who has it; None: nobody is in the order."""
        return self._places[0] if self._places else None

    def sort(self, places: Iterable[tuple[float, PeerId]]) -> None:
        """Begin anew with these."""
        self._places = sorted(places)

    def put(self, place: float, peer: PeerId) -> None:
        """Give a peer that is not in it a place."""
        insort(self._places, (place, peer))

    def remove(self, place: float, peer: PeerId) -> None:
        """Take a peer out. It has that place."""
        del self._places[bisect_left(self._places, (place, peer))]

    def draw(self, rng: random.Random, avoid: frozenset[PeerId]) -> PeerId | None:
        """One of those with the smallest place, by chance, of those that need not be avoided; None: all must be."""
        smallest = next((place for place, peer in self._places if peer not in avoid), None)
        if smallest is None:
            return None
        end = bisect_left(self._places, (math.nextafter(smallest, math.inf),))
        found: Sequence[int] = range(bisect_left(self._places, (smallest,)), end)
        if avoid:
            found = [index for index in found if self._places[index][1] not in avoid]
        return self._places[rng.choice(found)][1]
