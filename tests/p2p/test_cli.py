"""The command itself, in processes of its own: every peer runs it again."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from tests.p2p.processes import Run

# Cold starts of peers in this file: 2.

PROJECT = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        print("trained in", self.trainer.strategy.local_rank, flush=True)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(TensorDataset(rows), batch_size=8)
"""

CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_swarm.SwarmStrategy
    init_args:
      num_stages: 2
  max_epochs: 2
  precision: 64-true
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
model:
  class_path: their_project.Net
  init_args:
    width: 6
data: their_project.Data
"""


def test_fit_from_a_file_leaves_an_ordinary_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_project.py").write_text(PROJECT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    run = Run("fit", "--config", "run.yaml", "--trainer.max_epochs", 1, program=["-m", "lightning_swarm"])
    try:
        assert run.wait() == 0, "".join(run.output)
        assert run.survivors() == []
    finally:
        run.end()
    assert [line for line in run.output if line.startswith("trained in")] == ["trained in 0\n"] * 3
    [path] = tmp_path.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 3

    monkeypatch.syspath_prepend(tmp_path)
    their_project = importlib.import_module("their_project")
    sys.modules.pop("their_project")
    torch.manual_seed(1)
    plain = their_project.Net(width=6)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(plain, their_project.Data())
    assert saved["state_dict"].keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][name], tensor, rtol=1e-12, atol=1e-12)
