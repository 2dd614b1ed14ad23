"""Client of a served model: finds its servers, downloads weights outside the blocks, and sends the blocks' calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from lightning_swarm.client.adapter_uploads import AdapterUploads
from lightning_swarm.client.adapters import PackedAdapter
from lightning_swarm.client.inference import SessionWeights
from lightning_swarm.client.pipeline.context import send
from lightning_swarm.client.session_forwards import SessionForwards
from lightning_swarm.client.session_policy import ServerView, best_route
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    ConfigError,
    Damaged,
    PeerError,
    ProtocolError,
    StageLost,
    SwarmError,
    Unreachable,
)
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.attention_cache import CacheHandle, is_in_session
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.pretrained import FILES, weights_digest
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import SessionStep
from lightning_swarm.protocol.messages.serving import CardRequest, ModelCard, PartRequest, ServerOffer, WeightsDigest
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.rpc import MODEL_CARD, MODEL_PART, SESSION_STEP

if TYPE_CHECKING:
    from lightning_swarm.client.adapters import FoundAdapters
    from lightning_swarm.client.tuning import AdaptedBlocks

_log = logging.getLogger(__name__)

REFRESH_S: Final = 5.0
"""Seconds between two refreshes of a model's servers."""

_CARD_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 5.0
_CONNECT_AGAIN_S: Final = 15.0  # pause after a failed attempt to connect
_FIRST_BAN_S: Final = 5.0  # each further ban of a server is twice as long
_LONGEST_BAN_S: Final = 60.0
_LOOK_S: Final = 2.0  # between two pings of servers that did not answer
_NO_CACHE: Final = (
    "a cache of a served model holds no keys and values of a forward that may train, got a text that goes on from one. "
    "Write texts by `generate`, under `torch.no_grad()`; or freeze the adapter, by `requires_grad_(False)`; or pass "
    "`use_cache=False`, and the whole text each time."
)
_ONLY_HIDDEN: Final = (
    "gradients of a served model's blocks flow through the hidden state alone, got another argument of blocks that "
    "requires one. Detach what it is made of, or tune by LoRA."
)
_WEIGHTS: Final = SessionWeights(generation=0, version=0, number=0)  # served weights never change


def _check_not_empty(hidden: Tensor) -> None:
    if not hidden.numel():
        raise ConfigError(
            f"a served model takes at least one text of at least one token, got a hidden state of {list(hidden.shape)}."
        )


def offers_key(model: str) -> str:
    """Return the directory key under which the servers of this model announce their offers."""
    return f"{model}.offers"


async def read_card(transport: Transport, peer: PeerId) -> ModelCard:
    """Ask a server which model it serves."""
    return await MODEL_CARD.ask(transport, peer, CardRequest(), timeout=_CARD_TIMEOUT_S)


@dataclass(eq=False)
class ModelDirectory:
    """The servers of one model that announced themselves and can be reached."""

    transport: Transport
    directory: Directory
    card: ModelCard
    offers: dict[PeerId, ServerOffer] = field(default_factory=dict)
    uploads: AdapterUploads = field(init=False)  # adapters that this client sends
    _not_before_s: dict[PeerId, float] = field(default_factory=dict)  # peer -> time of the next attempt to connect

    def __post_init__(self) -> None:
        self.uploads = AdapterUploads(self.transport)

    async def refresh(self) -> None:
        """Read the announcements, and connect to newcomers."""
        found: dict[PeerId, ServerOffer] = {}
        for peer, value in (await self.directory.read(offers_key(self.card.id))).items():
            try:
                offer = decode(value, ServerOffer)
                self._check(peer, offer)
            except ProtocolError as error:
                _log.warning("Ignored what %s announced: %s", peer, shorten(str(error)))
            else:
                found[peer] = offer
        met = await gather(self._meets(peer, offer) for peer, offer in found.items())
        self.offers = {peer: offer for (peer, offer), is_met in zip(found.items(), met, strict=True) if is_met}

    async def keep_fresh(self) -> None:
        """Refresh periodically."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except PeerError as error:
                _log.info("The directory did not list the model's servers: %s", shorten(str(error)))

    def _check(self, peer: PeerId, offer: ServerOffer) -> None:
        """Refuse an offer of stages that the model does not have, or with addresses of other peers."""
        if offer.first_stage + offer.num_stages > len(self.card.stages):
            raise ProtocolError(f"the model has {len(self.card.stages)} stages, got an offer of {offer}")
        others = {address.rpartition("/p2p/")[2] for address in offer.addresses if "/p2p/" in address} - {peer}
        if others:
            raise ProtocolError(f"a peer announces its own addresses, got one of {min(others)}")

    async def _meets(self, peer: PeerId, offer: ServerOffer) -> bool:
        """Return whether a server can be reached; connect to it if it is new, or has new addresses."""
        known = self.offers.get(peer)
        if peer == self.transport.peer_id or (known is not None and known.addresses == offer.addresses):
            return True
        if self._not_before_s.get(peer, 0.0) > now_s():
            return False
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.transport.connect(offer.addresses)
        except (SwarmError, TimeoutError) as error:
            self._not_before_s[peer] = now_s() + _CONNECT_AGAIN_S
            _log.info("Server %s cannot be reached from here: %s", peer, shorten(str(error)))
            return False
        return True

    def serving(self, stage: int) -> list[PeerId]:
        """Return the servers of a stage."""
        return [peer for peer, offer in self.offers.items() if stage in offer.stages]

    # ------------------------------------------------------------------ downloads

    async def download(
        self, names: Sequence[str], like: Mapping[str, Tensor], wanted: WeightsDigest, sources: Collection[PeerId]
    ) -> dict[str, Tensor]:
        """Download tensors, formed as in `like`, from the first source whose tensors match the digest `wanted`."""
        problems: list[str] = []
        for peer in sources:
            try:
                found = {name: await self._tensor(peer, name, like[name]) for name in names}
                if await asyncio.to_thread(weights_digest, found) != wanted:
                    raise Damaged(f"the weights of {peer} are not those of the model's card")
            except SwarmError as error:
                problems.append(f"{peer}: {error}")
            else:
                return found
        raise StageLost(
            f"no server gives the weights {list(names)[:3]} of model {self.card.id[:12]}: "
            f"{problems or 'none has them'}. Start one that has the model's files: `serve --weights FOLDER`."
        )

    async def _tensor(self, peer: PeerId, name: str, like: Tensor) -> Tensor:
        (tensor,) = await self._part(peer, PartRequest(model=self.card.id, kind="tensor", name=name), like.nbytes)
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise Damaged(
                f"`{name}` has {tuple(like.shape)} and {like.dtype}, got {tuple(tensor.shape)}, {tensor.dtype}"
            )
        return tensor

    async def _part(self, peer: PeerId, request: PartRequest, max_bytes: int) -> tuple[Tensor]:
        max_bytes = max(max_bytes, 1)
        _, tensors = await MODEL_PART.ask(self.transport, peer, request, timeout=3600.0, max_bytes=max_bytes)
        if len(tensors) != 1:
            raise Damaged(f"{peer} sent {len(tensors)} tensors for {request.name!r}")
        return (tensors[0],)

    async def download_files(self) -> dict[str, bytes]:
        """Download the model's small files and check each against the card. Tokens depend on all of them."""
        found = {}
        for file in self.card.files:
            if file.name not in FILES:  # the name becomes a path
                raise ProtocolError(f"a model's files are among {FILES}, got {file.name!r} in its card")
            request = PartRequest(model=self.card.id, kind="file", name=file.name)
            for peer in [peer for peer, offer in self.offers.items() if offer.has_files]:
                try:
                    (tensor,) = await self._part(peer, request, file.num_bytes)
                except SwarmError as error:
                    _log.info("%s does not send %s: %s", peer, file.name, shorten(str(error)))
                    continue
                content = tensor.numpy().tobytes()
                if hashlib.sha256(content).digest() == file.sha256:
                    found[file.name] = content
                    break
            else:
                raise StageLost(
                    f"no server gives the file {file.name!r} of the model. Ask again, or use your own copy."
                )
        return found


class ServedRoutes:
    """Implements `client.session_routes.SessionRoutes`, where the methods are described, for a model's servers.

    Servers are chosen for the short time of a step: links, computation and the sessions that a server already has.
    """

    def __init__(self, model: ModelDirectory, *, timeout: float, rng: random.Random) -> None:
        self._model, self._rng = model, rng
        self.transport, self.timeout = model.transport, timeout
        self._banned: dict[PeerId, tuple[float, float]] = {}  # peer -> (end of the ban, its length in seconds)
        self._unreachable: set[PeerId] = set()  # banned peers that did not answer
        self._own: Counter[PeerId] = Counter()  # sessions of this client, which servers may not have announced yet

    def begin(self, rows: int) -> list[PeerId]:
        """See `SessionRoutes`."""
        views = self._views()
        number = len(self._model.card.stages)
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
        free = [peer for peer in here if views[peer].has_room and not self.is_banned(stage, peer)]
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
        # A session counts once at each server of its route.
        if chosen not in route:
            self._own[chosen] += 1
        if list(route).count(route[stage]) == 1:
            self._own[route[stage]] -= 1
        return chosen

    def _views(self) -> dict[PeerId, ServerView]:
        return {
            peer: ServerView(
                stages=offer.stages,
                step_s=offer.step_s,
                num_sessions=max(offer.num_sessions, self._own[peer]),
                has_room=not offer.is_draining and offer.free_bytes > 0 and not self.is_banned(0, peer),
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

    def ban(self, stage: int, peer: PeerId, *, version: int, error: PeerError) -> None:
        """See `SessionRoutes`. The ban holds for all stages."""
        _, before_s = self._banned.get(peer, (0.0, 0.0))
        for_s = min(_LONGEST_BAN_S, 2 * before_s) or _FIRST_BAN_S
        self._banned[peer] = now_s() + for_s, for_s
        if isinstance(error, Unreachable):
            self._unreachable.add(peer)
        else:
            self._unreachable.discard(peer)
        _log.info("Server %s gets no session for %g s: %s", peer, for_s, shorten(str(error)))

    async def keep_looking(self) -> None:
        """Lift the bans of unreachable servers as soon as they answer."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._unreachable &= self._model.offers.keys()
            await gather(map(self._look, sorted(self._unreachable)))

    async def _look(self, peer: PeerId) -> None:
        with contextlib.suppress(PeerError):
            await self.transport.ping(peer)
            if peer in self._unreachable:  # no other failure came meanwhile
                self._unreachable.discard(peer)
                _, for_s = self._banned[peer]
                self._banned[peer] = now_s(), for_s  # keep the length, so that the next ban is longer
                _log.info("Server %s answers again.", peer)

    def is_banned(self, stage: int, peer: PeerId) -> bool:
        """See `SessionRoutes`."""
        return self._banned.get(peer, (0.0, 0.0))[0] > now_s()

    async def give_adapter(self, peer: PeerId, adapter: PackedAdapter, *, again: bool) -> None:
        """See `SessionRoutes`."""
        await self._model.uploads.send(peer, adapter, timeout=self.timeout, again=again)

    async def send(self, peer: PeerId, step: SessionStep, tensors: Sequence[Tensor]) -> None:
        """See `SessionRoutes`."""
        await send(self.transport, peer, SESSION_STEP, step, tensors, timeout=self.timeout)


def _wants_gradient(tree: Any) -> bool:
    """Return whether gradients are enabled and a tensor of a tree needs one."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in serialization.flatten(tree)[1])


def _leads_to_gradients(found: FoundAdapters, hidden: Any) -> bool:
    """Return whether a forward needs a backward later, for adapters or for the hidden state."""
    return found.wants_grad or _wants_gradient(hidden)


class ServedBlocks:
    """Stands in for a model's blocks: their calls become steps of sessions."""

    def __init__(
        self,
        runtime: Runtime,
        routes: ServedRoutes,
        card: ModelCard,
        blocks: Sequence[nn.Module],
        *,
        device: torch.device,
        adapted: AdaptedBlocks | None = None,  # set if blocks may have adapters
    ) -> None:
        self._num_stages, self._device, self._adapted = len(card.stages), device, adapted
        self._blocks = blocks
        self._num_writing = 0  # calls of the Hugging Face model's `generate` under way
        self._forwards = SessionForwards(
            runtime, routes, codec=None, device=device, num_blocks=sum(stage.num_blocks for stage in card.stages)
        )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, treat forwards with a cache as text generation, even with an adapter that trains."""
        self._num_writing += 1
        try:
            yield
        finally:
            self._num_writing -= 1

    def generate(self, hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        """Compute the blocks' output for a forward with a cache, such as one step of Hugging Face's `generate`.

        If a text is written, the forward is a step of a session. If gradients are needed, or an adapter trains outside
        of `writing`, it is a forward for tuning, which uses no cache, and refuses one that holds a text.
        """
        _check_not_empty(hidden)
        found = self._adapters(hidden, extras)
        if self._adapted is None or found is None:
            modes = self._modes(training=self._trains)
            return self._forwards.step(hidden, extras, cache, weights=_WEIGHTS, modes=modes)
        handle = CacheHandle.of(cache)
        # Not each cache is for a text: a model makes one even if it will not be used, as in an evaluation. `is_trained`
        # is true if an adapter has parameters that train, even if gradients are off.
        is_text = self._num_writing > 0 or handle.session is not None or not found.is_trained
        if is_text and not _leads_to_gradients(found, hidden):
            packed, drops = self._adapted.packed(found), [stage.drops for stage in found.stages]
            modes = self._modes(training=found.trains)
            return self._forwards.step(
                hidden, extras, cache, weights=_WEIGHTS, modes=modes, adapters=packed, drops=drops
            )
        if handle.length or handle.session is not None:
            raise ConfigError(_NO_CACHE)
        # A forward for tuning: forbid any later use of the cache, and compute without it.
        handle.refuse_use(_NO_CACHE)
        extras = {name: None if is_in_session(value) else value for name, value in extras.items()}
        return self._adapted(hidden, extras, found)

    def __call__(self, hidden: Any, *carried: Any, **extras: Any) -> Any:
        """Compute a forward without a cache. `carried` are inputs beside the hidden state that require a gradient."""
        _check_not_empty(hidden)
        if carried and self._adapted is not None:
            raise ConfigError(_ONLY_HIDDEN)
        if carried:
            raise ConfigError(
                "a served model computes without gradients, got an input of its blocks that requires one. Call it "
                "under `torch.no_grad()`."
            )
        adapters = self._adapters(hidden, extras)
        if self._adapted is not None and adapters is not None:
            return self._adapted(hidden, extras, adapters)
        return self._forwards.once(hidden, extras, weights=_WEIGHTS, modes=self._modes(training=self._trains))

    @property
    def _trains(self) -> bool:
        """Whether a block without adapters is in train mode."""
        return any(block.training for block in self._blocks)

    def _adapters(self, hidden: Any, extras: dict[str, Any]) -> FoundAdapters | None:
        """Return the adapters; None if there are none and the call neither draws random numbers nor needs gradients."""
        if self._adapted is None:
            return None
        found = self._adapted.adapters()
        if _wants_gradient(extras):
            raise ConfigError(_ONLY_HIDDEN)
        draws = found.trains or any(stage.drops for stage in found.stages)
        return None if found.is_empty and not draws and not _leads_to_gradients(found, hidden) else found

    def _modes(self, *, training: bool = False) -> list[ComputeMode]:
        mode = capture(self._device.type, training=training, grad=False, input_grad=False)
        return [mode] * self._num_stages
