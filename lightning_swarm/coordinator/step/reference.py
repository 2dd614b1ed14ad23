"""Chooses the weights that a stage keeps if its replicas differ, and the servers to exclude. Pure.

Replicas with equal bits form a group, and one group is the stage's reference: the largest group. Among equally large
groups, it is the one whose shared weights most servers of other stages confirm, else the one with the oldest server.
Rosters list the oldest server first. The bits of a trusted server are the reference in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning_swarm.coordinator.step.replay_plan import Ledgers, ServerLedger
from lightning_swarm.core.errors import StepError, SwarmError
from lightning_swarm.core.readable import shorten
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Manifest, Member
from lightning_swarm.protocol.messages.step import MAX_DIFFERENCE

_MAX_NAMED: Final = 5  # tensors that an error names
_TIE: Final = "The largest groups of replicas are equally large, so the right one is unknown: the oldest is kept. "
_CAUSES: Final = (
    "Possible causes: a block writes to weights or buffers in its forward (as an embedding with `max_norm` does), or "
    "reads a clock, a file or its own random generator; faulty memory; another version of torch, whose optimizer "
    "computes differently."
)

_Stage: TypeAlias = Mapping[Member, ServerLedger]
_Bits: TypeAlias = tuple[int | None, frozenset[tuple[str, int]]]
"""Hash of a replica (None: not computed), and (name, hash) of each weight that it shares with other stages."""


class WeightsDiffer(StepError):
    """A server's weights, buffers or optimizer state differ from its stage's reference."""


def replicas_differ(ledgers: Ledgers, *, tied: bool) -> bool:
    """Return whether replicas of a stage differ or, if weights are `tied`, shared weights of different stages."""
    return any(map(_differs, ledgers)) or (tied and bool(_with_other_shared_weights(ledgers, (), ())))


def choose_excluded(
    ledgers: Ledgers,  # with a hash of each tensor, so that errors can name the tensors
    *,
    guests: Collection[PeerId] = (),  # members whose weights were never compared; they vote only in a stage of guests
    trusted: Sequence[PeerId] = (),  # in each stage, the first of these servers is the reference
    tied: bool = False,  # stages share weights, whose hashes are in the ledgers
) -> dict[PeerId, WeightsDiffer]:
    """Choose servers of one stage whose replicas differ or, if none differ, of stages whose `tied` weights do."""
    chosen = [
        _choose(index, ledgers, guests=guests, trusted=trusted, tied=tied)
        for index, stage in enumerate(ledgers)
        if _differs(stage)
    ]
    if chosen:
        # A tie is decided last, because excluding servers in another stage may resolve it.
        first = min(chosen, key=lambda choice: choice.is_tie)
        return first.errors(ledgers[first.stage])
    return _with_other_shared_weights(ledgers, guests, trusted) if tied else {}


def check_lead_kept(manifest: Manifest, excluded: Mapping[PeerId, WeightsDiffer]) -> None:
    """Raise the lead's error, if the lead is to be excluded and holds the whole model itself."""
    # Other trainers cannot begin the next epoch without the lead, and the lead needs their record to join again.
    if manifest.is_whole and (error := excluded.get(manifest.lead)) is not None:
        raise WeightsDiffer(f"{error} This is the lead's own copy: resume from a checkpoint on another machine.")


def _bits(ledger: ServerLedger) -> _Bits:
    """Return the hash that a replica reports of its state, and the hashes of its shared weights."""
    return ledger.report.version_hash, frozenset((ledger.report.tied or {}).items())


def _differs(stage: _Stage) -> bool:
    """Return whether a stage's replicas differ; a replica without a hash differs from any other."""
    groups = {_bits(ledger) for ledger in stage.values()}
    return len(groups) > 1 or (len(stage) > 1 and any(replica_hash is None for replica_hash, _ in groups))


@dataclass(frozen=True)
class _Choice:
    """The reference of one stage, and the reason for it."""

    stage: int
    kept: Member  # the reference's trusted server, else its oldest
    holders: str  # the servers that hold the reference, described for errors
    is_tie: bool = False  # another group is as large and as well confirmed

    def errors(self, stage: _Stage) -> dict[PeerId, WeightsDiffer]:
        """Return an error for each server that does not have the reference's bits."""
        kept = stage[self.kept]
        differing = {
            member.peer_id: ledger
            for member, ledger in stage.items()
            if member != self.kept and (_bits(ledger) != _bits(kept) or _bits(ledger)[0] is None)
        }
        remark = _TIE if self.is_tie else ""
        return {
            peer: WeightsDiffer(
                f"stage {self.stage}: the weights, buffers and optimizer state of {peer} "
                f"differ{_differing_tensors([kept, ledger])} from those of {self.holders}. {remark}{_CAUSES}"
            )
            for peer, ledger in differing.items()
        }


def _choose(
    index: int, ledgers: Ledgers, *, guests: Collection[PeerId], trusted: Sequence[PeerId], tied: bool
) -> _Choice:
    """Choose the reference of a stage whose replicas differ."""
    stage = ledgers[index]
    voting = _voting(stage, guests)
    by_peer = {member.peer_id: member for member in stage}
    group_of = {
        member: [voter for voter in voting if voter == member or _bits(stage[voter]) == _bits(stage[member])]
        for member in stage
    }
    arbiter = next((by_peer[peer] for peer in trusted if peer in by_peer), None)
    if arbiter is not None:
        number = sum(_bits(ledger) == _bits(stage[arbiter]) for ledger in stage.values())
        agreeing = f"{number} of {len(stage)} replicas agree with it"
        return _Choice(index, arbiter, f"{arbiter.peer_id}, which this run trusts ({agreeing})")

    def strength(member: Member) -> tuple[bool, int, int]:
        has_hash = stage[member].report.version_hash is not None
        size = len(group_of[member]) if has_hash else 1
        return has_hash, size, _num_confirming(index, member, ledgers) if tied else 0

    kept = max(voting, key=strength)  # among equals the first, which is the oldest
    number = len(group_of[kept])
    if 2 * number > len(voting):
        guests_left = f", without {len(stage) - len(voting)} that just joined" if len(voting) < len(stage) else ""
        return _Choice(index, kept, f"{number} of {len(voting)} replicas{guests_left}")
    if any(member not in group_of[kept] and strength(member) == strength(kept) for member in voting):
        return _Choice(index, kept, f"{kept.peer_id}, which has been in the stage longest", is_tie=True)
    return _Choice(index, kept, f"{number} of {len(voting)} replicas, the largest group")


def _voting(stage: _Stage, guests: Collection[PeerId]) -> list[Member]:
    """Return the servers that count in a majority: all but guests, or all if there are only guests."""
    return [member for member in stage if member.peer_id not in guests] or list(stage)


def _num_confirming(index: int, member: Member, ledgers: Ledgers) -> int:
    """Count the servers of other stages whose shared weights equal a server's."""
    tied = ledgers[index][member].report.tied or {}
    other_stages = (stage for other, stage in enumerate(ledgers) if other != index)
    return sum(_agree(tied, ledger.report.tied or {}) for stage in other_stages for ledger in stage.values())


def _agree(some: Mapping[str, int], others: Mapping[str, int]) -> bool:
    """Return whether two servers share weights, and all shared weights are equal."""
    shared = some.keys() & others.keys()
    return bool(shared) and all(some[name] == others[name] for name in shared)


def _with_other_shared_weights(
    ledgers: Ledgers, guests: Collection[PeerId], trusted: Sequence[PeerId]
) -> dict[PeerId, WeightsDiffer]:
    """Return an error for each server of a stage whose shared weights differ from a higher-ranked stage's."""
    # Called only if the replicas of each stage agree, so the first replica has the hashes of its stage.
    tied = [next((ledger.report.tied or {} for ledger in stage.values()), {}) for stage in ledgers]
    num_voting = [len(_voting(stage, guests)) for stage in ledgers]

    def rank(index: int) -> tuple[int, int, int]:
        """Return a key that sorts trusted servers' stages first, then stages whose weights most servers confirm."""
        peers = {member.peer_id for member in ledgers[index]}
        trusted_rank = next((rank for rank, peer in enumerate(trusted) if peer in peers), len(trusted))
        confirming = [stage for stage in range(len(ledgers)) if stage == index or _agree(tied[index], tied[stage])]
        return trusted_rank, -sum(num_voting[stage] for stage in confirming), index

    kept: dict[str, tuple[int, int]] = {}  # name of a shared weight -> its hash, stage that has it
    errors: dict[PeerId, WeightsDiffer] = {}
    for index in sorted(range(len(ledgers)), key=rank):
        hashes = tied[index]
        differing = sorted(name for name in hashes if name in kept and kept[name][0] != hashes[name])
        if not differing:
            kept |= {name: (hashes[name], index) for name in hashes if name not in kept}
        for member in ledgers[index] if differing else ():
            errors[member.peer_id] = WeightsDiffer(
                f"stage {index}: {_listed(differing)} of {member.peer_id} differ from those of stage "
                f"{kept[differing[0]][1]}, which shares them and is kept. {_CAUSES}"
            )
    return errors


def _differing_tensors(ledgers: Sequence[ServerLedger]) -> str:
    """Name the tensors that differ, if the servers reported a hash of each."""
    reported = [ledger.report.tensors or {} for ledger in ledgers]
    differing = sorted(name for name in set().union(*reported) if len({hashes.get(name) for hashes in reported}) > 1)
    return f" in {_listed(differing)}" if differing else ""


def _listed(names: Sequence[str]) -> str:
    omitted = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(map(repr, names[:_MAX_NAMED]))}{omitted}"


def differences(gone: Mapping[PeerId, SwarmError]) -> dict[PeerId, str]:
    """Return the servers excluded for differing weights, each with a description for the record."""
    return {
        peer: shorten(str(error))[:MAX_DIFFERENCE] for peer, error in gone.items() if isinstance(error, WeightsDiffer)
    }
