"""If a coordinator goes in any phase, another peer takes over, and no batch is lost or counted twice."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from lightning_swarm.client.step_client import StepClient
from lightning_swarm.coordinator import trainer_handlers
from lightning_swarm.coordinator.coordinator import Coordinator, CoordinatorGeneration
from lightning_swarm.core.errors import LeaseRevoked, NotCoordinator
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.network.task_transport import TaskTransport
from lightning_swarm.peer import discovery
from lightning_swarm.protocol.messages.batches import (
    Grant,
    GrantRequest,
    Lease,
    LoggedValue,
    MetricState,
    RegisterRequest,
    ReportReply,
)
from lightning_swarm.protocol.messages.step import Prepare, Promise, Record
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import AVERAGE, BACKWARD, GRANT, REGISTER, TAKE_METRICS
from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.sabotage import sabotage
from tests.held import batches_of
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.replays import Replayer, batch_of
from tests.unit.coordinator.step.test_data_order import plan
from tests.unit.swarm import LEAD, Swarm, key, plain_steps, result_of, rows

A, B, C, D, E = map(PeerId, "abcde")
OTHER = PeerId("other")
NUM_MICROBATCHES = 4
LONG_S = 1e6
SILENCE_S = 10.0


class Trial:
    """A swarm with three voters from its first step, a trainer that keeps copies, and faults."""

    def __init__(self, make_swarm: MakeSwarm, plan: FaultPlan, *rosters: str, trainers: str = LEAD) -> None:
        network = MemoryNetwork(latency_s=0.001)
        self.plan = plan
        self.swarm: Swarm = make_swarm(
            *(rosters or ("a b c", "d b c")),
            network=network,
            limits=Limits(call_timeout=30.0, silence_timeout=SILENCE_S, stage_timeout=3600.0),
            trainers=trainers,
        )
        self.trainer = Replayer(self.swarm)
        self.sabotage = sabotage(network, plan)
        self.records: list[Record] = []

    def train(self, num_steps: int, *, avoid: str = "") -> None:
        """Run steps; servers in `avoid` get no microbatch from the next step on."""
        self.trainer.avoid |= set(map(PeerId, avoid.split()))
        for _ in range(num_steps):
            step = len(self.records)
            self.records.append(self.swarm.run(self.trainer.step(*batch_of(step, NUM_MICROBATCHES))))

    def second(self) -> StepClient:
        """Return the client of another trainer, which knows the records so far."""
        other = self.swarm.client(self.swarm.network.transport(OTHER))
        other.run.version = len(self.records)
        other.run.set_members(self.swarm.steps.run.seats)
        return other

    @property
    def coordinators(self) -> list[PeerId]:
        return [
            name for name, server in self.swarm.servers.items() if server.admission.election.coordinator is not None
        ]

    def count(self, kind: Any) -> int:
        return sum(server.events.counts[kind] for server in self.swarm.servers.values())

    def members(self) -> list[list[PeerId]]:
        return [[member.peer_id for member in roster] for roster in self.swarm.rosters_now]

    def check(self) -> None:
        """Check faults, that each microbatch counts once, and that replicas are equal and the same as one machine's."""
        self.plan.check()
        assert [record.step for record in self.records] == list(range(len(self.records)))
        for record in self.records:
            assert [index for _, index, _ in self.swarm.counted(record)] == list(range(NUM_MICROBATCHES))
        batches = [batch_of(step, NUM_MICROBATCHES) for step in range(len(self.records))]
        plain_steps(self.swarm.module, batches, divisors=[1.0] * len(batches))
        expected = self.swarm.module.state_dict()
        seen: dict[str, torch.Tensor] = {}
        for index, roster in enumerate(self.swarm.rosters_now):
            for member in roster:
                steps = self.swarm.servers[member.peer_id].steps
                assert steps.version == len(self.records)
                for name, tensor in steps.stage(index).weights().items():
                    assert torch.equal(seen.setdefault(name, tensor), tensor), "replicas are equal to the bit"
                    torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)
        assert seen.keys() == expected.keys()


def strike(kind: str, peer: str, phase: Phase, **when: Any) -> FaultPlan:
    plan = FaultPlan()
    moment: dict[str, Any] = {"step": 1, "of": peer, **when}
    if kind == "kill":
        return plan.kill(peer, at=phase, **moment)
    return plan.freeze(peer, for_s=LONG_S, at=phase, **moment)


PHASES = [
    (Phase.GRANT, 1),
    (Phase.GRANT_DONE, 1),
    (Phase.DONE, 1),
    (Phase.DONE_DONE, 1),
    (Phase.DONE, 2),  # the lead asks to close
    (Phase.DONE_DONE, 2),
    (Phase.RECORD, 1),
    (Phase.CLOSE, 1),
    (Phase.CLOSE, 3),
    (Phase.CLOSE_DONE, 1),
    (Phase.AVERAGE, 1),
    (Phase.AVERAGE, 3),
    (Phase.AVERAGE_SEND, 1),
    (Phase.AVERAGE_REDUCE, 1),
    (Phase.AVERAGE_DONE, 1),
    (Phase.AVERAGE_DONE, 3),
    (Phase.PREPARE, 1),
    (Phase.PREPARE_DONE, 1),
    (Phase.DECIDE, 1),  # between the proposal and a majority
    (Phase.DECIDE, 2),
    (Phase.DECIDE_DONE, 1),  # after a majority, of which the coordinator has not learned
    (Phase.DECIDE_DONE, 2),
    (Phase.APPLY, 1),
    (Phase.APPLY, 3),
    (Phase.APPLY_DONE, 1),
    (Phase.APPLY_DONE, 3),
    (Phase.RECORD_DONE, 1),
]
every_phase = pytest.mark.parametrize(("phase", "nth"), PHASES, ids=lambda one: getattr(one, "name", one))


def by_name(phase: Phase) -> str:
    return phase.name


LATE = [
    (Phase.DONE, 1),
    (Phase.DONE_DONE, 2),
    (Phase.CLOSE, 3),
    (Phase.CLOSE_DONE, 1),
    (Phase.AVERAGE_SEND, 1),
    (Phase.AVERAGE_DONE, 3),
    (Phase.DECIDE, 1),
    (Phase.DECIDE_DONE, 2),
    (Phase.APPLY, 3),
]


@pytest.mark.first_cells(12)
@pytest.mark.each_value
@every_phase
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_coordinator_that_goes(make_swarm: MakeSwarm, kind: str, phase: Phase, nth: int) -> None:
    trial = Trial(make_swarm, strike(kind, "a", phase, nth=nth))
    trial.train(1)
    assert {voter.peer_id for voter in trial.swarm.steps.run.voters} == {A, B, C}
    trial.train(3, avoid="a")
    trial.check()
    assert trial.count("takeover") == 1
    assert [name for name in trial.coordinators if name != A] == [B]
    assert trial.swarm.announced == [B]
    assert trial.members() == [[B, C], [D, B, C]]
    assert {voter.peer_id for voter in trial.swarm.steps.run.voters} == {B, C, D}


@pytest.mark.first_cells(3)
@pytest.mark.parametrize(("phase", "nth"), LATE, ids=lambda one: getattr(one, "name", one))
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_coordinator_that_goes_with_gradients_in_its_sum(
    make_swarm: MakeSwarm, kind: str, phase: Phase, nth: int
) -> None:
    trial = Trial(make_swarm, strike(kind, "a", phase, nth=nth))
    trial.train(2)
    trial.train(2, avoid="a")
    trial.check()
    assert trial.count("takeover") == 1
    assert trial.members() == [[B, C], [D, B, C]]


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("for_s", [3.0, 12.0, 40.0])
@pytest.mark.parametrize(
    "phase", [Phase.GRANT, Phase.DONE, Phase.AVERAGE, Phase.DECIDE, Phase.APPLY], ids=lambda phase: phase.name
)
def test_a_coordinator_that_comes_back_does_no_harm(make_swarm: MakeSwarm, phase: Phase, for_s: float) -> None:
    """It was frozen for a moment, until other peers are about to take over, or until one has."""
    plan = FaultPlan().freeze("a", for_s=for_s, at=phase, of="a", step=1)
    trial = Trial(make_swarm, plan)
    trial.train(1)
    trial.train(4, avoid="a")
    trial.swarm.settle()
    trial.check()
    assert len(trial.coordinators) == 1, "the old one has stepped down"
    if for_s != 12.0:  # the other peers notice after about 12 s, so then the outcome varies
        assert trial.count("takeover") == (for_s > SILENCE_S)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "phase", [Phase.DECIDE, Phase.DECIDE_DONE, Phase.CLOSE, Phase.APPLY], ids=lambda phase: phase.name
)
@pytest.mark.parametrize("voter", ["b", "c"])
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_voter_that_goes(make_swarm: MakeSwarm, kind: str, voter: str, phase: Phase) -> None:
    trial = Trial(make_swarm, strike(kind, voter, phase))
    trial.train(1)
    trial.train(3, avoid=voter)
    trial.check()
    assert trial.count("takeover") == 0
    assert trial.coordinators == [A]
    assert PeerId(voter) not in {one.peer_id for one in trial.swarm.steps.run.voters}


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    "phase", [Phase.GRANT_DONE, Phase.CLOSE, Phase.AVERAGE, Phase.DECIDE, Phase.APPLY], ids=lambda phase: phase.name
)
def test_one_after_the_other(make_swarm: MakeSwarm, phase: Phase) -> None:
    """The second coordinator goes, too, and the third finishes."""
    plan = FaultPlan().kill("a", at=phase, of="a", step=1).kill("b", at=phase, of="b", step=3)
    trial = Trial(make_swarm, plan, "a b c d e", "d b c e")
    trial.train(1)
    trial.train(2, avoid="a b")
    trial.train(3)
    trial.check()
    assert trial.count("takeover") == 2
    assert trial.members() == [[C, D, E], [D, C, E]]


def test_a_coordinator_that_is_cut_off_from_the_others(make_swarm: MakeSwarm) -> None:
    """It is connected to the lead, but to no majority; when the connection returns it steps down."""
    plan = FaultPlan().partition(["a", LEAD], ["b", "c", "d"], for_s=40.0, at=Phase.DONE, of="a", step=1)
    trial = Trial(make_swarm, plan)
    trial.train(1)
    trial.train(2, avoid="a")
    trial.swarm.settle()
    trial.train(2)
    trial.check()
    assert trial.coordinators == [B]
    assert trial.count("takeover") == 1


def test_below_a_majority_the_swarm_pauses_and_resumes(make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """Both other voters are frozen for long; no record is decided until they return, and a line a minute reports it."""
    plan = FaultPlan().freeze("b", for_s=300.0, at=Phase.DECIDE, of="b", step=1)
    plan.freeze("c", for_s=300.0, at=Phase.DECIDE, of="c", step=1)
    trial = Trial(make_swarm, plan)
    trial.train(1)
    trial.train(1, avoid="b c")
    assert trial.swarm.loop.time() >= 290.0
    assert trial.count("pause") >= 1
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said.count("Step 1 waits for a majority of its voters: a, b, c.") == 4
    trial.train(1)
    trial.check()


@pytest.mark.parametrize("number", [2, 7])
def test_a_voter_that_tried_to_coordinate_in_vain_still_makes_a_majority(make_swarm: MakeSwarm, number: int) -> None:
    """It promised itself a higher term, and there is no majority without it, so the coordinator takes a higher one."""
    trial = Trial(make_swarm, FaultPlan().kill("c", at=Phase.DECIDE, of="c", step=1))
    trial.train(1)
    server = trial.swarm.servers[B]
    boot_id = server.membership.me.boot_id
    higher = Prepare(term=(number, B, boot_id), boot_id=boot_id, generation=0, step=1, fence=False)

    async def ask() -> Promise:
        return server.voter.promise(higher)

    assert trial.swarm.run(ask()).promised
    trial.train(3, avoid="c")
    trial.check()
    assert trial.count("takeover") == 1
    assert trial.swarm.loop.time() < 120.0


# ---------------------------------------------------------------------- leaving


def test_a_coordinator_that_leaves_hands_over_at_once(make_swarm: MakeSwarm) -> None:
    trial = Trial(make_swarm, FaultPlan())
    trial.train(2)
    begin_s = trial.swarm.loop.time()
    trial.swarm.run(trial.swarm.servers[A].admission.election.abdicate())
    assert trial.swarm.loop.time() < begin_s + 1.0
    assert trial.coordinators == [B]
    trial.train(2)
    trial.check()
    assert trial.members() == [[A, B, C], [D, B, C]], "it serves on"
    assert not trial.trainer.replayed


def test_the_first_coordinator_hands_over_though_it_alone_votes(make_swarm: MakeSwarm) -> None:
    trial = Trial(make_swarm, FaultPlan(), "a b", "c")
    trial.swarm.run(trial.swarm.servers[A].admission.election.abdicate())
    assert trial.coordinators == [B]
    trial.train(2)
    trial.check()


def test_who_does_not_coordinate_says_so(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    request = encode(GrantRequest(step=0, num_samples=2, generation=0))
    with pytest.raises(NotCoordinator, match="b does not coordinate"):
        swarm.run(swarm.trainer.call(B, GRANT.name, request, timeout=1.0))


def test_a_call_that_a_coordinator_was_answering_when_it_retired_is_asked_again(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor would carry out the same request."""
    swarm = make_swarm("a", "b")
    grant = Grant(lease=1, generation=0, step=0, first=0, weight=1.0)
    request = GrantRequest(step=0, num_samples=2, generation=0)
    report = ReportReply(begun=True, leases=[Lease(grant=grant, request=request)], closed=[])
    swarm.coordinator.generation.trainers._first_lease = 2  # acts like a successor of another coordinator

    async def slow(*_: Any, **__: Any) -> dict[tuple[int, int], Message]:
        await asyncio.sleep(5.0)
        return {}

    monkeypatch.setattr(trainer_handlers, "fetch_metrics", slow)

    async def go() -> None:
        body = encode(RegisterRequest(generation=0, step=0, report=report))
        registering = asyncio.ensure_future(swarm.trainer.call(A, REGISTER.name, body, timeout=30.0))
        await asyncio.sleep(1.0)
        await swarm.servers[A].admission.election.abdicate()
        with pytest.raises(NotCoordinator, match="is no longer the coordinator"):
            await registering

    swarm.run(go())


def test_who_hears_of_a_higher_term_while_it_comes_to_coordinate_steps_down(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(make_swarm, FaultPlan())
    swarm = trial.swarm
    trial.train(1)
    start = CoordinatorGeneration.start
    other, first = swarm.servers[C].admission, swarm.servers[B].admission.election

    async def slow(self: CoordinatorGeneration) -> None:
        monkeypatch.setattr(CoordinatorGeneration, "start", start)
        first._successor = C  # otherwise its voter would promise no term
        await other.election._take_over(other.membership.run, "test")
        await start(self)

    monkeypatch.setattr(CoordinatorGeneration, "start", slow)
    swarm.network.kill(A)
    swarm.settle()
    assert trial.coordinators == [A, C], "A is dead and knows nothing"
    assert trial.count("takeover") == 2
    trial.train(2, avoid="a")
    trial.check()


# ---------------------------------------------------------------------- the books


def logged(value: float) -> LoggedValue:
    return LoggedValue(
        name="loss", reduce="mean", value=value, batch_size=2, on_step=True, on_epoch=True, prog_bar=False, logger=True
    )


@pytest.mark.first_cells(3)
@pytest.mark.parametrize(
    ("phase", "nth"),
    [
        (Phase.DONE, 1),
        (Phase.DONE_DONE, 1),
        (Phase.CLOSE, 1),
        (Phase.AVERAGE_DONE, 1),
        (Phase.DECIDE, 1),
        (Phase.DECIDE_DONE, 2),
        (Phase.APPLY, 1),
        (Phase.APPLY_DONE, 3),
        (Phase.RECORD_DONE, 1),
    ],
    ids=lambda one: getattr(one, "name", one),
)
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_no_log_of_other_trainers_is_lost_or_counted_twice(
    make_swarm: MakeSwarm, kind: str, phase: Phase, nth: int
) -> None:
    trial = Trial(make_swarm, strike(kind, "a", phase, nth=nth), trainers=f"{LEAD} other")
    swarm = trial.swarm
    trial.train(1)
    trial.trainer.avoid |= {A}
    other = swarm.client(swarm.network.transport(OTHER))

    async def of_other(seed: int) -> None:
        grant = await other.grant(2)
        k = key(grant.first, 0, step=grant.step)
        await swarm.through(k, rows(seed), route=trial.trainer.route(0), weight=grant.weight)
        await other.done(grant.lease, [k.receipt], logs=[logged(float(seed))])

    async def step() -> Record:
        other.run.version = swarm.steps.version
        await of_other(77)
        record = await trial.trainer.step(*batch_of(len(trial.records), NUM_MICROBATCHES))
        assert await other.wait_for_record(record.step) == record
        return record

    for number in (1, 2):
        record = swarm.run(step())
        heard = swarm.steps.generation.records[-1]
        assert heard.record == record
        assert heard.logs == [logged(77.0)], f"of step {number}"
        assert len(batches_of(record)) == 2
    trial.plan.check()
    assert trial.count("takeover") == 1


def measured(number: int) -> tuple[list[MetricState], list[torch.Tensor]]:
    return [MetricState(name="accuracy", num_updates=number + 1, lengths=[1])], [rows(number)]


def test_what_a_batch_added_to_metrics_is_lost_alone(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Coordinator and trainer, which had it, both go after the record, and the lead asks for it next."""
    trial = Trial(make_swarm, FaultPlan(), trainers=f"{LEAD} other third")
    swarm = trial.swarm
    trial.train(1)
    trial.trainer.avoid |= {A}
    others = [swarm.client(swarm.network.transport(name)) for name in (OTHER, PeerId("third"))]
    stream = swarm.trainer.stream

    async def of_other(seed: int) -> None:
        client = others[seed]
        client.run.version = swarm.steps.version
        grant = await client.grant(2)
        k = key(grant.first, 0, step=grant.step)
        await swarm.through(k, rows(seed), route=trial.trainer.route(0), weight=grant.weight)
        await client.send_metrics(grant.lease, measured(seed))
        await client.done(grant.lease, [k.receipt])

    async def too_late(peer: PeerId, method: str, *args: Any, **kwargs: Any) -> Message:
        if method == TAKE_METRICS.name and peer == A:
            swarm.network.kill(A)
            swarm.network.kill(OTHER)
        return await stream(peer, method, *args, **kwargs)

    async def step() -> Record:
        await of_other(0)
        await of_other(1)
        return await trial.trainer.step(*batch_of(len(trial.records), NUM_MICROBATCHES))

    monkeypatch.setattr(swarm.trainer, "stream", too_late)
    record = swarm.run(step())
    assert len(batches_of(record)) == 3
    assert trial.count("takeover") == 1
    assert [states for states, _ in swarm.steps.generation.records[-1].metrics] == [measured(1)[0]]
    first = min(batches_of(record))
    assert f"The metric updates of the batch at place {first} of step 1 are lost." in caplog.messages
    trial.records.append(record)
    trial.train(1)


def test_a_trainer_that_does_not_report_gets_no_place_twice(make_swarm: MakeSwarm) -> None:
    """Its batch counts nowhere, and no other batch gets the key that its calls may have used."""
    trial = Trial(make_swarm, FaultPlan(), trainers=f"{LEAD} other")
    swarm = trial.swarm
    trial.train(1)
    other = trial.second()

    async def go() -> None:
        grant = await other.grant(2)
        k = key(grant.first, 0, step=1)
        await swarm.through(k, rows(5), route=[B, D], weight=grant.weight)
        swarm.network.kill(OTHER)
        swarm.network.kill(A)

    swarm.run(go())
    trial.train(2, avoid="a")
    trial.check()
    assert trial.swarm.counted(trial.records[1])[0][0] == 2 << 32
    assert trial.count("discard") >= 1


def test_a_trainer_that_calls_a_coordinator_as_it_begins_calls_again(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that the call started would have no owner yet."""
    trial = Trial(make_swarm, FaultPlan())
    refused: list[str] = []
    refusal = TaskTransport._refusal

    start = CoordinatorGeneration.start

    async def slow(coordinator: CoordinatorGeneration) -> None:
        await asyncio.sleep(1.0)
        await start(coordinator)

    def noted(role: TaskTransport, method: str) -> NotCoordinator:
        refused.append(method)
        return refusal(role, method)

    trial.train(1)
    monkeypatch.setattr(CoordinatorGeneration, "start", slow)
    monkeypatch.setattr(TaskTransport, "_refusal", noted)

    async def go() -> None:
        grant = await trial.swarm.steps.grant(2)
        handing_over = asyncio.ensure_future(trial.swarm.servers[A].admission.election.abdicate())
        await asyncio.sleep(0.5)
        await trial.swarm.steps.withdraw(grant.lease)
        await handing_over

    trial.swarm.run(go())
    assert REGISTER.name in refused
    assert trial.coordinators == [B]
    trial.train(1)
    trial.check()


def test_a_coordinator_that_hands_over_while_it_averages(make_swarm: MakeSwarm) -> None:
    trial = Trial(make_swarm, FaultPlan())
    trial.train(1)
    held = asyncio.Event()
    handler = trial.swarm.servers[D]._transport._call_handlers[AVERAGE.name]  # type: ignore[attr-defined]

    async def slow(caller: PeerId, body: bytes) -> bytes:
        held.set()
        await asyncio.sleep(5.0)
        answer: bytes = await handler(caller, body)
        return answer

    trial.swarm.servers[D]._transport._call_handlers[AVERAGE.name] = slow  # type: ignore[attr-defined]

    async def go() -> None:
        closing = asyncio.ensure_future(trial.trainer.step(*batch_of(1, NUM_MICROBATCHES)))
        await held.wait()
        await trial.swarm.servers[A].admission.election.abdicate()
        trial.records.append(await closing)

    trial.swarm.run(go())
    assert trial.coordinators == [B]
    trial.train(1)
    trial.check()


def test_what_a_new_coordinator_froze_is_not_reopened_by_the_end_of_the_old_one(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(make_swarm, FaultPlan())
    trial.train(1)
    old = trial.swarm.servers[A]
    averaging, reopened = asyncio.Event(), asyncio.Event()
    average = old._transport._call_handlers[AVERAGE.name]  # type: ignore[attr-defined]
    reopen, retire = old.steps.reopen, Coordinator.retire

    async def averages_later(caller: PeerId, body: bytes) -> bytes:
        averaging.set()
        await reopened.wait()
        answer: bytes = await average(caller, body)
        return answer

    async def retires_later(self: Coordinator) -> None:
        await averaging.wait()
        await retire(self)

    async def reopens() -> None:
        await reopen()
        if averaging.is_set():
            reopened.set()

    old._transport._call_handlers[AVERAGE.name] = averages_later  # type: ignore[attr-defined]
    monkeypatch.setattr(old.steps, "reopen", reopens)
    monkeypatch.setattr(Coordinator, "retire", retires_later)

    async def go() -> None:
        handing_over = asyncio.ensure_future(old.admission.election.abdicate())
        trial.records.append(await trial.trainer.step(*batch_of(1, NUM_MICROBATCHES)))
        await handing_over

    trial.swarm.run(go())
    assert reopened.is_set()
    assert trial.coordinators == [B]
    assert trial.count("round_repeated") == trial.count("gone") == 0
    trial.train(1)
    trial.check()


def test_what_a_deposed_coordinator_granted_while_another_one_closes_runs_again(make_swarm: MakeSwarm) -> None:
    """It is cut off from all peers but a trainer, which does not know its successor and requests a place from it."""
    trial = Trial(make_swarm, FaultPlan(), trainers=f"{LEAD} other")
    swarm = trial.swarm
    trial.train(1)
    other = trial.second()
    swarm.network.cut(OTHER, B)
    for peer in (LEAD, B, C, D):
        swarm.network.cut(A, PeerId(peer))
    trial.trainer.avoid.add(A)
    held, go_on = asyncio.Event(), asyncio.Event()
    handler = swarm.servers[D]._transport._call_handlers[AVERAGE.name]  # type: ignore[attr-defined]

    async def slow(caller: PeerId, body: bytes) -> bytes:
        held.set()
        await go_on.wait()
        answer: bytes = await handler(caller, body)
        return answer

    swarm.servers[D]._transport._call_handlers[AVERAGE.name] = slow  # type: ignore[attr-defined]

    async def go() -> None:
        closing = asyncio.ensure_future(trial.trainer.step(*batch_of(1, NUM_MICROBATCHES)))
        await held.wait()
        grant = await other.grant(2)
        assert (other.run.coordinator, grant.step) == (A, 1)
        k, route = key(grant.first, step=1), [C, D]
        output = await swarm.forward(k, rows(5), route=route)
        await swarm.send(D, BACKWARD.name, swarm.backward_request(k, 1, route, output))
        with pytest.raises(LeaseRevoked, match="its closing does not name"):
            await swarm.tickets.wait(result_of(D, k, 1, "backward"), timeout=1.0)
        swarm.network.mend(OTHER, B)
        await other.report_revoked(grant.lease)
        assert other.run.coordinator == B
        go_on.set()
        trial.records.append(await closing)
        again = await other.grant(2)
        assert again.step == 2
        await other.withdraw(again.lease)

    swarm.run(go())
    assert trial.coordinators == [A, B], "it has not heard of it yet"
    trial.train(1)
    trial.check()


def test_a_server_joins_with_the_coordinator_that_took_over(make_swarm: MakeSwarm) -> None:
    """The joiner knows the first coordinator only, or any member."""
    trial = Trial(make_swarm, FaultPlan(), "a b c", "d b c")
    trial.train(1)
    trial.swarm.run(trial.swarm.servers[A].admission.election.abdicate())
    trial.swarm.join("e")  # knows the first coordinator only
    trial.train(3)
    trial.check()
    assert E in {peer for roster in trial.members() for peer in roster}


# ---------------------------------------------------------------------- a run that begins


@pytest.mark.parametrize(("late_s", "found"), [(60.0, []), (200.0, [B])])
def test_a_coordinator_that_is_admitted_last_is_waited_for(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, late_s: float, found: list[PeerId]
) -> None:
    """Servers admitted earlier look for it immediately. A delay beyond the start timeout is a fault."""
    limits = Limits(call_timeout=30.0, silence_timeout=SILENCE_S, start_timeout=120.0)
    swarm = make_swarm("a b c", "d b c", admit=False, voters="a b c", limits=limits)
    connect = swarm.servers[A].admission._connect

    async def slowly() -> None:
        await asyncio.sleep(late_s)
        await connect()

    monkeypatch.setattr(swarm.servers[A].admission, "_connect", slowly)

    async def begin() -> None:
        admitting = asyncio.create_task(discovery.admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=1e3))
        await asyncio.sleep(30.0)
        assert [name for name, server in swarm.servers.items() if not server.membership.has_run] == [A]
        await admitting

    swarm.run(begin())
    swarm.settle()
    took_over = [name for name, server in swarm.servers.items() if server.events.counts["takeover"]]
    assert took_over == found
    assert [name for name, server in swarm.servers.items() if server.admission.election.coordinator] == (found or [A])


def test_batches_that_have_numbers_are_handed_out_on(make_swarm: MakeSwarm) -> None:
    """The coordinator dies within a step; its successor knows the order, the assigned batches and the dropped one."""
    network = MemoryNetwork(latency_s=0.001)
    limits = Limits(call_timeout=30.0, silence_timeout=SILENCE_S, stage_timeout=3600.0)
    swarm = make_swarm("a b c", "d b c", network=network, limits=limits, trainers=f"{LEAD} other", target_batch_size=4)
    other = swarm.client(network.transport(OTHER))
    swarm.run(swarm.steps.plan(plan(0, (2, 9)), (0, 0)))

    async def bring(client: StepClient, index: int) -> None:
        grant = await client.request_grant(client.next_serial(), 2, 1.0, (0, index))
        assert isinstance(grant, Grant)
        assert grant.batch == (0, index)
        k = key(grant.first, step=grant.step)
        await swarm.through(k, rows(index), route=[B, C], weight=grant.weight)
        await client.done(grant.lease, [k.receipt])

    async def step(first: int, second: int) -> Record:
        await bring(swarm.steps, first)
        await bring(other, second)
        record = await swarm.record(swarm.steps.version)
        assert await other.wait_for_record(record.step) == record
        return record

    assert swarm.run(step(0, 1)).position == (0, 2)
    swarm.run(bring(swarm.steps, 2))
    dropped = swarm.run(other.request_grant(other.next_serial(), 2, 1.0, (0, 3)))
    assert isinstance(dropped, Grant)
    swarm.run(other.withdraw(dropped.lease, dropped=True))
    network.kill(A)
    assert swarm.run(other.request_grant(other.next_serial(), 2, 1.0, (0, 2))) is None, "the lead has it"
    assert swarm.run(other.request_grant(other.next_serial(), 2, 1.0, (0, 3))) is None, "it was dropped"
    swarm.run(bring(other, 4))
    record = swarm.run(swarm.record(1))
    assert swarm.run(other.wait_for_record(1)) == record
    assert swarm.steps.run.coordinator != A
    assert len(batches_of(record)) == 2
    assert record.position == (0, 5)
    assert swarm.run(step(5, 6)).position == (0, 7)


def test_a_lead_that_missed_a_record_and_the_takeover_tells_the_order_of_batches(make_swarm: MakeSwarm) -> None:
    network = MemoryNetwork(latency_s=0.001)
    limits = Limits(call_timeout=30.0, silence_timeout=SILENCE_S, stage_timeout=3600.0)
    swarm = make_swarm("a b c", "d b c", network=network, limits=limits, trainers=f"{LEAD} other", target_batch_size=4)
    other = swarm.client(network.transport(OTHER))
    swarm.run(swarm.steps.plan(plan(0, (2, 9)), (0, 0)))

    async def ask(client: StepClient, index: int) -> Grant:
        grant = await client.request_grant(client.next_serial(), 2, 1.0, (0, index))
        assert isinstance(grant, Grant)
        return grant

    async def go() -> None:
        for client, index in ((swarm.steps, 0), (other, 1)):
            grant = await ask(client, index)
            k = key(grant.first, step=grant.step)
            await swarm.through(k, rows(index), route=[B, C], weight=grant.weight)
            await client.done(grant.lease, [k.receipt])
        assert await swarm.record(0) == await other.wait_for_record(0)
        network.freeze(LEAD)
        network.kill(A)
        await other.renew()
        network.thaw(LEAD)
        coordinator = other.run.coordinator
        assert coordinator != A
        books = swarm.servers[coordinator].admission.election.coordinator.generation.step_state
        assert not books.order.plans, "the lead has not answered"
        request = RegisterRequest(generation=0, step=0, report=swarm.steps._journal.report())
        await swarm.trainer.call(coordinator, REGISTER.name, encode(request), timeout=30.0)
        assert (await ask(other, 2)).step == 1

    swarm.run(go())
