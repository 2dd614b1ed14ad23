"""Decides what a closing that met a fault does next: which sums begin anew, what is computed again, who is to blame.

Pure: what servers reported goes in, a decision comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec import UnsetType

from lightning_swarm.coordinator.rebalancing.balancer import ReportedLoad
from lightning_swarm.core.errors import StepError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Origin, Receipt, unpack, unpack_origins
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import FreezeReply, NamedReceipts, StageLedger
from lightning_swarm.protocol.messages.wire import union


@dataclass(frozen=True)
class ServerLedger:
    """A server's ledger of one stage, as it reported it."""

    report: StageLedger
    held: set[Receipt]  # the microbatches that the report names
    origins: dict[int, Origin]  # of their batches, by place, as the server had them

    @classmethod
    def of(cls, report: StageLedger) -> ServerLedger:
        """Unpack a report; raises ProtocolError if it names too much, or origins of other batches."""
        held = unpack(report.held)
        return cls(report, held, unpack_origins(report.origins, {first for first, _, _ in held}))

    def with_tensors(self, other: ServerLedger | None) -> ServerLedger:
        """Return the ledger with the hashes of each tensor of a later one, if there is one."""
        if other is None:
            return self
        return dataclasses.replace(self, report=msgspec.structs.replace(self.report, tensors=other.report.tensors))

    @property
    def batches(self) -> set[int]:
        """Places of the batches of which the sum holds something."""
        return set(self.origins)

    def spoilt(self, granted: Mapping[int, Origin]) -> set[int]:
        """Places of the granted batches that the sum holds with another weight, or from another trainer."""
        return {first for first, origin in self.origins.items() if granted.get(first, origin) != origin}

    def misweighed(self, granted: Mapping[int, Origin]) -> set[int]:
        """Places of the granted batches that the sum holds from their trainers with another weight."""
        return {first for first in self.spoilt(granted) if granted[first].trainer == self.origins[first].trainer}


Ledgers: TypeAlias = list[dict[Member, ServerLedger]]
"""For each stage, the ledgers of those of its roster that are there, in the roster's order."""


def read_ledger(reply: FreezeReply, member: Member, stage_index: int) -> ServerLedger:
    """Read a member's ledger of its stage.

    Raises StepError if its sums are gone or it reports none of this stage, ProtocolError if it reports too much.
    """
    if reply.boot_id != member.boot_id:
        raise StepError(f"peer {member.peer_id} was restarted: its sums are gone")
    for ledger in reply.ledgers:
        if ledger.stage_index == stage_index:
            return ServerLedger.of(ledger)
    raise StepError(f"peer {member.peer_id} holds no ledger of stage {stage_index}")


def sum_digests(ledgers: Ledgers) -> dict[PeerId, dict[int, bytes]]:
    """Digests of the sums that servers committed to, by server and stage."""
    found: dict[PeerId, dict[int, bytes]] = {}
    for index, stage in enumerate(ledgers):
        for member, ledger in stage.items():
            if not isinstance(ledger.report.sum_digest, UnsetType):
                found.setdefault(member.peer_id, {})[index] = ledger.report.sum_digest
    return found


def named_receipts(ledgers: Ledgers) -> dict[PeerId, list[NamedReceipts]]:
    """Name what each server holds, for each of its stages."""
    found: dict[PeerId, list[NamedReceipts]] = {}
    for index, stage in enumerate(ledgers):
        for member, ledger in stage.items():
            report = ledger.report
            named = NamedReceipts(stage_index=index, receipts=report.held, origins=report.origins)
            found.setdefault(member.peer_id, []).append(named)
    return found


def reported_loads(ledgers: Ledgers) -> dict[PeerId, dict[int, ReportedLoad]]:
    """Collect how busy each server was, by stage."""
    found: dict[PeerId, dict[int, ReportedLoad]] = {}
    for index, stage in enumerate(ledgers):
        for member, ledger in stage.items():
            report = ledger.report
            load = ReportedLoad.from_report(
                report.samples_per_s, report.queued, report.busy_share, lacks_memory=report.lacks_memory
            )
            found.setdefault(member.peer_id, {})[index] = load
    return found


def touched_parameters(ledgers: Collection[ServerLedger]) -> bytes:
    """Join the replicas' bitmaps over a stage's parameters: which got a gradient.

    Raises StepError if the replicas do not have the same parameters.
    """
    bitmaps = [ledger.report.touched for ledger in ledgers]
    if len(set(map(len, bitmaps))) != 1:
        raise StepError("the replicas of a stage disagree on its number of parameters")
    return union(bitmaps)


@dataclass(frozen=True)
class ReplayPlan:
    """The work left until each receipt is in one sum of each stage that trains."""

    named: Sequence[Mapping[PeerId, AbstractSet[Receipt]]]  # by stage and server, the receipts that this one shall hold
    discards: Sequence[Sequence[PeerId]]  # by stage, the servers whose sum holds others, too: they begin it anew
    holes: Mapping[Receipt, Mapping[int, PeerId]]  # for each receipt that some stage lacks, by stage, who shall add it
    lost: Collection[int]  # places of batches that lack what nobody can compute again

    @property
    def done(self) -> bool:
        """Return whether the sums are what the step counts."""
        return not (self.holes or self.lost or any(self.discards))


def plan_replays(
    expected: Sequence[Sequence[Receipt]],
    sums: Sequence[Mapping[PeerId, AbstractSet[Receipt]]],
    *,
    first_trained: int,
    replayable: Sequence[bool],
    barred: Mapping[int, Collection[PeerId]],
    spoilt: Sequence[Collection[PeerId]],
) -> ReplayPlan:
    """Name one holder for each receipt and stage, so that little is computed again.

    A sum is one number for all that is in it: a server that holds a receipt that is not its own begins anew. Of those
    that hold the same receipt, the one that holds the least begins anew.

    Args:
        expected: For each stage, the receipts that count in it, in order.
        sums: For each stage, all that its servers hold, in the order of its roster; at least one server each.
        first_trained: No gradient goes to the stages before this one.
        replayable: For each stage, whether a microbatch can be sent there again.
        barred: By batch, servers that its trainer does not reach.
        spoilt: For each stage, servers whose sum holds something with another weight than was granted, or from
            another trainer.
    """
    named: list[dict[PeerId, set[Receipt]]] = []
    discards: list[list[PeerId]] = []
    holes: dict[Receipt, dict[int, PeerId]] = {}
    lost: set[int] = set()
    for index, (receipts, stage, wrong) in enumerate(zip(expected, sums, spoilt, strict=True)):
        trains = index >= first_trained
        dirty = _unusable(stage, frozenset(receipts) if trains else frozenset(), wrong)
        held = {peer: set[Receipt]() if peer in dirty else set(one) for peer, one in stage.items()}
        there = set[Receipt]().union(*held.values())
        missing = [receipt for receipt in receipts if trains and receipt not in there]
        if replayable[index]:
            for receipt, holder in _fill(held, missing, barred).items():
                holes.setdefault(receipt, {})[index] = holder
        lost |= {receipt[0] for receipt in missing if index not in holes.get(receipt, ())}
        named.append(held)
        discards.append(dirty)
    return ReplayPlan(named, discards, holes, lost)


def _fill(
    held: Mapping[PeerId, set[Receipt]], missing: Sequence[Receipt], barred: Mapping[int, Collection[PeerId]]
) -> dict[Receipt, PeerId]:
    """Give each missing receipt to the server that holds the least of those that its trainer reaches."""
    holders = {}
    for receipt in missing:
        able = [peer for peer in held if peer not in barred.get(receipt[0], ())]
        if able:
            holders[receipt] = holder = min(able, key=lambda peer: len(held[peer]))
            held[holder].add(receipt)
    return holders


def _unusable(
    stage: Mapping[PeerId, AbstractSet[Receipt]], counted: AbstractSet[Receipt], spoilt: Collection[PeerId]
) -> list[PeerId]:
    """The servers whose sum cannot be used."""
    dirty = {peer for peer, held in stage.items() if peer in spoilt or not held <= counted}
    # Those that hold the most choose first; the sort keeps the roster's order.
    taken: set[Receipt] = set()
    for peer in sorted((peer for peer in stage if peer not in dirty), key=lambda peer: -len(stage[peer])):
        if taken.isdisjoint(stage[peer]):
            taken |= stage[peer]
        else:
            dirty.add(peer)
    return [peer for peer in stage if peer in dirty]


def choose_blamed(
    rosters: Sequence[Sequence[PeerId]],
    failed: Collection[PeerId],
    unreached: Mapping[PeerId, Collection[PeerId]],
    *,
    spared: PeerId,
    is_audited: bool = False,
    believed: Collection[PeerId] = (),
) -> list[PeerId]:
    """Choose the servers to leave out when a round of averaging is repeated.

    Args:
        rosters: Of the round, for each stage.
        failed: Those that did not answer the coordinator.
        unreached: Whom the others did not reach, or got nothing from, by who says so.
        spared: The coordinator: it asks, so it is not the one that is cut off.
        is_audited: One server's word costs no other its place, but for both of them.
        believed: In audited runs, those whose word weighs more than that of one other server.

    Returns:
        Those that did not answer. If all did, the one that most of the others of its stage did not reach; of two that
        do not reach each other, the later one in the roster; in audited runs both, or the one that is not believed.
        Nobody, if nobody was missed.
    """
    if failed:
        return sorted(failed)
    order = {peer: place for place, peer in enumerate(dict.fromkeys(peer for roster in rosters for peer in roster))}
    against: dict[PeerId, set[PeerId]] = {}
    for accuser, peers in unreached.items():
        for peer in peers:
            if peer != accuser and any(peer in roster and accuser in roster for roster in rosters):
                # Who does not reach the coordinator has it from the coordinator that it was wrong.
                blamed, by = (accuser, peer) if peer == spared else (peer, accuser)
                against.setdefault(blamed, set()).add(by)
    if not against:
        return []
    blamed = max(against, key=lambda peer: (len(against[peer]), order[peer]))
    accusers = against[blamed]
    if not is_audited or len(accusers) > 1 or not accusers.isdisjoint({spared, *believed}):
        return [blamed]
    if blamed in believed and not _would_be_empty(rosters, accusers):
        return sorted(accusers)
    # Else one that lies could have all others of its stage left out, and would be believed about it then.
    return [blamed] if _would_be_empty(rosters, {blamed, *accusers}) else sorted({blamed, *accusers})


def _would_be_empty(rosters: Sequence[Sequence[PeerId]], without: Collection[PeerId]) -> bool:
    """Tell whether a stage has nobody left without some servers."""
    return any(roster and all(peer in without for peer in roster) for roster in rosters)
