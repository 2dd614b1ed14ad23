"""The sums of one step as its audits read them: ledgers and claims of all servers, and their kinds of machines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_swarm.coordinator.audit.disputes import ClaimedWork
from lightning_swarm.coordinator.audit.policy import Unit, WorkClaim
from lightning_swarm.coordinator.step.replay_plan import ServerLedger
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt


@dataclass(frozen=True)
class ExaminedStep:
    """The sums of all servers at one closing of a step."""

    ledgers: Mapping[Unit, ServerLedger]
    claims: Mapping[Unit, Mapping[Receipt, WorkClaim]]  # ordered as each server added them
    arithmetic: Mapping[PeerId, str]  # server -> its kind of machine
    round: int
    unrepeatable: Collection[str] = ()  # kinds of machines that compute other bits each time

    def auditors_of(self, unit: Unit, without: Collection[PeerId]) -> list[PeerId]:
        """Return the other servers of a unit's stage, except servers in `without`."""
        return [
            one.peer
            for one in self.ledgers
            if one.stage_index == unit.stage_index and one.peer != unit.peer and one.peer not in without
        ]

    def batches_of(self, peer: PeerId) -> set[int]:
        """Return the places of the batches with a microbatch that a server computed."""
        return {first for unit, claims in self.claims.items() if unit.peer == peer for first, _, _ in claims}

    def sharing_with(self, units: Collection[Unit]) -> set[Unit]:
        """Return the units that computed microbatches of these units at other stages than one of them."""
        stages = {unit.stage_index for unit in units}
        receipts = {receipt for unit in units for receipt in self.claims[unit]}
        return {
            unit
            for unit, claims in self.claims.items()
            if stages - {unit.stage_index} and not receipts.isdisjoint(claims)
        }

    def claimed_work(self, unit: Unit) -> ClaimedWork:
        """Return a server's commitment to its work."""
        ledger = self.ledgers[unit]
        report = ledger.report
        return ClaimedWork(self.claims[unit], ledger.origins, report.sum_digest or b"", report.touched)

    def differ(self, one: PeerId, other: PeerId) -> bool:
        """Return whether two servers' machines are of different kinds, or of a kind that does not repeat its bits."""
        kind = self.arithmetic.get(one)
        return kind != self.arithmetic.get(other) or kind in self.unrepeatable
