"""Machines of several kinds in one swarm have the plain Trainer's result, and replicas equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_swarm import Compression
from lightning_swarm.coordinator import commit
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.peer.peer import Peer
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase, UnlikeMachine
from tests.parity.harness import SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import BATCH_SIZE, DigitsMLP, Net, Recipe, digits, loader
from tests.parity.test_joining import Joining

STEPS = 50
LEFT_OUT = ("left", "discard", "unconfirmed", "round_repeated", "convicted", "went_back")
"""The event that reports a differing replica."""


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
    """Return a machine for each peer, all of different kinds."""
    return {f"peer-{peer}": UnlikeMachine(seed=peer) for peer in peers}


def replicas(strategy: InMemoryStrategy, gone: Collection[str] = ()) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the stage, and the weights, buffers and optimizer state, of each replica at the run's end."""
    for server in strategy.servers:
        if server.membership.is_member and server.membership.me.peer_id not in gone:
            for index, stage in server.steps.sums.stages.items():
                held = (dict(stage.module.state_dict()), stage.optimizer.state())
                yield index, [one for one in tree_leaves(held) if isinstance(one, Tensor)]


def assert_equal(strategy: InMemoryStrategy) -> None:
    """Check that all replicas of a stage are equal to the bit, and that none was excluded before."""
    first: dict[int, list[Tensor]] = {}
    for index, tensors in replicas(strategy):
        expected = first.setdefault(index, tensors)
        assert len(tensors) == len(expected)
        assert all(map(torch.equal, tensors, expected))
    for peer in strategy.peers:
        assert not {kind: peer.events.counts[kind] for kind in LEFT_OUT if peer.events.counts[kind]}  # type: ignore[index]
        assert differing(peer) == []


def differing(peer: Peer) -> list[str]:
    """Return the servers that were excluded for differing weights, as reported by a peer, with the reason."""
    return [f"{one.peer}: {one.reason}" for one in peer.events.newest if one.kind == "gone" and "differ" in one.reason]


def train(
    make: Callable[[], L.LightningModule], unlike: Mapping[str, UnlikeMachine], *, steps: int = STEPS, **options: Any
) -> SwarmRun:
    """Train with both Trainers; compare curves and replicas, and check that each unlike machine rounded differently."""
    common = {"max_steps": steps, "max_epochs": -1}
    common |= {name: options.pop(name) for name in tuple(options) if name.startswith("gradient_clip")}
    data = loader(digits())
    run = run_swarm(make, data, unlike=unlike, **common, **options)
    assert_exact(run, run_plain(make, data, **common))
    assert all(machine.num_moved for machine in unlike.values())
    assert any(record.portable for record in run.records), "no stage had machines of several kinds"
    assert run.strategy.refusals == []
    return run


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_stages", "num_servers", "unlike"),
    [(1, 2, (1,)), (2, 4, (1, 2)), (1, 2, (0,)), (1, 3, (1, 2)), (2, 4, (0, 1)), (2, 3, (1, 2)), (2, 4, (1, 2, 3))],
)
def test_unlike_machines_train_as_one(num_stages: int, num_servers: int, unlike: tuple[int, ...]) -> None:
    run = train(adamw, machines(*unlike), num_stages=num_stages, num_servers=num_servers)
    assert_equal(run.strategy)


OPTIONS: dict[str, tuple[Callable[[], L.LightningModule], dict[str, Any]]] = {
    "clipped by norm": (adamw, {"gradient_clip_val": 0.05}),
    "clipped by value": (adamw, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "adamw amsgrad": (lambda: Chosen(amsgrad=True), {}),
    "rmsprop": (lambda: Chosen(torch.optim.RMSprop, centered=True, momentum=0.5), {}),
    "adafactor": (lambda: Chosen(torch.optim.Adafactor), {}),
    "nadam": (lambda: Chosen(torch.optim.NAdam), {}),
    "sgd with momentum": (lambda: Chosen(torch.optim.SGD, momentum=0.9, nesterov=True), {}),
}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_each_replica_computes_is_portable(name: str) -> None:
    make, options = OPTIONS[name]
    run = train(make, machines(1), num_stages=1, steps=20, **options)
    assert_equal(run.strategy)


def test_statistics_of_batch_norms_are_the_same_everywhere() -> None:
    options: dict[str, Any] = {"num_stages": 1, "microbatch_size": BATCH_SIZE, "max_steps": 10, "max_epochs": -1}
    run = run_swarm(Normed, loader(digits(), 2 * BATCH_SIZE), unlike=machines(1), **options)
    assert all(record.portable for record in run.records)
    assert_equal(run.strategy)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "compression",
    [{"compression": "float16"}, {"compression": "8bit"}, {"compression": Compression(averaging="powersgd", rank=2)}],
)
def test_compressed_means_are_the_same_everywhere(compression: dict[str, Any]) -> None:
    options: dict[str, Any] = {"num_stages": 1, "num_servers": 3, "max_steps": 10, "max_epochs": -1}
    run = run_swarm(adamw, loader(digits()), unlike=(unlike := machines(1, 2)), **options, **compression)
    assert all(machine.num_moved for machine in unlike.values())
    assert all(record.portable for record in run.records)
    assert_equal(run.strategy)


def test_an_unlike_machine_joins() -> None:
    run = train(adamw, machines(2), num_joiners=1, callbacks=[Joining(at=3)], latency_s=0.001, steps=20)
    assert_equal(run.strategy)
    assert not run.records[0].portable, "the first servers hold a stage each"


@pytest.mark.thorough
def test_an_unlike_machine_dies() -> None:
    faults = FaultPlan().kill("peer-1", at=Phase.FORWARD, step=5)
    run = train(adamw, machines(1), num_stages=1, num_servers=3, num_gone=1, faults=faults, steps=20)
    faults.check()
    first, second = (tensors for _, tensors in replicas(run.strategy, gone=["peer-1"]))
    assert all(map(torch.equal, first, second))
    assert not run.records[-1].portable, "machines of one kind are left"


def test_an_unlike_machine_is_refused_where_bits_are_promised() -> None:
    joining = Joining(at=2)
    run = run_swarm(
        adamw, loader(digits()), exact_sums=True, unlike=machines(2), callbacks=[joining], latency_s=0.001,
        num_joiners=0, max_steps=8, max_epochs=-1,
    )  # fmt: skip
    (refusal,) = run.strategy.refusals
    assert isinstance(refusal, ConfigError)
    assert "deterministic=True" in str(refusal)
    assert "must be machines of one kind" in str(refusal)


class Odd(torch.optim.SGD):
    """Uses an operation that machines round differently."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.tanh())


@pytest.mark.parametrize("unlike", [{}, machines(2)], ids=["equal", "unlike"])
def test_an_optimizer_that_rounds_apart_needs_machines_of_one_kind(unlike: dict[str, UnlikeMachine]) -> None:
    run = run_swarm(
        lambda: Chosen(Odd), loader(digits()), unlike=unlike, callbacks=[Joining(at=2)], latency_s=0.001,
        num_joiners=not unlike, max_steps=8, max_epochs=-1,
    )  # fmt: skip
    assert bool(run.strategy.refusals) is bool(unlike)
    for refusal in run.strategy.refusals:
        assert isinstance(refusal, ConfigError)
        assert "aten::tanh" in str(refusal)


def test_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without portable arithmetic the younger of two unlike machines is excluded after the first step."""
    monkeypatch.setattr(commit, "mixed_stages", lambda *_: [])
    run = run_swarm(adamw, loader(digits()), num_stages=1, unlike=machines(1), max_steps=4, max_epochs=-1)
    [gone] = {said for peer in run.strategy.peers for said in differing(peer)}
    assert gone.startswith("peer-1: ")
    assert "peer-1 differ in" in gone
