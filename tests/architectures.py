"""Small models of transformers' text architectures; `python -m tests.architectures` tries all."""

from __future__ import annotations

import inspect
import logging
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_swarm.core.errors import ConfigError
from tests.served import ServedSwarm

_SIZES: Final[dict[tuple[str, ...], int]] = {
    ("vocab_size", "vocab_size_per_layer_input"): 29,
    ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "lru_width"): 16,
    ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"): 24,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"): 4,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): 2,
    ("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads", "linear_num_key_heads"): 2,
    ("num_key_value_heads", "encoder_layers", "num_global_key_value_heads", "first_k_dense_replace"): 1,
    ("head_dim", "mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim"): 8,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"): 64,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim", "expert_intermediate_size"): 12,
    ("n_routed_experts", "num_experts", "num_local_experts", "mamba_n_heads", "mamba_num_heads"): 4,
    ("num_experts_per_tok", "n_group", "topk_group", "mamba_expand"): 2,
    ("n_shared_experts", "mamba_n_groups"): 1,
    ("q_lora_rank", "kv_lora_rank"): 8,
    ("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "sliding_window", "hidden_size_per_layer_input"): 4,
    ("state_size", "mamba_d_state", "mamba_dt_rank", "ssm_state_size", "mamba_d_conv"): 4,
}
SIZES: Final = {name: size for names, size in _SIZES.items() for name in names}
_TURNS: Final = ["sliding_attention", "full_attention"] * 2
_TEXT: Final[dict[str, Any]] = {
    name: SIZES[name]
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"),
    )
}
OWN: Final[dict[str, dict[str, Any]]] = {
    "bailing_hybrid": {"layer_group_size": 2, "num_key_value_heads": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_key_value_heads": 2},
    "deepseek_v32": {"num_key_value_heads": 2},
    "diffllama": {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 4},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3": {
        "text_config": _TEXT,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
        "image_token_id": 28,
        "boi_token_id": 27,
        "eoi_token_id": 26,
    },
    "gemma3n_text": {"layer_types": _TURNS, "num_kv_shared_layers": 0},
    "glm4_moe_lite": {"num_key_value_heads": 2},
    "glm_moe_dsa": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 4, "n_groups": 2, "state_size": 8},
    "minicpm3": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2, "hybrid_override_pattern": "M*M-"},
    "olmo_hybrid": {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further fields that an architecture's small config needs."""

_MOST_PARAMETERS: Final = 3_000_000
PROMPTS: Final = torch.tensor([[0, 0, 5, 3, 7, 3], [4, 11, 2, 9, 2, 6]])


def make(kind: str) -> Any:
    """Make a small model with random weights; errors of transformers about unsuitable sizes pass through."""
    config_class: Any = CONFIG_MAPPING[kind]
    accepted = {
        *vars(config_class()),
        *config_class.attribute_map,
        *inspect.signature(config_class.__init__).parameters,
    }
    sizes = {name: size for name, size in SIZES.items() if name in accepted}
    config = config_class(**{**sizes, **OWN.get(kind, {})}, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    _without_grouped_products(config)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in empty.parameters()) > _MOST_PARAMETERS:
        raise ValueError("it stays too large")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():  # otherwise most of a small model's tokens are equal
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def _without_grouped_products(config: Any) -> None:
    """Make experts compute one by one: Hugging Face's grouped products do not support float64."""
    config._experts_implementation = config.get_text_config()._experts_implementation = "eager"


def write(model: Any) -> Tensor:
    """Write two texts, the first of which is padded."""
    found = model.generate(PROMPTS, attention_mask=(PROMPTS > 0).long(), max_new_tokens=9, do_sample=False)
    assert isinstance(found, Tensor)
    return found


def writes_one_token(found: Tensor) -> bool:
    """Return whether a text repeats one token, which any other model might generate, too."""
    return len(found[:, PROMPTS.shape[1] :].unique()) == 1


def plain(folder: Path) -> Tensor:
    """Generate with a model that Hugging Face loads."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    _without_grouped_products(model.config)
    return write(model)


def served(folder: Path) -> Tensor:
    """Generate with a model that is served in two stages."""
    swarm = ServedSwarm(folder, num_stages=2)
    try:
        swarm.serve("a")
        return write(swarm.connect())
    finally:
        swarm.close()


REASONS: Final = {
    "values between blocks": r"cannot be served: .*(values between stages must be|must call its blocks one after)",
    "no list of blocks": r"has no list of",
    "changed blocks": r"cannot be served: .*must not change its blocks",
}
"""Reason of a refusal, and a part of its error."""


def _verdict(kind: str) -> str | None:
    """Return the table's entry; None if the plain model of these sizes generates no text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            make(kind).save_pretrained(folder)
            wanted = plain(folder)
        except Exception:  # noqa: BLE001 - whatever it needs
            return None
        if writes_one_token(wanted):  # ProphetNet's masks give NaN in float64
            return None
        try:
            return "exact" if torch.equal(served(folder), wanted) else "ANOTHER TEXT"
        except ConfigError as error:
            return next((reason for reason, words in REASONS.items() if re.search(words, str(error))), f"{error}"[:200])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    for one in [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]:
        found = _verdict(one)
        if found is not None:
            print(f"| `{one}` | {found} |", flush=True)
