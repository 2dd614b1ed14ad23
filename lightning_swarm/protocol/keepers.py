"""The peers that decide in a run, and the peers that it excludes. Pure, except for look-ups of certificates.

Any server may vote, coordinate and lead, unless servers are strangers. Then only keepers may, and servers that did
false work are convicted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET, UnsetType

from lightning_swarm.core.errors import AccessDenied, ProtocolError, Untrusted
from lightning_swarm.core.readable import printable
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.access import Role
from lightning_swarm.protocol.messages.run import (
    MAX_CONVICTED,
    MAX_REASON,
    Conviction,
    Convictions,
    Keepers,
    Manifest,
    RunView,
    SeatedMembers,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.settings import RunSettings

ONLY_KEEPERS: Final = "in a run with strangers only keepers vote, coordinate and lead"

KEEPERS_REMEDY: Final = (
    f"{ONLY_KEEPERS}, and a majority of the voters must be alive: invite keepers with `lightning-swarm invite --role "
    "keeper`, until there are three or more"
)


def may_decide(peer: PeerId, keepers: Keepers) -> bool:
    """Return whether a peer may vote, coordinate and lead. Unset `keepers`: any server may."""
    return isinstance(keepers, UnsetType) or peer in keepers


def is_certified_keeper(transport: Transport, peer: PeerId) -> bool | None:
    """Return whether a peer's certificate is a keeper's; None: the peer has no certificate, as in runs without them."""
    permit = transport.permit_of(peer)
    return None if permit is None else permit.role.includes(Role.KEEPER)


def check_shown_by_keeper(transport: Transport, peer: PeerId, view: RunView) -> None:
    """Refuse a view of a run with strangers from a peer that is no keeper, because any peer could invent such a run."""
    if not view.manifest.settings.has_strangers:
        return
    if is_certified_keeper(transport, peer) is False or peer not in (view.seats.keepers or ()):
        raise Untrusted(
            f"only a keeper may show a run with strangers to joining peers, and {peer} is not among the run's keepers"
        )


def keepers_after(keepers: Keepers, new: Keepers) -> Keepers:
    """Return the keepers after a record that admits new keepers."""
    if isinstance(keepers, UnsetType) or isinstance(new, UnsetType):
        return keepers
    return [*keepers, *(peer for peer in new if peer not in keepers)]


def convictions(convicted: Mapping[PeerId, str]) -> Convictions:
    """Return convictions in their form on the wire; unset: there are none."""
    listed = [Conviction(peer=peer, reason=reason[:MAX_REASON]) for peer, reason in convicted.items()]
    return listed or UNSET


def convicted_after(known: Mapping[PeerId, str], new: Convictions) -> dict[PeerId, str]:
    """Merge convictions into peer -> reason, with each peer's first reason; keep the newest `MAX_CONVICTED` peers."""
    reasons = dict(known)
    for conviction in new or ():
        reasons.setdefault(conviction.peer, conviction.reason)
    return dict(list(reasons.items())[-MAX_CONVICTED:])


@dataclass(frozen=True)
class Electorate:
    """The peers that decide in a run at one version, and the peers that it excludes for good."""

    keepers: Keepers  # includes departed keepers; unset: all servers may decide
    convicted: dict[PeerId, str]  # peer -> reason

    @classmethod
    def of(cls, members: Manifest | SeatedMembers) -> Electorate:
        """Return the electorate that a manifest, or a list of members, describes."""
        return cls(members.keepers, convicted_after({}, members.convicted))

    @property
    def has_strangers(self) -> bool:
        """Return whether servers are strangers, so that only keepers decide, and reports need confirmation."""
        return not isinstance(self.keepers, UnsetType)

    def decides(self, peer: PeerId) -> bool:
        """Return whether a peer may vote, coordinate and lead."""
        return may_decide(peer, self.keepers)

    def is_keeper(self, peer: PeerId) -> bool:
        """Return whether a peer is, or was, a keeper."""
        return peer in (self.keepers or ())

    def new_convictions(self, convicted: Mapping[PeerId, str]) -> dict[PeerId, str]:
        """Return the convictions that the next record adds, without keepers and peers that are excluded already."""
        # Keepers are trusted, so their false work means a broken machine: they leave the run, but may join again.
        known = {*self.convicted, *(self.keepers or ())}
        return {peer: reason for peer, reason in convicted.items() if peer not in known}

    @property
    def remedy(self) -> str:
        """The remedy to append to an error about missing voters; empty if any server may decide."""
        return f"; {KEEPERS_REMEDY}" if self.has_strangers else ""

    def check_decides(self, peer: PeerId, act: str) -> None:
        """Refuse an act, such as "lead", of a peer that may not decide."""
        if not self.decides(peer):
            raise ProtocolError(
                f"{ONLY_KEEPERS}: {peer} is no keeper, so it must not {act}. If it should, let it join by an "
                "invitation made with `lightning-swarm invite --role keeper`."
            )

    def check_not_convicted(self, peer: PeerId) -> None:
        """Raise `AccessDenied`, with the reason, if a peer was convicted."""
        if (reason := self.convicted.get(peer)) is not None:
            raise AccessDenied(
                "a convicted peer may not take part in the run, nor in runs from its checkpoints, and "
                f"{peer} was convicted: {printable(reason)}. If its machine computes wrongly, repair the machine, and "
                "ask the run's owner for an invitation for another identity."
            )

    def after(self, record: Record) -> Electorate:
        """Return the electorate after a record."""
        return Electorate(
            keepers_after(self.keepers, record.keepers), convicted_after(self.convicted, record.convicted)
        )

    def check(self, record: Record, settings: RunSettings) -> None:
        """Refuse a record that names keepers or convicts peers against the rules, or rolls back without conviction."""
        new = {newcomer.member.peer_id for newcomer in record.newcomers}
        named = record.keepers or ()
        if named and not (self.has_strangers and new.issuperset(named) and len(set(named)) == len(named)):
            raise ProtocolError(
                "a record may name as keepers only its newcomers that have a keeper's certificate, each once, and only "
                f"in a run with strangers; record {record.step} names {named[:5]}"
            )
        convicted = [conviction.peer for conviction in record.convicted or ()]
        if convicted and not settings.has_strangers:
            raise ProtocolError(
                f"only a run with strangers may convict peers; record {record.step} has {convicted[:5]}"
            )
        if record.goes_back and not (convicted and settings.goes_back):
            raise ProtocolError(
                "a record may roll the run back only if it convicts a peer and `on_conviction` is 'go_back'; here it "
                f"is {settings.on_conviction!r}, and record {record.step} convicts {convicted[:5]}"
            )
        if len(set(convicted)) != len(convicted):
            raise ProtocolError(f"a record must convict each peer once; record {record.step} has {convicted[:5]}")


def check_no_convicted(seats: SeatedMembers, new: Collection[PeerId] = ()) -> None:
    """Refuse convicted peers among the members, the `new` trainers and the keepers."""
    convicted = {conviction.peer for conviction in seats.convicted or ()}
    if wrong := sorted(convicted & {*(seats.keepers or ())}):
        raise ProtocolError(f"keepers must not be convicted, got {wrong[:5]}")
    present = {member.peer_id for roster in seats.rosters for member in roster} | {*new}
    if wrong := sorted(convicted & present):
        raise ProtocolError(f"a run's members must not be convicted, got {wrong[:5]}")


def check_begun_by_keepers(manifest: Manifest) -> None:
    """Refuse a run with strangers that does not name its keepers, or in which other peers coordinate, vote or lead."""
    deciding = [manifest.lead, manifest.coordinator, *(voter.peer_id for voter in manifest.voters)]
    not_keepers = [peer for peer in deciding if not may_decide(peer, manifest.keepers)]
    if not_keepers or isinstance(manifest.keepers, UnsetType) == manifest.settings.has_strangers:
        raise ProtocolError(
            "a run with strangers must name its keepers, and only they may coordinate, vote and lead; other runs must "
            f"name none. Run {manifest.run_id!r} names {(manifest.keepers or [])[:5]}; not keepers: {not_keepers[:5]}"
        )
