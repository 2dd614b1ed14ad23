"""Invitations of the peers that ask to join or to train."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from lightning_swarm.core.errors import AccessDenied, Uncertified
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.invitations import MAX_COUNTED, has_room, invited_by, is_full, used_after
from lightning_swarm.protocol.messages.run import InvitedBy
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class InvitationUses:
    """Lets no more peers come by an invitation than it has uses, those that wait for a record included."""

    _transport: Transport
    _run: RunState
    waiting: list[Callable[[], Collection[PeerId]]] = field(default_factory=list)  # each: peers that wait for a record
    _wall_s: Callable[[], float] = time.time
    _asked: dict[PeerId, InvitedBy] = field(default_factory=dict)

    def check(self, peer: PeerId) -> None:
        """Note by which invitation a peer comes that asks; `AccessDenied` if that is used up."""
        used = self._run.invitations
        if isinstance(used, UnsetType):
            return
        permit = self._transport.permit_of(peer)
        if permit is None:  # it has just expired
            raise Uncertified(f"the certificate of {peer} has expired. Join with a new invitation.")
        by = invited_by(permit)
        waiting = {one for peers in self.waiting for one in peers()} - {peer}
        self._asked = {one: its for one, its in self._asked.items() if one in waiting}
        if self._wall_s() >= permit.come_by_s and not any(peer in one.peers for one in used):
            raise AccessDenied(
                f"who comes to a run for the first time comes before its invitation expires, and that of {peer} has "
                "expired. Ask the run's owner for another one: `lightning-swarm invite`."
            )
        counted = used_after(used, self._asked)
        if not has_room(counted, peer, by):
            if is_full(counted):
                raise AccessDenied(
                    f"a run counts up to {MAX_COUNTED} invited peers, and so many did, or are about to. "
                    "Peers that come back with the same key (`identity_path`) count once. To count anew, start the run "
                    "from a checkpoint without its entry `swarm_peers`, and ban again who is banned."
                )
            raise AccessDenied(
                f"an invitation lets in as many peers as it has uses: that of {peer} has {by.uses}, and as many others "
                "came by it, or are about to. Ask the run's owner for another one: `lightning-swarm invite`."
            )
        self._asked[peer] = by

    def of(self, peers: Iterable[PeerId]) -> dict[PeerId, InvitedBy] | UnsetType:
        """Return by which invitations these peers come, without those for which no use is left; unset: by none."""
        used = self._run.invitations
        if isinstance(used, UnsetType):
            return UNSET
        found: dict[PeerId, InvitedBy] = {}
        for peer in peers:
            by = self._asked.get(peer)
            if self._transport.permit_of(peer) is None:  # banned, or expired, while it waited
                _log.warning("%s does not get in: its certificate permits nothing any more.", peer)
                continue
            if by is None or not has_room(used, peer, by):
                _log.warning("%s does not get in: no use of its invitation is left.", peer)
                continue
            found[peer] = by
            used = used_after(used, {peer: by})
        return found
