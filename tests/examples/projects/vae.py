"""A variational autoencoder of handwritten digits, whose KL term and temperature are annealed."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from typing_extensions import override


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, size: int = 80) -> None:
        super().__init__()
        self.batch_size, self.size = batch_size, size

    @override
    def setup(self, stage: str) -> None:
        images = torch.tensor(load_digits().data[: self.size] / 16, dtype=torch.float32)
        parts = random_split(TensorDataset(images), [0.7, 0.3], torch.Generator().manual_seed(0))
        self.train_set, self.val_set = parts

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, self.batch_size)


class Layer(nn.Module):
    """Keeps its activity, for a penalty."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(d_in, d_out), nn.LayerNorm(d_out)
        self.activity: Tensor | None = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        out = F.silu(self.norm(self.linear(x)))
        self.activity = out.abs().mean()
        return out


class Posterior(nn.Module):
    """Mean and deviation of the code; `kl` is kept, one value for each sample."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.to_code = nn.Linear(width, 2 * latent)
        self.temperature = 1.0
        self.kl: Tensor | None = None

    @override
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.to_code(h).chunk(2, dim=1)
        self.kl = 0.5 * (mean.square() + log_var.exp() - 1.0 - log_var).sum(1)
        return mean, self.temperature * (0.5 * log_var).exp()


class VAE(L.LightningModule):
    def __init__(self, width: int = 24, latent: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(Layer(64, width), Layer(width, width), Posterior(width, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.SiLU(), nn.Linear(width, 64), nn.Sigmoid())
        self.kl_weight = 0.0
        self.register_buffer("sampled", torch.zeros(6, latent))

    @override
    def forward(self, images: Tensor) -> Tensor:
        mean, deviation = self.encoder(images)
        code = mean + deviation * torch.randn_like(mean) if self.training else mean
        decoded: Tensor = self.decoder(code)
        return decoded

    def losses(self, images: Tensor) -> dict[str, Tensor]:
        rebuilt = F.binary_cross_entropy(self(images), images, reduction="none").sum(1).mean()
        kl = self.encoder[-1].kl.mean()
        activity = torch.stack([layer.activity for layer in self.encoder[:-1]]).mean()
        return {"loss": rebuilt + self.kl_weight * kl + 0.1 * activity, "rebuilt": rebuilt, "kl": kl, "act": activity}

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.losses(batch[0])
        self.log_dict({f"train_{name}": value for name, value in found.items()})
        self.log("kl_weight", self.kl_weight)
        return found["loss"]

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log_dict({f"val_{name}": value for name, value in self.losses(batch[0]).items()}, prog_bar=True)

    @override
    def on_validation_epoch_end(self) -> None:
        self.sampled.normal_()
        drawn = self.decoder(self.sampled)
        self.log_dict({"sampled_ink": drawn.mean(), "sampled_spread": drawn.std(0).mean()})

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Annealing(Callback):
    """Raises the weight of the KL term, and cools the noise down, batch by batch."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        done = min(1.0, trainer.global_step / self.num_steps)
        pl_module.kl_weight = done
        pl_module.encoder[-1].temperature = 1.5 - done

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.temperature, pl_module.encoder[-1].temperature = pl_module.encoder[-1].temperature, 0.0

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.encoder[-1].temperature = self.temperature


def main(strategy: Any = "auto", **options: Any) -> L.Trainer:
    L.seed_everything(2, workers=True, verbose=False)
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=2,
        accelerator="cpu",
        callbacks=[Annealing(num_steps=6), EarlyStopping("val_loss", patience=5)],
        **options,
    )
    trainer.fit(VAE(), datamodule=DigitsDataModule())
    return trainer


if __name__ == "__main__":
    main()
