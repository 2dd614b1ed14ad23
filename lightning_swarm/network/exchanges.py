"""Exchanges with other peers that are under way, so that they can be ended before their time."""

from __future__ import annotations

import asyncio

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.gatekeeper import Gatekeeper
from lightning_swarm.network.rpc import Responder


class OpenExchanges:
    """The deadlines of the exchanges that are under way."""

    def __init__(self) -> None:
        self._limits: dict[asyncio.Timeout, PeerId] = {}  # ordered, so that a run repeats exactly

    def open(self, limit: asyncio.Timeout, peer: PeerId) -> None:
        """Let `end` and `end_all` move the deadline of an exchange, until `close`."""
        self._limits[limit] = peer

    def close(self, limit: asyncio.Timeout) -> None:
        """Note that an exchange has ended, if it had begun."""
        self._limits.pop(limit, None)

    def end(self, peer: PeerId) -> None:
        """End the exchanges with a peer now."""
        for limit, other in self._limits.items():
            if other == peer:
                _end(limit)

    def end_all(self) -> None:
        """End all exchanges now."""
        for limit in self._limits:
            _end(limit)


def _end(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(now_s())


async def answer_until_cut_off(
    gate: Gatekeeper, answering: OpenExchanges, caller: PeerId, respond: Responder, message: Message
) -> Message:
    """Answer a request, unless the caller's certificate ends, or is banned, before the answer is there."""
    gate.check_answered(caller)  # Its tensors may have taken a while to come.
    limit = asyncio.timeout(None)
    try:
        async with limit:
            answering.open(limit, caller)
            answer = await respond(message)
    except TimeoutError:
        if not limit.expired():
            raise
        gate.check_answered(caller)
        raise Busy(f"a ban of {caller} was lifted at once, so this is worth another try") from None
    finally:
        answering.close(limit)
    gate.check_answered(caller)  # No timer tells when a certificate ends.
    return answer
