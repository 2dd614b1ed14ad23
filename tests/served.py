"""Served models on an in-memory network under virtual time: servers and a client in one thread."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.event_loop import InlineRuntime
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.serving.blocks import TextInProgress
from lightning_swarm.serving.host import ModelHost, ServeOptions
from lightning_swarm.serving.placement import MovePolicy
from lightning_swarm.serving.remote_model import ServedModelClient

LIMITS = Limits(call_timeout=60.0, silence_timeout=5.0, session_bytes=1 << 24)

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 1}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Family -> the kind of config, and its options.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "gpt2": ("GPT2Config", {"vocab_size": 29, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, **WINDOWS, "head_dim": 8}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "neox": ("GPTNeoXConfig", SIZES),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64}),
    "falcon": ("FalconConfig", {**SIZES, "alibi": False}),
    "phi": ("PhiConfig", GROUPED),
    "bloom": ("BloomConfig", {"vocab_size": 29, "hidden_size": 16, "n_layer": 4, "n_head": 2}),
    "mixtral": ("MixtralConfig", {**GROUPED, **EXPERTS}),
    "deepseek": (
        "DeepseekV3Config",
        {
            **SIZES,
            "moe_intermediate_size": 12,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "mamba": ("MambaConfig", {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4}),
    "qwen3 next": (
        "Qwen3NextConfig",
        {
            **GROUPED,
            "head_dim": 8,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
}


def make_model(family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    """Make a small model with random weights, in eval mode."""
    kind, own = FAMILIES[family]
    torch.manual_seed(seed)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = getattr(transformers, kind)(**{**own, **ends, **options})
    config._experts_implementation = "eager"  # Hugging Face's grouped products have no float64
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # otherwise most of a small model's tokens are equal
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


class ServedSwarm:
    """Servers of a folder's model, and their clients."""

    def __init__(self, folder: Path, *, num_stages: int) -> None:
        self.loop, self.network = VirtualLoop(), MemoryNetwork()
        self.runtime = InlineRuntime(self.loop)
        self.folder, self.num_stages = folder, num_stages
        self.hosts: dict[str, ModelHost] = {}
        self.client: ServedModelClient | None = None  # the newest
        self.clients: list[ServedModelClient] = []

    def serve(
        self,
        name: str,
        *,
        join: str = "",
        has_files: bool = True,
        share: float = 1.0,
        weight_bytes: int | None = None,
        limits: Limits = LIMITS,
        moves: MovePolicy | None = None,
        say: Callable[[str], None] = lambda _: None,
        quantize: str | None = None,
        dtype: str | None = None,
        shares_prefixes: bool = False,
    ) -> ModelHost:
        """Start a server with memory for a share of the blocks, or for these bytes of weights."""
        transport = self.network.transport(name)
        options = ServeOptions(
            weights=self.folder if has_files else None,
            hosts=[PeerId(join)] if join else [],
            weight_bytes=weight_bytes if share == 1.0 else self._bytes_of(share),
            num_stages=None if join else self.num_stages,
            quantize=quantize,
            dtype=dtype,
            shares_prefixes=shares_prefixes,
            moves=moves,
        )
        host = ModelHost(transport, self.network.directory(transport), InlineExecutor, limits, options)
        self.loop.run_until_complete(host.open(say))
        self.hosts[name] = host
        return host

    def _bytes_of(self, share: float) -> int:
        first = next(iter(self.hosts.values()))
        assert first.server is not None
        size = sum(stage.weights.num_bytes for stage in first.server.card.stages)
        return int(size * share) + 1024

    def connect(self, *, host: str = "a", name: str = "client", **options: Any) -> Any:
        """Connect a client, and return its model."""
        transport = self.network.transport(name)
        self.client = ServedModelClient(
            self.runtime,
            transport,
            self.network.directory(transport),
            PeerId(host),
            weights=options.pop("weights", None),
            device=torch.device("cpu"),
            timeout=60.0,
            rng=random.Random(options.pop("seed", 0)),
            **options,
        )
        self.clients.append(self.client)
        return self.client.model

    def leave(self, name: str) -> None:
        """Let a server leave gracefully."""
        host = self.hosts.pop(name)
        host.leave()
        self.loop.run_until_complete(host.until_left(lambda _: None))
        self.loop.run_until_complete(host.close())
        self.network.kill(PeerId(name))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        import asyncio

        self.loop.run_until_complete(asyncio.sleep(seconds))

    def close(self) -> None:
        """Close servers and clients."""
        for client in self.clients:
            client.close()
        for host in self.hosts.values():
            self.loop.run_until_complete(host.close())
        left = asyncio.all_tasks(self.loop)  # such as last messages to servers that are dead
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left))
        self.loop.close()


def writing(model: Any, scope: Hashable = "") -> AbstractContextManager[TextInProgress]:
    """Inside, `model.generate` notes in the yielded text how many of its tokens the servers had before.

    It begins with prefixes of texts of the same scope alone.
    """
    client = getattr(model, "swarm", None)
    return nullcontext(TextInProgress()) if client is None else client.served.writing(scope)


def calling(do: Callable[[], None], *, at: int) -> Any:
    """Return a stopping criterion of `generate` that calls a function once, when a text has `at` tokens."""

    class Calling(transformers.StoppingCriteria):  # type: ignore[misc]  # transformers has no types here
        done = False

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            if not self.done and input_ids.shape[1] >= at:
                self.done = True
                do()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    return Calling()


def bytes_tokenizer(*special: str, template: str = "") -> Any:
    """Return a tokenizer of bytes, with further special tokens, whose texts can have any characters."""
    names = ["<pad>", "<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    found = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[])
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    found.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=list(special),
        chat_template=template or None,
    )
