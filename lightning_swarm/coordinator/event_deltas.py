"""Chooses the event counts to send to the lead: each count is sent again until the lead confirms it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.reports import EventCounts

MAX_NEWS: Final = 1000  # peers in one answer, at most 400 kB with all kinds of events


class EventDeltas:
    """Event counts that the lead lacks."""

    def __init__(self) -> None:
        self._version = -1  # version of the lead's last request; a later version confirms the last answer
        self._known: dict[PeerId, EventCounts] = {}  # confirmed counts, in the order in which the peers were last sent
        self._sent: dict[PeerId, EventCounts] = {}  # counts in the last answer, which may have been lost

    def news(self, noted: Mapping[PeerId, EventCounts], *, version: int) -> dict[PeerId, EventCounts]:
        """Choose the counts to send to the lead, which knows `version`. Counts only grow, so a delay loses none."""
        if version != self._version:
            sent_before = {peer: counts for peer, counts in self._known.items() if peer not in self._sent}
            self._known = {peer: counts for peer, counts in (sent_before | self._sent).items() if peer in noted}
            self._version, self._sent = version, {}
        last_sent = {peer: index for index, peer in enumerate(self._known)}
        new = [peer for peer, events in noted.items() if events.counts and self._known.get(peer) != events]
        new.sort(key=lambda peer: last_sent.get(peer, -1))
        self._sent = {peer: noted[peer] for peer in new[:MAX_NEWS]}
        return dict(self._sent)
