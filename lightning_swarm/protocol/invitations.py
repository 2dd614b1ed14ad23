"""The peers that used each invitation of a run, and the checks of these uses. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec import UnsetType

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Permit
from lightning_swarm.protocol.messages.run import InvitedBy, UsedInvitation
from lightning_swarm.protocol.messages.step import Record

# Most peers of all invitations together, because a `RunView` lists them twice, within `MAX_CALL_BYTES`.
MAX_COUNTED: Final = 4096

Used = Sequence[UsedInvitation] | UnsetType  # unset: the run needs no invitations


def invited_by(permit: Permit) -> InvitedBy:
    """Return the invitation from which a peer's permit comes."""
    return InvitedBy(number=permit.invitation, uses=permit.uses)


def used_after(used: Iterable[UsedInvitation], invited: Mapping[PeerId, InvitedBy]) -> list[UsedInvitation]:
    """Return the used invitations after some peers came. A peer that used its invitation before adds no use."""
    by_number = {invitation.number: invitation for invitation in used}
    for peer, by in invited.items():
        known = by_number.get(by.number) or UsedInvitation(number=by.number, uses=by.uses, peers=[])
        if peer not in known.peers:
            known = UsedInvitation(number=known.number, uses=known.uses, peers=[*known.peers, peer])
        by_number[by.number] = known
    return list(by_number.values())


def came_before(used: Iterable[UsedInvitation], peer: PeerId) -> bool:
    """Return whether a peer came to the run before, by any invitation."""
    return any(peer in invitation.peers for invitation in used)


def is_full(used: Collection[UsedInvitation]) -> bool:
    """Return whether a run can count no more peers. Departed peers count as well, because they may return."""
    return sum(len(invitation.peers) for invitation in used) >= MAX_COUNTED


def has_room(used: Collection[UsedInvitation], peer: PeerId, by: InvitedBy) -> bool:
    """Return whether a peer may use an invitation: the peer used it before, or it has a use left."""
    known = next((invitation for invitation in used if invitation.number == by.number), None)
    if known is not None and peer in known.peers:
        return True
    return not is_full(used) and (known is None or len(known.peers) < known.uses)


def check_used(used: Used) -> None:
    """Raise `ProtocolError` if an invitation has more peers than uses, or a peer or an invitation is listed twice."""
    if isinstance(used, UnsetType):
        return
    if len({invitation.number for invitation in used}) != len(used):
        raise ProtocolError(
            f"a list of {len(used)} used invitations must name each invitation once, got some repeatedly"
        )
    for invitation in used:
        peers = invitation.peers
        if len(peers) > invitation.uses or len(set(peers)) != len(peers):
            raise ProtocolError(
                f"invitation {invitation.number.hex()} must have at most {invitation.uses} distinct peers, got "
                f"{len(peers)} in all and {len(set(peers))} distinct; the last is {peers[-1]}"
            )


def check_invited(used: Used, record: Record) -> None:
    """Raise `ProtocolError` unless a record names the invitations of its new members, and of no other peers."""
    invited = {} if isinstance(record.invited, UnsetType) else record.invited
    members = {*record.enlisted, *(newcomer.member.peer_id for newcomer in record.newcomers)}
    expected = set() if isinstance(used, UnsetType) else members
    known = {} if isinstance(used, UnsetType) else {invitation.number: invitation.uses for invitation in used}
    for peer, by in invited.items():
        if known.get(by.number, by.uses) != by.uses:
            raise ProtocolError(
                f"record {record.step} must repeat the uses of an invitation known before: {peer} uses "
                f"{by.number.hex()}, which has {known[by.number]} uses, got {by.uses}"
            )
    if invited.keys() != expected:
        raise ProtocolError(
            f"record {record.step} must name the invitation of each of its {len(expected)} new members, and of no "
            f"other peer; it names those of {len(invited)} peers; the first difference is "
            f"{min(invited.keys() ^ expected)}"
        )
