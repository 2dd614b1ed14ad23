"""Promises of servers to stay, so that no stage of a served model loses its last server. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from lightning_swarm.network import PeerId

_MAX_PEERS: Final = 1024  # most peers with a promise at the same time


class Promises:
    """The promises of one server to servers that want to leave, and whether it is leaving itself.

    A server leaves its stages only if another server of each stage has promised to stay, and if it has made no promise
    itself. So the last two servers of a stage never leave together, even if their views are outdated.
    """

    def __init__(self) -> None:
        self.is_leaving = False
        self._until_s: dict[PeerId, float] = {}  # peer that asked -> end of its promise

    def give(
        self, peer: PeerId, stages: Collection[int], served: Collection[int], *, now_s: float, for_s: float
    ) -> bool:
        """Promise a peer to stay at `stages`, if the server has all of them in `served`; return whether it is promised.

        A new promise to a peer replaces the old promise. Without stages, the old promise is only withdrawn.
        """
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now_s and key != peer}
        if not stages or self.is_leaving or not set(stages) <= set(served) or len(self._until_s) >= _MAX_PEERS:
            return False
        self._until_s[peer] = now_s + for_s
        return True

    def begin_leaving(self, now_s: float) -> bool:
        """Begin to leave, and promise nothing from now on; return False if a promise holds or the server is leaving."""
        if self.is_leaving or any(until_s > now_s for until_s in self._until_s.values()):
            return False
        self.is_leaving = True
        return True

    def stay(self) -> None:
        """End the attempt to leave, so that promises are made again."""
        self.is_leaving = False
