"""Several trainers in one run and their waits for each other, on a virtual clock and without Lightning."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_swarm.client.step_client import StepClient
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.errors import LeaseRevoked, ProtocolError, RunOver, StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.batches import (
    MAX_LOGS,
    BatchDone,
    Grant,
    GrantReply,
    GrantRequest,
    LoggedValue,
    MetricState,
    RetireRequest,
    WaitForRecord,
    fold,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import APPLY, DONE, GRANT, RENEW, RETIRE
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import HYPERPARAMETERS, LEAD, Swarm, key, rows

A, B, OTHER, SECOND = PeerId("a"), PeerId("b"), PeerId("other"), PeerId("second")
LIMITS = Limits(call_timeout=30.0, lead_timeout=100.0)


def client(swarm: Swarm, name: PeerId = OTHER) -> StepClient:
    return swarm.client(swarm.network.transport(name))


def logged(value: float = 1.0, batch_size: int = 2, **changes: Any) -> LoggedValue:
    fields = {"name": "loss", "reduce": "mean", "on_step": True, "on_epoch": True, "prog_bar": False, "logger": True}
    return LoggedValue(**{**fields, "value": value, "batch_size": batch_size, **changes})


async def batch(
    swarm: Swarm, steps: StepClient, seed: int, logs: list[LoggedValue] | None = None
) -> tuple[Grant, bool]:
    """Run another trainer's batch of two samples; return its grant, and whether its step closes."""
    grant = await steps.grant(2)
    await swarm.through(key(grant.first, step=grant.step), rows(seed), weight=grant.weight)
    done = [key(grant.first).receipt]
    return grant, await steps.done(grant.lease, done, logs=logs or [])


def begun(make_swarm: MakeSwarm, target_batch_size: int, **settings: Any) -> tuple[Swarm, StepClient]:
    """Start a run whose lead has finished a batch of step 0."""
    swarm = make_swarm("a", "b", target_batch_size=target_batch_size, limits=LIMITS, **settings)
    swarm.run(swarm.batch(rows(0)))
    return swarm, client(swarm)


# ---------------------------------------------------------------------- samples of all count together


def test_samples_of_all_trainers_weigh_equally(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 6)
    second = client(swarm, SECOND)
    assert swarm.run(batch(swarm, other, 1))[1] is False
    assert swarm.run(batch(swarm, second, 2))[1] is True
    record = swarm.run(swarm.record(0))

    assert swarm.counted(record) == [(0, 0, 0), (2, 0, 0), (4, 0, 0)]
    optimizer = torch.optim.SGD(swarm.module.parameters(), lr=0.1)
    for seed in range(3):
        (2 / 6 * swarm.module(rows(seed)).square().sum() / 2).backward()
    optimizer.step()
    torch.testing.assert_close(swarm.weights(), dict(swarm.module.state_dict()), rtol=1e-12, atol=1e-14)


def test_the_wait_for_batches_begins_as_a_delayed_step_s_successor_is_full(make_swarm: MakeSwarm) -> None:
    limits = replace(LIMITS, snapshot_interval=None)  # a step whose record orders a snapshot is not delayed
    swarm = make_swarm("a", "b", target_batch_size=2, limits=limits, delays=True)
    other = client(swarm)

    async def go() -> None:
        grant = await swarm.steps.grant(2)
        asking = asyncio.create_task(other.grant(2))
        await asyncio.sleep(1.0)
        await swarm.through(key(grant.first, step=grant.step), rows(0), weight=grant.weight)
        await swarm.steps.done(grant.lease, [key(grant.first).receipt])
        asking.cancel()

    swarm.run(go())
    state = swarm.coordinator.generation.step_state
    assert state.open.step == 1
    assert state.open.closing
    assert state.closing_s is not None, "a batch that never comes is given up"


def test_a_trainer_that_was_busy_elsewhere_jumps_to_the_newest_record(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 2)
    swarm.run(swarm.record(0))
    for step in (1, 2):
        swarm.run(swarm.batch(rows(step)))
        swarm.run(swarm.record(step))
    grant, closing = swarm.run(batch(swarm, other, 3))
    assert (grant.step, closing, other.version) == (3, True, 3)
    assert other.generation.newest_record is not None
    assert other.generation.newest_record.step == 2
    assert [(one.record.step, one.logs) for one in other.generation.records] == [(2, [])], (
        "what was logged is for the lead"
    )


def test_a_trainer_that_passed_over_records_is_told_who_is_in_after_its_record_and_not_after_a_later_one(
    make_swarm: MakeSwarm,
) -> None:
    """It asks while the later record is applied at the coordinator, and not yet at all servers."""
    swarm, other = begun(make_swarm, 2)
    swarm.run(swarm.record(0))
    swarm.run(swarm.step(rows(1)))
    swarm.join("j")
    handlers = swarm.network.find(B)._call_handlers
    apply = handlers[APPLY.name]

    async def late(caller: PeerId, body: bytes) -> bytes:
        await asyncio.sleep(20.0)
        return await apply(caller, body)

    handlers[APPLY.name] = late

    async def go() -> None:
        await swarm.batch(rows(2))
        deciding = asyncio.create_task(swarm.record(2))
        await asyncio.sleep(10.0)
        assert swarm.servers[A].steps.version == 3
        await other.wait_for_record(0)
        assert other.version == 2
        assert [len(roster) for roster in other.run.rosters] == [1, 1]
        await deciding
        await other.wait_for_record(2)
        assert other.run.seats == swarm.steps.run.seats
        assert sorted(len(roster) for roster in other.run.rosters) == [1, 2]

    swarm.run(go())


# ---------------------------------------------------------------------- the lead


def test_nobody_trains_before_the_lead_does(make_swarm: MakeSwarm) -> None:
    """Before that the lead may still check servers or send them the optimizer's state."""
    swarm = make_swarm("a", "b", target_batch_size=4, limits=LIMITS)
    other = client(swarm)

    async def go() -> int:
        waiting = asyncio.create_task(batch(swarm, other, 1))
        await asyncio.sleep(80.0)
        assert not waiting.done()
        assert swarm.coordinator.generation.step_state.open.num_granted == 0
        await swarm.batch(rows(0))
        return (await waiting)[0].first

    assert swarm.run(go()) == 2


def test_nobody_waits_for_ever_for_the_lead_to_begin(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", target_batch_size=4, limits=LIMITS)
    with pytest.raises(StepError, match=r"lead trainer was silent for 100 s.*Raise `Limits.lead_timeout`"):
        swarm.run(client(swarm).grant(2))
    assert 100.0 <= swarm.loop.time() < 140.0


def test_a_record_waits_for_the_lead_to_ask(make_swarm: MakeSwarm) -> None:
    """Otherwise weights would change during its validation, and its ModelCheckpoint would miss the step."""
    swarm, other = begun(make_swarm, 4)

    async def go() -> Record:
        assert (await batch(swarm, other, 1))[1] is True
        waiting = asyncio.create_task(other.wait_for_record(0))
        await asyncio.sleep(90.0)  # the lead validates
        assert not waiting.done()
        assert {server.steps.version for server in swarm.servers.values()} == {0}
        record = await swarm.record(0)
        assert await waiting == record
        return record

    assert swarm.run(go()).closing.num_samples == 4


def test_renewing_makes_the_others_wait_longer(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 4)

    async def go() -> None:
        await batch(swarm, other, 1)
        waiting = asyncio.create_task(other.wait_for_record(0))
        for _ in range(5):
            await asyncio.sleep(90.0)
            await swarm.steps.renew()
        assert not waiting.done()
        await swarm.record(0)
        assert await waiting

    swarm.run(go())


def test_a_lead_that_is_not_heard_of_fails_the_step(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 4)

    async def go() -> None:
        await batch(swarm, other, 1)
        await other.wait_for_record(0)

    with pytest.raises(StepError, match=r"step 0 could not be decided: the lead trainer was silent for 100 s"):
        swarm.run(go())
    assert 100.0 <= swarm.loop.time() < 140.0
    assert {server.steps.version for server in swarm.servers.values()} == {0}
    with pytest.raises(StepError, match="was silent"):
        swarm.run(swarm.steps.grant(2))


def test_trainers_give_signs_of_life(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 4)
    swarm.run(other.renew())
    with pytest.raises(ProtocolError, match="stranger is none of the 5 trainers of run"):
        swarm.run(client(swarm, PeerId("stranger")).renew())
    with pytest.raises(ProtocolError, match="takes no arguments"):
        swarm.run(swarm.trainer.call(A, RENEW.name, b"x", timeout=1.0))


def test_the_lead_waits_for_one_record_at_most(make_swarm: MakeSwarm) -> None:
    """Otherwise it would miss the steps that faster trainers fill meanwhile."""
    swarm, other = begun(make_swarm, 4)
    second = client(swarm, SECOND)

    async def train(steps: StepClient) -> None:
        while True:
            grant, closing = await batch(swarm, steps, 1)
            if closing:
                await steps.wait_for_record(grant.step)

    async def go() -> list[int]:
        versions = []
        busy = [asyncio.create_task(train(one)) for one in (other, second)]
        await asyncio.sleep(1.0)
        await swarm.record(0)
        for _ in range(6):
            await asyncio.sleep(1.0)  # the other trainers fill a step meanwhile, and queue for more
            before = swarm.steps.version
            grant = await swarm.steps.grant(2)
            versions.append(grant.step - before)
            await swarm.through(key(grant.first, step=grant.step), rows(2), weight=grant.weight)
            await swarm.steps.done(grant.lease, [key(grant.first).receipt])
            await swarm.record(grant.step)
        for task in busy:
            task.cancel()
        await asyncio.wait(busy)
        return versions

    assert swarm.run(go()) == [1] * 6


@pytest.mark.parametrize("target_batch_size", [1, 2])
def test_trainers_take_turns_where_a_batch_is_a_step(make_swarm: MakeSwarm, target_batch_size: int) -> None:
    """The lead leaves a second step to its next batch, so it waits for a place before that step's record is decided."""
    swarm = make_swarm("a", "b", target_batch_size=target_batch_size, limits=LIMITS)
    steps_of: dict[str, list[int]] = {name: [] for name in ("lead", "other", "second")}

    async def train(name: str, steps: StepClient) -> None:
        while steps.version < 20:
            before = steps.version
            grant, _ = await batch(swarm, steps, 1)
            steps_of[name].append(grant.step)
            await asyncio.sleep(0.1)
            if name != "lead" or grant.step == before:
                await steps.wait_for_record(grant.step)

    async def go() -> None:
        trainers = {"lead": swarm.steps, "other": client(swarm), "second": client(swarm, SECOND)}
        async with asyncio.timeout(100.0), asyncio.TaskGroup() as group:
            tasks = [group.create_task(train(name, steps)) for name, steps in trainers.items()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    swarm.run(go())
    assert all(sum(step < 20 for step in steps) in (6, 7, 8) for steps in steps_of.values()), steps_of


def test_who_waits_longer_gets_a_place_first(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 2)
    second = client(swarm, SECOND)

    async def go() -> list[str]:
        order: list[str] = []

        async def wait(name: str, steps: StepClient) -> None:
            await batch(swarm, steps, 1)
            order.append(name)
            await swarm.record(swarm.steps.version)

        async with asyncio.TaskGroup() as group:
            for name, steps in (("second", second), ("other", other)):
                group.create_task(wait(name, steps))
                await asyncio.sleep(1.0)
            await swarm.record(0)
        return order

    assert swarm.run(go()) == ["second", "other"]


# ---------------------------------------------------------------------- the end, and what goes wrong


def test_a_place_that_is_withdrawn_is_somebody_elses(make_swarm: MakeSwarm) -> None:
    """A trainer that waits for the record is notified; otherwise both would wait for ever."""
    swarm, other = begun(make_swarm, 4)

    async def go() -> Record:
        grant = await other.grant(2)
        waiting = asyncio.create_task(swarm.steps.wait_for_record(0))
        await asyncio.sleep(1.0)
        assert await other.withdraw(grant.lease) is False
        assert await waiting is None
        assert await swarm.batch(rows(2)) is True
        return await swarm.record(0)

    assert swarm.counted(swarm.run(go())) == [(0, 0, 0), (4, 0, 0)]
    assert swarm.loop.time() < 5.0


def test_a_lead_that_was_told_to_go_on_is_waited_for_again(make_swarm: MakeSwarm) -> None:
    """Its request before a place was withdrawn is void: it may validate since, or have changed the learning rate."""
    swarm, other = begun(make_swarm, 4)

    async def go() -> Record:
        grant = await other.grant(2)
        waiting = asyncio.create_task(swarm.steps.wait_for_record(0))
        await asyncio.sleep(1.0)
        await other.withdraw(grant.lease)
        assert await waiting is None
        await batch(swarm, other, 1)
        await asyncio.sleep(50.0)
        assert {server.steps.version for server in swarm.servers.values()} == {0}
        swarm.steps.hyperparameters = lambda: [{"lr": 0.5}]
        return await swarm.record(0)

    assert swarm.run(go()).hyperparameters == [{"lr": 0.5}]


def test_a_place_is_kept_until_its_trainer_knows_the_record_before(make_swarm: MakeSwarm) -> None:
    """It requested a place in one step, was passed over in the next, and learned late of its place in the third."""
    swarm, other = begun(make_swarm, 2)
    second = client(swarm, SECOND)

    async def ask(step: int) -> GrantReply:
        request = GrantRequest(step=step, num_samples=2, generation=0, gradient_scale=1.0)
        return decode(
            await other._coordinator._transport.call(A, GRANT.name, encode(request), timeout=30.0), GrantReply
        )

    async def go() -> Grant | None:
        quicker = asyncio.create_task(batch(swarm, second, 1))
        await asyncio.sleep(1.0)
        assert (await ask(0)).wait == WaitForRecord(step=0)
        await swarm.record(0)
        assert (await quicker)[0].step == 1
        await swarm.record(1)
        assert (await ask(1)).wait == WaitForRecord(step=1)
        return (await ask(2)).grant

    grant = swarm.run(go())
    assert grant is not None
    assert grant.step == 2


def test_when_the_last_step_is_decided_nobody_waits(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 2, max_steps=1)

    async def go() -> None:
        waiting = asyncio.create_task(other.grant(2))
        await asyncio.sleep(1.0)
        await swarm.record(0)
        with pytest.raises(RunOver):
            await waiting
        with pytest.raises(RunOver):
            await client(swarm, SECOND).grant(2)

    swarm.run(go())
    assert swarm.loop.time() < 5.0
    assert swarm.coordinator.generation.step_state.open.num_granted == 0


@pytest.mark.parametrize("is_open", [False, True])
def test_a_trainer_that_ends_by_an_error_takes_only_its_own_batches_along(
    make_swarm: MakeSwarm, *, is_open: bool
) -> None:
    swarm, other = begun(make_swarm, 4, open_to_trainers=is_open)

    async def go() -> Record:
        await other.grant(2)
        retiring = asyncio.create_task(other.retire("RuntimeError: the user's own mistake"))
        await asyncio.sleep(1.0)
        await batch(swarm, swarm.steps, 1)
        record = await swarm.record(0)
        await retiring
        return record

    record = swarm.run(go())
    assert (record.closing.num_samples, record.retired) == (4, [OTHER] if is_open else [])
    (strike,) = [event for event in swarm.events(A) if event.kind == "strike"]
    assert strike.peer == OTHER
    assert "the user's own mistake" in strike.reason
    assert swarm.run(swarm.steps.grant(2)).step == 1


def test_the_lead_does_not_retire(make_swarm: MakeSwarm) -> None:
    swarm, _ = begun(make_swarm, 4)
    with pytest.raises(ProtocolError, match="dismissing"):
        swarm.run(swarm.trainer.call(A, RETIRE.name, encode(RetireRequest(reason="")), timeout=1.0))
    assert swarm.run(swarm.batch(rows(1)))


# ---------------------------------------------------------------------- what they logged


def test_the_lead_gets_what_the_counted_batches_of_others_logged(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 6)
    second = client(swarm, SECOND)

    async def go() -> None:
        withdrawn = await other.grant(2)
        await batch(swarm, other, 1, [logged(1.0), logged(5.0, name="most", reduce="max")])
        await other.report_armed(withdrawn.lease, [], [logged(1e9)])
        await other.withdraw(withdrawn.lease)
        await batch(swarm, second, 2, [logged(4.0, 6), logged(7.0, name="most", reduce="max")])
        waiting = asyncio.create_task(other.wait_for_record(0))
        await swarm.record(0)
        await waiting

    swarm.run(go())
    (heard,) = swarm.steps.generation.records
    assert heard.logs == [logged((2 * 1.0 + 6 * 4.0) / 8, 8), logged(7.0, 4, name="most", reduce="max")]
    assert [one.logs for one in other.generation.records] == [[]]


def test_what_was_logged_counts_once_however_often_the_record_is_asked_for(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 4)

    async def go() -> None:
        grant = await other.grant(2)
        await other.send_metrics(grant.lease, of_metric(1, [1]))
        await other.done(grant.lease, [], logs=[logged(3.0)])
        await asyncio.gather(swarm.record(0), swarm.record(0))
        await swarm.record(0)

    swarm.run(go())
    (heard,) = swarm.steps.generation.records
    assert heard.logs == [logged(3.0)]
    assert len(heard.metrics) == 1


@pytest.mark.parametrize(("reduce", "value"), [("mean", 3.25), ("sum", 5.0), ("max", 4.0), ("min", 1.0)])
def test_logs_fold_as_if_one_process_had_logged_them(reduce: str, value: float) -> None:
    logs = [logged(1.0, 1, reduce=reduce), logged(2.0, 0, name="x", reduce=reduce), logged(4.0, 3, reduce=reduce)]
    assert fold(logs) == [logged(value, 4, reduce=reduce), logged(2.0, 0, name="x", reduce=reduce)]


def test_there_is_an_end_to_what_a_step_logs(make_swarm: MakeSwarm) -> None:
    many = [logged(name=f"x{number}") for number in range(MAX_LOGS + 1)]
    step = OpenStep(0, 8)
    for lease, trainer in enumerate((OTHER, OTHER, LEAD, SECOND), 1):
        step.grant(lease, trainer, 2)
    step.complete(1, OTHER, [(0, 0, 0)], many[:-1])
    with pytest.raises(ProtocolError, match="a trainer's batches of a step may log 256 names, got 257"):
        step.complete(2, OTHER, [(2, 0, 0)], many[-1:])
    step.complete(2, OTHER, [(2, 0, 0)], many[:1])
    step.complete(3, LEAD, [(4, 0, 0)], [logged(name="loss"), logged(name="rare")])
    step.complete(4, SECOND, [(6, 0, 0)], [logged(name="loss")])
    found = [one.name for one in step.logs_for(LEAD)]
    assert len(found) == MAX_LOGS - 1, "beside what the lead alone logs"
    assert {"loss", "x0"} <= set(found)

    swarm = make_swarm("a", target_batch_size=4)
    grant = swarm.run(swarm.steps.grant(2))
    request = BatchDone(
        step=0,
        lease=grant.lease,
        completed=[],
        withdrawn=False,
        close=False,
        total_weight=None,
        generation=0,
        logs=many,
        noted=EventLog().report(),
    )
    before = swarm.state()
    with pytest.raises(ProtocolError, match="length <= 256"):
        swarm.run(swarm.trainer.call(A, DONE.name, encode(request), timeout=1.0))
    assert swarm.state() == before


def test_what_is_logged_for_nothing_is_refused() -> None:
    forged = encode(logged()).replace(b"on_step\xc3", b"on_step\xc2").replace(b"on_epoch\xc3", b"on_epoch\xc2")
    with pytest.raises(ProtocolError, match="must be logged for each step or for the epoch"):
        decode(forged, LoggedValue)


def of_metric(seed: int, lengths: list[int]) -> tuple[list[MetricState], list[torch.Tensor]]:
    return [MetricState(name="accuracy", num_updates=1, lengths=lengths)], [rows(seed)] * sum(lengths)


def test_the_lead_gets_what_the_counted_batches_of_others_added_to_metrics(make_swarm: MakeSwarm) -> None:
    swarm, other = begun(make_swarm, 6)

    async def of_a_batch(seed: int, *, withdrawn: bool = False) -> None:
        grant = await other.grant(2)
        await other.send_metrics(grant.lease, of_metric(seed, [seed, 1]))
        await other.send_metrics(grant.lease, of_metric(seed, [seed, 1]))  # a repeat, because the answer may be lost
        await (other.withdraw(grant.lease) if withdrawn else other.done(grant.lease, []))
        with pytest.raises(LeaseRevoked if withdrawn else ProtocolError, match=r"was struck|no open lease"):
            await other.send_metrics(grant.lease, of_metric(seed, [1]))

    async def go() -> None:
        await of_a_batch(1)
        await of_a_batch(2, withdrawn=True)
        await of_a_batch(3)
        waiting = asyncio.create_task(other.wait_for_record(0))
        await swarm.record(0)
        await waiting

    swarm.run(go())
    assert [one.metrics for one in other.generation.records] == [[]]
    (heard,) = swarm.steps.generation.records
    assert [states for states, _ in heard.metrics] == [of_metric(seed, [seed, 1])[0] for seed in (1, 3)]
    for seed, (_, tensors) in zip((1, 3), heard.metrics, strict=True):
        assert [tensor.tolist() for tensor in tensors] == [rows(seed).tolist()] * (seed + 1)
    swarm.run(batch(swarm, other, 1))
    swarm.run(swarm.steps.close())
    swarm.run(swarm.record(1))
    assert [len(one.metrics) for one in swarm.steps.generation.records] == [2, 0], "each step's once"


def test_there_is_an_end_to_what_a_step_adds_to_metrics() -> None:
    step = OpenStep(0, 8)
    for lease, trainer in enumerate((OTHER, OTHER, SECOND, SECOND), 1):
        step.grant(lease, trainer, 2)
    message = Message(b"12345", (torch.zeros(10, dtype=torch.float64),))
    limits = {"max_bytes": 170, "num_senders": 2}
    for lease in (1, 2):  # within the limit
        step.keep_metrics(lease, OTHER, message, **limits)
    step.keep_metrics(3, SECOND, message, **limits)
    with pytest.raises(ProtocolError, match=r"`Limits.max_metric_bytes` = 170 bytes, got 340, of which 170 come from"):
        step.keep_metrics(4, SECOND, message, **limits)
    step.withdraw(1, OTHER)
    step.withdraw(2, OTHER)
    step.keep_metrics(4, SECOND, message, **limits)


def test_the_lead_says_how_to_step_when_it_asks(make_swarm: MakeSwarm) -> None:
    """Earlier values would miss the change by a scheduler after the previous step."""
    swarm, other = begun(make_swarm, 4)
    swarm.run(batch(swarm, other, 1))
    swarm.steps.hyperparameters = lambda: [{"lr": 0.5}]
    assert swarm.run(swarm.record(0)).hyperparameters == [{"lr": 0.5}] != HYPERPARAMETERS
