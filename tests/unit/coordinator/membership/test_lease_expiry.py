"""Trainers that die, freeze and return: before their batch is armed, after it, or while they report it as through.

The lead trains beside another trainer that goes. Each record counts the right number of samples, each once, and the
weights equal one process's with the samples in the records.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.core.errors import LeaseRevoked, PeerError, Unreachable
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant, LoggedValue
from lightning_swarm.protocol.messages.calls import CallKey, Ticket
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.rpc import ARMED, BACKWARD, DONE, FENCE, FORWARD
from lightning_swarm.protocol.tickets import TicketStore
from tests.held import batches_of
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import key, plain_steps, result_of, rows

OTHER, A, B = PeerId("other"), PeerId("a"), PeerId("b")


class Run:
    """A swarm of two stages, its lead, and another trainer. Steps have ten samples, batches two; the lead has one."""

    def __init__(self, make_swarm: MakeSwarm, *rosters: str, **options: Any) -> None:
        self.swarm = make_swarm(*(rosters or ("a", "b")), target_batch_size=10, **options)
        self.steps = self.swarm.steps
        self.transport = self.swarm.network.transport(OTHER)
        self.other = self.swarm.client(self.transport)
        self.tickets = TicketStore(self.transport, max_bytes=1 << 30)
        self.fed: dict[tuple[int, int], Tensor] = {}  # (step, place) -> samples
        self.swarm.run(self.lead(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.swarm, name)

    def key_of(self, grant: Grant) -> CallKey:
        return key(grant.first, step=grant.step)

    async def begin(self, seed: int) -> tuple[Grant, Tensor]:
        """Let the other trainer get a place and run its forward."""
        grant = await self.other.grant(2)
        x = rows(seed)
        self.fed[grant.step, grant.first] = x
        k, route = self.key_of(grant), self.swarm.route()
        for stage, peer in enumerate(route):
            message = self.swarm.forward_request(k, stage, route, x, trainer=OTHER)
            await self.swarm.send_as(OTHER, peer, FORWARD.name, message)
        last = result_of(route[-1], k, len(route) - 1, "forward", OTHER)
        return grant, (await self.swarm.tickets.fetch(last, timeout=30.0)).tensors[0]

    async def send_backward(self, grant: Grant, output: Tensor) -> None:
        """Send all its backward calls without waiting for answers."""
        route = self.swarm.route()
        for stage in reversed(range(len(route))):
            message = self.swarm.backward_request(
                self.key_of(grant), stage, route, output, weight=grant.weight, trainer=OTHER
            )
            await self.swarm.send_as(OTHER, route[stage], BACKWARD.name, message)

    async def lead(self, *seeds: int) -> None:
        """Run batches of the lead."""
        for seed in seeds:
            grant = await self.steps.grant(2)
            x = rows(seed)
            self.fed[grant.step, grant.first] = x
            await self.swarm.through(self.key_of(grant), x, weight=grant.weight)
            await self.steps.done(grant.lease, [self.key_of(grant).receipt])

    def check(self, *records: Record) -> None:
        """Check the weights against one process with the samples in the records: each once, none missing."""
        assert all(record.closing.num_samples == 10 for record in records)
        batches = [[self.fed[record.step, first] for first in batches_of(record)] for record in records]
        plain_steps(self.swarm.module, batches, divisors=[5.0 for _ in records])
        torch.testing.assert_close(self.swarm.weights(), dict(self.swarm.module.state_dict()), rtol=0, atol=1e-10)

    def kinds(self) -> list[tuple[str, str | None]]:
        return [(event.kind, event.peer) for event in self.swarm.events(A)]


def logged(value: float) -> list[LoggedValue]:
    return [
        LoggedValue(
            name="x", reduce="sum", value=value, batch_size=2, on_step=True, on_epoch=True, prog_bar=False, logger=True
        )
    ]


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_what_a_dead_trainer_was_granted_goes_to_others(make_swarm: MakeSwarm, fault: str) -> None:
    run = Run(make_swarm)

    async def go() -> Record:
        grant, _ = await run.begin(1)
        getattr(run.network, fault)(OTHER)
        await run.lead(2, 3, 4)
        assert await run.steps.wait_for_record(0) is None, "there is a place again"
        assert run.loop.time() < 20.0
        await run.lead(5)
        record = await run.swarm.record(0)
        assert grant.first not in batches_of(record)
        return record

    run.check(run.swarm.run(go()))
    assert run.kinds() == [("gone", OTHER), ("strike", OTHER)]
    assert run.steps.events.drain() == {"gone": 1, "strike": 1}, "the lead hears of it"
    assert not run.other.events.drain()


def test_a_trainer_that_thaws_in_the_step_may_run_its_batch_again(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)

    async def go() -> Record:
        grant, output = await run.begin(1)
        run.network.freeze(OTHER)
        await run.lead(2, 3, 4)
        assert await run.steps.wait_for_record(0) is None
        run.network.thaw(OTHER)
        with pytest.raises(LeaseRevoked, match="the batch at 2 was struck from step 0"):
            await run.send_backward(grant, output)
        with pytest.raises(LeaseRevoked):
            await run.other.report_armed(grant.lease, [])
        with pytest.raises(LeaseRevoked):
            await run.other.done(grant.lease, [run.key_of(grant).receipt])
        again, output = await run.begin(1)
        assert again.step == 0
        assert again.first == 10, "a place of its own"
        await run.send_backward(again, output)
        await asyncio.sleep(1.0)
        await run.other.done(again.lease, [run.key_of(again).receipt])
        return await run.swarm.record(0)

    run.check(run.swarm.run(go()))


def test_what_a_server_refuses_does_not_keep_its_place(make_swarm: MakeSwarm) -> None:
    """Otherwise the coordinator would wait for the batch, because it does not know that it cannot count."""
    run = Run(make_swarm)

    async def go() -> Record:
        grant, _ = await run.begin(1)
        await run.lead(2, 3, 4)
        await run.other.report_revoked(grant.lease)
        again, output = await run.begin(1)
        assert again.first == 10, "a place of its own"
        await run.send_backward(again, output)
        await asyncio.sleep(1.0)
        await run.other.done(again.lease, [run.key_of(again).receipt])
        record = await run.swarm.record(0)
        assert run.loop.time() < 5.0
        return record

    run.check(run.swarm.run(go()))


def test_a_trainer_that_thaws_while_the_step_closes_hears_it_of_a_server_that_does_not_know_it(
    make_swarm: MakeSwarm,
) -> None:
    """A strike is announced once, and this server missed it; but its sums are frozen, which refuses the batch."""
    run = Run(make_swarm)
    lost = []

    async def lose(caller: PeerId, body: bytes) -> bytes:
        lost.append(caller)
        raise Unreachable("lost")

    async def go() -> None:
        run.servers[B]._transport._call_handlers[FENCE.name] = lose
        grant, output = await run.begin(1)
        run.network.freeze(OTHER)
        await run.lead(2, 3, 4)
        assert await run.steps.wait_for_record(0) is None
        await run.lead(5)
        await asyncio.sleep(1.0)
        assert lost == [A]
        run.network.thaw(OTHER)
        await run.swarm.send_as(
            OTHER, B, BACKWARD.name, run.swarm.backward_request(run.key_of(grant), 1, [A, B], output, trainer=OTHER)
        )
        with pytest.raises(LeaseRevoked, match="its closing does not name"):
            await run.tickets.wait(result_of(B, run.key_of(grant), 1, "backward", OTHER), timeout=5.0)

    run.swarm.run(go())
    run.check(run.swarm.run(run.swarm.record(0)))


def test_a_trainer_that_thaws_after_the_step_may_run_its_batch_again(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)

    async def go() -> list[Record]:
        grant, output = await run.begin(1)
        run.network.freeze(OTHER)
        await run.lead(2, 3, 4)
        assert await run.steps.wait_for_record(0) is None
        await run.lead(5)
        first = await run.swarm.record(0)
        run.network.thaw(OTHER)
        with pytest.raises(LeaseRevoked, match="step 0 is decided"):
            await run.send_backward(grant, output)
        with pytest.raises(LeaseRevoked):
            await run.other.report_armed(grant.lease, [])
        with pytest.raises(LeaseRevoked):
            await run.other.done(grant.lease, [run.key_of(grant).receipt])
        again, output = await run.begin(1)
        assert again.step == 1
        await run.send_backward(again, output)
        await asyncio.sleep(1.0)
        await run.other.done(again.lease, [run.key_of(again).receipt])
        await run.lead(6, 7, 8, 9)
        return [first, await run.swarm.record(1)]

    run.check(*run.swarm.run(go()))


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_an_armed_batch_is_completed_without_its_trainer(make_swarm: MakeSwarm, fault: str) -> None:
    run = Run(make_swarm)

    async def go() -> Record:
        grant, output = await run.begin(1)
        await run.send_backward(grant, output)
        await run.other.report_armed(grant.lease, [run.key_of(grant).receipt], logged(3.0))
        getattr(run.network, fault)(OTHER)
        await run.lead(2, 3, 4)
        record = await run.swarm.record(0)
        assert grant.first in batches_of(record)
        assert [one.value for heard in run.steps.generation.records for one in heard.logs] == [3.0]
        if fault == "freeze":
            run.network.thaw(OTHER)
            assert await run.other.done(grant.lease, [run.key_of(grant).receipt]), "it hears that its batch counts"
            assert (await run.other.wait_for_record(0)) == record
        return record

    run.check(run.swarm.run(go()))
    assert run.kinds() == [("gone", OTHER)]


def test_an_armed_batch_may_be_said_again_after_servers_completed_it(make_swarm: MakeSwarm) -> None:
    """It was received, but the answer was lost with the link, which was down until the trainer seemed gone."""
    run = Run(make_swarm)
    coordinator = run.servers[A]._transport
    handler = coordinator._call_handlers[ARMED.name]
    cut = []

    async def cutting(caller: PeerId, body: bytes) -> bytes:
        answer = await handler(caller, body)
        if not cut:
            cut.append(caller)
            run.network.cut(OTHER, A)
        return answer

    async def go() -> Record:
        coordinator._call_handlers[ARMED.name] = cutting
        grant, output = await run.begin(1)
        await run.send_backward(grant, output)
        saying = asyncio.create_task(run.other.report_armed(grant.lease, [run.key_of(grant).receipt]))
        await asyncio.sleep(30.0)
        assert not run.coordinator.generation.step_state.open.under_way(OTHER)
        assert not saying.done()
        run.network.mend(OTHER, A)
        await saying
        await run.other.done(grant.lease, [run.key_of(grant).receipt])
        await run.lead(2, 3, 4)
        return await run.swarm.record(0)

    run.check(run.swarm.run(go()))
    assert cut == [OTHER]


def test_an_armed_batch_is_waited_for_while_servers_work_on_it(make_swarm: MakeSwarm) -> None:
    """The first stage's server receives its input late: its part of the batch is under way, not lost."""
    run = Run(make_swarm)
    server = run.servers[A]
    held = asyncio.Event()
    fetch = server._tickets.fetch_reported

    async def late(source: Ticket, *, timeout: float) -> Any:
        if "/backward@" in source.name:
            await held.wait()
        return await fetch(source, timeout=timeout)

    async def go() -> Record:
        server._tickets.fetch_reported = late
        grant, output = await run.begin(1)
        await run.send_backward(grant, output)
        await run.other.report_armed(grant.lease, [run.key_of(grant).receipt])
        run.network.kill(OTHER)
        await asyncio.sleep(10.0)
        assert run.kinds() == [("gone", OTHER)]
        assert run.servers[A].events.counts["gone"] == 1, "each look finds it gone still"
        assert run.coordinator.generation.step_state.open.under_way(OTHER)
        held.set()
        await asyncio.sleep(5.0)
        assert not run.coordinator.generation.step_state.open.under_way(OTHER)
        await run.lead(2, 3, 4)
        return await run.swarm.record(0)

    run.check(run.swarm.run(go()))


def test_an_armed_batch_that_cannot_be_completed_is_struck(make_swarm: MakeSwarm) -> None:
    """One stage was never called, so the trainer's report was false. No record names the other stage's gradient."""
    run = Run(make_swarm)

    async def go() -> None:
        grant, output = await run.begin(1)
        await run.swarm.send_as(
            OTHER,
            B,
            BACKWARD.name,
            run.swarm.backward_request(run.key_of(grant), 1, [A, B], output, weight=2.0, trainer=OTHER),
        )
        await run.other.report_armed(grant.lease, [run.key_of(grant).receipt])
        run.network.kill(OTHER)
        await run.lead(2, 3, 4)
        assert await run.steps.wait_for_record(0) is None

    run.swarm.run(go())
    assert run.kinds() == [("gone", OTHER), ("strike", OTHER)]
    assert "no server has or computes 1 gradients of the batch" in run.swarm.events(A)[-1].reason


@pytest.mark.parametrize("when", ["answered"])
@pytest.mark.parametrize("method", [ARMED.name, DONE.name])
def test_a_trainer_freezes_while_it_says_that_its_batch_is_through(
    make_swarm: MakeSwarm, method: str, when: str
) -> None:
    """The samples count once, whether the report was received or not."""
    run = Run(make_swarm)
    coordinator = run.servers[A]._transport
    handler = coordinator._call_handlers[method]
    fired = []

    async def freezing(caller: PeerId, body: bytes) -> bytes:
        if caller != OTHER or fired:
            return await handler(caller, body)
        fired.append(caller)
        if when == "asked":  # it froze just before, and its report was lost
            run.network.freeze(OTHER)
            raise Unreachable("lost")
        answer = await handler(caller, body)
        run.network.freeze(OTHER)
        return answer

    async def say(grant: Grant) -> None:
        receipts = [run.key_of(grant).receipt]
        if method == ARMED.name:
            await run.other.report_armed(grant.lease, receipts)
        await run.other.done(grant.lease, receipts)

    async def go() -> Record:
        coordinator._call_handlers[method] = freezing
        grant, output = await run.begin(1)
        await run.send_backward(grant, output)
        await asyncio.sleep(1.0)
        speaking = asyncio.create_task(say(grant))
        await run.lead(2, 3, 4)
        record = await run.steps.wait_for_record(0)
        run.network.thaw(OTHER)
        with contextlib.suppress(PeerError):
            await speaking
        if record is None:
            with pytest.raises(LeaseRevoked):
                await run.other.done(grant.lease, [run.key_of(grant).receipt])
            await run.lead(5)
            record = await run.swarm.record(0)
        else:
            assert await run.other.done(grant.lease, [run.key_of(grant).receipt])
        return record

    run.check(run.swarm.run(go()))
    assert fired


def test_a_trainer_that_is_there_keeps_its_place_however_long_it_takes(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)

    async def go() -> Record:
        grant, output = await run.begin(1)
        await asyncio.sleep(1000.0)
        await run.send_backward(grant, output)
        await asyncio.sleep(1.0)
        await run.other.done(grant.lease, [run.key_of(grant).receipt])
        await run.lead(2, 3, 4)
        return await run.swarm.record(0)

    record = run.swarm.run(go())
    assert 2 in batches_of(record)
    run.check(record)
    assert run.kinds() == []


def test_a_single_trainer_is_waited_for(make_swarm: MakeSwarm) -> None:
    """No other trainer could take its places."""
    run = Run(make_swarm)
    for server in run.servers.values():
        server.membership.run.trainers[:] = [run.manifest.lead]

    async def go() -> Record:
        grant = await run.steps.grant(2)
        run.network.freeze(run.manifest.lead)
        await asyncio.sleep(100.0)
        run.network.thaw(run.manifest.lead)
        run.fed[0, grant.first] = rows(1)
        await run.swarm.through(run.key_of(grant), rows(1), weight=2.0)
        await run.steps.done(grant.lease, [run.key_of(grant).receipt])
        await run.lead(2, 3, 4)
        return await run.swarm.record(0)

    run.check(run.swarm.run(go()))
    assert run.kinds() == []


def test_a_fence_ends_what_is_under_way_and_refuses_what_comes(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)

    async def go() -> None:
        grant, output = await run.begin(1)
        # The last stage's call never comes, so this one waits for its gradient.
        message = run.swarm.backward_request(run.key_of(grant), 0, [A, B], output, trainer=OTHER)
        await run.swarm.send_as(OTHER, A, BACKWARD.name, message)
        waiting = asyncio.create_task(
            run.swarm.tickets.wait(result_of(A, run.key_of(grant), 0, "backward", OTHER), timeout=100.0)
        )
        await asyncio.sleep(1.0)
        assert run.servers[A].calls.under_way.tasks
        assert run.servers[B].calls.cache.used_bytes
        run.network.kill(OTHER)
        with pytest.raises(LeaseRevoked):
            await waiting
        assert run.loop.time() < 10.0
        assert not run.servers[A].calls.under_way.tasks
        assert not run.servers[A].calls.cache.used_bytes
        assert not run.servers[B].calls.cache.used_bytes

    run.swarm.run(go())
