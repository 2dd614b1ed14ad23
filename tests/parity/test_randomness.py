"""Random draws do not depend on the arrangement of peers, and the user's own generators keep their state."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from tests.parity.harness import SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader

STEPS = 9


def with_dropout() -> DigitsMLP:
    return DigitsMLP(dropout=0.4)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("num_servers", "seed"), [(1, 0), (2, 1), (3, 2), (4, 3), (4, 4)])
def test_the_curve_does_not_depend_on_who_computes_what(num_servers: int, seed: int) -> None:
    reference = run_swarm(with_dropout, loader(digits()), num_stages=2, num_servers=2, max_steps=STEPS)
    swarm = run_swarm(with_dropout, loader(digits()), num_stages=2, num_servers=num_servers, seed=seed, max_steps=STEPS)
    assert_exact(swarm, reference)
    free = run_swarm(DigitsMLP, loader(digits()), num_stages=2, num_servers=2, max_steps=STEPS)
    assert swarm.losses[0] != free.losses[0], "no dropout"
    assert len(set(swarm.losses)) == len(swarm.losses)


def test_the_seed_of_the_script_decides_the_draws() -> None:
    first = run_swarm(with_dropout, loader(digits()), max_steps=2)
    again = run_swarm(with_dropout, loader(digits()), max_steps=2)
    other = run_swarm(with_dropout, loader(digits()), max_steps=2, callbacks=[_Reseed()])
    assert first.losses[0] == pytest.approx(again.losses[0], rel=1e-12)
    assert first.losses[0] != pytest.approx(other.losses[0], rel=1e-6)


@pytest.mark.thorough
def test_the_seed_of_the_network_replays_a_run() -> None:
    def routes(run: SwarmRun) -> list[list[dict[PeerId, set[Receipt]]]]:
        """Return, for each step and stage, the replica of each microbatch."""
        return [run.held.by_stage(record) for record in run.records]

    first, again, other = (
        run_swarm(with_dropout, loader(digits()), num_servers=4, seed=seed, max_steps=STEPS) for seed in (0, 0, 1)
    )
    assert again.losses == first.losses
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in first.weights.items())
    assert routes(again) == routes(first)
    assert routes(other) != routes(first)


class _Reseed(L.Callback):
    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        torch.manual_seed(1)


class Noisy(DigitsMLP):
    """Draws in `training_step` from all generators that exist; builds its layers late."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.states: list[Any] = []

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.states.append(generator_states())
        images, labels = batch
        noise = torch.randn_like(images) * random.random() * float(np.random.rand())  # noqa: NPY002
        return F.cross_entropy(self.net(images + noise), labels)


def generator_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002


def test_the_users_generators_are_left_alone() -> None:
    def seeded() -> Noisy:
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        return Noisy()

    plain = run_plain(seeded, loader(digits(), shuffle=True), max_steps=STEPS)
    after_plain = generator_states()
    swarm = run_swarm(seeded, loader(digits(), shuffle=True), num_stages=2, num_servers=3, max_steps=STEPS)
    assert generator_states() == after_plain
    assert_exact(swarm, plain)
    assert isinstance(plain.module, Noisy)
    assert isinstance(swarm.module, Noisy)
    assert swarm.module.states == plain.module.states
    assert plain.module.states[0] != plain.module.states[-1], "nothing was drawn"
