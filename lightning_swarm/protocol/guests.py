"""Guests, members whose weights no closing has compared yet; and servers removed because theirs differed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Record

_MAX_REMOVALS: Final = 2  # after this many removals for differing weights a server may not join again
_MAX_REMEMBERED: Final = 1024


def guests_after(guests: Collection[PeerId], record: Record, rosters: Sequence[Sequence[Member]]) -> list[PeerId]:
    """Return the guests after a record: newcomers, and guests absent from its closing. `rosters`: after the record."""
    staying = {member.peer_id for roster in rosters for member in roster}
    not_compared = [peer for peer in guests if peer in record.closing.absent and peer in staying]
    return list(dict.fromkeys([*not_compared, *(newcomer.member.peer_id for newcomer in record.newcomers)]))


class DifferingServers:
    """Servers that records removed because their weights differed, until a later comparison finds them equal."""

    def __init__(self) -> None:
        self._reasons: dict[PeerId, list[str]] = {}

    def follow(self, guests: Collection[PeerId], record: Record) -> None:
        """Apply the next record; `guests`: before the record."""
        for peer in guests:
            if peer not in record.closing.absent:
                self._reasons.pop(peer, None)
        removed = {vacancy.member.peer_id: vacancy.reason for vacancy in record.left if vacancy.reason}
        for peer, reason in removed.items():
            self._reasons[peer] = [*self._reasons.pop(peer, []), str(reason)]
        while len(self._reasons) > _MAX_REMEMBERED:
            del self._reasons[next(iter(self._reasons))]

    def check_may_join(self, peer: PeerId) -> None:
        """Refuse a server that differed, joined again, and differed once more at the first comparison."""
        reasons = self._reasons.get(peer, [])
        if len(reasons) >= _MAX_REMOVALS:
            raise ConfigError(
                f"a server that was removed because its weights differed may join once more, and the weights of {peer} "
                f"differed {len(reasons)} times: {reasons[-1]} Use the run's version of torch, or another machine."
            )
