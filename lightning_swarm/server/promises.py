"""Promises of servers of a served model to stay, without which no server leaves its stages for others. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from lightning_swarm.network import PeerId

_MAX_PEERS: Final = 1024


class Promises:
    """What one server has promised to servers that are about to leave, and whether it leaves itself.

    A server leaves its stages only while another one of each of them has promised to stay, and while it has promised
    nothing itself. So the last two servers of a stage never leave it together, however old their views of each other.
    """

    def __init__(self) -> None:
        self.is_leaving = False
        self._until_s: dict[PeerId, float] = {}  # by whom it was asked

    def give(self, peer: PeerId, stages: Collection[int], here: Collection[int], *, now_s: float, for_s: float) -> bool:
        """Promise a peer to stay at some of the stages that are here; returns whether it is promised.

        A newer promise to the same peer takes the place of the older one. With no stages it is only taken back.
        """
        self._until_s = {one: until_s for one, until_s in self._until_s.items() if until_s > now_s and one != peer}
        if not stages or self.is_leaving or not set(stages) <= set(here) or len(self._until_s) >= _MAX_PEERS:
            return False
        self._until_s[peer] = now_s + for_s
        return True

    def begin_leaving(self, now_s: float) -> bool:
        """Promise nothing from now on; returns whether nothing is promised, so that it may ask others."""
        if self.is_leaving or any(until_s > now_s for until_s in self._until_s.values()):
            return False
        self.is_leaving = True
        return True

    def stay(self) -> None:
        """Note that the server is where it is to stay."""
        self.is_leaving = False
