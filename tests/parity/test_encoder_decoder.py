"""An encoder and a decoder, whose hidden states pass the stages side by side; embeddings tied to the head."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.testing import FaultPlan, Phase
from tests.parity.harness import assert_exact, run_plain, run_swarm

VOCABULARY = 13
WIDTH = 8
STEPS = 8


class Embed(nn.Module):
    """Embeds the source text and the target text."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Any]:
        return {"memory": self.token(source), "hidden": self.token(target), "padding": source == 0}


class Encode(nn.Module):
    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "memory": self.layer(state["memory"], src_key_padding_mask=state["padding"])}


class Decode(nn.Module):
    def __init__(self, layer: nn.TransformerDecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: dict[str, Any], causal: Tensor) -> dict[str, Any]:
        hidden = self.layer(state["hidden"], state["memory"], causal, memory_key_padding_mask=state["padding"])
        return {**state, "hidden": hidden}


class Leave(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, state: dict[str, Any], labels: Tensor) -> Tensor:
        logits = self.head(state["hidden"])
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="none")
        return losses.view_as(labels).sum(1)


class Translator(L.LightningModule):
    """An ordinary model whose layers have no code for stages; wrappers define the tensors between them."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
        self.embed = Embed()
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, **options) for _ in range(3)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(WIDTH, 2, **options) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.token.weight

    def configure_stages(self) -> list[nn.Module]:
        return [self.embed, *map(Encode, self.encoder), *map(Decode, self.decoder), Leave(self.head)]

    @override
    def forward(self, source: Tensor, target: Tensor, *, labels: Tensor, causal: Tensor) -> Tensor:
        state = self.embed(source, target)
        for layer in self.encoder:
            state = Encode(layer)(state)
        for layer in self.decoder:
            state = Decode(layer)(state, causal)
        losses: Tensor = Leave(self.head)(state, labels)
        return losses

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        source, text = batch
        target, labels = text[:, :-1], text[:, 1:]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=text.device).triu(1)
        losses = self(source, target, labels=labels, causal=causal)
        return losses.sum() / (labels > 0).sum()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Return pairs of texts of many lengths."""
    generator = torch.Generator().manual_seed(11)
    texts = []
    for length in torch.randint(2, 8, (26,), generator=generator).tolist():
        source = torch.randint(1, VOCABULARY, (length,), generator=generator)
        texts.append((source, torch.cat([torch.ones(1, dtype=torch.long), source.flip(0)[: length // 2 + 1]])))
    return texts


def collate(texts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return tuple(pad_sequence(list(column), batch_first=True) for column in zip(*texts, strict=True))  # type: ignore[return-value]


def loader() -> DataLoader[Any]:
    data = DataLoader(pairs(), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    assert len({source.shape for source, _ in data}) > 2
    return data


run = partial(run_swarm, Translator, max_steps=STEPS, max_epochs=-1, shared=("causal",), gradient_clip_val=0.5)


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(("num_stages", "num_servers"), [(2, 2), (3, 3), (4, 6)])
def test_it_trains_as_on_one_machine(num_stages: int, num_servers: int) -> None:
    plain = run_plain(Translator, loader(), max_steps=STEPS, max_epochs=-1, gradient_clip_val=0.5)
    swarm = run(loader(), num_stages=num_stages, num_servers=num_servers)
    assert_exact(swarm, plain)
    assert swarm.module.head.weight is swarm.module.embed.token.weight  # type: ignore[union-attr]


@pytest.mark.thorough
def test_a_server_dies() -> None:
    plain = run_plain(Translator, loader(), max_steps=STEPS, max_epochs=-1, gradient_clip_val=0.5)
    plan = FaultPlan().kill("peer-4", at=Phase.BACKWARD_DONE, step=2)
    try:
        swarm = run(loader(), num_stages=3, num_servers=6, num_gone=1, faults=plan, latency_s=0.001)
    finally:
        plan.check()
    assert_exact(swarm, plain)
