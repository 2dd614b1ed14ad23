"""Train the denoiser; keep the best checkpoint, stop when it gets no better, test the best."""

import argparse
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from denoise.data import Photos
from denoise.model import Denoiser


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=6)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-patches", type=int, default=512)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    return parser.parse_args()


def main() -> None:
    """Train and test."""
    args = parse_arguments()
    L.seed_everything(args.seed, workers=True)
    data = Photos(args.batch_size, args.num_patches, num_workers=args.num_workers)
    model = Denoiser(args.width, args.depth, args.learning_rate)
    checkpoint = ModelCheckpoint(args.out / "checkpoints", monitor="val_psnr", mode="max", save_last=True)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.max_epochs,
        precision=args.precision,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=CSVLogger(args.out, name="logs"),
        callbacks=[
            checkpoint,
            EarlyStopping(monitor="val_psnr", mode="max", patience=args.patience),
            LearningRateMonitor(logging_interval="step"),
        ],
    )
    trainer.fit(model, data)
    trainer.test(model, data, ckpt_path="best")


if __name__ == "__main__":
    main()
