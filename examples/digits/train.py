"""Classify scikit-learn's handwritten digits on a swarm of local peers, or with ``--plain`` on none.

The model and its loop are what a Lightning tutorial has; the swarm is the Trainer's `strategy` and `devices`.
"""

import argparse
import logging
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_swarm import SwarmStrategy


class DigitsData(L.LightningDataModule):
    """1797 images of 8 by 8 pixels; one in five is kept for validation. They come with scikit-learn."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Load and split, in the same way at every run."""
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        split = torch.Generator().manual_seed(0)
        self.train_set, self.val_set = random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2], split)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """In order."""
        return DataLoader(self.val_set, self.batch_size)


class DigitsClassifier(L.LightningModule):
    """A small convolutional network. All its layers are in one `Sequential`, so a swarm knows how to cut it."""

    def __init__(self, width: int = 16, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy over all validation images."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def main() -> None:
    """Train, and say how well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="use Lightning's own strategy instead of a swarm")
    parser.add_argument("--devices", type=int, default=3, help="local peers of the swarm (default: 3)")
    parser.add_argument("--num-stages", type=int, default=2, help="parts the model is cut into (default: 2)")
    parser.add_argument("--max-epochs", type=int, default=8, help="passes over the data (default: 8)")
    arguments = parser.parse_args()
    # Small data in memory needs no worker processes.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own business with a torch that is newer than it.
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if arguments.plain else arguments.devices,
        strategy="auto" if arguments.plain else SwarmStrategy(num_stages=arguments.num_stages),
        max_epochs=arguments.max_epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsClassifier(), DigitsData())
    print(f"accuracy on images that it was not trained on: {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
