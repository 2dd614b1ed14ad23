"""Assigns joining strangers to random stages, so that colluders cannot gather in one stage."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from blake3 import blake3

from lightning_swarm.network import PeerId

_MANY: Final = 3  # from this number of servers on, one server more makes a stage no less needy


class StageLots:
    """Ranks the stages at random for each server, and decides which stages it may request."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._known: defaultdict[PeerId, set[int]] = defaultdict(set)  # server -> its present, former and next stages
        # Server -> stage of its newest draw. Older draws are dropped, so that it cannot choose among several.
        self._drawn: dict[PeerId, int] = {}
        self._holders: defaultdict[bytes, list[PeerId]] = defaultdict(list)  # invitation -> server of each ranking

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
        invitation: bytes | None = None,  # number of the server's invitation
        waiting: Collection[PeerId] = (),  # servers that are joining
    ) -> int:
        """Return the first stage in a server's ranking, among the stages that need a server most."""
        least = min(num_servers)
        needy = [index for index, number in enumerate(num_servers) if number <= least + (least >= _MANY)]
        # A server's ranking stays the same, or it could join again and again until it gets the stage that it wants.
        name = peer if invitation is None else f"{invitation.hex()}/{self._ranking_index(peer, invitation, waiting)}"
        drawn = min(needy, key=lambda index: blake3(self._secret + f"{name}/{index}".encode()).digest())
        self._drawn[peer] = drawn
        return drawn

    def _ranking_index(self, peer: PeerId, invitation: bytes, waiting: Collection[PeerId]) -> int:
        """Return the index of a server's ranking among its invitation's: that of an absent peer, or a new one.

        New peer ids cost nothing. If each got a new ranking, an invited user could try ids until the stage suits.
        """
        holders = self._holders[invitation]
        if peer not in holders:
            absent = [holder for holder in holders if holder not in waiting and holder not in self._known]
            if absent:
                holders[holders.index(absent[0])] = peer
                self._drawn.pop(absent[0], None)
            else:
                holders.append(peer)
        return holders.index(peer)
