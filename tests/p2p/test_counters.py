"""A script started from a shell, with several trainers: its weights equal the plain Trainer's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_swarm import SwarmStrategy


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.factor = 1.0

    def on_train_epoch_start(self):
        self.factor = 1.0 + float(self.trainer.callback_metrics.get("val", 0.0))

    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.05 / (1 + self.global_step)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        out = self.net(x)
        loss = (out - x.sum(1, keepdim=True)).square().mean() * self.factor
        lazy = 2.0 if batch_idx % 4 == 0 else 0.0
        return loss + lazy * out.abs().mean() / self.trainer.num_training_batches

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    devices, out = int(sys.argv[1]), sys.argv[2]
    L.seed_everything(0, verbose=False)
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    swarm = SwarmStrategy(num_stages=1, role="both", target_batch_size=8)
    own = dict(strategy=swarm, devices=devices) if devices > 1 else dict(devices=1, accumulate_grad_batches=2)
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **own,
    )
    module = Net()
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=4), DataLoader(TensorDataset(x), batch_size=8))
    torch.save({"steps": trainer.global_step, **module.state_dict()}, out)
"""


def run(folder: Path, devices: int) -> tuple[dict[str, torch.Tensor], str]:
    script, out = folder / "train.py", folder / f"{devices}.pt"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script.name, str(devices), str(out)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(out), done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [2, 4])
def test_a_script_reads_the_runs_counters(tmp_path: Path, devices: int) -> None:
    plain, _ = run(tmp_path, 1)
    found, said = run(tmp_path, devices)
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-10, msg=name)
    assert "'factor'" in said, "that it changes is told, though all trainers have the same"
