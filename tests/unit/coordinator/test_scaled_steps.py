"""Steps with scaled gradients, as with `16-mixed`: each receiver of the means divides by the scale once."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.messages.scaling import LossScaling
from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.sabotage import sabotage
from tests.unit.swarm import LEAD, Swarm, key, rows

SCALE = 1024.0


async def step(swarm: Swarm, number: int) -> None:
    grant = await swarm.steps.grant(4, SCALE)
    done = []
    for index in range(2):
        k = key(grant.first, index, step=grant.step)
        route = swarm.route(index)
        output = await swarm.forward(k, rows(2 * number + index), route=route)
        await swarm.backward(k, output * SCALE, route=route, weight=grant.weight)
        done.append(k.receipt)
    await swarm.steps.done(grant.lease, done)
    await swarm.steps.close()
    await swarm.record(grant.step)


def assert_alike(swarm: Swarm) -> None:
    one, other = (server.steps.stage(0).weights() for server in swarm.servers.values())
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("late", ["a", "b"])
def test_a_replica_that_takes_its_part_late_gets_the_same(late: str) -> None:
    """It comes after the other replicas have divided their parts."""
    network = MemoryNetwork(latency_s=0.001)
    swarm = Swarm("a b", network=network, trainers=LEAD)
    plan = FaultPlan().delay(late, by_s=1.0, at=Phase.AVERAGE_REDUCE)
    sabotage(network, plan)
    try:
        swarm.run(step(swarm, 0))
        plan.check()
        assert_alike(swarm)
    finally:
        swarm.close()


def test_a_joiner_that_follows_a_round_gets_the_same() -> None:
    swarm = Swarm("a", trainers="trainer")
    try:
        swarm.run(step(swarm, 0))
        joiner = swarm.join("z")
        swarm.run(step(swarm, 1))
        assert joiner.steps.version == 2
        assert_alike(swarm)
    finally:
        swarm.close()


def test_a_trainer_that_scales_otherwise_than_the_run_gets_no_place() -> None:
    scaling = LossScaling(scale=SCALE, growth_factor=2.0, backoff_factor=0.5, growth_interval=1)
    swarm = Swarm("a", scaling=scaling)
    run = swarm.coordinator.generation.context.run

    async def work() -> None:
        with pytest.raises(ProtocolError, match=r"scale their losses alike, by 1024 in step 0; got 1\b"):
            await swarm.steps.grant(4, 1.0)
        await step(swarm, 0)

    try:
        swarm.run(work())
        assert run.loss_scale == 2 * SCALE, "its record says that all fitted"
    finally:
        swarm.close()
