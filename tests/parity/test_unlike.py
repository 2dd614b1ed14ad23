"""Machines of several kinds in one swarm: the plain Trainer's result, and replicas that are equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_swarm.coordinator import commit
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase, UnlikeMachine
from tests.parity.harness import SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader
from tests.parity.test_joining import Joining

STEPS = 50
LEFT_OUT = ("left", "discard", "unconfirmed", "round_repeated", "convicted", "went_back")
"""What is noted where a replica differs from the others."""


class Chosen(DigitsMLP):
    """Digits, with an optimizer of the test's choice."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self._make, self._options = optimizer, options

    @override
    def configure_optimizers(self) -> Any:
        return self._make(self.parameters(), **{"lr": 1e-2, **self._options})


class Normed(DigitsMLP):
    """Digits with a batch norm, whose statistics the servers of a stage exchange."""

    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw"))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 10))


def adamw() -> Net:
    return DigitsMLP(Recipe(optimizer="adamw"))


def machines(*peers: int) -> dict[str, UnlikeMachine]:
    """Machines of as many kinds as peers, none of them the others' kind."""
    return {f"peer-{peer}": UnlikeMachine(seed=peer) for peer in peers}


def replicas(strategy: InMemoryStrategy) -> Iterator[tuple[int, list[Tensor]]]:
    """The stage, and the weights, buffers and optimizer's state, of each replica that is in the run at its end."""
    for server in strategy.servers:
        if server.membership.is_member:
            for index, stage in server.steps.sums.stages.items():
                held = (dict(stage.module.state_dict()), stage.optimizer.state())
                yield index, [one for one in tree_leaves(held) if isinstance(one, Tensor)]


def assert_equal(strategy: InMemoryStrategy) -> None:
    """All replicas of a stage are equal to the bit, and none was left out before."""
    first: dict[int, list[Tensor]] = {}
    for index, tensors in replicas(strategy):
        expected = first.setdefault(index, tensors)
        assert len(tensors) == len(expected)
        assert all(map(torch.equal, tensors, expected))
    for peer in strategy.peers:
        assert not {kind: peer.events.counts[kind] for kind in LEFT_OUT if peer.events.counts[kind]}  # type: ignore[index]


def train(
    make: Callable[[], L.LightningModule], unlike: Mapping[str, UnlikeMachine], *, steps: int = STEPS, **options: Any
) -> SwarmRun:
    """Train both ways; compare the curves and the replicas. Each unlike machine has rounded differently."""
    common = {"max_steps": steps, "max_epochs": -1}
    common |= {name: options.pop(name) for name in tuple(options) if name.startswith("gradient_clip")}
    run = run_swarm(make, loader(digits()), unlike=unlike, **common, **options)
    assert_exact(run, run_plain(make, loader(digits()), **common))
    assert all(machine.num_moved for machine in unlike.values())
    assert any(record.portable for record in run.records), "no stage had machines of several kinds"
    assert run.strategy.refusals == []
    return run


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(("num_stages", "num_servers"), [(1, 2), (2, 4), (2, 3)])
@pytest.mark.parametrize("unlike", [(0,), (1,), (1, 2)], ids=["the trainer's", "another", "two kinds more"])
def test_unlike_machines_train_as_one(num_stages: int, num_servers: int, unlike: tuple[int, ...]) -> None:
    chosen = [peer for peer in unlike if peer < num_servers]
    run = train(adamw, machines(*chosen), num_stages=num_stages, num_servers=num_servers)
    assert_equal(run.strategy)


def test_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "mixed_stages", lambda *_: [])
    run = run_swarm(adamw, loader(digits()), num_stages=1, num_gone=1, unlike=machines(1), max_steps=4, max_epochs=-1)
    assert sum(peer.events.counts["left"] for peer in run.strategy.peers)
