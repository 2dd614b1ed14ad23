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

MAX_VOTERS: Final = 7  # more would make every decision slower and few of them safer


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
    # Leaving peers are released in the order of requests, each from all its stages at once. Each stage must keep a
    # member of the former roster, because newcomers have not applied a record yet. The same holds if a peer gives up
    # one stage and stays in another.
    for peer in leaving:
        if peer in staying and not alone_in(rosters, peer, staying):
            staying.discard(peer)
    held = [[member for member in roster if member.peer_id in staying] for roster in rosters]
    for one in releases:
        others = [member for member in held[one.stage] if member.peer_id != one.peer]
        elsewhere = (member.peer_id for index, roster in enumerate(held) if index != one.stage for member in roster)
        if others and one.peer in elsewhere:
            held[one.stage] = others
    return [
        [*roster, *(one.member for one in newcomers if one.stage_index == index)] for index, roster in enumerate(held)
    ]


def alone_in(rosters: Sequence[Sequence[Member]], peer: PeerId, staying: Collection[PeerId]) -> list[int]:
    """Return the stages of `peer` that no other peer in `staying` holds."""
    held = [{member.peer_id for member in roster} for roster in rosters]
    return [index for index, peers in enumerate(held) if peer in peers and not peers & (set(staying) - {peer})]


def trainer_changes(
    trainers: Sequence[PeerId], *, lead: PeerId, leaving: Collection[PeerId], joining: Sequence[PeerId]
) -> tuple[list[PeerId], list[PeerId]]:
    """Return the trainers that the next step adds, in the order of requests, and the trainers that it removes."""
    # No record removes the lead; only failover replaces it.
    removed = [one for one in trainers if one in leaving and one != lead]
    room = MAX_TRAINERS - len(trainers) + len(removed)
    return [one for one in joining if one not in trainers][:room], removed


def members_that_may_vote(
    rosters: Sequence[Sequence[Member]], is_on_trainers: Sequence[bool], keepers: Keepers = UNSET
) -> list[Member]:
    """Return the members that may vote: the pipeline's servers, or all if there is none; only keepers, if any."""
    servers = [roster for roster, is_own in zip(rosters, is_on_trainers, strict=True) if not is_own] or rosters
    members = dict.fromkeys(member for roster in servers for member in roster)
    return [member for member in members if may_decide(member.peer_id, keepers)]


def number_of_voters(num_members: int) -> int:
    """Return how many of the members vote: an odd number, or 0 without members."""
    return max(0, (min(num_members, MAX_VOTERS) + 1) // 2 * 2 - 1)


def choose_voters(
    rosters: Sequence[Sequence[Member]],
    is_on_trainers: Sequence[bool],
    voters: Sequence[Member],
    hosts: Mapping[PeerId, str],
    keepers: Keepers = UNSET,
) -> list[Member]:
    """Choose the voters on the next record: an odd number of the members that may vote."""
    members = members_that_may_vote(rosters, is_on_trainers, keepers)
    number = number_of_voters(len(members))
    chosen = [voter for voter in voters if voter in members][:number]  # present voters stay, as far as there is room
    others = [member for member in members if member not in chosen]  # hosts with the fewest votes come first
    while len(chosen) < number:
        there = Counter(hosts.get(member.peer_id, member.peer_id) for member in chosen)
        best = min(others, key=lambda member: there[hosts.get(member.peer_id, member.peer_id)])
        others.remove(best)
        chosen.append(best)
    return chosen
