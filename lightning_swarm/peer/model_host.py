"""A peer that serves stages of a model which is not trained: loads them, announces them, and leaves without loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lightning_swarm.client.served_model import REFRESH_S, ModelDirectory, offers_key, read_card, stages_of
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ConfigError, PeerError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.readable import short_name, shorten
from lightning_swarm.core.tasks import TaskOwner, gather
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel, check_version, weights_digest
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.protocol.messages.serving import ModelCard, ServerOffer, WeightsDigest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.server.executor import Executor
from lightning_swarm.server.model_server import ModelServer, ServedParts
from lightning_swarm.server.placement import choose_span

_log = logging.getLogger(__name__)

_OFFER_TTL_S: Final = 4 * REFRESH_S
_MAX_STAGES: Final = 16  # of a model that nobody says how to cut
_MAX_NEIGHBOURS: Final = 32
_DRAIN_LOOK_S: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server is to serve.

    Args:
        weights: A folder of Hugging Face; None: the weights come from other servers.
        hosts: Servers of the model that run already; none: this one is the first.
        weight_bytes: Most bytes of weights that it holds; None: all stages.
        num_stages: Into so many stages the first server cuts the model; None: one for each block, up to 16.
        dtype: Of the weights, at the first server; None: as they were saved.
        blocks: The name of the list of blocks, at the first server; None: it is found.
        device: That computes.
        joins: Compute steps of several texts together, which changes their last bits.
    """

    weights: Path | None
    hosts: Sequence[PeerId] = ()
    weight_bytes: int | None = None
    num_stages: int | None = None
    dtype: str | None = None
    blocks: str | None = None
    device: str = "cpu"
    joins: bool = True


class ModelHost:
    """Serves stages of one model."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        executor: Callable[[], Executor],
        limits: Limits,
        options: ServeOptions,
    ) -> None:
        self._transport, self._directory = transport, directory
        self._executor_of, self._limits, self._options = executor, limits, options
        self._executor: Executor | None = None
        self._tasks = TaskOwner()
        self._leaving = asyncio.Event()
        self.server: ModelServer | None = None
        self.span = range(0)

    async def open(self, say: Callable[[str], None] = _log.info) -> None:
        """Load stages, and begin to serve them."""
        options = self._options
        folder = None if options.weights is None else PretrainedFolder(options.weights)
        if options.hosts:
            card = await self._card_of_hosts()
            check_version(card)
            model = await asyncio.to_thread(
                PretrainedModel, card.config, card.generation_config, dtype=card.dtype, blocks=card.blocks
            )
        elif folder is None:
            raise ConfigError("the first server of a model needs its files: name their folder by `--weights`.")
        else:
            say(f"Reading {options.weights}, to tell others which weights are served.")
            model, card = await asyncio.to_thread(_first, folder, options)
        self._models = ModelDirectory(self._transport, self._directory, card)
        if options.hosts:
            await self._models.refresh()
        self.span = self._chosen(card)
        stages = dict(zip(self.span, model.stages(card.ranges)[self.span.start : self.span.stop], strict=True))
        for index, stage in stages.items():
            await self._load(model, stage, card.stages[index].weights, folder, index)
        self._executor = self._executor_of()
        await self._tasks.start()
        parts = _parts(model, stages, folder)
        self.server = ModelServer(
            self._transport,
            self._executor,
            self._limits,
            self._tasks,
            card,
            parts,
            torch.device(options.device),
            joins=options.joins,
        )
        await self._announce()
        self._tasks.spawn(self._keep_announcing())
        self._tasks.spawn(self._keep_looking())
        last = self.span.stop - 1
        which = f"stage {last}" if len(self.span) == 1 else f"stages {self.span.start} to {last}"
        say(f"Serving {which} of {len(card.stages)} of model {card.id[:12]}.")

    async def _card_of_hosts(self) -> ModelCard:
        problems = []
        for peer in self._options.hosts:
            try:
                return await read_card(self._transport, peer)
            except PeerError as error:
                problems.append(f"{short_name(peer)}: {shorten(str(error))}")
        raise ConfigError(
            f"`--join` must name a server of a model, and none says which: {'; '.join(problems)}. Copy the address "
            "that it printed, and see whether it runs."
        )

    def _chosen(self, card: ModelCard) -> range:
        rates = [0.0] * len(card.stages)
        for offer in self._models.offers.values():
            for stage in stages_of(offer) if not offer.is_draining else ():
                rates[stage] += 1.0 / len(stages_of(offer))  # who has many stages has less for each
        return choose_span([stage.weights.num_bytes for stage in card.stages], self._options.weight_bytes, rates)

    async def _load(
        self,
        model: PretrainedModel,
        stage: StageModule,
        wanted: WeightsDigest,
        folder: PretrainedFolder | None,
        index: int,
    ) -> None:
        tensors = stage.named_stage_tensors()
        if folder is not None:
            read = folder.reader(model)
            values = await asyncio.to_thread(model.fill, tensors, read, torch.device(self._options.device))
            if await asyncio.to_thread(weights_digest, values) != wanted:
                raise ConfigError(
                    f"`--weights` must be the folder of the model that is served at `--join`, and stage {index} in "
                    f"{str(folder.path)!r} has other weights. Leave `--weights` out: then they come from other servers."
                )
            return
        sources = self._models.serving(index)
        sources += [peer for peer, offer in self._models.offers.items() if offer.has_files and peer not in sources]
        found = await self._models.download(model.saved(tensors), tensors, wanted, sources)
        await asyncio.to_thread(model.fill, tensors, found.__getitem__, torch.device(self._options.device))

    # ------------------------------------------------------------------ announcements

    async def _announce(self) -> None:
        server = self.server
        assert server is not None
        offer = ServerOffer(
            addresses=list(await self._transport.addresses()),
            first_stage=self.span.start,
            num_stages=len(self.span),
            step_s=server.sessions.step_s,
            num_sessions=server.sessions.num_open // len(self.span),
            free_bytes=server.sessions.free_bytes,
            has_files=server.parts.has_files,
            is_draining=self._leaving.is_set(),
            round_trips=self._round_trips(),
        )
        await self._directory.announce(offers_key(server.card.id), encode(offer), ttl_s=_OFFER_TTL_S)

    def _round_trips(self) -> dict[PeerId, float]:
        links = self._transport.links
        measured = {peer: links[peer].round_trip_s for peer in self._models.offers if peer in links}
        return {peer: trip_s for peer, trip_s in list(measured.items())[:_MAX_NEIGHBOURS] if trip_s is not None}

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            with contextlib.suppress(PeerError):  # the next time may go better
                await self._announce()

    async def _keep_looking(self) -> None:
        """Meet the other servers, and have the links to them measured."""
        while True:
            await asyncio.sleep(REFRESH_S)
            with contextlib.suppress(PeerError):
                await self._models.refresh()
                await gather(self._measure(peer) for peer in list(self._models.offers)[:_MAX_NEIGHBOURS])

    async def _measure(self, peer: PeerId) -> None:
        """Have the link to another server measured."""
        if peer != self._transport.peer_id:
            with contextlib.suppress(PeerError):
                await self._transport.ping(peer)

    # ------------------------------------------------------------------ the end

    async def until_left(self, say: Callable[[str], None]) -> None:
        """Serve until `leave`, and then until no text is under way here, or for as long as one may take."""
        await self._leaving.wait()
        server = self.server
        if server is None:
            return
        with contextlib.suppress(PeerError):
            await self._announce()
        end_s = now_s() + self._limits.drain_timeout
        if server.sessions.num_open:
            say(
                f"Leaving when the texts that are under way here are done, in {self._limits.drain_timeout:g} s at most."
            )
        while server.sessions.num_open and now_s() < end_s:  # noqa: ASYNC110 - it ends by many ways
            await asyncio.sleep(_DRAIN_LOOK_S)

    def leave(self) -> None:
        """On the loop: have `until_left` end. Twice is fine."""
        self._leaving.set()
        if self.server is not None:
            self.server.is_leaving = True

    async def close(self) -> None:
        """Serve nothing any more."""
        try:
            await self._tasks.close()
        finally:
            if self._executor is not None:
                self._executor.close()


def _first(folder: PretrainedFolder, options: ServeOptions) -> tuple[PretrainedModel, ModelCard]:
    model = PretrainedModel(
        folder.config, folder.generation_config, dtype=options.dtype or folder.dtype, blocks=options.blocks
    )
    number = len(model.blocks.modules)
    stages = min(number, _MAX_STAGES) if options.num_stages is None else options.num_stages
    if not 1 <= stages <= number:
        raise ConfigError(
            f"a model is cut between its blocks, of which this one has {number}, got {stages} stages. Correct "
            "`--stages`."
        )
    ranges = [range(index * number // stages, (index + 1) * number // stages) for index in range(stages)]
    return model, folder.card(model, ranges)


def _parts(model: PretrainedModel, stages: Mapping[int, StageModule], folder: PretrainedFolder | None) -> ServedParts:
    """Return what others may have: from the folder, or of the stages that are here."""
    if folder is not None:
        known = {*model.module.state_dict()}
        dtypes = {name: tensor.dtype for name, tensor in model.module.state_dict().items()}
        read = folder.reader(model)

        def from_folder(name: str) -> Tensor:
            if name not in known:
                raise KeyError(name)
            return read(name).to(dtypes[name])

        return ServedParts(stages, from_folder, folder.files, has_files=True)
    own = {name: tensor for stage in stages.values() for name, tensor in stage.named_stage_tensors().items()}
    return ServedParts(stages, own.__getitem__, {}, has_files=False)
