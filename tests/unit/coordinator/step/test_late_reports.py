"""Late or unsolicited reports of trainers to a coordinator assign no place twice."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.step.leases import first_lease
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.takeover import fetch_metrics, rebuild
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.messages.batches import (
    BatchMetrics,
    Grant,
    GrantReply,
    GrantRequest,
    Lease,
    MetricState,
    RegisterRequest,
    ReportReply,
    ReportRequest,
)
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import GRANT, REGISTER, REPORT_METRICS
from tests.unit.swarm import Swarm

A, B, OTHER = PeerId("a"), PeerId("b"), PeerId("other")


def lease(number: int, first: int, *, step: int = 0, scale: float = 1.0) -> Lease:
    return Lease(
        grant=Grant(lease=number, generation=0, step=step, first=first, weight=2.0),
        request=GrantRequest(step=step, num_samples=2, generation=0, gradient_scale=scale),
        completed=[(first, 0, 0)],
    )


@pytest.mark.parametrize("num_turns", range(8))
def test_who_said_that_it_has_nothing_takes_no_place_of_an_older_term(num_turns: int) -> None:
    """The older coordinator's answer arrives, and the newer one asks a number of loop turns later."""
    swarm = Swarm("a b", trainers="trainer")
    steps, call = swarm.steps, swarm.trainer.call
    swarm.servers[A].voter.follow((2, "b", 101))  # it has promised
    reports: list[ReportReply] = []
    reporting: list[asyncio.Task[None]] = []

    async def report() -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        reports.append(await steps._handle_report(B, ReportRequest(term=(2, "b", 101), generation=0)))

    async def calling(peer: PeerId, method: str, body: bytes, *, timeout: float) -> bytes:
        if method == GRANT.name and peer == A:
            reporting.append(asyncio.create_task(report()))
            return encode(GrantReply(grant=lease(1, 0).grant))
        if method == GRANT.name:
            await asyncio.sleep(1e6)
        return await call(peer, method, body, timeout=timeout)

    swarm.trainer.call = calling  # type: ignore[method-assign]

    async def go() -> bool:
        asking = asyncio.create_task(steps.request_grant(1, 2))
        await asyncio.wait({asking}, timeout=5.0)
        has_place = asking.done() and asking.exception() is None
        asking.cancel()
        await asyncio.wait({asking})
        await reporting[0]
        return has_place

    try:
        has_place = swarm.run(go())
        (told,) = reports
        assert bool(told.leases) == has_place
    finally:
        swarm.close()


def test_a_batch_whose_place_is_taken_is_not_restored() -> None:
    new = (1 << 32) + 1
    step = OpenStep(3, 4)
    step.first_lease = new
    place = step.grant(new, OTHER, 2)
    assert place is not None
    step.restore(PeerId("trainer"), lease(1, place[0], step=3), None)
    step.restore(PeerId("trainer"), lease(2, place[0] + 1, step=3), None)
    step.complete(new, OTHER, [(place[0], 0, 0)])
    assert step.counted == [(place[0], 0, 0)]
    step.restore(PeerId("trainer"), lease(3, place[0] + 2, step=3), None)
    assert len(step.counted) == 2


@pytest.mark.parametrize("number", [-5, 0, 1, 1 << 40])
def test_a_batch_that_no_coordinator_before_granted_is_refused(number: int) -> None:
    swarm = Swarm("a b", trainers="trainer other", target_batch_size=4)
    other = swarm.network.transport("other")
    report = ReportReply(begun=True, leases=[lease(number, 0)], closed=[])
    request = encode(RegisterRequest(generation=0, step=0, report=report))

    async def go() -> None:
        await swarm.steps.grant(2)
        before = swarm.state()
        with pytest.raises(ProtocolError):
            await other.call(A, REGISTER.name, request, timeout=5.0)
        assert swarm.state() == before

    try:
        swarm.run(go())
    finally:
        swarm.run(other.close())
        swarm.close()


FORGED = {
    "at the last place of a message": lease(1, (1 << 63) - 1),
    "at a place of no former coordinator": lease(1, 1 << 40),
    "of more samples than there are": replaced(
        lease(1, 0), request=GrantRequest(step=0, num_samples=1 << 40, generation=0)
    ),
    "at another scale": lease(1, 0, scale=2.0),
    "of another weight": replaced(lease(1, 0), grant=replaced(lease(1, 0).grant, weight=1e300)),
    "dropped": replaced(lease(1, 0), withdrawn=True, dropped=True),
    "with metrics": replaced(lease(1, 0), has_metrics=True),
}


@pytest.mark.parametrize("forged", FORGED, ids=lambda one: one.replace(" ", "-"))
def test_what_one_trainer_registers_keeps_no_place_from_the_lead(forged: str) -> None:
    swarm = Swarm("a b", trainers="trainer other", target_batch_size=4)
    other = swarm.network.transport("other")
    trainers = swarm.coordinator.generation.trainers
    trainers._first_lease = 100  # acts like a successor of another coordinator
    report = ReportReply(begun=True, leases=[FORGED[forged]], closed=[])

    async def go() -> None:
        await other.call(A, REGISTER.name, encode(RegisterRequest(generation=0, step=0, report=report)), timeout=60.0)
        grant = await swarm.steps.grant(2)
        assert grant.first < 1 << 33
        await swarm.steps.withdraw(grant.lease)

    try:
        swarm.run(go())
    finally:
        swarm.run(other.close())
        swarm.close()


def test_a_new_coordinator_takes_no_lease_of_its_own_term_from_a_report() -> None:
    """It would assign that number to another batch."""
    swarm = Swarm("a b", trainers="trainer other", target_batch_size=8)
    run = swarm.steps.run
    run.follow_term((2, "b", 101))
    own = first_lease(run.term)
    leases = [lease(own, 0), lease(own + 1, 2), lease(1, 4), lease(2, 6, scale=2.0), lease(3, 1 << 40)]
    try:
        step = rebuild(run, {OTHER: ReportReply(begun=True, leases=leases, closed=[])}, {}, complete=False).open
    finally:
        swarm.close()
    assert {first: origin.weight for first, origin in step.origins.items()} == {4: 2.0}


KEPT = encode(
    BatchMetrics(generation=0, step=0, lease=1, metrics=[MetricState(name="accuracy", num_updates=1, lengths=[1])])
)


@pytest.mark.parametrize(
    ("answer", "num_taken"),
    [
        (Message(KEPT, (torch.zeros(2),)), 2),
        (Message(KEPT, (torch.zeros(3),)), 1),
        (Message(KEPT, (torch.zeros(5),)), 0),
        (Message(KEPT), 0),
        (Message(b"\xc1", (torch.zeros(1),)), 0),
        (Message(), 0),
    ],
    ids=["two", "too-many", "too-large", "too-few-tensors", "no-message", "nothing"],
)
def test_metrics_that_a_new_coordinator_fetches_are_checked(answer: Message, num_taken: int) -> None:
    network = MemoryNetwork()
    other, new = network.transport("other"), network.transport("a")

    async def answering(caller: PeerId, message: Message) -> Message:
        return answer

    async def go() -> int:
        other.handle_stream(REPORT_METRICS.name, answering, max_bytes=0)
        leases = [replaced(lease(number, 2 * number), has_metrics=True) for number in range(1, 3)]
        reports = {OTHER: ReportReply(begun=True, leases=leases, closed=[])}
        try:
            return len(await fetch_metrics(new, reports, timeout=5.0, max_bytes=16))
        finally:
            await other.close()
            await new.close()

    with contextlib.closing(VirtualLoop()) as loop:
        assert loop.run_until_complete(go()) == num_taken
