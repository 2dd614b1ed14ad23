"""By which invitations the first members of a run come: the starter counts them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from lightning_swarm.core.errors import AccessDenied, SwarmError
from lightning_swarm.core.readable import short_name, shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.access import Permit, Role
from lightning_swarm.peer.discovery import ServerAnnouncement
from lightning_swarm.protocol.invitations import Used, has_room, invited_by, used_after
from lightning_swarm.protocol.messages.run import UsedInvitation, UsedInvitations

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Arrivals:
    """The peers that came to a run by each invitation, until its next generation begins."""

    _transport: Transport
    used: Used = UNSET  # in older generations
    _warned: set[PeerId] = field(default_factory=set)

    async def invited(self, servers: Mapping[PeerId, ServerAnnouncement]) -> dict[PeerId, ServerAnnouncement]:
        """Return the servers whose certificates permit what they announce; all, if the run takes any peer."""
        own = self._transport.permit_of(self._transport.peer_id)
        if own is None:
            return dict(servers)
        used = self._after(self._transport.peer_id, own, () if isinstance(self.used, UnsetType) else self.used)
        asked = sorted(servers.keys() - {self._transport.peer_id})
        permits = await gather(self._permit_of(peer, servers[peer]) for peer in asked)
        found = {peer: server for peer, server in servers.items() if peer == self._transport.peer_id}
        for peer, permit in zip(asked, permits, strict=True):
            if permit is None:
                continue
            if not has_room(used, peer, invited_by(permit)):
                self._warn(peer, f"{permit.uses} other peers came by its invitation, which has no more uses")
                continue
            used = self._after(peer, permit, used)
            found[peer] = servers[peer]
        return found

    async def count(self, members: Iterable[PeerId]) -> UsedInvitations:
        """Count the first members of a generation, which are `invited`; unset: the run takes any peer."""
        if self._transport.permit_of(self._transport.peer_id) is None:
            return UNSET
        used = [] if isinstance(self.used, UnsetType) else list(self.used)
        for peer in sorted(set(members)):
            permit = await self._transport.certify(peer)
            if permit is None:
                raise AccessDenied(f"the certificate of {peer} has just expired. Begin again without it.")
            used = self._after(peer, permit, used)
        return used

    def _after(self, peer: PeerId, permit: Permit, used: Iterable[UsedInvitation]) -> list[UsedInvitation]:
        return used_after(used, {peer: invited_by(permit)})

    async def _permit_of(self, peer: PeerId, server: ServerAnnouncement) -> Permit | None:
        """Return what a server is permitted; None if that is less than it announces."""
        least = Role.TRAINER if server.trains else Role.SERVER
        try:
            permit = await self._transport.certify(peer)
        except SwarmError as error:
            self._warn(peer, str(error))
            return None
        if permit is None or not permit.role.includes(least):
            self._warn(peer, f"its certificate is not of the role {least}")
            return None
        return permit

    def _warn(self, peer: PeerId, reason: str) -> None:
        if peer not in self._warned:
            self._warned.add(peer)
            _log.warning("%s announced itself, and the run begins without it: %s", short_name(peer), shorten(reason))
