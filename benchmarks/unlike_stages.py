"""Trainings in one stage of machines of several kinds, in memory: for `benchmarks.unlike`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT
from lightning_swarm.testing import InMemoryStrategy, UnlikeMachine, local_swarm

NUM_KINDS: Final = 3
"""Kinds in one stage: this machine, and two unlike ones."""
DIFFERING: Final = ("gone", "left", "discard", "unconfirmed", "round_repeated", "convicted", "went_back")
"""Kinds of events that a replica causes which differs from the others."""
OPTIMIZERS: Final[dict[str, Callable[[Any], Optimizer]]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-2),
}


@cache
def _source(context: int) -> PythonSource:
    source = PythonSource(context, max_bytes=2_000_000)
    source.setup("fit")
    return source


class Bytes(ByteGPT):
    """The GPT on bytes, at a constant learning rate."""

    def __init__(self, optimizer: str = "AdamW", **sizes: int) -> None:
        super().__init__(**sizes)
        self._optimizer = optimizer

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the mean cross entropy, in nats a byte."""
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def batches(self, size: int, seed: int = 0) -> DataLoader[Any]:
        """Return batches of so many windows, in an order that the seed decides."""
        order = torch.Generator().manual_seed(seed)
        return DataLoader(_source(self.context).train_windows, size, shuffle=True, generator=order, drop_last=True)

    @torch.no_grad()
    def held_out(self, size: int) -> float:
        """Return the loss on so many windows of unseen files."""
        return self.loss(next(iter(DataLoader(_source(self.context).val_windows, size)))).item()

    @override
    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self._optimizer](self.parameters())


class Tiny(L.LightningModule):
    """A regression of noise, whose gradients stay large."""

    def __init__(self, optimizer: str = "AdamW", dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
        self._optimizer = optimizer

    @override
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self._optimizer](self.parameters())


def noise(num_steps: int, seed: int) -> DataLoader[Any]:
    """Make batches for so many steps, each of two samples for each kind of machine."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2 * NUM_KINDS * num_steps, 6, generator=generator)
    return DataLoader(TensorDataset(numbers[:, :4], numbers[:, 4:]), 2 * NUM_KINDS)


def machines(number: int = NUM_KINDS) -> dict[str, UnlikeMachine]:
    """Make machines of a kind of their own for all peers but the first."""
    return {f"peer-{peer}": UnlikeMachine(seed=peer) for peer in range(1, number)}


def fit(
    model: L.LightningModule,
    data: Any,
    num_steps: int,
    unlike: Mapping[str, UnlikeMachine],
    *,
    num_servers: int = NUM_KINDS,
    arguments: Mapping[str, Any] | None = None,
    **settings: Any,
) -> InMemoryStrategy:
    """Train on servers of one stage, and return their strategy; `arguments` are the Trainer's."""
    with local_swarm(num_servers, unlike=unlike, num_stages=1, **settings) as swarm:
        trainer = swarm.trainer(max_steps=num_steps, max_epochs=-1, limit_val_batches=0, **(arguments or {}))
        trainer.fit(model, data)
    return swarm.strategies[-1]


def differences_noted(strategy: InMemoryStrategy) -> int:
    """Count the events that replicas which differ cause, over all peers."""
    counts: Counter[str] = Counter()
    for peer in strategy.peers:
        counts.update(peer.events.counts)
    return sum(counts[kind] for kind in DIFFERING)


def drift(replicas: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the largest difference of a weight between any two replicas."""
    vectors = [torch.cat([one.detach().flatten() for one in replica.values()]) for replica in replicas]
    return max(float((one - other).abs().max()) for one, other in itertools.combinations(vectors, 2))
