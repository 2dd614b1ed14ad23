"""What a closing that met a fault does next: who gives up a sum, what is computed again and by whom, who is to blame.

Pure: what servers said goes in, a decision comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_swarm.network import PeerId
from lightning_swarm.types.calls import Receipt


@dataclass(frozen=True)
class Sum:
    """What the sum of one stage on one server holds.

    Args:
        held: For each receipt that counts in this stage, whether it is in it.
        num_unnamed: Receipts beside those.
    """

    held: Sequence[bool]
    num_unnamed: int


@dataclass(frozen=True)
class Plan:
    """What is to be done until each receipt is in one sum of each stage that trains.

    Args:
        named: For each stage and each of its servers, the receipts that count in it and are this server's to hold.
        discards: For each stage, the servers whose sum holds others, too: they begin it anew.
        holes: For each receipt that some stage lacks, by stage, who shall add it.
        lost: Batches (the positions of their first samples) that lack what nobody can compute again.
    """

    named: Sequence[Mapping[PeerId, Sequence[bool]]]
    discards: Sequence[Sequence[PeerId]]
    holes: Mapping[Receipt, Mapping[int, PeerId]]
    lost: Collection[int]

    @property
    def done(self) -> bool:
        """Whether the sums are what the step counts."""
        return not (self.holes or self.lost or any(self.discards))


def plan_replays(
    expected: Sequence[Sequence[Receipt]],
    sums: Sequence[Mapping[PeerId, Sum]],
    *,
    first_trained: int,
    replayable: Sequence[bool],
    barred: Mapping[int, Collection[PeerId]],
) -> Plan:
    """Name one holder for each receipt and stage, so that little is computed again.

    A sum is one number for all that is in it: who holds a receipt that is not its own begins anew. Of those that
    hold the same receipt, whoever holds the least does.

    Args:
        expected: For each stage, the receipts that count in it, in order.
        sums: For each stage, what its servers hold, in the order of its roster; at least one server each.
        first_trained: No gradient goes to the stages before this one.
        replayable: For each stage, whether a microbatch can be sent there again.
        barred: By batch, servers that its trainer does not reach.
    """
    named: list[dict[PeerId, list[bool]]] = []
    discards: list[list[PeerId]] = []
    holes: dict[Receipt, dict[int, PeerId]] = {}
    lost: set[int] = set()
    for index, (receipts, stage) in enumerate(zip(expected, sums, strict=True)):
        trains = index >= first_trained
        dirty = _dirty(stage, trains=trains)
        held = {peer: [False] * len(receipts) if peer in dirty else list(one.held) for peer, one in stage.items()}
        missing = [
            place for place in range(len(receipts)) if trains and not any(flags[place] for flags in held.values())
        ]
        if replayable[index]:
            for place, holder in _fill(held, receipts, missing, barred).items():
                holes.setdefault(receipts[place], {})[index] = holder
        lost |= {receipts[place][0] for place in missing if index not in holes.get(receipts[place], ())}
        named.append(held)
        discards.append(dirty)
    return Plan(named, discards, holes, lost)


def _fill(
    held: Mapping[PeerId, list[bool]],
    receipts: Sequence[Receipt],
    missing: Sequence[int],
    barred: Mapping[int, Collection[PeerId]],
) -> dict[int, PeerId]:
    """Have what is missing held by whoever holds the least of those that its trainer reaches; returns who, by place."""
    load = Counter({peer: sum(flags) for peer, flags in held.items()})
    holders = {}
    for place in missing:
        able = [peer for peer in held if peer not in barred.get(receipts[place][0], ())]
        if able:
            holders[place] = holder = min(able, key=lambda peer: load[peer])
            load[holder] += 1
            held[holder][place] = True
    return holders


def _dirty(stage: Mapping[PeerId, Sum], *, trains: bool) -> list[PeerId]:
    """Whose sum cannot be used."""
    if not trains:
        return [peer for peer, one in stage.items() if one.num_unnamed or any(one.held)]
    dirty = {peer for peer, one in stage.items() if one.num_unnamed}
    # Those that hold the most choose first.
    taken: set[int] = set()
    for peer in sorted(stage.keys() - dirty, key=lambda peer: (-sum(stage[peer].held), list(stage).index(peer))):
        places = {place for place, holds in enumerate(stage[peer].held) if holds}
        if places & taken:
            dirty.add(peer)
        else:
            taken |= places
    return [peer for peer in stage if peer in dirty]


def choose_blamed(
    rosters: Sequence[Sequence[PeerId]],
    failed: Collection[PeerId],
    unreached: Mapping[PeerId, Collection[PeerId]],
    *,
    spared: PeerId,
) -> list[PeerId]:
    """Without whom to repeat a round of averaging.

    Args:
        rosters: Of the round, for each stage.
        failed: Those that did not answer the coordinator.
        unreached: Whom the others did not reach, by who says so.
        spared: The coordinator: it asks, so it is not the one that is cut off.

    Returns:
        Those that did not answer. If all did, the one that most of the others of its stage did not reach; of two that
        do not reach each other, the later one in the roster. Nobody, if nobody was missed.
    """
    if failed:
        return sorted(failed)
    order = {peer: place for place, peer in enumerate(dict.fromkeys(peer for roster in rosters for peer in roster))}
    votes: Counter[PeerId] = Counter()
    for accuser, peers in unreached.items():
        for peer in peers:
            if peer != accuser and any(peer in roster and accuser in roster for roster in rosters):
                # Who does not reach the coordinator has it from the coordinator that it was wrong.
                votes[accuser if peer == spared else peer] += 1
    if not votes:
        return []
    return [max(votes, key=lambda peer: (votes[peer], order[peer]))]
