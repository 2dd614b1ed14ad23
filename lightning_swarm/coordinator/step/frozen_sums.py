"""What frozen sums hold: nothing but what their servers said before, and were told to add since."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Final

from lightning_swarm.coordinator.step.replay_plan import ReplayPlan
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt

_NOTHING: Final = frozenset[Receipt]()


# Of two sums with one microbatch, the one that holds less begins anew, and whoever does so too often is left out. A
# server that said now this and now that could have all others of its stage left out.
class FrozenSums:
    """What the sums of one step hold since they were frozen, in an audited run."""

    def __init__(self) -> None:
        # By server and stage: what the sum holds in any case, and what it may hold.
        self._bounds: dict[tuple[PeerId, int], tuple[AbstractSet[Receipt], AbstractSet[Receipt]]] = {}

    def take(self, peer: PeerId, stage_index: int, held: AbstractSet[Receipt]) -> None:
        """Enter what a server says that its sum holds; raise ProtocolError if that cannot be."""
        least, most = self._bounds.get((peer, stage_index), (_NOTHING, held))
        if not least <= held <= most:
            raise ProtocolError(
                f"the frozen sum of stage {stage_index} on {peer} has come to hold {len(held - most)} microbatches "
                f"that nobody named, and has lost {len(least - held)}"
            )
        self._bounds[peer, stage_index] = held, held

    def order(self, plan: ReplayPlan, concerned: Collection[PeerId]) -> None:
        """Enter what servers are told to hold, some of which begin their sums anew."""
        for index, (named, discards) in enumerate(zip(plan.named, plan.discards, strict=True)):
            for peer in named.keys() & set(concerned):
                least = _NOTHING if peer in discards else self._bounds[peer, index][0]
                self._bounds[peer, index] = least, least | named[peer]
