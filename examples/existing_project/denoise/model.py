"""A residual convolutional network that predicts the noise."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.image import PeakSignalNoiseRatio


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut; shape in is shape out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the convolutions make of it."""
        out: Tensor = hidden + self.body(hidden)
        return out


class Denoiser(L.LightningModule):
    """Noisy patches in, clean ones out.

    Args:
        width: Channels inside.
        depth: Residual blocks.
        learning_rate: The peak of a one-cycle schedule.
        weight_decay: Of AdamW.
    """

    def __init__(
        self, width: int = 32, depth: int = 4, learning_rate: float = 1e-3, weight_decay: float = 1e-4
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            *(ResidualBlock(width) for _ in range(depth)),
            nn.Conv2d(width, 3, 3, padding=1),
        )
        for parameter in self.net[-1].parameters():
            nn.init.zeros_(parameter)  # so that an untrained model changes nothing
        self.val_psnr = PeakSignalNoiseRatio(data_range=1.0)
        self.test_psnr = PeakSignalNoiseRatio(data_range=1.0)

    def forward(self, noisy: Tensor) -> Tensor:
        """``[batch, 3, height, width]``, the noise taken away."""
        clean: Tensor = noisy - self.net(noisy)
        return clean

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        noisy, clean = batch
        loss = F.mse_loss(self(noisy), clean)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Peak signal-to-noise ratio in dB over all patches."""
        noisy, clean = batch
        self.val_psnr(self(noisy), clean)
        self.log("val_psnr", self.val_psnr, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same on other patches."""
        noisy, clean = batch
        self.test_psnr(self(noisy), clean)
        self.log("test_psnr", self.test_psnr)

    def configure_optimizers(self) -> Any:
        """AdamW, one cycle."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams["learning_rate"], weight_decay=self.hparams["weight_decay"]
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams["learning_rate"],
            total_steps=int(self.trainer.estimated_stepping_batches),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
