"""`SwarmStrategy(deterministic=True)` ends with the same bits for every arrangement of peers and every failure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm import Rebalancing
from lightning_swarm.protocol import serialization
from lightning_swarm.testing import FaultPlan, Phase
from tests.parity.harness import SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, NanoGPT, Recipe, TinyGPT, digits, loader, sentences
from tests.parity.test_batch_norm import ResNet
from tests.parity.test_joining import Joining
from tests.parity.test_rollback import Fit, Killing
from tests.parity.test_tied import TiedGPT

STEPS = 6


def digits_net() -> DigitsMLP:
    return DigitsMLP(Recipe(schedule="onecycle"))


def train(
    make: Callable[[], L.LightningModule] = digits_net, data: Callable[[], Any] = digits, **options: Any
) -> SwarmRun:
    """Train in float32, where most additions round."""
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "max_epochs": -1,
        "gradient_clip_val": 0.5,
        "precision": "32-true",
        "microbatch_size": 2,
        "latency_s": 0.001,
        "exact_sums": True,
    }
    settings |= options
    run = run_swarm(make, loader(data()), **settings)
    if isinstance(settings.get("faults"), FaultPlan):
        settings["faults"].check()
    assert len(run.records) == settings["max_steps"]
    return run


def bits(run: SwarmRun) -> dict[str, Tensor]:
    """Return all results of a run: losses, norms, weights, and the optimizer's state of each stage."""
    found = {f"weight {name}": tensor for name, tensor in run.weights.items()}
    found["losses"] = torch.tensor(run.losses, dtype=torch.float64)
    decided = [(record.squared_norm, record.clip_factor, record.closing.total_weight) for record in run.records]
    found["records"] = torch.tensor(decided, dtype=torch.float64)
    for server in run.strategy.servers:
        for index in server.steps.stages:
            if server.membership.me not in run.rosters[-1][index]:
                continue
            for name, state in server.steps.stage(index).optimizer.state().items():
                for number, tensor in enumerate(serialization.flatten(state)[1]):
                    key = f"state {index} {name} {number}"
                    assert torch.equal(found.setdefault(key, tensor), tensor)
    assert sum(key.startswith("state") for key in found) >= len(list(run.module.parameters()))
    return found


def different(one: SwarmRun, other: SwarmRun, of: tuple[str, ...] = ("",)) -> list[str]:
    """Return the names beginning with `of` whose tensors differ in any bit."""
    ours, theirs = ({name: tensor for name, tensor in bits(run).items() if name.startswith(of)} for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(tensor.isfinite().all() for tensor in ours.values())
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def holders(run: SwarmRun) -> list[Any]:
    """By step and stage: the members that averaged, and their microbatches."""
    return [run.held.by_stage(record) for record in run.records]


def num_computed_again(run: SwarmRun) -> int:
    """Count calls that were sent again, and microbatches whose gradients were lost."""
    return run.rerouted["repeated"] + sum(peer.events.counts["replay"] for peer in run.strategy.peers)


# In the second step one of the two servers of the second stage dies with its sum, and the other one computes all of it
# again.
def deadly(phase: Phase) -> dict[str, Any]:
    return {"num_servers": 4, "num_gone": 1, "faults": FaultPlan().kill("peer-3", at=phase, step=2)}


WIRED: list[Callable[[], dict[str, Any]]] = [
    lambda: {"num_servers": 2},
    lambda: {"num_servers": 1},
    lambda: {"num_servers": 4, "seed": 1},
    lambda: {"num_servers": 5, "seed": 2, "microbatch_s": [0.01, 0.03, 0.02]},
    lambda: deadly(Phase.BACKWARD_DONE),
    lambda: deadly(Phase.RECEIPT_SEEN),
    lambda: deadly(Phase.AVERAGE_SEND),
    lambda: deadly(Phase.AVERAGE_DONE),
    lambda: {"num_servers": 3, "callbacks": [Joining(at=2, count=2)], "num_joiners": 2},
    # The first server coordinates, and holds the second stage.
    lambda: {**deadly(Phase.BACKWARD), "role": "trainer", "faults": FaultPlan().kill("peer-1", at=Phase.CLOSE, step=2)},
    lambda: {
        "num_servers": 1,
        "callbacks": [Joining(at=1)],
        "num_joiners": 1,
        "num_shed": 1,
        "rebalancing": Rebalancing("gain", interval=0.5),
        "microbatch_s": [0.1, 0.1],
    },
]
NAMES = [
    "one each",
    "one for both",
    "two each",
    "of unequal speed",
    "dies 1",
    "dies 2",
    "dies 3",
    "dies 4",
    "joiners",
    "coordinator",
    "shed",
]


@pytest.fixture(scope="module")
def reference() -> SwarmRun:
    run = train(num_servers=3, seed=7)
    assert run.num_clipped > 0
    return run


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("wired", WIRED, ids=NAMES)
def test_the_same_bits(reference: SwarmRun, wired: Callable[[], dict[str, Any]]) -> None:
    options = wired()
    run = train(**options)
    assert holders(run) != holders(reference)
    if "faults" in options:
        assert num_computed_again(run), "nothing was lost"
    assert different(run, reference) == []


@pytest.mark.thorough
def test_other_bits_without_it() -> None:
    """Without `deterministic` the bits differ, so the tests above can fail."""
    runs = [train(exact_sums=False, **wired()) for wired in WIRED[:5]]
    for one, other in itertools.combinations(runs[1:], 2):
        found = different(one, other)
        assert sum(name.startswith("weight") for name in found) > len(one.weights) // 2


def test_exact_in_float64() -> None:
    plain = run_plain(digits_net, loader(digits()), max_steps=STEPS, max_epochs=-1, gradient_clip_val=0.5)
    swarm = train(num_servers=5, precision="64-true")
    assert_exact(swarm, plain)
    assert swarm.norms == pytest.approx(plain.norms, rel=1e-11)


class Poisoned(DigitsMLP):
    """Has one gradient that is not finite."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (self.poison if batch_idx == 2 else 1.0)

    poison = math.nan


class Huge(Poisoned):
    """Has one gradient that is finite but overflows in the sum."""

    poison = 1e12


@pytest.mark.parametrize("make", [Poisoned, Huge])
def test_what_cannot_be_added_up_skips_its_step(make: Callable[[], Any]) -> None:
    one, other = train(make, max_steps=4, num_servers=2), train(make, max_steps=4, num_servers=5, seed=1)
    assert different(one, other, of=("weight", "state")) == []
    for run in (one, other):
        assert [record.outcome for record in run.records] == ["apply", "apply", "skip", "apply"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        (TinyGPT, sentences, {}),
        (TiedGPT, sentences, {}),
        (lambda: NanoGPT(Recipe()), sentences, {"pipeline": "transformer.h"}),
        (ResNet, digits, {"gradient_clip_val": 0.2}),
        (lambda: DigitsMLP(dropout=0.3), digits, {}),
        (digits_net, digits, {"delay_optimizer_step": True}),
        (digits_net, digits, {"accumulate_grad_batches": 3, "max_steps": 4}),
        (digits_net, digits, {"target_batch_size": 20, "max_steps": 4}),
    ],
    ids=["gpt", "tied", "around", "batch norms", "dropout", "late", "accumulated", "target"],
)
def test_in_other_runs(make: Any, data: Any, options: dict[str, Any]) -> None:
    one = train(make, data, **options, num_servers=2)
    assert one.num_clipped
    for other in (
        train(make, data, **options, num_servers=5, seed=3),
        train(make, data, **options, **deadly(Phase.RECEIPT_SEEN)),
    ):
        assert holders(one) != holders(other)
        assert different(one, other) == []
    plain = [train(make, data, **options, exact_sums=False, num_servers=number) for number in (2, 5)]
    assert different(*plain)


@pytest.mark.thorough
def test_a_run_that_went_back_to_a_snapshot() -> None:
    def fit(killing: Killing, **options: Any) -> Fit:
        wired = {"deterministic": True, "microbatch_size": 1, **options}
        found = Fit(killing, devices=4, swarm=wired, precision="32-true", gradient_clip_val=0.5)
        assert not killing.left, "nobody was killed"
        return found

    # Peers 1 and 3 hold the second stage.
    runs = [fit(Killing([5], [[1, 3]])), fit(Killing([], []), seed=1)]
    assert [run.num_went_back for run in runs] == [1, 0]
    for name, tensor in runs[0].weights.items():
        assert torch.equal(runs[1].weights[name], tensor)
