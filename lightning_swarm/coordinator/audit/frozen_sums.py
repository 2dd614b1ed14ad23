"""Checks that frozen sums change only as the coordinator ordered, by the ledgers that servers report in a step."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Final

from lightning_swarm.coordinator.step.replay_plan import ReplayPlan
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt

_NOTHING: Final = frozenset[Receipt]()


# If two sums hold the same microbatch, the smaller sum is discarded, and a server is excluded after too many discards.
# Without these checks, a server could report another sum at each freeze, and have all others of its stage excluded.
class FrozenSums:
    """The possible contents of one step's sums after their freeze, in a run with strangers."""

    def __init__(self) -> None:
        # (server, stage) -> receipts that the sum must hold, receipts that it may hold.
        self._bounds: dict[tuple[PeerId, int], tuple[AbstractSet[Receipt], AbstractSet[Receipt]]] = {}

    def record_ledger(self, peer: PeerId, stage_index: int, held: AbstractSet[Receipt]) -> None:
        """Record the receipts that a server reports for its sum; raise ProtocolError if they cannot be true."""
        least, most = self._bounds.get((peer, stage_index), (_NOTHING, held))
        if not least <= held <= most:
            raise ProtocolError(
                f"the frozen sum of stage {stage_index} on {peer} has {len(held - most)} microbatches that the "
                f"coordinator did not name, and lacks {len(least - held)} that it had"
            )
        self._bounds[peer, stage_index] = held, held

    def record_orders(self, plan: ReplayPlan, servers: Collection[PeerId]) -> None:
        """Record the receipts that servers are ordered to hold; sums in `plan.discards` begin anew."""
        for index, (named, discards) in enumerate(zip(plan.named, plan.discards, strict=True)):
            for peer in named.keys() & set(servers):
                least = _NOTHING if peer in discards else self._bounds[peer, index][0]
                self._bounds[peer, index] = least, least | named[peer]
