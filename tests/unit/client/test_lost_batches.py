"""Trainers are notified if batches that they know as through are struck from their steps."""

from __future__ import annotations

import asyncio

import pytest

from lightning_swarm.client.step_client import StepClient
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import PLACES
from lightning_swarm.protocol.rpc import AVERAGE
from lightning_swarm.testing import FaultPlan, Phase
from tests.held import batches_of
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator import test_takeover
from tests.unit.coordinator.replays import Replayer
from tests.unit.coordinator.test_commit import A, B, C, Trial
from tests.unit.swarm import LEAD, key, plain_steps, rows

OTHER = PeerId("other")


def begun(make_swarm: MakeSwarm, target_batch_size: int | None) -> tuple[Trial, StepClient, Grant]:
    """Finish another trainer's batch and the lead's; then lose the other's gradients, of which it keeps no copies."""
    plan = FaultPlan().kill("c", at=Phase.CLOSE)
    trial = Trial(make_swarm, plan, "a", "b c", target_batch_size=target_batch_size, trainers=f"{LEAD} other")
    swarm = trial.swarm
    transport = swarm.network.transport(OTHER)
    other, _ = swarm.client(transport), Replayer(swarm, transport)
    lead = swarm.run(swarm.steps.grant(2))
    theirs = swarm.run(other.grant(2))
    swarm.run(swarm.through(key(theirs.first), rows(7), route=[A, C], weight=theirs.weight))
    swarm.run(other.done(theirs.lease, [key(theirs.first).receipt]))
    swarm.run(trial.trainer.through(key(lead.first), rows(8), weight=lead.weight, choice=1))
    swarm.run(swarm.steps.done(lead.lease, [key().receipt], close=target_batch_size is None))
    return trial, other, theirs


def test_a_record_that_does_not_count_it(make_swarm: MakeSwarm) -> None:
    trial, other, grant = begun(make_swarm, None)

    async def go() -> None:
        asking = asyncio.create_task(other.wait_for_record(0))
        record = await trial.swarm.record(0)
        assert batches_of(record) == [0]
        assert await asking == record

    trial.swarm.run(go())
    trial.plan.check()
    assert other.generation.lost == [grant.lease]
    assert trial.swarm.steps.generation.lost == []
    trial.swarm.run(other.grant(2))
    assert other.generation.lost == [grant.lease], "each is told once"


def test_a_step_that_takes_batches_again(make_swarm: MakeSwarm) -> None:
    trial, other, grant = begun(make_swarm, 4)

    async def go() -> None:
        asking = asyncio.create_task(other.wait_for_record(0))
        assert await trial.swarm.steps.wait_for_record(0) is None
        assert await asking is None

    trial.swarm.run(go())
    trial.plan.check()
    assert other.generation.lost == [grant.lease]
    assert trial.swarm.steps.generation.lost == []
    again = trial.swarm.run(other.grant(2))
    assert (again.step, again.first) == (0, 4)


@pytest.mark.parametrize("is_lost", [True, False])
def test_records_that_were_passed_over(make_swarm: MakeSwarm, is_lost: bool) -> None:
    """The newest record contains no batch of an earlier step."""
    if is_lost:
        trial, other, grant = begun(make_swarm, None)
    else:
        trial = Trial(make_swarm, FaultPlan(), "a", "b", trainers=f"{LEAD} other")
        other = trial.swarm.client(trial.swarm.network.transport(OTHER))
        trial.swarm.run(trial.trainer.batch(rows(8)))
        grant = trial.swarm.run(other.grant(2))
        trial.swarm.run(trial.swarm.through(key(grant.first), rows(7)))
        trial.swarm.run(other.done(grant.lease, [key(grant.first).receipt]))
        trial.swarm.run(trial.swarm.steps.close())
    trial.swarm.run(trial.swarm.record(0))
    trial.train(1)
    assert trial.swarm.run(other.grant(2)).step == 2
    assert other.generation.lost == ([grant.lease] if is_lost else [])


@pytest.mark.parametrize("target_batch_size", [None, 2])
def test_no_step_is_made_of_nothing(make_swarm: MakeSwarm, target_batch_size: int | None) -> None:
    """The only batch is lost though its trainer lives, so it runs again in this step, which stays open until then."""
    plan = FaultPlan().kill("c", at=Phase.CLOSE)
    trial = Trial(make_swarm, plan, "a", "b c", target_batch_size=target_batch_size, trainers=str(LEAD))
    swarm = trial.swarm
    asks = target_batch_size is None
    grant = swarm.run(swarm.steps.grant(2))
    swarm.run(swarm.through(key(), rows(7), route=[A, C], weight=grant.weight))
    swarm.run(swarm.steps.done(grant.lease, [key().receipt], close=asks))
    assert swarm.run(swarm.steps.wait_for_record(0)) is None
    trial.plan.check()
    assert swarm.steps.generation.lost == [grant.lease]

    again = swarm.run(swarm.steps.grant(2))
    swarm.run(trial.trainer.through(key(again.first), rows(7), weight=again.weight))
    assert swarm.run(swarm.steps.done(again.lease, [key(again.first).receipt], close=asks))
    record = swarm.run(swarm.record(0))
    assert batches_of(record) == [PLACES], "it draws what it drew in the first place"
    plain_steps(swarm.module, [[rows(7)]], divisors=[1.0])
    trial.check_weights(record)


def test_a_coordinator_that_took_over_and_closes_already(make_swarm: MakeSwarm) -> None:
    """The batch was not reported to it in time, and comes too late."""
    trial = test_takeover.Trial(make_swarm, FaultPlan(), trainers=f"{LEAD} other")
    swarm = trial.swarm
    trial.train(1)
    other = trial.second()
    held, go_on = asyncio.Event(), asyncio.Event()
    handler = swarm.servers[PeerId("d")]._transport._call_handlers[AVERAGE.name]  # type: ignore[attr-defined]

    async def slow(caller: PeerId, body: bytes) -> bytes:
        held.set()
        await go_on.wait()
        answer: bytes = await handler(caller, body)
        return answer

    swarm.servers[PeerId("d")]._transport._call_handlers[AVERAGE.name] = slow  # type: ignore[attr-defined]

    async def go() -> Grant:
        grant = await other.grant(2)
        k = key(grant.first, step=1)
        await swarm.through(k, rows(5), route=[C, PeerId("d")], weight=grant.weight)
        await other.done(grant.lease, [k.receipt])
        swarm.network.freeze(OTHER)
        swarm.network.kill(A)
        trial.trainer.avoid.add(A)
        closing = asyncio.ensure_future(trial.trainer.step(*test_takeover.batch_of(1, test_takeover.NUM_MICROBATCHES)))
        await held.wait()
        swarm.network.thaw(OTHER)
        asking = asyncio.ensure_future(other.wait_for_record(1))
        await asyncio.sleep(1.0)
        assert other.run.coordinator == B
        go_on.set()
        trial.records.append(await closing)
        assert await asking == trial.records[-1]
        return grant

    grant = swarm.run(go())
    assert grant.first not in batches_of(trial.records[1])
    assert other.generation.lost == [grant.lease]
    trial.check()


def test_what_was_struck_before_a_takeover_is_not_waited_for_after_it(make_swarm: MakeSwarm) -> None:
    """The trainer, which does not know yet, reports the batch as under way; later a server notifies the trainer."""
    trial = test_takeover.Trial(make_swarm, FaultPlan(), trainers=f"{LEAD} other")
    swarm = trial.swarm
    trial.train(1)
    other = trial.second()

    async def go() -> None:
        grant = await other.grant(2)
        coordinator = swarm.coordinator
        await coordinator.generation.lease_expiry.strike(
            coordinator.generation.step_state.open, [grant.first], "it was not heard of"
        )
        swarm.network.kill(A)
        trial.trainer.avoid.add(A)
        while B not in trial.coordinators:  # noqa: ASYNC110 - it tells nobody here
            await asyncio.sleep(1.0)
        open_step = swarm.servers[B].admission.election.coordinator.generation.step_state.open  # type: ignore[union-attr]
        assert list(open_step.under_way(OTHER)) == [grant.first]
        await other.report_revoked(grant.lease)
        assert not open_step.under_way(OTHER)

    swarm.run(go())
    begin_s = swarm.loop.time()
    trial.train(1)
    assert swarm.loop.time() < begin_s + 5.0
    trial.check()
