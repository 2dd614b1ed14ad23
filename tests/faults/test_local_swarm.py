"""`local_swarm`, with which other projects test their models."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_swarm.testing import FaultPlan, MakeLocalSwarm, Phase, local_swarm

pytest_plugins = ["lightning_swarm.testing.plugin"]


class Net(L.LightningModule):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.blocks(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=8)


def test_a_swarm_for_a_block() -> None:
    net = Net()
    plan = FaultPlan().delay("peer-2", by_s=3.0, at=Phase.BACKWARD, step=1)
    with local_swarm(4, num_stages=2, seed=3, latency_s=0.01, faults=plan) as swarm:
        trainer = swarm.trainer(max_steps=3)
        trainer.fit(net, data())
    assert trainer.global_step == len(net.losses) == 3
    assert plan.fired == 1
    assert len(swarm.strategies[0].servers) == 4


def test_faults_that_do_not_happen_fail_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="kill peer-1 at BACKWARD, step 9"),
        local_swarm(2, faults=FaultPlan().kill("peer-1", at=Phase.BACKWARD, step=9), num_stages=2) as swarm,
    ):
        swarm.trainer(max_steps=1).fit(Net(), data())


def test_a_fixture_makes_swarms(local_swarm: MakeLocalSwarm) -> None:
    losses = []
    for plan in (FaultPlan(), FaultPlan().duplicate("peer-1", at=Phase.FORWARD, step=0)):
        net = Net()
        local_swarm(3, num_stages=3, faults=plan).trainer(max_steps=2, precision="64-true").fit(net, data())
        losses.append(net.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)
