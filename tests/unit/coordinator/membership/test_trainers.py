"""Trainers that join during a run, leave it, and fall silent: on a virtual clock, without Lightning."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.client import coordinator_client
from lightning_swarm.client.step_client import StepClient
from lightning_swarm.coordinator.membership import rosters as rosters_module
from lightning_swarm.coordinator.membership import trainers as trainers_module
from lightning_swarm.core.errors import ConfigError, LeaseRevoked, NotEnlisted, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.batches import Grant, GrantRequest, RetireRequest
from lightning_swarm.protocol.messages.calls import CallKey
from lightning_swarm.protocol.messages.membership import EnlistRequest
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, encode
from lightning_swarm.protocol.rpc import ENLIST, GRANT, RETIRE
from lightning_swarm.protocol.run_state import RunState
from tests.held import batches_of
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, Swarm, key, plain_steps, rows

A, B, NEW = PeerId("a"), PeerId("b"), PeerId("new")
EPOCH = 3
LIMITS = Limits(call_timeout=30.0, silence_timeout=10.0)


class Run:
    """A lead, which brings batches of two samples to steps of four, and trainers that join it."""

    def __init__(self, make_swarm: MakeSwarm, *stages: str, **options: Any) -> None:
        options = {"target_batch_size": 4, "trainers": LEAD, "open_to_trainers": True, "limits": LIMITS, **options}
        self.swarm: Swarm = make_swarm(*(stages or ("a", "b")), **options)
        self.swarm.steps.epoch = lambda: EPOCH
        self.fed: dict[tuple[int, int], Tensor] = {}
        self.records: list[Record] = []
        self._seed = 0
        self._transports: dict[PeerId, MemoryTransport] = {}

    def transport(self, name: PeerId = NEW) -> MemoryTransport:
        if name not in self._transports:
            self._transports[name] = self.swarm.network.transport(name)
        return self._transports[name]

    async def enter(self, transport: MemoryTransport, **changes: Any) -> StepClient:
        """Join as a trainer does."""
        seen = RunState(self.swarm.manifest)
        patience = coordinator_client.CoordinatorTimeouts(answer_s=30.0, successor_s=600.0, alone_s=600.0)
        view, epoch = await coordinator_client.enter(transport, seen, patience)
        assert epoch == EPOCH

        async def note(record: Record, rosters: Sequence[Sequence[Member]]) -> None:
            """Keep the routes, which the tests choose themselves."""

        return StepClient(
            transport,
            RunState.from_view(view, view.version),
            timeouts=coordinator_client.CoordinatorTimeouts(answer_s=30.0, successor_s=600.0),
            on_record=note,
            events=EventLog(),
            first_serial=1000 + self._seed,
        )

    async def begin(self, steps: StepClient) -> tuple[Grant, CallKey]:
        """Begin a batch."""
        grant = await steps.grant(2)
        self.fed[grant.step, grant.first] = rows(self._seed)
        self._seed += 1
        return grant, key(grant.first, step=grant.step)

    async def bring(self, *trainers: StepClient) -> None:
        for steps in trainers:
            grant, k = await self.begin(steps)
            await self.swarm.through(
                k, self.fed[grant.step, grant.first], route=self.swarm.route(1), weight=grant.weight
            )
            await steps.done(grant.lease, [k.receipt])

    async def end(self) -> Record:
        lead = self.swarm.steps
        self.records.append(await self.swarm.record(lead.version))
        return self.records[-1]

    async def step(self, *trainers: StepClient) -> Record:
        await self.bring(*trainers)
        return await self.end()

    @property
    def lead(self) -> StepClient:
        return self.swarm.steps

    @property
    def trainers(self) -> list[PeerId]:
        (found,) = {tuple(server.membership.run.trainers) for server in self.swarm.servers.values()}
        assert list(found) == self.lead.run.trainers
        return list(found)

    def check(self) -> None:
        """Check that the weights contain each batch in a record once, and no other batch."""
        assert all(record.closing.num_samples == 4 for record in self.records)
        batches = [[self.fed[record.step, first] for first in batches_of(record)] for record in self.records]
        plain_steps(self.swarm.module, batches, divisors=[2.0 for _ in self.records])
        torch.testing.assert_close(self.swarm.weights(), dict(self.swarm.module.state_dict()), rtol=0, atol=1e-10)


# ---------------------------------------------------------------------- in


def test_a_trainer_that_comes_has_places_from_the_next_step_on(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)

    async def go() -> None:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        await run.bring(run.lead)
        with pytest.raises(NotEnlisted):
            await run.transport().call(
                A, GRANT.name, encode(GrantRequest(step=0, num_samples=2, generation=0)), timeout=1.0
            )
        assert not coming.done()
        record = await run.step(run.lead)
        assert (record.enlisted, record.retired) == ([NEW], [])
        new = await coming
        assert (new.version, new.run.trainers) == (1, [LEAD, NEW])
        await run.step(run.lead, new)
        await run.step(new, run.lead)

    run.swarm.run(go())
    assert run.trainers == [LEAD, NEW]
    assert {"joined"} <= {event.kind for event in run.swarm.events(A) if event.peer == NEW}
    run.check()


def test_it_waits_while_nothing_is_decided_and_is_told_the_epoch(make_swarm: MakeSwarm) -> None:
    """The lead validates for many times as long as a call may take."""
    run = Run(make_swarm)

    async def go() -> None:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(20 * LIMITS.call_timeout)
        assert not coming.done()
        await run.step(run.lead, run.lead)
        await coming  # checks the epoch, too

    run.swarm.run(go())
    assert run.trainers == [LEAD, NEW]


def test_one_that_gave_up_asking_is_not_let_in(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)

    async def go() -> None:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        coming.cancel()
        await asyncio.sleep(2 * LIMITS.call_timeout)
        assert (await run.step(run.lead, run.lead)).enlisted == []

    run.swarm.run(go())


def test_a_run_that_is_not_open_says_what_to_do(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm, open_to_trainers=False)
    with pytest.raises(ConfigError, match=r"only if its starter has `role='both'` and `target_batch_size`"):
        run.swarm.run(run.enter(run.transport()))


def test_another_version_of_the_protocol_is_refused(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)
    request = encode(EnlistRequest(protocol_version=PROTOCOL_VERSION + 1, generation=None))
    with pytest.raises(ConfigError, match=rf"is {PROTOCOL_VERSION + 1} at the caller and {PROTOCOL_VERSION} in"):
        run.swarm.run(run.transport().call(A, ENLIST.name, request, timeout=1.0))


def test_the_number_of_trainers_is_bounded(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(make_swarm)
    monkeypatch.setattr(trainers_module, "MAX_TRAINERS", 2)
    monkeypatch.setattr(rosters_module, "MAX_TRAINERS", 2)

    async def go() -> None:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        with pytest.raises(ConfigError, match="at most 2 trainers"):
            await run.enter(run.transport(PeerId("one too many")))
        await run.step(run.lead, run.lead)
        await coming

    run.swarm.run(go())
    assert run.trainers == [LEAD, NEW]


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_peer_comes_to_coordinate_around_the_record_that_lets_it_in(make_swarm: MakeSwarm, when: str) -> None:
    run = Run(make_swarm, "a b c", "b c a")

    async def go() -> None:
        await run.step(run.lead, run.lead)  # three voters from here on
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        if when == "after":  # the coordinator dies with the answer
            run.swarm.network.cut(NEW, A)
            await run.step(run.lead, run.lead)
        run.swarm.network.kill(A)
        await run.bring(*() if when == "after" else (run.lead, run.lead))
        if when == "before":
            record = await run.end()
            while not record.enlisted:
                record = await run.step(run.lead, run.lead)
        else:
            await run.step(run.lead, run.lead)
        new = await coming
        await run.step(run.lead, new)

    run.swarm.run(go())
    assert run.lead.run.coordinator != A
    assert run.lead.run.trainers == [LEAD, NEW]


# ---------------------------------------------------------------------- out


def entered(run: Run) -> StepClient:
    async def go() -> StepClient:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        await run.step(run.lead, run.lead)
        return await coming

    return run.swarm.run(go())


def test_one_that_retires_is_waited_for_no_more_and_what_it_brought_counts(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)
    new = entered(run)

    async def go() -> None:
        await run.bring(new)
        left = asyncio.create_task(new.retire("its data is read"))
        record = await run.step(run.lead)
        assert (record.enlisted, record.retired) == ([], [NEW])
        await left
        await run.step(run.lead, run.lead)

    run.swarm.run(go())
    assert run.trainers == [LEAD]
    run.check()


def test_the_batch_in_hand_of_one_that_retires_is_struck(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)
    new = entered(run)

    async def go() -> None:
        await run.bring(run.lead)
        await run.begin(new)
        left = asyncio.create_task(new.retire("SIGTERM"))
        await asyncio.sleep(1.0)
        await run.step(run.lead)
        await left

    run.swarm.run(go())
    assert run.trainers == [LEAD]
    run.check()


def test_the_lead_does_not_retire(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)
    with pytest.raises(ProtocolError, match="it ends the run by dismissing"):
        run.swarm.run(run.swarm.trainer.call(A, RETIRE.name, encode(RetireRequest(reason="x")), timeout=1.0))


def test_one_that_dies_in_its_first_step_leaves_the_list(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)
    new = entered(run)

    async def go() -> None:
        await run.begin(new)
        run.swarm.network.kill(NEW)
        await run.bring(run.lead)
        await asyncio.sleep(5 * LIMITS.silence_timeout)
        record = await run.step(run.lead)
        assert record.retired == [NEW]
        await run.step(run.lead, run.lead)

    run.swarm.run(go())
    assert run.trainers == [LEAD]
    run.check()


def test_one_that_was_silent_comes_back_by_itself(make_swarm: MakeSwarm) -> None:
    run = Run(make_swarm)
    new = entered(run)

    async def go() -> None:
        grant, k = await run.begin(new)
        run.swarm.network.freeze(NEW)
        await asyncio.sleep(5 * LIMITS.silence_timeout)
        assert (await run.step(run.lead, run.lead)).retired == [NEW]
        run.swarm.network.thaw(NEW)
        saying = asyncio.create_task(new.done(grant.lease, [k.receipt]))
        await asyncio.sleep(1.0)
        assert not saying.done()
        assert (await run.step(run.lead, run.lead)).enlisted == [NEW]
        with pytest.raises(LeaseRevoked, match="struck from step"):
            await saying
        await run.step(new, run.lead)
        assert new.version == run.lead.version - 1

    run.swarm.run(go())
    assert run.trainers == [LEAD, NEW]
    run.check()


def test_what_one_had_under_way_that_was_started_again_is_void(make_swarm: MakeSwarm) -> None:
    """It has the same name, and the previous record did not exclude it."""
    run = Run(make_swarm)
    new = entered(run)

    async def go() -> None:
        await run.begin(new)
        run.swarm.network.kill(NEW)
        again = await run.enter(run.swarm.network.transport(NEW))  # immediately a member
        assert again.version == 1
        await run.step(again, run.lead)

    run.swarm.run(go())
    assert run.trainers == [LEAD, NEW]
    strikes = [event.peer for event in run.swarm.events(A) if event.kind == "strike"]
    assert strikes == [NEW]
    run.check()
