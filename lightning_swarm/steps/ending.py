"""The end of a run: all are told of it, in order by the lead, or by who coordinates when the lead is gone."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lightning_swarm.errors import SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.steps import BREAK_OFF, LEAVE
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import BrokenOff
from lightning_swarm.types.wire import encode

_log = logging.getLogger(__name__)


async def dismiss(transport: Transport, peers: Iterable[PeerId], *, broken_off: str = "", timeout: float) -> None:
    """Tell peers that the run is over. One that is gone is no error.

    Args:
        transport: The lead's, or that of who coordinates.
        peers: All that are to know.
        broken_off: Why nobody ended it in order; empty: the lead did.
        timeout: Seconds for each.
    """
    method, body = (BREAK_OFF, encode(BrokenOff(reason=broken_off))) if broken_off else (LEAVE, b"")

    async def one(peer: PeerId) -> None:
        try:
            await transport.call(peer, method, body, timeout=timeout)
        except SwarmError as error:  # refused by one that was never admitted: it goes on waiting for a run
            _log.info("%s did not hear of the end: %s", peer, error)

    await gather(one(peer) for peer in sorted(set(peers)))
