"""Adversarial training on handwritten digits: a few steps of projected gradient ascent for each batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override


class RobustClassifier(L.LightningModule):
    def __init__(self, epsilon: float = 0.1, num_steps: int = 2, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8)),
            nn.Conv2d(1, 6, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(6, 12, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(192, 10),
        )
        self.accuracies = MetricCollection(
            {name: MulticlassAccuracy(num_classes=10, average="micro") for name in ("clean", "fgsm", "pgd")},
            prefix="val_",
            compute_groups=False,
        )

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def fgsm(self, images: Tensor, labels: Tensor) -> Tensor:
        images = images.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(self(images), labels), images)
        return (images + self.hparams["epsilon"] * gradient.sign()).clamp(0, 1).detach()

    def pgd(self, images: Tensor, labels: Tensor) -> Tensor:
        epsilon, num_steps = self.hparams["epsilon"], self.hparams["num_steps"]
        was_training = self.training
        self.eval()
        moved = (images + torch.empty_like(images).uniform_(-epsilon, epsilon)).clamp(0, 1)
        for _ in range(num_steps):
            moved.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(self(moved), labels), moved)
            moved = moved.detach() + epsilon * gradient.sign()
            moved = torch.min(torch.max(moved, images - epsilon), images + epsilon).clamp(0, 1)
        self.train(was_training)
        return moved

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        clean = F.cross_entropy(self(images), labels)
        logits = self(self.pgd(images, labels))
        robust = F.cross_entropy(logits, labels)
        loss = 0.5 * (clean + robust)
        self.log_dict({"loss": loss, "clean_loss": clean, "robust_loss": robust}, on_step=True, on_epoch=True)
        self.log("robust_accuracy", (logits.argmax(1) == labels).double().mean(), prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        with torch.enable_grad():
            attacked = {"fgsm": self.fgsm(images, labels), "pgd": self.pgd(images, labels)}
        for name, shown in ({"clean": images} | attacked).items():
            logits = self(shown)
            self.accuracies[name].update(logits, labels)
            self.log(f"val_loss_{name}", F.cross_entropy(logits, labels))
        self.log_dict(self.accuracies)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.hparams["lr"], momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
        return [optimizer], [schedule]


def loaders(batch_size: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 8, 8), torch.tensor(labels))
    train, val = (torch.utils.data.Subset(data, range(*part)) for part in ((0, 56), (56, 88)))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


def main(strategy: Any = "auto", **options: Any) -> L.Trainer:
    L.seed_everything(3, verbose=False)
    train, val = loaders()
    model = RobustClassifier()
    trainer = L.Trainer(strategy=strategy, max_epochs=2, accelerator="cpu", inference_mode=False, **options)
    trainer.fit(model, train, val)
    return trainer


if __name__ == "__main__":
    main()
