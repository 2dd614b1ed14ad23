"""An audited training in eight processes, of which three are malicious and one is killed; writes its results.

``python tests/p2p/audited.py FOLDER SEED SINCE``: the malicious servers begin in step SINCE. Every peer runs this
script again, as with any script.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # imports the tests' modules in any working directory

from lightning_swarm import Trust
from lightning_swarm.core.limits import Limits
from lightning_swarm.testing import FaultPlan, FaultySwarmStrategy, Phase
from tests.adversaries.adversary import Adversary
from tests.adversaries.swarms import lie_in_process

NUM_PEERS, NUM_STAGES, NUM_STEPS = 8, 2, 48
WIDTH, ROWS = 16, 32
LIARS = {"peer-1": "sign_flip", "peer-4": "skipped_blocks", "peer-7": "scaled_sum"}
KILLED = "peer-5"


class Net(L.LightningModule):
    """Four blocks in float64."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(*made)

    @override
    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.net(inputs) - targets).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loader(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, NUM_STEPS * ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(*rows), batch_size=ROWS)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_steps": NUM_STEPS,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def main(folder: Path, seed: int, since: int) -> None:
    """Train; the starter writes the weights, and the events of each peer."""
    liars = [Adversary(peer, attack, since=since, seed=seed) for peer, attack in LIARS.items()]
    strategy = FaultySwarmStrategy(
        faults=FaultPlan().kill(KILLED, at=Phase.BACKWARD, nth=8),  # counts from its joining, which may come late
        fired=folder / "fired",
        modify_peer=lie_in_process(liars, folder / "fired"),
        num_stages=NUM_STAGES,
        microbatch_size=2,
        deterministic=True,
        trust=Trust("audited", audit_share=0.25),
        limits=Limits(call_timeout=60.0, start_timeout=400.0),
    )
    net = Net(seed)
    trainer = L.Trainer(devices=NUM_PEERS, strategy=strategy, **QUIET)
    trainer.fit(net, loader(seed))
    assert strategy.peer is not None or strategy.local_rank == 0
    torch.save(net.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
