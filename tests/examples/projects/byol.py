"""BYOL on handwritten digits: a network learns to predict its own momentum average's features of another view."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override


class TwoViews(Dataset[tuple[Tensor, Tensor, int]]):
    """Returns each image twice, shifted and with noise."""

    def __init__(self, augment: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = labels
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        image = self.images[index]
        first, second = (self.view(image), self.view(image)) if self.augment else (image, image)
        return first, second, int(self.labels[index])

    def view(self, image: Tensor) -> Tensor:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        moved = image.roll((down, right), (1, 2))
        return (moved + 0.1 * torch.randn_like(moved)).clamp(0, 1)


class Digits(L.LightningDataModule):
    def __init__(self, batch_size: int, num_train: int, num_val: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    @override
    def setup(self, stage: str) -> None:
        num_train, num_val = self.hparams["num_train"], self.hparams["num_val"]
        self.train_set = Subset(TwoViews(augment=True), range(num_train))
        self.val_set = Subset(TwoViews(augment=False), range(num_train, num_train + num_val))

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, self.hparams["batch_size"], shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, self.hparams["batch_size"])


def convolution(channels: int, width: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, stride, padding=1), nn.GroupNorm(2, width), nn.ReLU())


def head(width: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, out))


@torch.no_grad()
def update_momentum(model: nn.Module, average: nn.Module, momentum: float) -> None:
    for ours, theirs in zip(model.parameters(), average.parameters(), strict=True):
        theirs.data = theirs.data * momentum + ours.data * (1.0 - momentum)


class BYOL(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1, momentum: float = 0.9, max_steps: int = 100) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            convolution(1, width), convolution(width, 2 * width, stride=2), nn.Flatten(), nn.Linear(32 * width, 32)
        )
        self.projector = head(32, 32, 16)
        self.predictor = head(16, 32, 16)
        self.target_backbone = copy.deepcopy(self.backbone).requires_grad_(False)
        self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.probe = nn.Linear(32, 10)
        self.val_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.backbone(images)
        return features

    @torch.no_grad()
    def targets(self, images: Tensor) -> Tensor:
        projected: Tensor = self.target_projector(self.target_backbone(images))
        return projected

    @override
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        first, second, labels = batch
        features = self(first), self(second)
        predicted = [self.predictor(self.projector(one)) for one in features]
        wanted = self.targets(second), self.targets(first)
        similarity = sum(F.cosine_similarity(p, t, dim=1).mean() for p, t in zip(predicted, wanted, strict=True))
        probed = F.cross_entropy(self.probe(features[0].detach()), labels)  # a probe, which does not train the network
        loss = 2.0 - similarity + probed
        self.log_dict({"train/loss": loss, "train/similarity": similarity / 2, "train/probe": probed})
        self.log("train/std", F.normalize(features[0].detach(), dim=1).std(0).mean(), on_epoch=True, on_step=False)
        return loss

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = self.global_step / self.hparams["max_steps"]
        momentum = 1.0 - (1.0 - self.hparams["momentum"]) * (math.cos(math.pi * done) + 1.0) / 2.0
        update_momentum(self.backbone, self.target_backbone, momentum)
        update_momentum(self.projector, self.target_projector, momentum)
        self.log("momentum", momentum)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        images, _, labels = batch
        features = self(images)
        self.val_accuracy(self.probe(features), labels)
        distance = F.mse_loss(self.projector(features), self.targets(images))
        self.log_dict({"val/accuracy": self.val_accuracy, "val/distance": distance})

    @override
    def configure_optimizers(self) -> Any:
        networks = nn.ModuleList([self.backbone, self.projector, self.predictor])
        decayed = [p for p in networks.parameters() if p.dim() > 1]
        rest = [p for p in networks.parameters() if p.dim() <= 1]
        optimizer = torch.optim.SGD(
            [
                {"params": decayed, "weight_decay": 1e-4},
                {"params": rest, "weight_decay": 0.0},
                {"params": self.probe.parameters(), "lr": 0.3, "weight_decay": 0.0},
            ],
            lr=self.hparams["lr"],
            momentum=0.9,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["max_steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(strategy: Any = "auto", max_epochs: int = 2, **options: Any) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    data = Digits(batch_size=12, num_train=48, num_val=36)
    model = BYOL(max_steps=max_epochs * 4)
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=max_epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        **options,
    )
    trainer.fit(model, datamodule=data)
    return trainer


if __name__ == "__main__":
    main()
