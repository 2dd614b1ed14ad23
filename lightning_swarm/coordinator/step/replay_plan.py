"""Plans the repair of a closing step: the sums to discard, the microbatches to replay, the servers to blame. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from lightning_swarm.coordinator.rebalancing.balancer import ReportedLoad
from lightning_swarm.core.errors import StepError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Origin, Receipt, unpack, unpack_origins
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import FreezeReply, NamedReceipts, StageLedger
from lightning_swarm.protocol.messages.wire import union


@dataclass(frozen=True)
class ServerLedger:
    """A server's ledger of one stage, as reported."""

    report: StageLedger
    held: set[Receipt]  # the microbatches that the report names
    origins: dict[int, Origin]  # place of a batch -> its origin, as received by the server

    @classmethod
    def of(cls, report: StageLedger) -> ServerLedger:
        """Unpack a report; raise ProtocolError if it has too many receipts, or origins of other batches."""
        held = unpack(report.held)
        return cls(report, held, unpack_origins(report.origins, {first for first, _, _ in held}))

    def with_tensors(self, other: ServerLedger | None) -> ServerLedger:
        """Return this ledger with the hashes of each tensor, if the server reported them later, on request."""
        if other is None:
            return self
        return dataclasses.replace(self, report=msgspec.structs.replace(self.report, tensors=other.report.tensors))

    @property
    def batches(self) -> set[int]:
        """Places of the batches in the sum."""
        return set(self.origins)

    def spoilt(self, granted: Mapping[int, Origin]) -> set[int]:
        """Return places of batches that the sum holds with another weight, or from another trainer, than granted."""
        return {first for first, origin in self.origins.items() if granted.get(first, origin) != origin}

    def misweighed(self, granted: Mapping[int, Origin]) -> set[int]:
        """Return places of batches that the sum holds from the right trainer, but with another weight than granted."""
        return {first for first in self.spoilt(granted) if granted[first].trainer == self.origins[first].trainer}


Ledgers: TypeAlias = list[dict[Member, ServerLedger]]
"""For each stage, the ledgers of its present members, in the roster's order."""


def read_ledger(reply: FreezeReply, member: Member, stage_index: int) -> ServerLedger:
    """Read a member's ledger of its stage; raise StepError if there is none, or ProtocolError if it is malformed."""
    if reply.boot_id != member.boot_id:
        raise StepError(f"peer {member.peer_id} was restarted: its sums are gone")
    for ledger in reply.ledgers:
        if ledger.stage_index == stage_index:
            return ServerLedger.of(ledger)
    raise StepError(f"peer {member.peer_id} holds no ledger of stage {stage_index}")


def named_receipts(ledgers: Ledgers) -> dict[PeerId, list[NamedReceipts]]:
    """Return the receipts that each server holds, for each of its stages."""
    named_by_server: dict[PeerId, list[NamedReceipts]] = {}
    for index, stage in enumerate(ledgers):
        for member, ledger in stage.items():
            report = ledger.report
            named = NamedReceipts(stage_index=index, receipts=report.held, origins=report.origins)
            named_by_server.setdefault(member.peer_id, []).append(named)
    return named_by_server


def reported_loads(ledgers: Ledgers) -> dict[PeerId, dict[int, ReportedLoad]]:
    """Return the load that each server reported: server -> stage -> load."""
    loads: dict[PeerId, dict[int, ReportedLoad]] = {}
    for index, stage in enumerate(ledgers):
        for member, ledger in stage.items():
            report = ledger.report
            load = ReportedLoad.from_report(
                report.samples_per_s, report.queued, report.busy_share, lacks_memory=report.lacks_memory
            )
            loads.setdefault(member.peer_id, {})[index] = load
    return loads


def touched_parameters(ledgers: Collection[ServerLedger]) -> bytes:
    """Return the union of the replicas' bitmaps of parameters with a gradient; raise StepError if lengths differ."""
    bitmaps = [ledger.report.touched for ledger in ledgers]
    if len(set(map(len, bitmaps))) != 1:
        raise StepError("the replicas of a stage disagree on its number of parameters")
    return union(bitmaps)


@dataclass(frozen=True)
class ReplayPlan:
    """The work left until each receipt is in one sum of each stage that trains."""

    named: Sequence[Mapping[PeerId, AbstractSet[Receipt]]]  # stage -> server -> receipts that it must hold
    discards: Sequence[Sequence[PeerId]]  # stage -> servers whose sums are unusable and begin anew
    holes: Mapping[Receipt, Mapping[int, PeerId]]  # missing receipt -> stage -> server that must add it
    lost: Collection[int]  # places of batches with missing receipts that cannot be replayed

    @property
    def done(self) -> bool:
        """Return whether the sums hold exactly the receipts that the step counts."""
        return not (self.holes or self.lost or any(self.discards))


def plan_replays(
    expected: Sequence[Sequence[Receipt]],  # stage -> counted receipts `(batch's place, index, call)`, in order
    sums: Sequence[Mapping[PeerId, AbstractSet[Receipt]]],  # stage -> receipts of each server, in its roster's order
    *,
    first_trained: int,  # the first stage that gets gradients
    replayable: Sequence[bool],  # stage -> whether a microbatch can be sent there again
    barred: Mapping[int, Collection[PeerId]],  # place of a batch -> servers that must not get its replays
    spoilt: Sequence[Collection[PeerId]],  # stage -> servers whose sum has another weight or trainer than granted
) -> ReplayPlan:
    """Choose one holder for each receipt in each stage, with few replays."""
    # No receipt can be removed from a sum, so a sum with a wrong receipt begins anew. If two sums of a stage have a
    # receipt in common, the sum with fewer receipts begins anew.
    named: list[dict[PeerId, set[Receipt]]] = []
    discards: list[list[PeerId]] = []
    holes: dict[Receipt, dict[int, PeerId]] = {}
    lost: set[int] = set()
    for index, (receipts, stage, wrong) in enumerate(zip(expected, sums, spoilt, strict=True)):
        trains = index >= first_trained
        unusable = _unusable(stage, frozenset(receipts) if trains else frozenset(), wrong)
        held = {peer: set[Receipt]() if peer in unusable else set(own) for peer, own in stage.items()}
        present = set[Receipt]().union(*held.values())
        missing = [receipt for receipt in receipts if trains and receipt not in present]
        if replayable[index]:
            for receipt, holder in _fill(held, missing, barred).items():
                holes.setdefault(receipt, {})[index] = holder
        lost |= {receipt[0] for receipt in missing if index not in holes.get(receipt, ())}
        named.append(held)
        discards.append(unusable)
    return ReplayPlan(named, discards, holes, lost)


def _fill(
    held: Mapping[PeerId, set[Receipt]], missing: Sequence[Receipt], barred: Mapping[int, Collection[PeerId]]
) -> dict[Receipt, PeerId]:
    """Assign each missing receipt to the server with the fewest receipts among the servers that may hold it."""
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
    """Return the servers whose sums hold wrong receipts or gradients, or receipts that a larger sum also holds."""
    unusable = {peer for peer, held in stage.items() if peer in spoilt or not held <= counted}
    # The largest sums come first; among equals, the sort keeps the roster's order.
    taken: set[Receipt] = set()
    for peer in sorted((peer for peer in stage if peer not in unusable), key=lambda peer: -len(stage[peer])):
        if taken.isdisjoint(stage[peer]):
            taken |= stage[peer]
        else:
            unusable.add(peer)
    return [peer for peer in stage if peer in unusable]


def choose_blamed(
    rosters: Sequence[Sequence[PeerId]],  # stage -> servers of the round
    failed: Collection[PeerId],  # servers that did not answer the coordinator
    unreached: Mapping[PeerId, Collection[PeerId]],  # server -> servers that it reports as unreached or silent
    *,
    spared: PeerId,  # the coordinator, which is never blamed, because it reaches the servers
    has_strangers: bool = False,  # a report by a single server blames that server, too
    trusted: Collection[PeerId] = (),  # servers whose reports are believed
) -> list[PeerId]:
    """Choose the servers to exclude when a round of averaging is repeated; none if all were reached."""
    if failed:
        return sorted(failed)
    order = {peer: index for index, peer in enumerate(dict.fromkeys(peer for roster in rosters for peer in roster))}
    accusers_of: dict[PeerId, set[PeerId]] = {}
    for accuser, peers in unreached.items():
        for peer in peers:
            if peer != accuser and any(peer in roster and accuser in roster for roster in rosters):
                # A report against the coordinator counts as the coordinator's report against its sender.
                accused, reporter = (accuser, peer) if peer == spared else (peer, accuser)
                accusers_of.setdefault(accused, set()).add(reporter)
    if not accusers_of:
        return []
    # The server that most members of its stage did not reach; if two report each other, the later one in the roster.
    blamed = max(accusers_of, key=lambda peer: (len(accusers_of[peer]), order[peer]))
    accusers = accusers_of[blamed]
    if not has_strangers or len(accusers) > 1 or not accusers.isdisjoint({spared, *trusted}):
        return [blamed]
    if blamed in trusted and not _would_be_empty(rosters, accusers):  # then its single accuser is excluded
        return sorted(accusers)
    # Exclude both servers, if the stage has a third one. If only the accused server were excluded, one malicious server
    # could have all other servers of its stage excluded, and then no server would contradict it.
    return [blamed] if _would_be_empty(rosters, {blamed, *accusers}) else sorted({blamed, *accusers})


def _would_be_empty(rosters: Sequence[Sequence[PeerId]], without: Collection[PeerId]) -> bool:
    """Return whether a stage has no server left without these servers."""
    return any(roster and all(peer in without for peer in roster) for roster in rosters)
