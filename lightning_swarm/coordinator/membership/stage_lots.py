"""Assigns joining strangers to random stages, so that colluders cannot gather in one stage."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from blake3 import blake3

from lightning_swarm.network import PeerId

_MANY: Final = 3  # servers per stage from which one server more makes no difference


class StageLots:
    """Draws one order of the stages for each server, and decides which stages it may request."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._known: defaultdict[PeerId, set[int]] = defaultdict(set)  # server -> stages, current, former or as a mover
        self._drawn: dict[PeerId, int] = {}  # server -> its newest draw only: it must not collect draws to choose from
        self._holders: defaultdict[bytes, list[PeerId]] = defaultdict(list)  # invitation -> holders of its orders

    def record_stage(self, peer: PeerId, stage_index: int) -> None:
        """Record that a server is in a stage, or is to move to it."""
        self._known[peer].add(stage_index)

    def may_choose(self, peer: PeerId, stage_index: int) -> bool:
        """Return whether a server may have the stage that it requests."""
        return stage_index in self._known.get(peer, ()) or self._drawn.get(peer) == stage_index

    def draw(
        self,
        peer: PeerId,
        num_servers: Sequence[int],  # stage -> number of its servers
        *,
        invitation: bytes | None = None,  # number of the invitation by which the server comes
        waiting: Collection[PeerId] = (),  # servers that are joining
    ) -> int:
        """Return the first stage in a server's order, among the stages that need a server most."""
        least = min(num_servers)
        needy = [index for index, number in enumerate(num_servers) if number <= least + (least >= _MANY)]
        # The order is the same each time, or a server could come again until it gets the stage that it wants.
        whose = peer if invitation is None else f"{invitation.hex()}/{self._place(peer, invitation, waiting)}"
        drawn = min(needy, key=lambda index: blake3(self._secret + f"{whose}/{index}".encode()).digest())
        self._drawn[peer] = drawn
        return drawn

    def _place(self, peer: PeerId, invitation: bytes, waiting: Collection[PeerId]) -> int:
        """Return the index of a server's order among its invitation's: an absent peer's order, or a new one.

        New ids cost nothing, so an invitation's holder could otherwise try one after the other until the stage suits.
        """
        holders = self._holders[invitation]
        if peer not in holders:
            free = [one for one in holders if one not in waiting and one not in self._known]
            if free:
                holders[holders.index(free[0])] = peer
                self._drawn.pop(free[0], None)
            else:
                holders.append(peer)
        return holders.index(peer)
