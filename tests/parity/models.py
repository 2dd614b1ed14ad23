"""Models and data of the parity tests: small, with the awkward features of real models."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import lightning as L
import lightning_swarm.nn
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

NUM_SAMPLES = 52
BATCH_SIZE = 8
"""Seven batches an epoch, the last one of 4: it cuts accumulation windows of 2 and of 3."""

NUM_STEPS = 50
VOCABULARY = 11
LENGTH = 6


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a model's optimizer and schedule."""

    optimizer: Literal["sgd", "adamw"] = "adamw"
    schedule: Literal["constant", "onecycle", "cosine"] = "constant"
    learning_rate: float = 3e-3
    total_steps: int = NUM_STEPS + 10


class Net(L.LightningModule):
    """Base of the models that consist of a chain of blocks called `net`, with an optimizer and a schedule."""

    shared: tuple[str, ...] = ()
    """Keyword arguments of the model that all microbatches share; passed to `SwarmStrategy`."""

    def __init__(self, net: nn.Sequential, recipe: Recipe | None = None) -> None:
        super().__init__()
        self.net = net
        self.recipe = recipe or Recipe()

    @override
    def configure_optimizers(self) -> Any:
        return configured(self, self.recipe)


def configured(module: nn.Module, recipe: Recipe) -> Any:
    """Return the result of `configure_optimizers` for a recipe."""
    optimizer = make_optimizer(module, recipe)
    schedule = make_schedule(optimizer, recipe)
    if schedule is None:
        return optimizer
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), lr=10 * recipe.learning_rate, momentum=0.9)
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate)


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe) -> LRScheduler | None:
    if recipe.schedule == "onecycle":
        highest = [3 * group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, max_lr=highest, total_steps=recipe.total_steps)
    if recipe.schedule == "cosine":
        return LambdaLR(
            optimizer, lambda step: 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * step / recipe.total_steps))))
        )
    return None


# ---------------------------------------------------------------------- digits


class DigitsMLP(Net):
    """Images to classes: an ordinary `torch.nn.Sequential`."""

    def __init__(self, recipe: Recipe | None = None, dropout: float = 0.0) -> None:
        drop = [nn.Dropout(dropout)] if dropout else []
        layers = [nn.Linear(64, 24), nn.Tanh(), *drop, nn.Linear(24, 24), nn.ReLU(), nn.LayerNorm(24), *drop]
        super().__init__(nn.Sequential(*layers, nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 10)), recipe)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)


@cache
def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(images[:NUM_SAMPLES] / 16, dtype=torch.float32), torch.tensor(labels[:NUM_SAMPLES])
    )


class Images(L.LightningModule):
    """An explicit `Sequential` between layers with statistics over the batch and a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12))
        self.body = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.leave = nn.Linear(12, 10)
        self.temperature = nn.Parameter(torch.ones(()))

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.leave(self.body(self.enter(x))) * self.temperature
        return logits

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        # The optimizer has state before its first step.
        return torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)


# ---------------------------------------------------------------------- language


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, width))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens) + self.place
        return embedded


class Block(nn.Module):
    """A transformer's block with causal attention."""

    def __init__(self, width: int, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        queries, keys, values = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).flatten(2))
        out: Tensor = hidden + self.mlp(self.norms[1](hidden))
        return out


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(hidden))
        return logits


class LossHead(Head):
    """Computes the loss beside the logits, which then need not travel; takes targets, returns a loss per sample."""

    @override
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(hidden)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).mean(1)


class TinyGPT(Net):
    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(nn.Sequential(Embed(8), Block(8), Block(8), Head(8)), recipe)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())


class TinyGPTWithLosses(Net):
    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(lightning_swarm.nn.Sequential(Embed(8), Block(8), Block(8), LossHead(8)), recipe)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        losses: Tensor = self.net(tokens, targets=targets)
        return losses.mean()


class NanoGPT(L.LightningModule):
    """Written like nanoGPT: blocks in a list in a dict, a forward that takes the targets, a tied head."""

    def __init__(self, recipe: Recipe | None = None, num_blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        self.recipe = recipe or Recipe()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(LENGTH, width),
                "h": nn.ModuleList([Block(width) for _ in range(num_blocks)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    @override
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts = self.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1], device=idx.device))
        for block in parts["h"]:  # type: ignore[union-attr]  # the type of a dict's values is `Module`
            x = block(x)
        logits = self.lm_head(parts["ln_f"](x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self(*batch)[1]
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return configured(self, self.recipe)


@cache
def sentences() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH + 1), generator=generator)
    text[:, 1::2] = (text[:, :-1:2] * 3 + 1) % VOCABULARY  # a pattern to learn
    return TensorDataset(text[:, :-1], text[:, 1:])


# ---------------------------------------------------------------------- trees


class Enter(nn.Module):
    """Turns one tree into another, with an integer leaf, and a leaf that passes through to the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Linear(3, width)

    def forward(self, batch: dict[str, Tensor], offset: float) -> dict[str, Any]:
        hidden = self.token(batch["tokens"]) + self.place(batch["features"]).unsqueeze(1) + offset
        return {"hidden": hidden, "kept": (batch["tokens"], hidden.mean(1)), "name": "enter"}


class Mix(nn.Module):
    """Mixes positions by a table that all samples share, and scales each sample by a number of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, tree: dict[str, Any], *, table: Tensor, scale: Tensor) -> dict[str, Any]:
        mixed = torch.einsum("st,btd->bsd", table, torch.tanh(self.inner(tree["hidden"])))
        return {**tree, "hidden": tree["hidden"] + mixed * scale[:, None, None]}


class Gate(nn.Module):
    """Uses the integer leaf; returns tuples in place of dicts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Embedding(VOCABULARY, width)

    def forward(self, tree: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tokens, early = tree["kept"]
        return tree["hidden"] * torch.sigmoid(self.gate(tokens)), (tokens, early)


class Leave(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(2 * width, 3)

    def forward(self, pair: tuple[Tensor, tuple[Tensor, Tensor]], *, scale: Tensor) -> dict[str, Tensor]:
        hidden, (tokens, early) = pair
        logits = self.out(torch.cat([hidden.mean(1), early], dim=1))
        return {"logits": logits, "energy": hidden.square().mean((1, 2)) * scale, "first": tokens[:, 0]}


class Trees(Net):
    """Passes dicts and tuples between blocks and stages; has split and shared extras; one output has no gradient."""

    shared = ("table", "offset")

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(lightning_swarm.nn.Sequential(Enter(8), Mix(8), Gate(8), Leave(8)), recipe)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, features, scale, labels = batch
        # As long as a batch, on purpose, so that only its name shows that each microbatch gets all of it.
        table = torch.ones(LENGTH, LENGTH, dtype=features.dtype).tril() / LENGTH
        out = self.net({"tokens": tokens, "features": features}, offset=0.125, table=table, scale=scale)
        assert torch.equal(out["first"], tokens[:, 0])
        loss: Tensor = F.cross_entropy(out["logits"], labels) + 0.1 * out["energy"].mean()
        return loss


@cache
def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
    features = torch.randn(NUM_SAMPLES, 3, generator=generator)
    scale = torch.rand(NUM_SAMPLES, generator=generator)
    return TensorDataset(tokens, features, scale, tokens.sum(1) % 3)


MODELS: dict[str, tuple[Callable[[Recipe], Net], Callable[[], TensorDataset]]] = {
    "digits": (DigitsMLP, digits),
    "gpt": (TinyGPT, sentences),
    "gpt-losses": (TinyGPTWithLosses, sentences),
    "trees": (Trees, records),
}


def loader(data: Dataset[Any], batch_size: int = BATCH_SIZE, **options: Any) -> DataLoader[Any]:
    assert isinstance(data, Sized)
    return DataLoader(data, batch_size=batch_size, **options)
