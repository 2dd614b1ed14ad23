"""Models that could not be cut well, whole on each trainer: in float64 their curves are the plain Trainer's.

Trainers share one order of batches, so a single plain run is the reference for all runs of a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BartConfig, BartForConditionalGeneration
from typing_extensions import override

from tests.parity.harness import LOSS_TOLERANCE, QUIET, WEIGHT_TOLERANCE, quiet_warnings
from tests.parity.models import LENGTH, Recipe, configured, digits, sentences
from tests.parity.test_shared_data import curve
from tests.parity.test_whole import WHOLE
from tests.parity.trainers import Seen, ThreadStrategy, copied, default_dtype, shuffled, train

# Steps with a single trainer. Runs with joins and deaths (`test_whole_churn.py`) cost more, and are shorter.
NUM_STEPS = 50
NUM_SAMPLES, BATCH_SIZE, BATCHES_OF_A_STEP = 48, 4, 2  # an epoch is six steps


class Whole(L.LightningModule):
    """Base of the models, with a common optimizer and schedule."""

    recipe = Recipe(schedule="onecycle")

    @override
    def configure_optimizers(self) -> Any:
        return configured(self, self.recipe)


class Boring(BoringModel):
    """Decays its learning rate more slowly than the original, whose factor of 0.1 would stop training by epoch ten."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch[0], batch_idx)["loss"]  # type: ignore[index, call-overload]
        return loss

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


class Residual(nn.Module):
    """torchvision's `BasicBlock`."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.downsample = shortcut if stride > 1 else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + identity).relu()


class ResNet(Whole):
    recipe = Recipe(optimizer="sgd", learning_rate=1e-3)  # AdamW would amplify rounding that a batch norm cancels

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = Residual(4, 4, 1), Residual(4, 8, 2)
        self.fc = nn.Linear(8, 10)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.layer2(self.layer1(self.bn1(self.conv1(batch[0].view(-1, 1, 8, 8))).relu()))
        return F.cross_entropy(self.fc(found.mean((2, 3))), batch[1])


class UNet(Whole):
    """Finds the pixels of ink in a noisy image."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, padding=1)
        self.bottom, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, 2)
        self.leave = nn.Conv2d(8, 1, 1)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images = batch[0].view(-1, 1, 8, 8)
        skipped = self.enter(images).relu()
        found = self.up(self.bottom(self.down(skipped).relu()).relu())
        masks = self.leave(torch.cat([skipped, found], 1))
        return F.binary_cross_entropy_with_logits(masks, (images > 0.5).to(images.dtype))


class VAE(Whole):
    """Has its noise in the batch, because each trainer's process draws other random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 12), nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 64))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mean, log_var = self.encoder(batch[0]).chunk(2, 1)
        generator = torch.Generator().manual_seed(int((16 * batch[0]).sum()))
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        decoded = self.decoder(mean + noise * (0.5 * log_var).exp())
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        return F.mse_loss(decoded, batch[0], reduction="sum") / len(decoded) + 0.1 * divergence


class Contrastive(Whole):
    """Matches each image with its mirror image among all images of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        views = torch.cat([batch[0], batch[0].view(-1, 8, 8).flip(2).flatten(1)])
        found = F.normalize(self.encoder(views), dim=1)
        logits = found @ found.T / self.temperature
        own = torch.eye(len(views), dtype=torch.bool)
        return F.cross_entropy(logits.masked_fill(own, -torch.inf), torch.arange(len(views)).roll(len(batch[0])))


class GraphNetwork(Whole):
    """Passes messages along the edges of all graphs of a batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message, self.update = nn.Linear(3, 8), nn.Linear(16, 8), nn.GRUCell(8, 8)
        self.leave = nn.Linear(8, 1)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        nodes, edges, targets = batch
        num_graphs, num_nodes, _ = nodes.shape
        source, sink = (edges + num_nodes * torch.arange(num_graphs)[:, None, None]).transpose(0, 1).flatten(1)
        hidden = self.enter(nodes.flatten(0, 1))
        for _ in range(2):
            messages = self.message(torch.cat([hidden[source], hidden[sink]], 1)).tanh()
            hidden = self.update(torch.zeros_like(hidden).index_add(0, sink, messages), hidden)
        found = self.leave(hidden).view(num_graphs, num_nodes).mean(1)
        return F.mse_loss(found, targets)


class Translator(Whole):
    """Hugging Face's BART, whose encoder, decoder and head share one embedding."""

    def __init__(self) -> None:
        super().__init__()
        names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
        sizes = {"d_model": 8, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, **dict.fromkeys(names, 1)}
        self.model = BartForConditionalGeneration(
            BartConfig(vocab_size=11, max_position_embeddings=LENGTH, **sizes, dropout=0.0)
        )

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0].flip(1)).loss
        return loss


class Experts(nn.Module):
    """Keeps its load imbalance as an attribute, which the LightningModule reads."""

    balance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(1)
        self.balance = 3 * shares.mean(0).square().sum()
        return x + torch.stack([expert(x).tanh() for expert in self.experts], 2).mul(shares[:, None]).sum(2)


class Auxiliary(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 16), nn.Linear(16, 10)
        self.mixtures = nn.ModuleList([Experts(), Experts()])

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.enter(batch[0])
        for mixture in self.mixtures:
            hidden = mixture(hidden)
        balance = sum(one.balance for one in self.modules() if isinstance(one, Experts))
        return F.cross_entropy(self.leave(hidden), batch[1]) + 0.3 * balance


# ---------------------------------------------------------------------- the plain Trainer


def first(data: TensorDataset) -> TensorDataset:
    return TensorDataset(*(part[:NUM_SAMPLES] for part in data.tensors))


def vectors() -> TensorDataset:
    return TensorDataset(torch.randn(NUM_SAMPLES, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float32))


def graphs() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    nodes = torch.randn(NUM_SAMPLES, 5, 3, generator=generator, dtype=torch.float32)
    edges = torch.randint(5, (NUM_SAMPLES, 2, 9), generator=generator)
    return TensorDataset(nodes, edges, nodes.norm(dim=2).mean(1))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], TensorDataset]]] = {
    "boring": (Boring, vectors),
    "resnet": (ResNet, lambda: first(digits())),
    "unet": (UNet, lambda: first(digits())),
    "vae": (VAE, lambda: first(digits())),
    "contrastive": (Contrastive, lambda: first(digits())),
    "graphs": (GraphNetwork, graphs),
    "bart": (Translator, lambda: first(sentences())),
    "auxiliary": (Auxiliary, lambda: first(digits())),
}


@dataclass
class Plain(L.Callback):
    """Records the plain Trainer's losses, and the weights after each step."""

    losses: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(BATCHES_OF_A_STEP * float(outputs["loss"]))  # Lightning has divided it
        if trainer.global_step > len(self.weights):
            self.weights.append(copied(pl_module))


@cache
def plain(model: str) -> Plain:
    make, data = MODELS[model]
    found = Plain()
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data(), BATCH_SIZE, shuffle=True, generator=generator)
    options: dict[str, Any] = {"max_steps": NUM_STEPS, "accumulate_grad_batches": BATCHES_OF_A_STEP}
    with default_dtype(torch.float64), quiet_warnings():
        torch.manual_seed(0)
        L.Trainer(**QUIET, **options, devices=1, callbacks=[found]).fit(make(), loader)
    return found


# ---------------------------------------------------------------------- the swarm


def run(model: str, num_trainers: int, **options: Any) -> Seen:
    make, data = MODELS[model]
    rank = vars(rank_zero_only)["rank"]  # a global of the process, which these trainers share as threads only
    swarm = {**WHOLE, "target_batch_size": BATCHES_OF_A_STEP * BATCH_SIZE, **options.pop("swarm", {})}
    try:
        return train(num_trainers, lambda seen: make(), data=lambda: shuffled(data()), swarm=swarm, **options)
    finally:
        vars(rank_zero_only)["rank"] = rank


def assert_plain(seen: Seen, model: str, num_steps: int) -> None:
    """Check each loss and the final weights and buffers against the plain Trainer's."""
    reference = plain(model)
    losses = [loss for step in curve(seen) for _, loss in step]
    assert len(seen.steps) == num_steps
    assert losses == pytest.approx(reference.losses[: len(losses)], rel=LOSS_TOLERANCE, abs=0.0)
    weights = reference.weights[num_steps - 1]
    assert seen.weights.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(seen.weights[name], tensor, rtol=0.0, atol=WEIGHT_TOLERANCE, msg=name)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("model", MODELS)
def test_one_trainer(model: str) -> None:
    assert_plain(run(model, 1, max_steps=NUM_STEPS), model, NUM_STEPS)


@pytest.mark.thorough
@pytest.mark.parametrize("num_trainers", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_several_trainers(model: str, num_trainers: int) -> None:
    seen = run(model, num_trainers, max_steps=NUM_STEPS)
    assert_plain(seen, model, NUM_STEPS)


class StopsInMidStep(L.Callback):
    """Stops the run at the lead while one of its batches is in a step that waits for another one."""

    def __init__(self) -> None:
        self.holds, self.has_stopped = threading.Event(), threading.Event()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.is_global_zero and trainer.global_step >= 3:
            self.holds.set()
            assert self.has_stopped.wait(30.0)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, ThreadStrategy)
        assert trainer.strategy.run is not None
        assert trainer.strategy.run.loop is not None
        if trainer.is_global_zero and self.holds.is_set() and trainer.strategy.run.loop.pending_samples:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.has_stopped.set()


def test_ends_in_mid_step(caplog: pytest.LogCaptureFixture) -> None:
    """Batch norms count the batches in records only, not the lead's batch in the open step."""
    stops = StopsInMidStep()
    seen = run("resnet", 2, callbacks=lambda rank: [stops], max_steps=NUM_STEPS)
    assert "ended in mid-step: 4 samples" in caplog.text
    assert_plain(seen, "resnet", len(seen.steps))
