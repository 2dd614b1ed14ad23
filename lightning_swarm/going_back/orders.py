"""Which snapshots there are, and at which versions one may come to be."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from lightning_swarm.assembly import Peer
from lightning_swarm.server.snapshots import Ordered
from lightning_swarm.session import Session

_NEARLY: Final = 0.9
"""The part of an interval for which no order can come. It is measured from when an order came to this peer's server,
which is some time after it was given."""


class Orders:
    """What a trainer knows of them, as far as they are of use to its loop.

    Args:
        peer: Whose.
        session: In the run.
        interval_s: Between two orders; None: there are none.
    """

    def __init__(self, peer: Peer, session: Session, interval_s: float | None) -> None:
        self._peer = peer
        self._session = session
        self._interval_s = interval_s
        self._first_step = session.version
        self._newest: Ordered | None = None

    def clear(self) -> None:
        """Those that came so far are void."""
        self._newest = None

    def look(self) -> None:
        """What this peer's server heard, which knows all records; else what the trainer heard."""
        record, ordered = self._session.newest_record, self._peer.ordered
        if record is not None and record.snapshot is not None and record.step >= self._first_step:
            heard = Ordered(record.step + 1, record.snapshot.keep, time.monotonic())
            ordered = heard if ordered is None or ordered.version < heard.version else ordered
        if ordered is not None and (self._newest is None or ordered.version > self._newest.version):
            self._newest = ordered

    @property
    def versions(self) -> list[int]:
        """Of the snapshots."""
        newest = self._newest
        return [] if newest is None else [one for one in (newest.keep, newest.version) if one is not None]

    def may_be_at(self, version: int, through: Collection[int]) -> bool:
        """Whether there is one, or may come to be, that goes with a loop between two batches.

        Args:
            version: That the loop has counted to.
            through: The places of its batches in the open step.
        """
        newest = self._newest
        if newest is not None and newest.version == version and not through:
            return True
        if not self._session.is_shared or self._interval_s is None:
            return False
        # Others may fill the next steps before this trainer asks for a place again.
        return (
            newest is None or newest.version > version or time.monotonic() >= newest.at_s + _NEARLY * self._interval_s
        )
