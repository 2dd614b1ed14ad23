"""Unchanged Hugging Face models, built from configs, and cut by the names of their lists of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.nn import call_blocks
from tests.parity.harness import assert_exact, run_plain, run_swarm

VOCABULARY = 19
LONGEST = 9
NUM_STEPS = 7
LAYERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
DECODER = {**LAYERS, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": 0}
CLASSIFIER = {**LAYERS, "num_labels": 3, "pad_token_id": 0}


class Finetuned(L.LightningModule):
    """The usual module around such a model."""

    def __init__(self, kind: Callable[[Any], Any], config: Any) -> None:
        super().__init__()
        self.model = kind(config)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def texts(count: int = 26) -> list[Tensor]:
    """Return texts of many lengths."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def collate(sequences: Sequence[Tensor], *, classes: int | None = None) -> dict[str, Tensor]:
    """Pad a batch to its longest text; the last batch is smaller."""
    ids = pad_sequence(list(sequences), batch_first=True)
    mask = (ids > 0).long()
    labels = ids.masked_fill(mask == 0, -100) if classes is None else ids.sum(1) % classes
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loader(classes: int | None = None) -> DataLoader[Any]:
    data = DataLoader(texts(), batch_size=8, collate_fn=partial(collate, classes=classes))  # type: ignore[arg-type]
    assert len({batch["input_ids"].shape for batch in data}) > 2, "batches must differ in length and in size"
    return data


@dataclass(frozen=True)
class Model:
    """Builds a model, and says where it is cut."""

    kind: str
    config: str
    options: dict[str, Any]
    layers: str
    classes: int | None = None

    def make(self, **others: Any) -> Finetuned:
        config = getattr(transformers, self.config)(**{**self.options, **others})
        return Finetuned(getattr(transformers, self.kind), config)


MODELS = {
    # Rotary tables have one row for all samples; each sample has a mask.
    "llama": Model("LlamaForCausalLM", "LlamaConfig", DECODER, "model.model.layers"),
    "tied llama": Model(
        "LlamaForCausalLM", "LlamaConfig", {**DECODER, "tie_word_embeddings": True}, "model.model.layers"
    ),
    # It has layers of two kinds, each with its own mask.
    "qwen": Model(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            **DECODER,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": 2 * ["sliding_attention", "full_attention"],
        },
        "model.model.layers",
    ),
    # Its blocks take keyword arguments by `**kwargs`; its embeddings are tied.
    "gpt2": Model(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 4,
            "n_head": 2,
            "n_positions": LONGEST,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "use_cache": False,
        },
        "model.transformer.h",
    ),
    # Its blocks return tuples, of which the forward uses the first element.
    "falcon": Model(
        "FalconForCausalLM",
        "FalconConfig",
        {**DECODER, "max_position_embeddings": LONGEST},
        "model.transformer.h",
    ),
    # The encoder is on the trainer, and all layers of the decoder attend to its output.
    "bart": Model(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 4,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 2 * LONGEST,
            "dropout": 0.0,
            "use_cache": False,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        "model.model.decoder.layers",
    ),
    # A learned position bias is shared by all layers and samples.
    "mpnet": Model(
        "MPNetForSequenceClassification",
        "MPNetConfig",
        {
            **CLASSIFIER,
            "max_position_embeddings": 2 * LONGEST,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "model.mpnet.encoder.layer",
        classes=3,
    ),
    "bert": Model(
        "BertForSequenceClassification",
        "BertConfig",
        {
            **CLASSIFIER,
            "max_position_embeddings": LONGEST,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "model.bert.encoder.layer",
        classes=3,
    ),
}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_one_machine(name: str) -> None:
    model = MODELS[name]
    plain = run_plain(model.make, loader(model.classes), max_steps=NUM_STEPS)
    swarm = run_swarm(model.make, loader(model.classes), max_steps=NUM_STEPS, num_servers=3, pipeline=model.layers)
    assert_exact(swarm, plain)


def test_a_cache_of_keys_and_values_is_refused() -> None:
    model = MODELS["llama"]
    with pytest.raises(
        ConfigError,
        match=r"a cache of keys and values supports only generating text, .* by `use_cache=False` in a Hugging",
    ):
        run_swarm(partial(model.make, use_cache=True), loader(), max_steps=1, pipeline=model.layers)


def checkpointed() -> Finetuned:
    model = MODELS["llama"].make()
    model.model.activation_checkpointing_enable()
    return model


def test_layers_that_are_computed_again_in_the_backward() -> None:
    plain = run_plain(MODELS["llama"].make, loader(), max_steps=NUM_STEPS)
    swarm = run_swarm(checkpointed, loader(), max_steps=NUM_STEPS, pipeline="model.model.layers")
    assert swarm.module.model.model.layers[0].gradient_checkpointing
    assert_exact(swarm, plain)


class Losses(torch.nn.Module):
    """Computes the losses next to the logits, so that these need not travel."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none")
        return losses.view(len(labels), -1).sum(1)


class AllInStages(Finetuned):
    """Leaves no layer on the trainer: embeddings and head are in stages and share one weight."""

    def configure_stages(self) -> list[torch.nn.Module]:
        inner = self.model.model
        return [inner.embed_tokens, *inner.layers, inner.norm, Losses(self.model.lm_head)]

    @override
    def forward(self, tokens: Tensor, *, position_embeddings: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        losses: Tensor = call_blocks(
            self.configure_stages(), (tokens,), {"position_embeddings": position_embeddings, "labels": labels}
        )
        return losses

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, labels = batch["input_ids"], batch["labels"]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        tables = self.model.model.rotary_emb(torch.empty(1, dtype=self.dtype, device=ids.device), positions)
        losses = self(ids, position_embeddings=tables, labels=labels)
        return losses.sum() / (labels[:, 1:] >= 0).sum()


def in_stages() -> AllInStages:
    return AllInStages(
        transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**DECODER, "tie_word_embeddings": True})
    )


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("num_stages", "num_servers"), [(2, 2), (3, 5)])
def test_a_whole_model_in_stages(num_stages: int, num_servers: int) -> None:
    plain = run_plain(in_stages, loader(), max_steps=NUM_STEPS)
    swarm = run_swarm(in_stages, loader(), max_steps=NUM_STEPS, num_stages=num_stages, num_servers=num_servers)
    assert not any(stage.on_trainers for stage in swarm.strategy.peers[0].lead.run.manifest.stages)  # type: ignore[union-attr]
    assert_exact(swarm, plain)
    whole = run_plain(MODELS["tied llama"].make, loader(), max_steps=NUM_STEPS)
    assert swarm.losses == pytest.approx(whole.losses, rel=1e-6), "as the model's own loss has it, in float32"
