"""A swarm of linear blocks, whose steps can be computed independently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm.server.stage import Stage
from lightning_swarm.testing import FaultPlan
from tests.adversaries.adversary import Adversary
from tests.adversaries.swarms import local_swarm

WIDTH = 4
BATCH = 16
NUM_STEPS = 4
LR = 0.5
F64 = torch.float64
FIRST, LAST = "peer-1", "peer-0"
"""The servers of two stages in a swarm of two peers."""


class Net(L.LightningModule):
    """Linear blocks; if there is one only, its gradients do not depend on its weights.

    Args:
        num_blocks: Each is a stage, if the swarm has as many.
        labels: Whether samples have labels by their first column, for a cross entropy; else the loss is the output's
            mean.
    """

    def __init__(self, num_blocks: int = 1, *, labels: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_blocks)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.labels = labels
        self.outputs: list[Tensor] = []

    def loss(self, x: Tensor, *, flipped: bool = False) -> Tensor:
        output: Tensor = self.blocks(x)
        self.outputs.append(output.detach())
        if not self.labels:
            return output.mean()
        labels = (x[:, 0] > 0).long()
        return cross_entropy(output, WIDTH - 1 - labels if flipped else labels)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().to(F64, copy=True) for parameter in self.parameters()]

    def clean(self, num_steps: int, *, flipped: bool = False) -> list[Tensor]:
        """Return the weights after some steps on one machine."""
        twin = Net(len(self.blocks), labels=self.labels).double()
        optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
        for x in batches()[:num_steps]:
            optimizer.zero_grad()
            twin.loss(x, flipped=flipped).backward()
            optimizer.step()
        return twin.weights()


def batches() -> Sequence[Tensor]:
    x = torch.randn(NUM_STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64)
    return x.split(BATCH)


class Replicas(L.Callback):
    """Keeps references to the servers' stages, which a server releases at the run's end."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[int, Stage]] = {}

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        for server in trainer.strategy.servers:  # type: ignore[attr-defined]
            self.stages[server.membership.me.peer_id] = dict(server.steps.sums.stages)

    def weights(self, peer: str, stage: int = 0) -> Tensor:
        (found,) = self.stages[peer][stage].weights().values()
        return found.clone()


def run(
    net: Net,
    *adversaries: Adversary,
    num_peers: int = 4,
    num_steps: int = NUM_STEPS,
    callbacks: Sequence[L.Callback] = (),
    faults: FaultPlan | None = None,
    clip: float | None = None,
    **settings: Any,
) -> Replicas:
    replicas = Replicas()
    arguments: dict[str, Any] = {
        "num_stages": len(net.blocks),
        "microbatch_size": 1,
        "adversaries": adversaries,
        "faults": faults,
        **settings,
    }
    with local_swarm(num_peers, **arguments) as swarm:
        trainer = swarm.trainer(
            max_steps=num_steps, precision="64-true", callbacks=[replicas, *callbacks], gradient_clip_val=clip
        )
        trainer.fit(net, DataLoader(TensorDataset(torch.cat(list(batches()))), batch_size=BATCH))
    return replicas
