"""Routes of a client's generation sessions through the servers of a served model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from torch import Tensor

from lightning_swarm.client.inference.adapters import PackedAdapter
from lightning_swarm.client.inference.policy import ServerView, best_route
from lightning_swarm.client.pipeline.context import send
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import PeerError, StageLost, Unreachable
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import SessionSteps, SessionStepsReply
from lightning_swarm.protocol.rpc import SESSION_STEPS
from lightning_swarm.serving.directory import ModelDirectory

_log = logging.getLogger(__name__)

_FIRST_EJECTION_S: Final = 5.0  # each further ejection of a server is twice as long
_LONGEST_EJECTION_S: Final = 60.0
_LOOK_S: Final = 2.0  # between two pings of servers that did not answer


class ServedRoutes:
    """Implements `client.inference.routes.SessionRoutes`, where the methods are described, for a model's servers.

    Servers are chosen for the short time of a step: links, computation and the sessions that a server already has.
    """

    def __init__(self, model: ModelDirectory, *, timeout: float, rng: random.Random) -> None:
        self._model, self._rng = model, rng
        self.transport, self.timeout = model.transport, timeout
        self._ejected: dict[PeerId, tuple[float, float]] = {}  # peer -> (its end, its length in seconds)
        self._unreachable: set[PeerId] = set()  # ejected peers that did not answer
        self._own: Counter[PeerId] = Counter()  # sessions of this client, which servers may not have announced yet
        self.num_replaced = 0  # times that a stage of a text got another server

    def begin(self, rows: int, like: Sequence[PeerId] = ()) -> list[PeerId]:
        """See `SessionRoutes`."""
        views = self._views()
        number = len(self._model.card.stages)
        fit = {peer for peer, view in views.items() if view.has_room}
        if like and all(peer in fit and stage in views[peer].stages for stage, peer in enumerate(like)):
            self._own.update(set(like))
            return [*like]
        route = best_route(number, views, self._between, self._rng)
        if route is None:
            free = {peer: view for peer, view in views.items() if view.has_room}
            empty = [stage for stage in range(number) if not any(stage in view.stages for view in free.values())]
            raise StageLost(
                f"each stage of a served model needs a server that takes sessions, and {empty} of {number} have none "
                "now. Start one: `lightning-swarm serve --join ADDRESS`."
            )
        self._own.update(set(route))
        return route

    def replace(self, stage: int, route: Sequence[PeerId], rows: int) -> PeerId:
        """See `SessionRoutes`."""
        before = route[stage - 1] if stage else None
        behind = route[stage + 1] if stage + 1 < len(route) else None
        views = self._views()
        here = [peer for peer, view in views.items() if stage in view.stages and peer != route[stage]]
        free = [peer for peer in here if views[peer].has_room and not self.is_ejected(stage, peer)]
        if not free:
            return route[stage]
        chosen = min(
            free,
            key=lambda peer: (
                self._between(before, peer)
                + self._between(peer, behind)
                + views[peer].step_s * (1 + views[peer].num_sessions)
            ),
        )
        self.num_replaced += 1
        # A session counts once at each server of its route.
        if chosen not in route:
            self._own[chosen] += 1
        if list(route).count(route[stage]) == 1:
            self._own[route[stage]] -= 1
        return chosen

    def share_prefixes(self) -> bool:
        """Return whether all known servers let sessions begin with prefixes of other clients."""
        return all(offer.shares_prefixes for offer in self._model.offers.values())

    def _views(self) -> dict[PeerId, ServerView]:
        return {
            peer: ServerView(
                stages=offer.stages,
                step_s=offer.step_s,
                num_sessions=max(offer.num_sessions, self._own[peer]),
                has_room=not offer.is_draining and offer.free_bytes > 0 and not self.is_ejected(0, peer),
            )
            for peer, offer in self._model.offers.items()
        }

    def _between(self, one: PeerId | None, other: PeerId | None) -> float:
        """Return the seconds that a message takes between two peers; None is this client."""
        if one == other:
            return 0.0
        if one is None or other is None:
            peer = other if one is None else one
            link = self.transport.links.get(peer) if peer is not None else None
            return (link.round_trip_s or 0.0) / 2 if link is not None else 0.0
        offers = self._model.offers
        for here, there in ((one, other), (other, one)):
            if here in offers and there in offers[here].round_trips:
                return offers[here].round_trips[there] / 2
        return self._between(None, one) + self._between(None, other)  # unmeasured: estimate through the client

    def end(self, route: Sequence[PeerId]) -> None:
        """See `SessionRoutes`."""
        self._own.subtract(set(route))

    def servers(self, stage: int) -> Collection[PeerId]:
        """See `SessionRoutes`."""
        return self._model.serving(stage)

    def eject(self, stage: int, peer: PeerId, *, version: int, error: PeerError) -> None:
        """See `SessionRoutes`. The server is ejected from all stages."""
        _, before_s = self._ejected.get(peer, (0.0, 0.0))
        for_s = min(_LONGEST_EJECTION_S, 2 * before_s) or _FIRST_EJECTION_S
        self._ejected[peer] = now_s() + for_s, for_s
        if isinstance(error, Unreachable):
            self._unreachable.add(peer)
        else:
            self._unreachable.discard(peer)
        _log.info("Server %s gets no session for %g s: %s", peer, for_s, shorten(str(error)))

    async def keep_looking(self) -> None:
        """Use unreachable servers again as soon as they answer."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._unreachable &= self._model.offers.keys()
            await gather(map(self._look, sorted(self._unreachable)))

    async def _look(self, peer: PeerId) -> None:
        with contextlib.suppress(PeerError):
            await self.transport.ping(peer)
            if peer in self._unreachable:  # no other failure came meanwhile
                self._unreachable.discard(peer)
                _, for_s = self._ejected[peer]
                self._ejected[peer] = now_s(), for_s  # keep the length, so that the next one is longer
                _log.info("Server %s answers again.", peer)

    def is_ejected(self, stage: int, peer: PeerId) -> bool:
        """See `SessionRoutes`."""
        return self._ejected.get(peer, (0.0, 0.0))[0] > now_s()

    async def give_adapter(self, peer: PeerId, adapter: PackedAdapter, *, again: bool) -> None:
        """See `SessionRoutes`."""
        await self._model.uploads.send(peer, adapter, timeout=self.timeout, again=again)

    async def send(self, peer: PeerId, request: SessionSteps, tensors: Sequence[Tensor]) -> SessionStepsReply:
        """See `SessionRoutes`."""
        return await send(self.transport, peer, SESSION_STEPS, request, tensors, timeout=self.timeout)
