"""Counts the peers that came to a run by each invitation. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import UnsetType

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Permit
from lightning_swarm.protocol.messages.run import InvitedBy, UsedInvitation
from lightning_swarm.protocol.messages.step import Record

# Largest number of peers of all invitations together. A `RunView` lists them twice, within `MAX_CALL_BYTES`.
MAX_COUNTED: Final = 4096

Used = Sequence[UsedInvitation] | UnsetType  # unset: the run needs no invitations


def invited_by(permit: Permit) -> InvitedBy:
    """Return the invitation from which a peer's permit comes."""
    return InvitedBy(number=permit.invitation, uses=permit.uses)


def used_after(used: Iterable[UsedInvitation], invited: Mapping[PeerId, InvitedBy]) -> list[UsedInvitation]:
    """Return the used invitations after some peers came. A peer that used its invitation before adds no use."""
    found = {one.number: one for one in used}
    for peer, by in invited.items():
        known = found.get(by.number) or UsedInvitation(number=by.number, uses=by.uses, peers=[])
        if peer not in known.peers:
            known = UsedInvitation(number=known.number, uses=known.uses, peers=[*known.peers, peer])
        found[by.number] = known
    return list(found.values())


def has_come(used: Iterable[UsedInvitation], peer: PeerId) -> bool:
    """Return whether a peer came to the run before, by any invitation."""
    return any(peer in one.peers for one in used)


def is_full(used: Collection[UsedInvitation]) -> bool:
    """Return whether a run can count no more peers. Departed peers count as well, because they may return."""
    return sum(len(one.peers) for one in used) >= MAX_COUNTED


def has_room(used: Collection[UsedInvitation], peer: PeerId, by: InvitedBy) -> bool:
    """Return whether a peer may use an invitation: it used it before, or there is room for another use."""
    known = next((one for one in used if one.number == by.number), None)
    if known is not None and peer in known.peers:
        return True
    return not is_full(used) and (known is None or len(known.peers) < known.uses)


def check_used(used: Used) -> None:
    """Raise `ProtocolError` if an invitation has more peers than uses, or a peer or an invitation is listed twice."""
    if isinstance(used, UnsetType):
        return
    if len({one.number for one in used}) != len(used):
        raise ProtocolError("each invitation is counted once")
    for one in used:
        if len(one.peers) > one.uses or len(set(one.peers)) != len(one.peers):
            raise ProtocolError(
                f"invitation {one.number.hex()} has {one.uses} uses, one for each peer; "
                f"{len(one.peers)} peers are counted (some perhaps twice), the last is {one.peers[-1]}"
            )


def check_invited(used: Used, record: Record) -> None:
    """Raise `ProtocolError` unless a record names the invitations of its new members, and of no other peers."""
    invited = {} if isinstance(record.invited, UnsetType) else record.invited
    members = {*record.enlisted, *(one.member.peer_id for one in record.newcomers)}
    expected = set() if isinstance(used, UnsetType) else members
    known = {} if isinstance(used, UnsetType) else {one.number: one.uses for one in used}
    for peer, by in invited.items():
        if known.get(by.number, by.uses) != by.uses:
            raise ProtocolError(
                f"invitation {by.number.hex()}, by which {peer} comes, has {known[by.number]} uses; record "
                f"{record.step} says {by.uses}"
            )
    if invited.keys() != expected:
        raise ProtocolError(
            f"record {record.step} must name the invitation of each of its {len(expected)} new members, and of nobody "
            f"else; it names those of {len(invited)} peers; the first difference is {min(invited.keys() ^ expected)}"
        )
