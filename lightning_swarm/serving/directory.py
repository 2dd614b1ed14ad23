"""The servers of a served model, and downloads from them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from lightning_swarm.client.inference.adapter_uploads import AdapterUploads
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Damaged, PeerError, ProtocolError, StageLost, SwarmError
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.pretrained import FILES, weights_digest
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.protocol.messages.serving import CardRequest, ModelCard, PartRequest, ServerOffer, WeightsDigest
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.rpc import MODEL_CARD, MODEL_PART

_log = logging.getLogger(__name__)

REFRESH_S: Final = 5.0
"""Seconds between two refreshes of a model's servers."""

_CARD_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 5.0
_RECONNECT_S: Final = 15.0  # pause after a failed attempt to connect


def offers_key(model: str) -> str:
    """Return the directory key under which a model's servers announce their offers."""
    return f"{model}.offers"


async def read_card(transport: Transport, peer: PeerId) -> ModelCard:
    """Return the card of the model that a server serves."""
    return await MODEL_CARD.ask(transport, peer, CardRequest(), timeout=_CARD_TIMEOUT_S)


@dataclass(eq=False)
class ModelDirectory:
    """The servers of one model that announced themselves and can be reached."""

    transport: Transport
    directory: Directory
    card: ModelCard
    offers: dict[PeerId, ServerOffer] = field(default_factory=dict)
    uploads: AdapterUploads = field(init=False)  # adapters that this client sends
    _retry_at_s: dict[PeerId, float] = field(default_factory=dict)  # peer -> time of the next attempt to connect

    def __post_init__(self) -> None:
        self.uploads = AdapterUploads(self.transport)

    async def refresh(self) -> None:
        """Read the servers' announcements, and connect to new servers."""
        announced: dict[PeerId, ServerOffer] = {}
        for peer, value in (await self.directory.read(offers_key(self.card.id))).items():
            try:
                offer = decode(value, ServerOffer)
                self._check(peer, offer)
            except ProtocolError as error:
                _log.warning("Ignored the announcement of %s: %s", peer, shorten(str(error)))
            else:
                announced[peer] = offer
        reached = await gather(self._connect(peer, offer) for peer, offer in announced.items())
        self.offers = {peer: announced[peer] for peer, is_reached in zip(announced, reached, strict=True) if is_reached}

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
            raise ProtocolError(f"an offer must name some of the model's {len(self.card.stages)} stages, got {offer}")
        foreign = {address.rpartition("/p2p/")[2] for address in offer.addresses if "/p2p/" in address} - {peer}
        if foreign:
            raise ProtocolError(f"a peer must announce its own addresses, got an address of {min(foreign)}")

    async def _connect(self, peer: PeerId, offer: ServerOffer) -> bool:
        """Connect to a server that is new or has new addresses; return whether it can be reached."""
        known = self.offers.get(peer)
        if peer == self.transport.peer_id or (known is not None and known.addresses == offer.addresses):
            return True
        if self._retry_at_s.get(peer, 0.0) > now_s():
            return False
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.transport.connect(offer.addresses)
        except (SwarmError, TimeoutError) as error:
            self._retry_at_s[peer] = now_s() + _RECONNECT_S
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
        """Download tensors like those in `like` from the first source whose tensors match the digest `wanted`."""
        problems: list[str] = []
        for peer in sources:
            try:
                tensors = {name: await self._tensor(peer, name, like[name]) for name in names}
                if await asyncio.to_thread(weights_digest, tensors) != wanted:
                    raise Damaged(f"the weights from {peer} do not match the model's card")
            except SwarmError as error:
                problems.append(f"{peer}: {error}")
            else:
                return tensors
        raise StageLost(
            f"no server sent the weights {list(names)[:3]} of model {self.card.id[:12]}: "
            f"{problems or 'no server has them'}. Start one that has the model's files: `serve --weights FOLDER`."
        )

    async def _tensor(self, peer: PeerId, name: str, like: Tensor) -> Tensor:
        (tensor,) = await self._part(peer, PartRequest(model=self.card.id, kind="tensor", name=name), like.nbytes)
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise Damaged(
                f"`{name}` must be {tuple(like.shape)} in {like.dtype}, got {tuple(tensor.shape)} in {tensor.dtype}"
            )
        return tensor

    async def _part(self, peer: PeerId, request: PartRequest, max_bytes: int) -> tuple[Tensor]:
        max_bytes = max(max_bytes, 1)
        _, tensors = await MODEL_PART.ask(self.transport, peer, request, timeout=3600.0, max_bytes=max_bytes)
        if len(tensors) != 1:
            raise Damaged(f"{peer} must send one tensor for {request.name!r}, got {len(tensors)}")
        return (tensors[0],)

    async def download_files(self) -> dict[str, bytes]:
        """Download the model's small files, and check each against the card. The tokenizer needs all of them."""
        files = {}
        for file in self.card.files:
            if file.name not in FILES:  # the name becomes a path
                raise ProtocolError(f"a model's files must be among {FILES}, got {file.name!r} in its card")
            request = PartRequest(model=self.card.id, kind="file", name=file.name)
            for peer in [peer for peer, offer in self.offers.items() if offer.has_files]:
                try:
                    (tensor,) = await self._part(peer, request, file.num_bytes)
                except SwarmError as error:
                    _log.info("%s did not send %s: %s", peer, file.name, shorten(str(error)))
                    continue
                content = tensor.numpy().tobytes()
                if hashlib.sha256(content).digest() == file.sha256:
                    files[file.name] = content
                    break
            else:
                raise StageLost(f"no server sent the file {file.name!r} of the model. Try again, or use your own copy.")
        return files
