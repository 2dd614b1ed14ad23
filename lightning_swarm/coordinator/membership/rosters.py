"""Decides the servers of each stage, the voters and the trainers, from one record to the next. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import UNSET

from lightning_swarm.coordinator.rebalancing.policy import StageRelease
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.keepers import may_decide
from lightning_swarm.protocol.messages.run import MAX_TRAINERS, Keepers, Member
from lightning_swarm.protocol.messages.step import Candidate

MAX_VOTERS: Final = 7  # more voters would slow down every decision, and rarely make one safer


def next_rosters(
    rosters: Sequence[Sequence[Member]],
    *,
    gone: Collection[PeerId] = (),
    leaving: Sequence[PeerId] = (),
    releases: Sequence[StageRelease] = (),
    newcomers: Sequence[Candidate] = (),
) -> list[list[Member]]:
    """Make the rosters that a record sets for the next step: members in their old order, then newcomers."""
    # A stage that lost all members has only newcomers, or no servers; such a record must not be proposed.
    staying = {member.peer_id for roster in rosters for member in roster} - set(gone)
    # Leaving peers are released in the order of their requests, each from all its stages at once. Each stage must keep
    # a member of the former roster, because newcomers have not applied a record yet. This also holds for `releases`, by
    # which a peer gives up one stage and stays in another.
    for peer in leaving:
        if peer in staying and not alone_in(rosters, peer, staying):
            staying.discard(peer)
    kept = [[member for member in roster if member.peer_id in staying] for roster in rosters]
    for release in releases:
        others = [member for member in kept[release.stage] if member.peer_id != release.peer]
        elsewhere = (member.peer_id for index, roster in enumerate(kept) if index != release.stage for member in roster)
        if others and release.peer in elsewhere:
            kept[release.stage] = others
    return [[*roster, *(new.member for new in newcomers if new.stage_index == i)] for i, roster in enumerate(kept)]


def alone_in(rosters: Sequence[Sequence[Member]], peer: PeerId, staying: Collection[PeerId]) -> list[int]:
    """Return the stages of `peer` that no other peer in `staying` holds."""
    others = set(staying) - {peer}
    holders = [{member.peer_id for member in roster} for roster in rosters]
    return [index for index, peers in enumerate(holders) if peer in peers and not peers & others]


def trainer_changes(
    trainers: Sequence[PeerId], *, lead: PeerId, leaving: Collection[PeerId], joining: Sequence[PeerId]
) -> tuple[list[PeerId], list[PeerId]]:
    """Return the trainers that the next step adds, in the order of requests, and the trainers that it removes."""
    # No record removes the lead; only failover replaces it.
    removed = [peer for peer in trainers if peer in leaving and peer != lead]
    room = MAX_TRAINERS - len(trainers) + len(removed)
    return [peer for peer in joining if peer not in trainers][:room], removed


def members_that_may_vote(
    rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool], keepers: Keepers = UNSET
) -> list[Member]:
    """Return the members that may vote: only servers of pipeline stages, or trainers if the run has no pipeline."""
    # If the run has `keepers`, only they may vote.
    pipeline = [roster for roster, is_local in zip(rosters, on_trainers, strict=True) if not is_local]
    members = dict.fromkeys(member for roster in pipeline or rosters for member in roster)
    return [member for member in members if may_decide(member.peer_id, keepers)]


def number_of_voters(num_members: int) -> int:
    """Return how many of the members vote: an odd number, or 0 without members."""
    return max(0, (min(num_members, MAX_VOTERS) + 1) // 2 * 2 - 1)


def choose_voters(
    rosters: Sequence[Sequence[Member]],
    on_trainers: Sequence[bool],
    voters: Sequence[Member],
    hosts: Mapping[PeerId, str],
    keepers: Keepers = UNSET,
) -> list[Member]:
    """Choose the voters on the next record: an odd number of eligible members, the present voters first."""
    members = members_that_may_vote(rosters, on_trainers, keepers)
    number = number_of_voters(len(members))
    chosen = [voter for voter in voters if voter in members][:number]
    others = [member for member in members if member not in chosen]
    while len(chosen) < number:  # prefer hosts with the fewest voters
        num_voters = Counter(hosts.get(member.peer_id, member.peer_id) for member in chosen)
        best = min(others, key=lambda member: num_voters[hosts.get(member.peer_id, member.peer_id)])
        others.remove(best)
        chosen.append(best)
    return chosen
