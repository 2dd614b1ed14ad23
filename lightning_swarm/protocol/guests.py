"""Guests (members whose weights no closing has compared yet), and servers whose weights came to differ. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Record

_MAX_TIMES: Final = 2  # a server left out so often for differing weights may not join again
_MAX_REMEMBERED: Final = 1024


def guests_after(guests: Collection[PeerId], record: Record, rosters: Sequence[Sequence[Member]]) -> list[PeerId]:
    """Return the guests after a record: newcomers, and guests that its closing did not compare. `rosters`: after it."""
    staying = {member.peer_id for roster in rosters for member in roster}
    left = [peer for peer in guests if peer in record.closing.absent and peer in staying]
    return list(dict.fromkeys([*left, *(one.member.peer_id for one in record.newcomers)]))


class DifferingServers:
    """Servers that records left out because their weights differed, until a later comparison finds them equal."""

    def __init__(self) -> None:
        self._reasons: dict[PeerId, list[str]] = {}

    def follow(self, guests: Collection[PeerId], record: Record) -> None:
        """Apply the next record; `guests` are the guests before it."""
        for peer in guests:
            if peer not in record.closing.absent:
                self._reasons.pop(peer, None)
        for peer, reason in {one.member.peer_id: one.reason for one in record.left if one.reason}.items():
            self._reasons[peer] = [*self._reasons.pop(peer, []), str(reason)]
        while len(self._reasons) > _MAX_REMEMBERED:
            del self._reasons[next(iter(self._reasons))]

    def check_may_join(self, peer: PeerId) -> None:
        """Refuse a server that differed, joined again, and differed once more at the first comparison."""
        reasons = self._reasons.get(peer, [])
        if len(reasons) >= _MAX_TIMES:
            raise ConfigError(
                f"a server that was left out because its weights differ may join once more, and those of {peer} "
                f"differed {len(reasons)} times: {reasons[-1]} Use the run's version of torch, or another machine."
            )
