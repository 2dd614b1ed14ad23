"""An ordinary Hugging Face model in this process, whose blocks are computed by servers."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import random
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_swarm.client.inference.adapters import check_kind, find_adapters
from lightning_swarm.client.inference.forwards import SessionForwards
from lightning_swarm.client.pipeline.interception import BlockChain, Interception
from lightning_swarm.core.errors import ConfigError, SwarmError
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel, check_version, device_of, weights_digest
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.network.addresses import Address
from lightning_swarm.peer.entry import visitor_entry
from lightning_swarm.peer.network import visit_network
from lightning_swarm.protocol.messages.serving import ModelCard
from lightning_swarm.serving.blocks import ServedBlocks
from lightning_swarm.serving.directory import ModelDirectory, read_card
from lightning_swarm.serving.model_guards import refuse_changes
from lightning_swarm.serving.model_traits import has_own_prompt, positions_depend_on_length
from lightning_swarm.serving.prefixes import PREFILL_CHUNK, TextPrefixes, call_options, can_begin_with_prefix
from lightning_swarm.serving.routes import ServedRoutes
from lightning_swarm.serving.speculation import DRAFT_OPTIONS, speculation_for
from lightning_swarm.serving.tuning_client import AdaptedBlocks


class ServedModelClient:
    """This process's connection to the swarm that serves a model.

    Attributes:
        model: The Hugging Face model. Its blocks are on the meta device, and their calls go to servers.
        card: The card of the served model.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        directory: Directory,
        host: PeerId,
        *,
        weights: str | Path | None,
        device: torch.device,
        timeout: float,
        rng: random.Random,  # draws routes
        adapts: bool = False,  # the blocks may get adapters
        exact: bool = False,  # servers compute each text alone
        microbatch_size: int | None = None,  # rows; None: chosen
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime, self._on_close = runtime, on_close
        self._tasks = TaskOwner()
        self._closed = False
        self.card: ModelCard = runtime.run(read_card(transport, host))
        check_version(self.card)
        self._models = ModelDirectory(transport, directory, self.card)
        runtime.run(self._models.refresh())
        self.routes = ServedRoutes(self._models, timeout=timeout, rng=rng)
        blocks = sum(stage.num_blocks for stage in self.card.stages)
        self._forwards = SessionForwards(runtime, self.routes, codec=None, device=device, num_blocks=blocks)
        self._new_adapted = functools.partial(
            AdaptedBlocks,
            runtime,
            self._models,
            device=device,
            timeout=timeout,
            microbatch_size=microbatch_size,
            rng=rng,
        )
        self._device, self._exact = device, exact
        self._build(lambda model: self._fill(model, weights, device), adapts=adapts)
        runtime.run(self._begin())

    def _build(self, fill: Callable[[PretrainedModel], object], *, adapts: bool) -> None:
        """Build the Hugging Face model, whose blocks are on servers. `fill` loads the weights around the blocks."""
        card = self.card
        configs = card.config, card.generation_config
        pretrained = PretrainedModel(*configs, dtype=card.dtype, blocks=card.blocks, computes_blocks=False)
        fill(pretrained)
        self.model: Any = pretrained.module
        self.model.swarm = self
        blocks, device = pretrained.blocks, self._device
        self.blocks = blocks.modules
        refuse_changes(pretrained.module, self.model.dtype, device, moves=adapts)
        # Stand in for the weights on servers.
        self.placeholders: list[torch.Tensor] = pretrained.make_placeholders(device) if adapts else []
        adapted = self._new_adapted(blocks.modules, blocks.names) if adapts else None
        served = self.served = ServedBlocks(
            self._forwards, card, self.blocks, device=device, adapted=adapted, exact=self._exact
        )
        self.prefixes = TextPrefixes(self.model, served, shares=self.routes.share_prefixes)
        vars(pretrained.module)["generate"] = _wrapped_generate(self.model, served, self.model.generate)
        self._interception = Interception(blocks, BlockChain(blocks, served, served.call_with_cache, device.type))

    async def _begin(self) -> None:
        await self._tasks.start()
        self._tasks.spawn(self._models.keep_fresh())
        self._tasks.spawn(self.routes.keep_pinging())

    def _fill(self, model: PretrainedModel, weights: str | Path | None, device: torch.device) -> None:
        """Load the weights around the blocks from the folder `weights` or, without a folder, from servers."""
        tensors = model.around
        if weights is not None:
            folder = PretrainedFolder(Path(weights))
            if weights_digest(model.fill(tensors, folder.reader(model), device)) != self.card.around:
                raise ConfigError(
                    f"`weights` must be the folder of the served model, but {str(weights)!r} has other weights around "
                    "the blocks. Leave `weights` out to get them from a server."
                )
            return
        sources = [peer for peer, offer in self._models.offers.items() if offer.has_files]
        names = model.saved(tensors)
        values = self._runtime.run(self._models.download(names, tensors, self.card.around, sources))
        model.fill(tensors, values.__getitem__, device)

    @property
    def step_tokens(self) -> int:
        """The most tokens, summed over rows, that each known server takes in one step."""
        return min((offer.step_tokens for offer in self._models.offers.values()), default=Limits().step_tokens)

    def tokenizer(self) -> Any:
        """Return the model's tokenizer; `ConfigError` if its servers have none."""
        import transformers

        files = self._runtime.run(self._models.download_files())
        if not files:
            raise ConfigError(
                "this model is served without a tokenizer. Save one into the served folder with "
                "`tokenizer.save_pretrained(FOLDER)`, or use your own."
            )
        with tempfile.TemporaryDirectory() as folder:
            for name, content in {**files, "config.json": self.card.config.encode()}.items():
                (Path(folder) / name).write_bytes(content)
            return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def load_adapter(self, folder: str | Path) -> Any:
        """Return the model with an adapter that peft has saved; `ConfigError` if it does not belong to this model."""
        try:
            import peft
        except ImportError as error:
            raise ConfigError("adapters need peft. Install it: `pip install 'lightning-swarm[tune]'`.") from error
        try:
            if not Path(folder, "adapter_config.json").is_file():  # peft would download a missing one from the Hub
                raise FileNotFoundError("it has no adapter_config.json")
            check_kind(peft.PeftConfig.from_pretrained(str(folder)))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Found missing adapter keys")  # missing keys are refused below
                model = peft.PeftModel.from_pretrained(self.model, str(folder))
            find_adapters(self.blocks, self.card.ranges)  # refuses adapters that servers cannot compute
            saved = peft.load_peft_weights(str(folder), device="cpu").keys()
            expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys()
            if saved != expected:
                raise ValueError(f"its tensors do not match this model, for example {sorted(saved ^ expected)[:2]}")
        except SwarmError:
            raise
        except Exception as error:  # peft raises errors of any kind if the folder does not fit
            raise ConfigError(
                "`adapter` must be a folder that peft's `save_pretrained` wrote for an adapter of this model, "
                f"got {str(folder)!r}: {shorten(str(error))}"
            ) from error
        return model

    def with_lora(self, folder: str | Path) -> Any:
        """Return a further model with a LoRA adapter that peft has saved; `ConfigError` if it does not fit.

        Both models share this connection, and the memory of the weights around the blocks. Several threads may write
        texts with each model.
        """
        other = copy.copy(self)
        other._closed = True  # only the original closes the connection
        weights = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        other._build(lambda model: model.fill(model.around, weights.__getitem__, self._device), adapts=True)
        if other.load_adapter(folder).active_peft_config.is_prompt_learning:  # peft generates such texts one at a time
            raise ConfigError(
                f"an endpoint serves LoRA adapters, got tuned prompts in {str(folder)!r}. Use them with "
                "`lightning-swarm generate --adapter FOLDER`."
            )
        return other.model

    def close(self) -> None:
        """Leave the swarm. Afterwards the model cannot compute. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # the event loop has ended already
            self._runtime.post(self._models.uploads.cancel)
            self._runtime.run(self._tasks.close())
        self._on_close()


def remote_model(
    address: str,
    *,
    invite: str | None = None,
    weights: str | Path | None = None,
    adapter: str | Path | None = None,
    device: str | torch.device = "cpu",
    timeout: float = 300.0,
    exact: bool = False,
) -> Any:
    """Return a Hugging Face model whose blocks are computed by the servers of a swarm.

    It is an ordinary model for generating text, in eval mode and without gradients. ``generate`` works with all of its
    options that keep a dynamic cache, and ``model(input_ids)`` gives logits. Embeddings and the head are computed in
    this process, and hidden states travel. If a server dies, other servers continue the text with the same tokens. With
    ``prompt_lookup_num_tokens`` or ``assistant_model``, several tokens are verified in one round trip.

    The servers see hidden states, from which a prompt can be reconstructed: use only servers that you trust with it.

    Args:
        address: A server's address, as the server prints it: ``HOST:PORT/ID``.
        invite: The file of an invitation with the role ``trainer``, if the servers answer only invited peers.
        weights: The model's folder, if it is on this machine. None: weights outside the blocks come from a server.
        adapter: A folder that peft has saved, with an adapter of this model: LoRA, prompt tuning or p-tuning. Servers
            compute with it for this client only.
        device: The device of embeddings, head and inputs.
        timeout: Seconds that a step may take.
        exact: Have servers compute each text alone. Otherwise they compute texts of all clients together, which is
            faster, but makes rounding depend on the other texts.

    Returns:
        The model, or with an adapter peft's model around it. ``model.swarm`` is its connection, with ``tokenizer()``,
        ``card`` and ``close()``.

    Raises:
        ConfigError: The address, the invitation or a folder does not belong to the served model, or the adapter is of
            an unsupported kind or does not fit.
        StageLost: Some blocks have no server. The model raises it later, too.
        Unreachable: No server answers at the address.

    Example:
        >>> model = remote_model("203.0.113.7:31337/12D3...")
        >>> tokenizer = model.swarm.tokenizer()
        >>> model.generate(**tokenizer("Hi", return_tensors="pt"), max_new_tokens=50)
    """
    client = connect(
        address,
        invite=invite,
        weights=weights,
        device=device_of(device),
        timeout=timeout,
        adapts=adapter is not None,
        exact=exact,
    )
    if adapter is None:
        return client.model
    try:
        return client.load_adapter(adapter)
    except BaseException:
        client.close()
        raise


def connect(
    address: str,
    *,
    invite: str | None,
    weights: str | Path | None,
    device: torch.device,
    timeout: float,
    adapts: bool = False,
    exact: bool = False,
    microbatch_size: int | None = None,
) -> ServedModelClient:
    """Connect to a served model; `remote_model` and `ServedModelClient` explain the arguments."""
    host = Address.parse(address)
    entry = None if invite is None else visitor_entry(invite, now_s=time.time())
    runtime, transport, directory = visit_network(host, entry)

    def leave() -> None:
        with contextlib.ExitStack() as closing:  # runs all callbacks, even after an error
            closing.callback(runtime.close)
            closing.callback(lambda: runtime.run(transport.close()))
            closing.callback(lambda: runtime.run(directory.close()))

    try:
        client = ServedModelClient(
            runtime,
            transport,
            directory,
            host.peer_id,
            weights=weights,
            device=device,
            timeout=timeout,
            rng=random.Random(secrets.randbits(64)),
            adapts=adapts,
            exact=exact,
            microbatch_size=microbatch_size,
            on_close=leave,
        )
    except BaseException:
        leave()
        raise
    atexit.register(client.close)
    return client


# ---------------------------------------------------------------------- calls of `generate`


def _wrapped_generate(model: Any, served: ServedBlocks, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's `generate` to write drafts ahead, to cut long prompts, and to reuse prefixes that servers keep."""

    @functools.wraps(generate)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        prompt, option = call_options(model, args, kwargs)
        speculation = speculation_for(model, served, prompt, option, args, kwargs, step_tokens=step_tokens(model))
        options = {**kwargs, **_chunk_options(model, prompt, option, may_draft=speculation is None)}
        with served.writing() as text:
            if speculation is not None:
                return speculation.write(generate, args, options)
            if not can_begin_with_prefix(model, prompt, option, {*kwargs}):
                return generate(*args, **options)
            prefixes: TextPrefixes = model.swarm.prefixes
            output = generate(*args, **options, **prefixes.begin(prompt, text))
            prefixes.keep(output if isinstance(output, torch.Tensor) else output.sequences, text)
            return output

    return wrapped


def _chunk_options(model: Any, prompt: Any, option: Callable[[str], Any], *, may_draft: bool) -> dict[str, int]:
    """Return the options that cut a prompt which is too long for one step.

    `may_draft` tells whether `generate` itself handles draft options. If it drafts, it cannot cut prompts.
    """
    conflicting = map(option, ("prefill_chunk_size", *(DRAFT_OPTIONS if may_draft else ())))
    if not isinstance(prompt, torch.Tensor) or any(conflicting) or option("use_cache") is False:
        return {}
    num_rows = len(prompt) * max(option("num_beams") or 1, option("num_return_sequences") or 1)
    num_tokens = prompt.shape[-1]
    return prefill_options(model, num_tokens, num_rows) if num_rows * num_tokens > step_tokens(model) else {}


def prefill_options(model: Any, num_tokens: int, num_rows: int = 1) -> dict[str, int]:
    """Return the options of `generate` that cut a long prompt into chunks."""
    size = prefill_chunk(model, num_rows)
    return {"prefill_chunk_size": size} if size is not None and size < num_tokens else {}


def prefill_chunk(model: Any, num_rows: int = 1) -> int | None:
    """Return the number of tokens in each chunk of a long prompt; None: prompts stay whole."""
    # Other texts wait for a chunk, not for a prompt. A prompt stays whole if peft puts soft tokens before it, or if the
    # model has recurrent states, positions that depend on the text's length, or no cache.
    if has_own_prompt(model) or model._is_stateful or positions_depend_on_length(model):
        return None
    if not getattr(model.generation_config, "use_cache", True):
        return None
    return max(1, min(PREFILL_CHUNK, step_tokens(model) // num_rows))


def step_tokens(model: Any) -> int:
    """Return the most tokens, summed over rows, that each server of a model takes in one step."""
    client = getattr(model, "swarm", None)
    return client.step_tokens if isinstance(client, ServedModelClient) else Limits().step_tokens
