"""A codec's error in averaged gradients is carried to the next step: once, with the record, by its own peer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.network import PeerId
from lightning_swarm.protocol import compression
from lightning_swarm.protocol.settings import Compression
from tests.unit.swarm import LEAD, Swarm, key, rows

A, B = PeerId("a"), PeerId("b")
FEEDBACK = Compression(activations="none", gradients="none", averaging="4bit", rank=4, error_feedback=True)


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """Two servers of one stage."""
    monkeypatch.setattr(compression, "MIN_ELEMENTS", 1)
    made = Swarm("a b", compression=FEEDBACK)
    yield made
    made.close()


async def step(swarm: Swarm, number: int, *, factor: float = 1.0, scale: float = 1.0) -> None:
    """Run one microbatch on each server, and decide the record."""
    grant = await swarm.steps.grant(4, scale)
    done = []
    for index in range(2):
        k = key(grant.first, index, step=grant.step)
        route = swarm.route(index)
        output = await swarm.forward(k, rows(2 * number + index), route=route)
        await swarm.backward(k, output * factor * scale, route=route, weight=grant.weight)
        done.append(k.receipt)
    await swarm.steps.done(grant.lease, done)
    await swarm.steps.close()
    await swarm.record(grant.step)


def lost(swarm: Swarm) -> list[Tensor | None]:
    return [swarm.servers[peer].steps.stage(0).generation.carried.lost for peer in (A, B)]


def assert_alike(swarm: Swarm) -> None:
    one, other = (swarm.servers[peer].steps.stage(0).weights() for peer in (A, B))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_each_carries_what_it_lost(swarm: Swarm) -> None:
    assert lost(swarm) == [None, None]
    swarm.run(step(swarm, 0))
    first, second = lost(swarm)
    assert first is not None
    assert second is not None
    assert first.norm() > 0.0
    assert second.norm() > 0.0
    assert not torch.equal(first, second)
    swarm.run(step(swarm, 1))
    after = lost(swarm)[0]
    assert after is not None
    assert not torch.equal(after, first)
    assert_alike(swarm)


def test_a_step_of_no_numbers_is_skipped_and_carries_nothing(swarm: Swarm) -> None:
    swarm.run(step(swarm, 0))
    before = lost(swarm)
    swarm.run(step(swarm, 1, factor=math.nan))
    assert swarm.steps.generation.newest_record.outcome == "skip"
    assert all(one is other for one, other in zip(lost(swarm), before, strict=True))
    swarm.run(step(swarm, 2))
    assert swarm.steps.generation.newest_record.outcome == "apply"
    assert all(one is not None and one.isfinite().all() for one in lost(swarm))
    assert_alike(swarm)


def test_what_is_carried_does_not_depend_on_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """This applies to scaled gradients, as with `16-mixed`; the scale may change from step to step."""
    monkeypatch.setattr(compression, "MIN_ELEMENTS", 1)
    weights, carried = [], []
    for scales in ((1.0, 1.0), (1024.0, 64.0)):
        swarm = Swarm("a b", compression=FEEDBACK, trainers=LEAD)  # a single trainer chooses its scale freely
        try:
            for number, scale in enumerate(scales):
                swarm.run(step(swarm, number, scale=scale))
            weights.append(swarm.servers[A].steps.stage(0).weights())
            carried.append(lost(swarm)[0])
        finally:
            swarm.close()
    assert carried[0] is not None
    assert carried[1] is not None
    torch.testing.assert_close(carried[0], carried[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-9, atol=1e-12)


def test_it_is_carried_over_a_selection_that_trains_the_same(swarm: Swarm) -> None:
    """For example, the optimizer has a new group. If other parameters train, the carried error is useless."""
    swarm.run(step(swarm, 0))
    stage = swarm.servers[A].steps.stage(0)
    before, selection = stage.generation.carried, stage.selection
    assert before.lost is not None
    assert selection is not None
    stage.select(replace(selection, num_groups=selection.num_groups + 1))
    assert stage.generation.carried is before
    stage.select(replace(selection, frozen=[next(iter(stage.parameters))]))
    assert stage.generation.carried.lost is None


def test_a_run_that_goes_back_carries_nothing_there(swarm: Swarm) -> None:
    swarm.run(step(swarm, 0))
    stage = swarm.servers[A].steps.stage(0)
    stage.enter_generation(0, None)
    assert stage.generation.carried.lost is None
