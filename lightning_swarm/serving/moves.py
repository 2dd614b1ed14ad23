"""Moves a server of a served model to worse-served stages, if other servers stay at the stages that it leaves."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.messages.serving import StayRequest
from lightning_swarm.protocol.rpc import MODEL_STAY
from lightning_swarm.serving.placement import MovePolicy

if TYPE_CHECKING:
    from lightning_swarm.serving.host import ModelHost

_log = logging.getLogger(__name__)

_ASK_TIMEOUT_S: Final = 10.0
_MARGIN_S: Final = 30.0  # seconds by which a promise outlasts the longest drain


class Moves:
    """Checks at random times whether a server should serve other stages, and moves it there.

    First, another server of each of its stages promises to stay. Then the server takes no new texts, and waits for the
    texts in progress, up to `Limits.drain_timeout`. Finally it drops its stages and loads the new stages, because it
    lacks memory for both. Texts that are not done by then continue at other servers.
    """

    def __init__(self, host: ModelHost, transport: Transport, policy: MovePolicy, limits: Limits) -> None:
        self._host, self._transport, self._policy = host, transport, policy
        self._promise_s = limits.drain_timeout + _MARGIN_S
        self._rng = random.Random(str(transport.peer_id))
        self._away_until_s: dict[range, float] = {}  # stages that the server left -> time until which it avoids them
        self._asked: set[PeerId] = set()  # servers that were asked to stay, even if they have not promised it

    async def keep_checking(self) -> None:
        """Check at random times, because servers that check at the same time would all move to the same stages."""
        while True:
            await asyncio.sleep(self._policy.look_s * self._rng.uniform(0.5, 1.5))
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001 - after a failure of a disk or device, the server continues
                _log.warning("This server did not move to other stages: %s", shorten(str(error)))

    async def check(self) -> bool:
        """Move if it is worthwhile and other servers promise to stay; return whether the server moved."""
        host = self._host
        assert host.server is not None
        await host.models.refresh()
        if host.is_leaving:
            return False
        wanted = self._wanted()
        if wanted is None or not host.server.promises.begin_leaving(now_s()):
            return False
        try:
            return await self._move(wanted)
        finally:
            host.server.promises.stay()
            await gather(self._ask(peer, []) for peer in self._asked)
            self._asked.clear()

    def _wanted(self) -> range | None:
        host = self._host
        if not host.span:  # an earlier move could not load its stages
            return host.choose_span()
        avoided = [span for span, until_s in self._away_until_s.items() if until_s > now_s()]
        return host.choose_move(avoided, gain=self._policy.gain)

    async def _move(self, wanted: range) -> bool:
        host, before, began_s = self._host, self._host.span, now_s()
        if not await self._secure_stages(before):
            return False
        _log.info("Moving from the stages %s to %s, which are served worse.", [*before], [*wanted])
        await host.drain()
        if now_s() >= began_s + self._promise_s:  # the promises to stay may have expired
            await host.stay()
            return False
        await host.move(wanted)
        if host.span != before:
            self._away_until_s[before] = now_s() + self._policy.times_away * (now_s() - began_s)
        return host.span == wanted

    async def _secure_stages(self, stages: range) -> bool:
        """Ask other servers to stay at these stages; return whether one has promised it for each stage."""
        left = set(stages)
        offers = [(peer, offer) for peer, offer in self._host.models.offers.items() if not offer.is_draining]
        self._rng.shuffle(offers)
        for peer, offer in offers:
            shared = left & set(offer.stages)
            if shared and peer != self._transport.peer_id and await self._ask(peer, sorted(shared)):
                left -= shared
        return not left

    async def _ask(self, peer: PeerId, stages: list[int]) -> bool:
        """Ask a server to stay at `stages`; an empty list ends its promise. Return whether it stays."""
        request = StayRequest(model=self._host.models.card.id, stages=stages, for_s=self._promise_s)
        if stages:
            self._asked.add(peer)  # before the call, because its answer may be lost
        try:
            return (await MODEL_STAY.ask(self._transport, peer, request, timeout=_ASK_TIMEOUT_S)).stays
        except SwarmError as error:
            _log.info("%s did not answer whether it stays: %s", peer, shorten(str(error)))
            return False
