"""Draws the stages of servers that join an audited run: who could choose would gather with its accomplices in one."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from lightning_swarm.network import PeerId

_MANY: Final = 3  # servers that a stage has, if one more in another stage is as much needed

lots = random.SystemRandom()


class StageLots:
    """Draws for each server one order of the stages, and knows which of them it may ask for."""

    def __init__(self) -> None:
        self._secret = lots.randbytes(32)
        # Those that a server was in, was drawn for, or was told to move to.
        self._known: defaultdict[PeerId, set[int]] = defaultdict(set)

    def know(self, peer: PeerId, stage_index: int) -> None:
        """Note that a server is in a stage, or was told to move to it."""
        self._known[peer].add(stage_index)

    def may_choose(self, peer: PeerId, stage_index: int) -> bool:
        """Tell whether a server may have the stage that it asks for."""
        return stage_index in self._known.get(peer, ())

    def draw(self, peer: PeerId, num_servers: Sequence[int]) -> int:
        """Return the first stage in a server's order of those that need one most; `num_servers` of each stage."""
        least = min(num_servers)
        needy = [index for index, number in enumerate(num_servers) if number <= least + (least >= _MANY)]
        # The same each time, or who comes again and again would get the one that it wants.
        drawn = min(needy, key=lambda index: blake3(self._secret + f"{peer}/{index}".encode()).digest())
        self.know(peer, drawn)
        return drawn
