"""Draws the stages of servers that join an audited run: who could choose would gather with its accomplices in one."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from blake3 import blake3

from lightning_swarm.network import PeerId

_MANY: Final = 3  # servers that a stage has, if one more in another stage is as much needed


class StageLots:
    """Draws for each server one order of the stages, and knows which of them it may ask for."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._known: defaultdict[PeerId, set[int]] = defaultdict(set)  # those that a server was in, or was to move to
        self._drawn: dict[PeerId, int] = {}  # the newest draw; with those before, it could wait until it may choose
        self._holders: defaultdict[bytes, list[PeerId]] = defaultdict(list)  # of each invitation's orders

    def know(self, peer: PeerId, stage_index: int) -> None:
        """Note that a server is in a stage, or was told to move to it."""
        self._known[peer].add(stage_index)

    def may_choose(self, peer: PeerId, stage_index: int) -> bool:
        """Tell whether a server may have the stage that it asks for."""
        return stage_index in self._known.get(peer, ()) or self._drawn.get(peer) == stage_index

    def draw(
        self,
        peer: PeerId,
        num_servers: Sequence[int],
        *,
        invitation: bytes | None = None,
        waiting: Collection[PeerId] = (),
    ) -> int:
        """Return the first stage in a server's order of those that need one most.

        Args:
            peer: The server.
            num_servers: Of each stage.
            invitation: The number of the one by which it comes.
            waiting: Who else is joining.
        """
        least = min(num_servers)
        needy = [index for index, number in enumerate(num_servers) if number <= least + (least >= _MANY)]
        # The same each time, or who comes again and again would get the one that it wants.
        whose = peer if invitation is None else f"{invitation.hex()}/{self._place(peer, invitation, waiting)}"
        drawn = min(needy, key=lambda index: blake3(self._secret + f"{whose}/{index}".encode()).digest())
        self._drawn[peer] = drawn
        return drawn

    def _place(self, peer: PeerId, invitation: bytes, waiting: Collection[PeerId]) -> int:
        """Return which of its invitation's orders a server has: that of a peer that did not come, or a new one.

        Names cost nothing: who holds an invitation could else come under one after the other, until it likes the stage.
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
