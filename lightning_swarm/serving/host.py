"""A peer that serves stages of a finished model: loads, announces and moves them, and leaves without loss of texts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ConfigError, PeerError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.core.process import release_free_memory
from lightning_swarm.core.readable import short_name, shorten, size_text
from lightning_swarm.core.tasks import TaskOwner, gather
from lightning_swarm.model.inference.linear_layers import use_onednn
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel, check_version, weights_digest
from lightning_swarm.model.quantization import Quantization, check_same, with_quantization
from lightning_swarm.monitor.model_report import changes, coverage, missing_stages, named_stages
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.protocol.messages.serving import MAX_LISTED_SERVERS, ModelCard, ModelServers, ServerOffer
from lightning_swarm.protocol.messages.wire import MAX_TEXT, encode
from lightning_swarm.protocol.rpc import MODEL_SERVERS
from lightning_swarm.server.executor import Executor
from lightning_swarm.serving.directory import REFRESH_S, ModelDirectory, offers_key, read_card
from lightning_swarm.serving.memory import check_fits
from lightning_swarm.serving.moves import Moves
from lightning_swarm.serving.placement import MovePolicy, Placed, choose_move, choose_span, stage_rates
from lightning_swarm.serving.server import ModelServer, ServedParts
from lightning_swarm.serving.trial_call import ModelForm, servable

_log = logging.getLogger(__name__)

_OFFER_TTL_S: Final = 4 * REFRESH_S
_MAX_STAGES: Final = 16  # most stages of a model, if the user sets no number
_MAX_NEIGHBOURS: Final = 32  # other servers to which links are measured
_DRAIN_POLL_S: Final = 0.2  # pause between checks of the texts in progress
_RATE_WEIGHT: Final = 0.3  # weight of the newest `REFRESH_S` in the announced rate of tokens
_QUIET_S: Final = 10.0  # seconds without a step after which a text no longer counts as in progress here


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of a server of a finished model.

    Args:
        weights: A Hugging Face folder; None: the weights come from other servers.
        hosts: Running servers of the model; empty: this server is the first.
        weight_bytes: The maximum bytes of weights that the server holds; None: no limit.
        num_stages: Number of stages into which the first server cuts the model; None: one for each block, up to 16.
        dtype: Dtype of the weights, at the first server; None: as they were saved.
        quantize: The kind of quantised weights, ``nf4`` or ``int8``, at the first server; None: as they were saved.
        blocks: The name of the list of blocks, at the first server; None: it is found.
        device: The device that computes.
        batches_texts: Compute steps of several texts together, which may change their last bits.
        shares_prefixes: All clients share the prefixes of prompts that the server keeps. From the time of an answer, a
            client can then guess whether other clients have sent its prompt.
        moves: Policy of moves to worse-served stages; None: never move.
    """

    weights: Path | None
    hosts: Sequence[PeerId] = ()
    weight_bytes: int | None = None
    num_stages: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    blocks: str | None = None
    device: str = "cpu"
    batches_texts: bool = True
    shares_prefixes: bool = False
    moves: MovePolicy | None = field(default_factory=MovePolicy)


class ModelHost:
    """Serves stages of one model."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        new_executor: Callable[[], Executor],
        limits: Limits,
        options: ServeOptions,
    ) -> None:
        self._transport, self._directory = transport, directory
        self._new_executor, self._limits, self._options = new_executor, limits, options
        self._executor: Executor | None = None
        self._device = torch.device(options.device)
        self._tasks = TaskOwner()
        self._leaving = asyncio.Event()
        self._folder: PretrainedFolder | None = None
        self.server: ModelServer | None = None
        self.span = range(0)  # stages of this server
        self._tokens_per_s = MovingAverage(_RATE_WEIGHT)  # at each of its stages
        self._reported: dict[str, range] = {}  # server -> its stages, as last printed

    async def open(self, say: Callable[[str], None] = _log.info) -> None:
        """Load stages, and begin to serve them. `say` prints what happens."""
        options = self._options
        self._folder = None if options.weights is None else PretrainedFolder(options.weights)
        self._say = say
        if options.hosts:
            card = await self._read_card()
            check_version(card)
            check_same(card.config, None if self._folder is None else self._folder.config, options.quantize)
            model, ranges = await self._build(card), card.ranges
            self.models = ModelDirectory(self._transport, self._directory, card)
            await self.models.refresh()
            self.span = await asyncio.to_thread(self._choose_first_span, model, ranges, self._others(), say)
        elif self._folder is None:
            raise ConfigError("the first server of a model needs its files: name their folder by `--weights`.")
        else:
            model, ranges, form = await asyncio.to_thread(_cut_model, self._folder, options, say)
            self.span = await asyncio.to_thread(self._choose_first_span, model, ranges, [], say)
            say(f"Reading {options.weights}, to describe the weights in the model's card.")
            card = await asyncio.to_thread(_card, self._folder, model, ranges, form)
            self.models = ModelDirectory(self._transport, self._directory, card)
        parts = await self._load(model, self.span)
        self._executor = self._new_executor()
        await self._tasks.start()
        self.server = ModelServer(
            self._transport,
            self._executor,
            self._limits,
            self._tasks,
            card,
            parts,
            self._device,
            batches_texts=options.batches_texts and not (model.quantization and model.quantization.rows_depend),
            shares_prefixes=options.shares_prefixes,
        )
        MODEL_SERVERS.serve(self._transport, self._handle_servers)
        await self._serve(self.span)
        self._reported = self._stages_by_server()
        self._tasks.spawn(self._keep_announcing())
        self._tasks.spawn(self._keep_refreshing())
        if options.moves is not None:
            self._tasks.spawn(Moves(self, self._transport, options.moves, self._limits).keep_checking())

    async def _serve(self, span: range) -> None:
        """Announce these stages, which are loaded, and take texts."""
        assert self.server is not None
        self.span = span
        self.server.is_draining = self.is_leaving
        with contextlib.suppress(PeerError):  # a later announcement may succeed
            await self._announce()
        card = self.models.card
        self._say(f"Serving {named_stages(span)} of {len(card.stages)} of model {card.id[:12]}.")

    async def move(self, span: range) -> None:
        """Serve the stages of `span`. If they cannot be loaded, serve the former stages, or none if that fails, too."""
        assert self.server is not None
        before = self.span
        await self.server.withdraw()
        self.span = range(0)
        try:
            parts = await self._load(await self._build(self.models.card), span)
        except Exception as error:  # disks and devices fail with errors of any kind
            if not before:
                raise
            _log.warning("Not moved, because the stages %s cannot be loaded: %s", [*span], shorten(str(error)))
            span, parts = before, await self._load(await self._build(self.models.card), before)
        self.server.serve_parts(parts)
        await self._serve(span)

    async def _build(self, card: ModelCard) -> PretrainedModel:
        configs = card.config, card.generation_config
        return await asyncio.to_thread(PretrainedModel, *configs, dtype=card.dtype, blocks=card.blocks)

    async def _read_card(self) -> ModelCard:
        """Read the model's card from the first server in `hosts` that answers."""
        problems = []
        for peer in self._options.hosts:
            try:
                return await read_card(self._transport, peer)
            except PeerError as error:
                problems.append(f"{short_name(peer)}: {shorten(str(error))}")
        raise ConfigError(
            f"`--join` must name a running server of a model, but none answers: {'; '.join(problems)}. Copy the "
            "address that the server printed, and check that it runs."
        )

    def _choose_first_span(
        self, model: PretrainedModel, ranges: Sequence[range], others: Sequence[Placed], say: Callable[[str], None]
    ) -> range:
        """Choose this server's stages before they are loaded, and print the memory that the model needs and has."""
        sizes, capacity = model.stage_bytes(ranges), self._options.weight_bytes
        span = choose_span(sizes, capacity, stage_rates(len(sizes), others))
        spans = [*(other.stages for other in others), span]
        hint = ""
        if missing_stages(len(sizes), spans):
            memory = sum(sizes[stage] for other in others for stage in other.stages)
            memory += sum(sizes) if capacity is None else capacity
            quantized = model.bytes_if_quantized("nf4", ranges, self._device)
            if quantized is not None and quantized <= memory:
                hint = f" By `--quantize nf4` it would need {size_text(quantized)}."
        say(coverage(sizes, spans) + hint)
        check_fits(sum(sizes[stage] for stage in span), self._device)
        return span

    def choose_span(self) -> range:
        """Choose stages for this server, as if it served none."""
        sizes = self.stage_bytes
        return choose_span(sizes, self._options.weight_bytes, stage_rates(len(sizes), self._others()))

    def choose_move(self, avoided: Collection[range], *, gain: float) -> range | None:
        """Choose stages that need this server more than its own stages; None: it stays."""
        assert self.server is not None
        own = Placed(self.span, 1.0 / (self.server.sessions.step_s or self._typical_step_s))
        capacity = self._options.weight_bytes
        return choose_move(self.stage_bytes, capacity, own, self._others(), avoided=avoided, gain=gain)

    @property
    def stage_bytes(self) -> list[int]:
        """Bytes of each stage's weights."""
        return [stage.weights.num_bytes for stage in self.models.card.stages]

    def _others(self) -> list[Placed]:
        """Return the other servers that take texts. A server without a measured rate has the typical rate."""
        typical_s, own_id = self._typical_step_s, self._transport.peer_id
        return [
            Placed(offer.stages, 1.0 / (offer.step_s or typical_s))
            for peer, offer in self.models.offers.items()
            if peer != own_id and not offer.is_draining
        ]

    @property
    def _typical_step_s(self) -> float:
        return statistics.median([offer.step_s for offer in self.models.offers.values() if offer.step_s] or [1.0])

    async def _load(self, model: PretrainedModel, span: range) -> ServedParts:
        """Load stages from the folder, or else from other servers."""
        cut = model.stages(self.models.card.ranges)
        for index in span:
            await self._load_stage(model, cut[index], index)
            await asyncio.to_thread(use_onednn, cut[index].modules())
            # Quantising a stage has freed the memory of its plain weights.
            await asyncio.to_thread(release_free_memory)
        return _parts(model, {index: cut[index] for index in span}, self._folder)

    async def _load_stage(self, model: PretrainedModel, stage: StageModule, index: int) -> None:
        """Fill a stage with weights, which must have the digest in the card."""
        tensors, folder, wanted = stage.named_stage_tensors(), self._folder, self.models.card.stages[index].weights
        if folder is not None:
            read = folder.reader(model)
            values = await asyncio.to_thread(model.fill, tensors, read, self._device)
            if await asyncio.to_thread(weights_digest, values) != wanted:
                raise ConfigError(
                    f"`--weights` must be the folder of the model that is served at `--join`, and stage {index} in "
                    f"{str(folder.path)!r} has other weights. Leave `--weights` out to get them from other servers."
                )
            return
        sources = self.models.serving(index)
        sources += [peer for peer, offer in self.models.offers.items() if offer.has_files and peer not in sources]
        values = await self.models.download(model.saved(tensors), tensors, wanted, sources)
        await asyncio.to_thread(model.fill, tensors, values.__getitem__, self._device)

    # ------------------------------------------------------------------ announcements

    async def _announce(self) -> None:
        """Announce the stages and the load of this server, if it has stages."""
        server = self.server
        if server is None or not self.span:
            return
        await self._directory.announce(
            offers_key(server.card.id), encode(await self._offer(server)), ttl_s=_OFFER_TTL_S
        )

    async def _offer(self, server: ModelServer) -> ServerOffer:
        """Return the announcement of this server, which must have at least one stage."""
        return ServerOffer(
            addresses=list(await self._transport.addresses()),
            first_stage=self.span.start,
            num_stages=len(self.span),
            step_s=server.sessions.step_s,
            num_sessions=server.sessions.num_open // len(self.span),
            tokens_per_s=self._tokens_per_s.value or 0.0,
            free_bytes=server.sessions.free_bytes,
            step_tokens=self._limits.step_tokens,
            has_files=server.parts.has_files,
            is_draining=server.is_draining,
            shares_prefixes=self._options.shares_prefixes,
            round_trips=self._round_trips(),
        )

    async def _handle_servers(self, caller: PeerId, _: None) -> ModelServers:
        """Return the model's servers that this server knows."""
        assert self.server is not None
        card, offers = self.models.card, dict(self.models.offers)
        offers.pop(self._transport.peer_id, None)
        if self.span:
            offers = {self._transport.peer_id: await self._offer(self.server), **offers}
        settings = json.loads(card.config)
        quantization = Quantization.of(settings)
        listed = itertools.islice(offers.items(), MAX_LISTED_SERVERS)
        return ModelServers(
            model=card.id,
            kind=str(settings.get("model_type", ""))[:MAX_TEXT],
            weights=card.dtype if quantization is None else quantization.kind,
            stage_bytes=self.stage_bytes,
            servers={peer: msgspec.structs.replace(offer, round_trips={}) for peer, offer in listed},
        )

    def _round_trips(self) -> dict[PeerId, float]:
        links = self._transport.links
        measured = {peer: links[peer].round_trip_s for peer in self.models.offers if peer in links}
        return {peer: trip_s for peer, trip_s in list(measured.items())[:_MAX_NEIGHBOURS] if trip_s is not None}

    async def _keep_announcing(self) -> None:
        while True:
            before = self.server.sessions.num_tokens if self.server is not None else 0
            await asyncio.sleep(REFRESH_S)
            if self.server is not None and self.span:
                self._tokens_per_s.measure((self.server.sessions.num_tokens - before) / len(self.span) / REFRESH_S)
            with contextlib.suppress(PeerError):  # a later announcement may succeed
                await self._announce()

    async def _keep_refreshing(self) -> None:
        """Periodically read the other servers' announcements, and measure the links to these servers."""
        while True:
            await asyncio.sleep(REFRESH_S)
            with contextlib.suppress(PeerError):
                await self.models.refresh()
                self._report_changes()
                await gather(self._measure_link(peer) for peer in list(self.models.offers)[:_MAX_NEIGHBOURS])

    def _stages_by_server(self) -> dict[str, range]:
        """Return the stages of each server that takes texts, including this server."""
        stages = {str(peer): offer.stages for peer, offer in self.models.offers.items() if not offer.is_draining}
        return stages | ({str(self._transport.peer_id): self.span} if self.span else {})

    def _report_changes(self) -> None:
        """Print which servers came, left or moved since the last report, and whether each stage has a server."""
        stages = self._stages_by_server()
        if changed := changes(self._reported, stages):
            self._reported = stages
            self._say(f"{', '.join(changed)}. {coverage(self.stage_bytes, list(stages.values()))}")

    async def _measure_link(self, peer: PeerId) -> None:
        """Measure the link to another server."""
        if peer != self._transport.peer_id:
            with contextlib.suppress(PeerError):
                await self._transport.ping(peer)

    # ------------------------------------------------------------------ the end

    async def until_left(self, say: Callable[[str], None]) -> None:
        """Serve until `leave`, and then until no text is in progress here, up to `Limits.drain_timeout`."""
        await self._leaving.wait()
        if self.server is None:
            return
        if self.server.sessions.num_under_way(_QUIET_S):
            say(f"Leaving when the texts in progress here are done, in at most {self._limits.drain_timeout:g} s.")
        await self.drain()

    async def drain(self) -> None:
        """Take no new texts, and wait until none is in progress here, up to `Limits.drain_timeout`."""
        assert self.server is not None
        self.server.is_draining = True
        with contextlib.suppress(PeerError):
            await self._announce()
        sessions, end_s = self.server.sessions, now_s() + self._limits.drain_timeout
        while sessions.num_under_way(_QUIET_S) and now_s() < end_s:  # noqa: ASYNC110 - no single event ends the wait
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stay(self) -> None:
        """Take texts again, unless this server is about to leave."""
        assert self.server is not None
        self.server.is_draining = self.is_leaving
        with contextlib.suppress(PeerError):
            await self._announce()

    @property
    def is_leaving(self) -> bool:
        """Whether the server was asked to leave."""
        return self._leaving.is_set()

    def leave(self) -> None:
        """Make `until_left` end. Call it on the event loop; a second call does nothing."""
        self._leaving.set()
        if self.server is not None:
            self.server.is_draining = True

    async def close(self) -> None:
        """Stop serving."""
        try:
            await self._tasks.close()
        finally:
            if self._executor is not None:
                self._executor.close()


def _cut_model(
    folder: PretrainedFolder, options: ServeOptions, say: Callable[[str], None]
) -> tuple[PretrainedModel, list[range], ModelForm]:
    """On the first server: build the model without weights; return it, each stage's blocks, and the model's form."""
    dtype = options.dtype or folder.dtype
    config = with_quantization(folder.config, options.quantize, dtype)
    saved = ModelForm(config=config, generation_config=folder.generation_config, dtype=dtype, blocks=options.blocks)
    form, reason = servable(saved)
    if reason:
        say(
            "Clients generate text without a cache: they send the whole text for each token, which becomes slower as "
            f"the text grows. The reason: {reason}"
        )
    model = PretrainedModel(form.config, form.generation_config, dtype=dtype, blocks=options.blocks)
    model.check_device(torch.device(options.device))  # before all weights are read
    num_blocks = len(model.blocks.modules)
    num_stages = min(num_blocks, _MAX_STAGES) if options.num_stages is None else options.num_stages
    if not 1 <= num_stages <= num_blocks:
        raise ConfigError(
            f"a model is cut between blocks, so {num_blocks} blocks make 1 to {num_blocks} stages, got {num_stages}. "
            "Correct `--stages`."
        )
    cuts = [index * num_blocks // num_stages for index in range(num_stages + 1)]
    return model, [range(begin, end) for begin, end in itertools.pairwise(cuts)], form


def _card(folder: PretrainedFolder, model: PretrainedModel, ranges: Sequence[range], form: ModelForm) -> ModelCard:
    """On the first server: read all weights, and return the model's card."""
    card = folder.card(model, ranges)
    release_free_memory()
    return msgspec.structs.replace(card, config=form.config, generation_config=form.generation_config)


def _parts(model: PretrainedModel, stages: Mapping[int, StageModule], folder: PretrainedFolder | None) -> ServedParts:
    """Return the parts that other peers may fetch, from the folder or from the loaded stages."""
    if folder is not None:
        tensors = [*model.module.named_parameters(remove_duplicate=False), *model.module.named_buffers()]
        dtypes = {name: tensor.dtype for name, tensor in tensors}
        known = set(model.saved(dtypes))
        read = folder.reader(model)

        def from_folder(name: str) -> Tensor:
            if name not in known:
                raise KeyError(name)
            return read(name).to(dtypes[name])

        return ServedParts(stages, from_folder, folder.files, has_files=True)
    loaded = {name: tensor for stage in stages.values() for name, tensor in stage.named_stage_tensors().items()}
    return ServedParts(stages, loaded.__getitem__, {}, has_files=False)
