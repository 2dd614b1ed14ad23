"""A rollback removes the old generation from a trainer, even if answers of the coordinator come late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from lightning_swarm.client.run_generation import PiggybackedRequests
from lightning_swarm.core.errors import WentBack
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import ReportReply
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.rpc import DONE, GRANT, RECORD
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.test_rollback import restarting, step
from tests.unit.swarm import LEAD, Swarm, key, rows

A = PeerId("a")


def assert_is_new(swarm: Swarm) -> None:
    generation = swarm.steps.generation
    assert (generation.number, generation.open_step, swarm.steps.version) == (1, 0, 0)
    assert generation.journal.report() == ReportReply(begun=False, leases=[], closed=[])
    assert (generation.reserved, generation.newest_record, generation.step_ended, generation.imminent_step) == (
        None,
    ) * 4
    assert (generation.records, generation.lost, generation.hyperparameters) == ([], [], {})


async def finish_a_batch(swarm: Swarm) -> None:
    grant = await swarm.steps.grant(2)
    k = key(grant.first)
    await swarm.through(k, rows(1), weight=grant.weight)
    await swarm.steps.done(grant.lease, [k.receipt], close=True, ahead=PiggybackedRequests(num_samples=2))


@pytest.mark.parametrize(
    ("method", "ask"),
    [
        (GRANT.name, lambda swarm: swarm.steps.grant(2)),
        (DONE.name, finish_a_batch),
        (RECORD.name, lambda swarm: step(swarm, 1)),
    ],
    ids=[GRANT.name, DONE.name, RECORD.name],
)
def test_an_answer_that_comes_after_a_rollback_changes_nothing(
    make_swarm: MakeSwarm,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    ask: Callable[[Swarm], Awaitable[Any]],
) -> None:
    swarm = make_swarm("a", "b", trainers=LEAD)
    handlers = swarm.servers[A]._transport._call_handlers  # type: ignore[attr-defined]
    handle, answered, let_go = handlers[method], asyncio.Event(), asyncio.Event()

    async def late(caller: PeerId, body: bytes) -> bytes:
        answer: bytes = await handle(caller, body)
        answered.set()
        await let_go.wait()
        return answer

    monkeypatch.setitem(handlers, method, late)

    async def go() -> None:
        asking = asyncio.ensure_future(ask(swarm))
        await answered.wait()
        swarm.steps.enter_generation(restarting(swarm))
        let_go.set()
        with pytest.raises(WentBack, match="rolled back to generation 1"):
            await asking

    swarm.run(go())
    assert_is_new(swarm)


def test_a_record_is_not_applied_if_the_run_rolls_back_before_the_pipeline_has_noted_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", trainers=LEAD)

    async def roll_back(record: Record, rosters: Sequence[Sequence[Member]]) -> None:
        swarm.steps.enter_generation(restarting(swarm))

    swarm.steps._on_record = roll_back
    with pytest.raises(WentBack, match="rolled back to generation 1"):
        swarm.run(step(swarm, 1))
    assert_is_new(swarm)
