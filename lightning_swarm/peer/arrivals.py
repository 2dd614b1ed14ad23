"""Decides, at the peer that starts a run, which servers may be first members, and counts uses of invitations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from lightning_swarm.core.errors import AccessDenied, ConfigError, ProtocolError, SwarmError
from lightning_swarm.core.readable import printable, short_name, shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.access import Permit, Role
from lightning_swarm.peer.discovery import ServerAnnouncement
from lightning_swarm.protocol.bans import apply_received_ban
from lightning_swarm.protocol.invitations import (
    MAX_COUNTED,
    Used,
    came_before,
    check_used,
    has_room,
    invited_by,
    is_full,
    used_after,
)
from lightning_swarm.protocol.keepers import convicted_after, convictions, is_certified_keeper
from lightning_swarm.protocol.messages.run import Convictions, UsedInvitation, UsedInvitations
from lightning_swarm.protocol.messages.wire import WireMessage
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)

_CERTIFICATE_TIMEOUT_S: Final = 3.0  # bounds the wait for each peer, because any peer may announce itself


class KnownPeers(WireMessage, frozen=True):
    """The peers that a checkpoint names: the users of each invitation, banned peers, and convicted peers."""

    bans: list[bytes]  # signed by the run's owner
    invitations: UsedInvitations = UNSET
    convicted: Convictions = UNSET


def known_peers(run: RunState, bans: list[bytes]) -> dict[str, Any] | None:
    """Return a checkpoint's `KnownPeers` in plain values; None if the run admits any peer and convicted none."""
    if isinstance(run.invitations, UnsetType) and not run.electorate.convicted:
        return None
    known = KnownPeers(bans, run.invitations, convictions(run.electorate.convicted))
    plain: dict[str, Any] = msgspec.to_builtins(known)
    return plain


@dataclass(eq=False)
class Arrivals:
    """Chooses a generation's first members.

    It remembers from older generations which invitations were used, and which peers were keepers or convicted.
    """

    _transport: Transport
    named_keepers: Collection[PeerId] = ()  # keepers of a run in memory, which has no certificates
    used: Used = UNSET  # invitations used in older generations
    keepers: Collection[PeerId] = ()  # keepers of older generations
    convicted: dict[PeerId, str] = field(default_factory=dict)  # peer -> reason, in older generations
    _warned: set[PeerId] = field(default_factory=set)  # peers for which a warning was logged
    _wall_s: Callable[[], float] = time.time

    def restore(self, known: Any) -> None:
        """Begin with a checkpoint's known peers, so that used invitations, bans and convictions stay in force."""
        try:
            peers = msgspec.convert(known, KnownPeers)
            check_used(peers.invitations)
        except (msgspec.ValidationError, ProtocolError) as error:
            raise ConfigError(
                f"the checkpoint's entry `swarm_peers` must be as it was saved: {error}. Use another checkpoint, or "
                "remove the entry: then all invitations count anew, and no peer is banned or convicted."
            ) from error
        self.used = peers.invitations
        self.convicted = convicted_after({}, peers.convicted)
        for signed_ban in peers.bans:
            apply_received_ban(self._transport, signed_ban)

    async def invited(self, servers: Mapping[PeerId, ServerAnnouncement]) -> dict[PeerId, ServerAnnouncement]:
        """Return the servers that may be first members.

        A server may be one if it was not convicted and its certificate permits the announced role. If it has never used
        its invitation, the invitation must also be valid and have a use left. A run that admits any peer checks only
        convictions.
        """
        self._warned &= servers.keys()
        for peer in sorted(servers.keys() & self.convicted.keys()):
            self._warn(peer, f"it was convicted: {printable(self.convicted[peer])}")
        servers = {peer: server for peer, server in servers.items() if peer not in self.convicted}
        me = self._transport.peer_id
        own_permit = self._transport.permit_of(me)
        if own_permit is None:
            return dict(servers)
        used = self._after(me, own_permit, () if isinstance(self.used, UnsetType) else self.used)
        others = sorted(servers.keys() - {me})
        permits = await gather(self._permit_of(peer, servers[peer]) for peer in others)
        accepted = {peer: server for peer, server in servers.items() if peer == me}
        for peer, permit in zip(others, permits, strict=True):
            if permit is None:
                continue
            if self._wall_s() >= permit.come_by_s and not came_before(used, peer):
                self._warn(peer, "it comes for the first time, and its invitation has expired")
                continue
            if not has_room(used, peer, invited_by(permit)):
                run_is_full = f"{MAX_COUNTED} invited peers have joined, and the run counts no more"
                is_used_up = f"all uses ({permit.uses}) of its invitation are taken by other peers"
                self._warn(peer, run_is_full if is_full(used) else is_used_up)
                continue
            used = self._after(peer, permit, used)
            accepted[peer] = servers[peer]
        return accepted

    def note_end(self, run: RunState) -> None:
        """Keep the used invitations, keepers and convictions of a generation that ends."""
        self.used, self.convicted = run.invitations, dict(run.electorate.convicted)
        self.keepers = run.electorate.keepers or ()

    def keepers_among(self, me: PeerId, members: Iterable[PeerId]) -> list[PeerId]:
        """Return the keepers of a new run with strangers: `me`, its starter, and certified first members.

        Raises `ConfigError` if this peer's certificate is not a keeper's, because later joiners accept keepers alone.
        """
        if is_certified_keeper(self._transport, me) is False:
            raise ConfigError(
                "a run with strangers must be started by a keeper, because peers that join later recognize it by its "
                f"certificate, and the certificate of {me} has another role. Start the run where its owner's key is, "
                "or with an invitation made with `lightning-swarm invite --role keeper`."
            )
        named = self.named_keepers
        new = [peer for peer in sorted(members) if peer in named or is_certified_keeper(self._transport, peer)]
        return list(dict.fromkeys([me, *self.keepers, *new]))  # includes departed keepers, which may return

    async def count(self, members: Iterable[PeerId]) -> UsedInvitations:
        """Count first members, all of which `invited` returned, as uses of invitations; UNSET in a run for any peer."""
        if self._transport.permit_of(self._transport.peer_id) is None:
            return UNSET
        used = [] if isinstance(self.used, UnsetType) else list(self.used)
        for peer in sorted(set(members)):
            permit = await self._transport.certify(peer)
            if permit is None:
                raise AccessDenied(f"the certificate of {peer} has just expired. Start again without that peer.")
            used = self._after(peer, permit, used)
        return used

    def _after(self, peer: PeerId, permit: Permit, used: Iterable[UsedInvitation]) -> list[UsedInvitation]:
        return used_after(used, {peer: invited_by(permit)})

    async def _permit_of(self, peer: PeerId, server: ServerAnnouncement) -> Permit | None:
        """Return a server's permit; None if it does not permit the announced role."""
        least = Role.TRAINER if server.trains else Role.SERVER
        try:
            async with asyncio.timeout(_CERTIFICATE_TIMEOUT_S):  # `invited` is called again while servers are missing
                permit = await self._transport.certify(peer)
        except (SwarmError, TimeoutError) as error:
            self._warn(peer, str(error) or f"it showed no certificate within {_CERTIFICATE_TIMEOUT_S:g} s")
            return None
        if permit is None or not permit.role.includes(least):
            self._warn(peer, f"its certificate is not of the role {least}")
            return None
        return permit

    def _warn(self, peer: PeerId, reason: str) -> None:
        """Log once why a peer is no first member, as long as it announces itself."""
        if peer not in self._warned:
            self._warned.add(peer)
            _log.warning("%s announced itself, and the run begins without it: %s", short_name(peer), shorten(reason))
