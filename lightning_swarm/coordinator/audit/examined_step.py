"""One closing of a step, as its audits read it.

A `Unit` is one server's work in one stage. For each unit, its server has reported a ledger and claims. The ledger names
the microbatches in its sum, and commits to the sum. The claims are digests of each microbatch's inputs and results.
"""

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
    """The reports of all servers at one closing of a step, and the kinds of their machines."""

    ledgers: Mapping[Unit, ServerLedger]
    claims: Mapping[Unit, Mapping[Receipt, WorkClaim]]  # ordered as each server added them
    machine_kinds: Mapping[PeerId, str]  # server -> kind of its machine
    round: int  # number of the averaging round to which the reports belong
    unrepeatable: Collection[str] = ()  # kinds of machines that compute different bits each time

    def auditors_of(self, unit: Unit, without: Collection[PeerId]) -> list[PeerId]:
        """Return the other servers of a unit's stage, except servers in `without`."""
        peers = [other.peer for other in self.ledgers if other.stage_index == unit.stage_index]
        return [peer for peer in peers if peer != unit.peer and peer not in without]

    def batches_of(self, peer: PeerId) -> set[int]:
        """Return the places of the batches with a microbatch that a server computed."""
        return {first for unit, claims in self.claims.items() if unit.peer == peer for first, _, _ in claims}

    def sharing_with(self, units: Collection[Unit]) -> set[Unit]:
        """Return the units of other stages that computed the same microbatches as one of these units."""
        # If these units are of several stages, the result may include some of them.
        stages = {unit.stage_index for unit in units}
        receipts = {receipt for unit in units for receipt in self.claims[unit]}
        return {
            unit
            for unit, claims in self.claims.items()
            if stages - {unit.stage_index} and not receipts.isdisjoint(claims)
        }

    def claimed_work(self, unit: Unit) -> ClaimedWork:
        """Return all that a server claims about a unit."""
        ledger = self.ledgers[unit]
        report = ledger.report
        return ClaimedWork(self.claims[unit], ledger.origins, report.sum_digest or b"", report.touched)

    def needs_tolerance(self, server: PeerId, auditor: PeerId) -> bool:
        """Return whether two honest servers may compute different bits: the machines' kinds differ or do not repeat."""
        kind = self.machine_kinds.get(server)
        return kind != self.machine_kinds.get(auditor) or kind in self.unrepeatable
