"""Counts the uses of invitations, by peers that ask to join or to train."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, UnsetType

from lightning_swarm.core.errors import AccessDenied, Busy, Uncertified
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.invitations import MAX_COUNTED, came_before, has_room, invited_by, is_full, used_after
from lightning_swarm.protocol.messages.run import InvitedBy
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)


class WaitingList(Protocol):
    """Peers that wait for the record that lets them in."""

    @property
    def waiting(self) -> Collection[PeerId]:
        """The peers that wait."""
        ...

    def forget(self, peer: PeerId) -> None:
        """Remove a peer that is gone from the list, if it is there."""
        ...


@dataclass(eq=False)
class InvitationUses:
    """Admits no more peers by an invitation than it has uses, including peers that wait for a record."""

    _transport: Transport
    _run: RunState
    waiting_lists: list[WaitingList] = field(default_factory=list)
    _wall_s: Callable[[], float] = time.time
    _asked: dict[PeerId, InvitedBy] = field(default_factory=dict)  # waiting peer -> its invitation

    async def free_lost_uses(self, peer: PeerId) -> None:
        """Free the uses of peers that died while they waited, if this peer needs one of them."""
        uses, permit = self._run.invitations, self._transport.permit_of(peer)
        if isinstance(uses, UnsetType) or permit is None:
            return
        invitation, pending = invited_by(permit), self._pending(peer)
        if not has_room(uses, peer, invitation) or has_room(used_after(uses, pending), peer, invitation):
            return  # all uses are taken by members, or one is left
        # A peer that downloads may not call the coordinator for long, so it is pinged.
        alive = await alive_among(self._transport, pending)
        for gone in sorted(pending.keys() - alive):
            _log.info("%s is gone, and its use of the invitation is free again.", gone)
            for waiting_list in self.waiting_lists:
                waiting_list.forget(gone)

    def _pending(self, peer: PeerId) -> dict[PeerId, InvitedBy]:
        """Return the invitations of all other peers that wait for a record."""
        others = {waiting for waiting_list in self.waiting_lists for waiting in waiting_list.waiting} - {peer}
        return {other: invitation for other, invitation in self._asked.items() if other in others}

    def reserve(self, peer: PeerId) -> None:
        """Reserve a use of its invitation for a peer that asks to join or to train; raise AccessDenied or Busy."""
        uses = self._run.invitations
        if isinstance(uses, UnsetType):
            return
        permit = self._transport.permit_of(peer)
        if permit is None:  # it has just expired
            raise Uncertified(f"the certificate of {peer} has expired. Join with a new invitation.")
        invitation = invited_by(permit)
        self._asked = self._pending(peer)
        if self._wall_s() >= permit.come_by_s and not came_before(uses, peer):
            raise AccessDenied(
                f"a new peer must join before its invitation expires: the invitation of {peer} has expired, and this "
                "peer was never in the run. Ask the run's owner for another one: `lightning-swarm invite`."
            )
        if not has_room(uses, peer, invitation):
            if is_full(uses):
                raise AccessDenied(
                    f"a run counts up to {MAX_COUNTED} invited peers, and {MAX_COUNTED} have joined. "
                    "Peers that come back with the same key (`identity_path`) count once. To count anew, start the run "
                    "from a checkpoint without its entry `swarm_peers`, and repeat the bans."
                )
            raise AccessDenied(
                f"all uses ({invitation.uses}) of the invitation of {peer} are taken by other peers. "
                "Ask the run's owner for another one: `lightning-swarm invite`."
            )
        if not has_room(used_after(uses, self._asked), peer, invitation):  # the last uses are for peers that wait
            raise Busy(
                f"no use of its invitation is free for {peer} now: the last ones are reserved for peers that are "
                "joining. Ask again later; a use is free again if its peer does not join."
            )
        self._asked[peer] = invitation

    def invitations_of(self, peers: Iterable[PeerId]) -> dict[PeerId, InvitedBy] | UnsetType:
        """Return these peers' invitations, without peers that have no use left; unset if the run counts no uses."""
        uses = self._run.invitations
        if isinstance(uses, UnsetType):
            return UNSET
        admitted: dict[PeerId, InvitedBy] = {}
        for peer in peers:
            invitation = self._asked.get(peer)
            if self._transport.permit_of(peer) is None:  # banned, or expired, while it waited
                _log.warning("%s is not admitted: its certificate permits nothing any more.", peer)
                continue
            if invitation is None or not has_room(uses, peer, invitation):
                _log.warning("%s is not admitted: no use of its invitation is left.", peer)
                continue
            admitted[peer] = invitation
            uses = used_after(uses, {peer: invitation})
        return admitted
