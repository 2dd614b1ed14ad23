"""The comparison for ``import pytorch_lightning``, in the process that runs it for `lightning.pytorch`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.pytorch_lightning import AttachStrategy, SwarmStrategy
from lightning_swarm.strategy import attach
from tests.parity.harness import LOSS_TOLERANCE, QUIET, assert_exact, quiet_warnings, run_plain, run_swarm
from tests.parity.models import Recipe, digits, loader, make_optimizer, make_schedule
from tests.served import ServedSwarm, make_model


class Digits(pl.LightningModule):
    """Trains, validates, and steps its schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 16), nn.Linear(16, 10))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    @override
    def configure_optimizers(self) -> object:
        optimizer = make_optimizer(self, Recipe())
        schedule = make_schedule(optimizer, Recipe(schedule="onecycle"))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_curve_validation_and_checkpoints_equal_the_plain_trainers(tmp_path: Path) -> None:
    data = loader(digits())

    def saving(name: str) -> dict[str, Any]:
        checkpoint = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        common = {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        return {**common, "callbacks": [checkpoint], "enable_checkpointing": True}

    plain = run_plain(Digits, data, loader(digits()), **saving("plain"))
    swarm = run_swarm(Digits, data, loader(digits()), **saving("swarm"))
    assert_exact(swarm, plain)
    assert isinstance(swarm.strategy, SwarmStrategy)
    assert swarm.num_clipped > 0
    assert swarm.trainer is not None
    assert plain.trainer is not None
    for name in ("loss", "val_loss"):
        ours, theirs = (run.trainer.callback_metrics[name].item() for run in (swarm, plain))
        assert ours == pytest.approx(theirs, rel=1e-11)

    # Each resumes from the other's file. Lightning loads weights before it applies the precision.
    for run, name in ((run_plain, "swarm"), (run_swarm, "plain")):
        path = tmp_path / name / "epoch=0.ckpt"
        options = saving(f"from {name}")
        resumed = run(lambda: Digits().double(), data, loader(digits()), **options, ckpt_path=path)
        assert 0 < len(resumed.losses) < len(plain.losses)
        assert resumed.losses == pytest.approx(plain.losses[-len(resumed.losses) :], rel=1e-11)
        for key, tensor in plain.weights.items():
            torch.testing.assert_close(resumed.weights[key], tensor, rtol=0, atol=1e-10)


class Tuning(pl.LightningModule):
    """Tunes a model that it takes as an argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # caused by peft
@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_an_adapter_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path / "base")
    rows = torch.randint(1, 29, (12, 7), generator=torch.Generator().manual_seed(0))
    losses = []
    with closing(ServedSwarm(tmp_path / "base", num_stages=2)) as swarm:
        swarm.serve("a")
        for served in (False, True):
            chosen: Any = "auto"
            base = make_model("llama")
            if served:
                monkeypatch.setattr(attach, "connect", lambda *_, **__: swarm.client)
                swarm.connect(adapts=True)
                chosen = AttachStrategy("127.0.0.1:1/a")
                base = chosen.base_model()
            torch.manual_seed(1)
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            module = Tuning(peft.get_peft_model(base, config))
            options: dict[str, Any] = {**QUIET, "devices": 1, "max_epochs": 2}
            with quiet_warnings():
                pl.Trainer(strategy=chosen, **options).fit(module, DataLoader(rows, 4))  # type: ignore[arg-type]
            losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=LOSS_TOLERANCE)
