"""Routes of a client's inference sessions through the servers of a served model."""

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
_PING_S: Final = 2.0  # pause between pings of unreachable servers


class ServedRoutes:
    """Chooses a model's servers for sessions, and sends steps to them.

    Implements `client.inference.routes.SessionRoutes`. A route has the shortest expected time of a step, with its links
    and with computation at servers that share their time among sessions. A server that failed is ejected for a while.
    """

    def __init__(self, model: ModelDirectory, *, timeout: float, rng: random.Random) -> None:
        self._model, self._rng = model, rng
        self.transport, self.timeout = model.transport, timeout
        self._ejected: dict[PeerId, tuple[float, float]] = {}  # peer -> end and length of its ejection, in seconds
        self._unreachable: set[PeerId] = set()  # peers ejected because they did not answer
        self._own_sessions: Counter[PeerId] = Counter()  # this client's sessions, which servers may not announce yet
        self.num_replaced = 0  # times that a stage of a text got another server

    def begin(self, rows: int, like: Sequence[PeerId] = ()) -> list[PeerId]:
        """Choose a server for each stage of a session; the servers of `like` if all of them have room."""
        views = self._views()
        num_stages = len(self._model.card.stages)
        free = {peer: view for peer, view in views.items() if view.has_room}
        if like and all(peer in free and stage in free[peer].stages for stage, peer in enumerate(like)):
            self._own_sessions.update(set(like))
            return [*like]
        route = best_route(num_stages, views, self._trip_s, self._rng)
        if route is None:
            empty = [stage for stage in range(num_stages) if not any(stage in view.stages for view in free.values())]
            raise StageLost(
                f"each stage of a served model needs a server that takes sessions, and the stages {empty} of "
                f"{num_stages} have none now. Start one: `lightning-swarm serve --join ADDRESS`."
            )
        self._own_sessions.update(set(route))
        return route

    def replace(self, stage: int, route: Sequence[PeerId], rows: int) -> PeerId:
        """Choose another server for a stage of a route; return the same server if there is no other."""
        previous = route[stage - 1] if stage else None
        following = route[stage + 1] if stage + 1 < len(route) else None
        views = self._views()
        others = [peer for peer, view in views.items() if stage in view.stages and peer != route[stage]]
        free = [peer for peer in others if views[peer].has_room and not self.is_ejected(stage, peer)]
        if not free:
            return route[stage]
        chosen = min(
            free,
            key=lambda peer: (
                self._trip_s(previous, peer)
                + self._trip_s(peer, following)
                + views[peer].step_s * (1 + views[peer].num_sessions)
            ),
        )
        self.num_replaced += 1
        # A session counts once at each server of its route.
        if chosen not in route:
            self._own_sessions[chosen] += 1
        if list(route).count(route[stage]) == 1:
            self._own_sessions[route[stage]] -= 1
        return chosen

    def share_prefixes(self) -> bool:
        """Return whether all known servers share prefixes among clients."""
        return all(offer.shares_prefixes for offer in self._model.offers.values())

    def _views(self) -> dict[PeerId, ServerView]:
        return {
            peer: ServerView(
                stages=offer.stages,
                step_s=offer.step_s,
                num_sessions=max(offer.num_sessions, self._own_sessions[peer]),
                has_room=not offer.is_draining and offer.free_bytes > 0 and not self.is_ejected(0, peer),
            )
            for peer, offer in self._model.offers.items()
        }

    def _trip_s(self, sender: PeerId | None, receiver: PeerId | None) -> float:
        """Return the seconds that a message takes between two peers; None is this client."""
        if sender == receiver:
            return 0.0
        if sender is None or receiver is None:
            peer = receiver if sender is None else sender
            link = self.transport.links.get(peer) if peer is not None else None
            return (link.round_trip_s or 0.0) / 2 if link is not None else 0.0
        offers = self._model.offers
        for peer, other in ((sender, receiver), (receiver, sender)):
            if peer in offers and other in offers[peer].round_trips:
                return offers[peer].round_trips[other] / 2
        return self._trip_s(None, sender) + self._trip_s(None, receiver)  # not measured: estimate through the client

    def end(self, route: Sequence[PeerId]) -> None:
        """Release a route whose session is over."""
        self._own_sessions.subtract(set(route))

    def servers(self, stage: int) -> Collection[PeerId]:
        """Return the servers of a stage."""
        return self._model.serving(stage)

    def eject(self, stage: int, peer: PeerId, *, version: int, error: PeerError) -> None:
        """Give a server no sessions for a while, at any stage, because it failed in a step."""
        _, last_s = self._ejected.get(peer, (0.0, 0.0))
        for_s = min(_LONGEST_EJECTION_S, 2 * last_s) or _FIRST_EJECTION_S
        self._ejected[peer] = now_s() + for_s, for_s
        if isinstance(error, Unreachable):
            self._unreachable.add(peer)
        else:
            self._unreachable.discard(peer)
        _log.info("Server %s gets no sessions for %g s: %s", peer, for_s, shorten(str(error)))

    async def keep_pinging(self) -> None:
        """Ping unreachable servers, and end their ejections as soon as they answer."""
        while True:
            await asyncio.sleep(_PING_S)
            self._unreachable &= self._model.offers.keys()
            await gather(map(self._ping, sorted(self._unreachable)))

    async def _ping(self, peer: PeerId) -> None:
        with contextlib.suppress(PeerError):
            await self.transport.ping(peer)
            if peer in self._unreachable:  # it was not ejected meanwhile for another reason
                self._unreachable.discard(peer)
                _, for_s = self._ejected[peer]
                self._ejected[peer] = now_s(), for_s  # keeps the length, so that the next ejection is longer
                _log.info("Server %s answers again.", peer)

    def is_ejected(self, stage: int, peer: PeerId) -> bool:
        """Return whether a server is ejected, at whichever stage it failed."""
        return self._ejected.get(peer, (0.0, 0.0))[0] > now_s()

    async def send_adapter(self, peer: PeerId, adapter: PackedAdapter, *, again: bool) -> None:
        """Send a server an adapter unless it was sent before; with `again`, in any case."""
        await self._model.uploads.send(peer, adapter, timeout=self.timeout, again=again)

    async def send(self, peer: PeerId, request: SessionSteps, tensors: Sequence[Tensor]) -> SessionStepsReply:
        """Send a server steps of sessions."""
        return await send(self.transport, peer, SESSION_STEPS, request, tensors, timeout=self.timeout)
