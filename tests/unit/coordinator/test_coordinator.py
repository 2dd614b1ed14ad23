"""The coordinator's books, without a network; and whole steps through coordinator and servers."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.step.open_step import OpenStep, add_up, clip_factor
from lightning_swarm.core.errors import LeaseRevoked, ProtocolError, RunOver, StepError, Unreachable
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import Event, EventLog
from lightning_swarm.protocol.messages.batches import BatchDone, BatchDoneReply, Grant, GrantReply, GrantRequest, Lease
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import AverageRequest, FreezeRequest, NamedReceipts, Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import APPLY, AVERAGE, BACKWARD, DONE, FREEZE, GRANT
from lightning_swarm.server.averaging.all_reduce import AveragingResult
from tests.held import batches_of
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import HYPERPARAMETERS, LEAD, Swarm, closing, key, plain_steps, result_of, rows

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
OTHER = PeerId("other")

# ---------------------------------------------------------------------- the books


def test_places_follow_one_another() -> None:
    step = OpenStep(0, None)
    assert [step.grant(lease, LEAD, 4) for lease in (1, 2, 3)] == [(0, 1.0), (4, 1.0), (8, 1.0)]
    assert step.num_granted == 12
    assert step.total_weight == 3.0


def test_gradients_of_one_step_have_one_scale() -> None:
    step = OpenStep(0, 10)
    assert step.grant(1, LEAD, 4, 1024.0) == (0, 4.0)
    with pytest.raises(ProtocolError, match="must have the scale 1024, got a batch with 512"):
        step.grant(2, OTHER, 4, 512.0)
    assert (step.num_granted, step.gradient_scale) == (4, 1024.0)
    assert step.grant(2, OTHER, 6, 1024.0) == (4, 6.0)
    assert step.grant(3, OTHER, 4, 512.0) is None, "a full step is for nobody to wait with another scale"


def test_a_step_is_full_when_its_target_is_granted() -> None:
    step = OpenStep(0, 10)
    assert step.grant(1, LEAD, 6) == (0, 6.0)
    assert step.grant(2, OTHER, 6) == (6, 6.0), "batches are never split"
    assert step.grant(3, LEAD, 1) is None
    assert (step.closing, step.ready) == (True, False)
    step.complete(1, LEAD, [(0, 0, 0)])
    assert not step.ready
    step.complete(2, OTHER, [(6, 0, 0)])
    assert step.ready
    assert step.total_weight == 12.0


def test_without_a_target_the_lead_closes() -> None:
    step = OpenStep(0, None)
    step.grant(1, LEAD, 1000)
    step.complete(1, LEAD, [])
    assert not step.closing
    step.ask_to_close(4.0)
    assert step.ready
    assert step.total_weight == 4.0
    assert step.grant(2, LEAD, 1) is None


def test_a_withdrawn_batch_counts_nowhere_and_its_place_stays_empty() -> None:
    step = OpenStep(0, 8)
    step.grant(1, LEAD, 4)
    step.grant(2, LEAD, 4)
    step.complete(1, LEAD, [(0, 1, 0), (0, 0, 0)])
    step.withdraw(2, LEAD)
    assert not step.closing
    assert step.grant(3, LEAD, 4) == (8, 4.0), "a key must not come back with other samples"
    step.complete(3, LEAD, [(8, 0, 0)])
    assert step.counted == [(0, 0, 0), (0, 1, 0), (8, 0, 0)]
    assert (step.num_granted, step.total_weight) == (8, 8.0)


def test_a_trainer_that_reports_a_lease_has_no_say_in_its_weight() -> None:
    """A new coordinator computes the weights that its predecessor must have granted."""
    for target, weight in ((None, 1.0), (8, 4.0)):
        step = OpenStep(0, target)
        for wrong in (1e6, 1e-6, 8.0):
            grant = Grant(lease=1, generation=0, step=0, first=0, weight=wrong)
            step.restore(OTHER, Lease(grant=grant, request=GrantRequest(step=0, num_samples=4, generation=0)), None)
            assert not step.origins
        grant = replaced(grant, weight=weight)
        step.restore(OTHER, Lease(grant=grant, request=GrantRequest(step=0, num_samples=4, generation=0)), None)
        assert step.origins == {0: (weight, OTHER)}


def test_a_step_without_batches_has_a_weight_to_divide_by() -> None:
    step = OpenStep(0, None)
    step.ask_to_close(None)
    assert (step.ready, step.counted, step.total_weight) == (True, [], 1.0)


def test_each_granted_batch_ends_once_and_by_its_trainer() -> None:
    step = OpenStep(0, None)
    step.grant(1, LEAD, 2)
    for lease, trainer in ((1, OTHER), (2, LEAD)):
        with pytest.raises(ProtocolError, match="no open lease"):
            step.complete(lease, trainer, [])
        with pytest.raises(ProtocolError, match="no open lease"):
            step.withdraw(lease, trainer)
    for foreign in ([(2, 0, 0)], [(0, 0, 0), (0, 0, 0)]):
        with pytest.raises(ProtocolError, match="lease 1 has place 0"):
            step.complete(1, LEAD, foreign)
    step.complete(1, LEAD, [(0, 0, 0)])
    step.complete(1, LEAD, [(0, 0, 0)])  # a repeated report, whose first answer was lost
    for other in ([], [(0, 1, 0)]):
        with pytest.raises(ProtocolError, match="no open lease"):
            step.complete(1, LEAD, other)
    with pytest.raises(ProtocolError, match="no open lease"):
        step.withdraw(1, LEAD)
    assert step.counted == [(0, 0, 0)]


# ---------------------------------------------------------------------- norms


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3, None])
def test_the_clip_factor_is_torchs(max_norm: float | None) -> None:
    parameters = [torch.zeros(5, dtype=torch.float64) for _ in range(3)]
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.arange(5.0, dtype=torch.float64) + i
    gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    squared_norm = add_up(float(gradient.square().sum()) for gradient in gradients)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient * clip_factor(squared_norm, max_norm), parameter.grad, rtol=1e-13, atol=0)


def test_norms_add_up_to_what_can_be_told_from_a_number() -> None:
    assert add_up([3.0, 1.0]) == 4.0
    assert add_up([]) == 0.0
    assert math.isinf(add_up([1e308, 1e308]))
    assert math.isinf(add_up([1.0, math.inf]))
    assert math.isnan(add_up([1.0, math.nan]))


# ---------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("rosters", [("a",), ("a", "b"), ("a b", "c"), ("a b", "a b"), ("a b c", "d", "e f")])
def test_the_swarm_takes_the_steps_that_one_machine_would(make_swarm: MakeSwarm, rosters: tuple[str, ...]) -> None:
    swarm = make_swarm(*rosters)
    batches = [[rows(10 * step + i) for i in range(5)] for step in range(3)]

    for step, batch in enumerate(batches):
        record = swarm.run(swarm.step(*batch))
        assert record.step == step
        assert swarm.counted(record) == [(0, i, 0) for i in range(5)]
        assert record.closing.num_samples == 10

    plain_steps(swarm.module, batches, divisors=[1.0] * 3)
    expected = swarm.module.state_dict()
    torch.testing.assert_close(swarm.weights(), dict(expected), rtol=1e-12, atol=1e-14)


def test_records_apply_in_order_and_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    records = [swarm.run(swarm.step(rows(step))) for step in range(3)]
    before = swarm.state()
    coordinator = swarm.servers[A]._transport
    for record in records:
        swarm.run(coordinator.call(B, APPLY.name, encode(record), timeout=1.0))  # repeated
    early = replaced(records[-1], closing=replaced(records[-1].closing, step=7))
    with pytest.raises(ProtocolError):
        swarm.run(coordinator.call(B, APPLY.name, encode(early), timeout=1.0))
    unknown = replaced(records[-1], closing=replaced(records[-1].closing, step=3))
    with pytest.raises(ProtocolError, match="no round of this peer"):
        swarm.run(coordinator.call(B, APPLY.name, encode(unknown), timeout=1.0))
    assert swarm.state() == before


def test_a_record_whose_caller_hung_up_is_told_again(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = make_swarm("a", "b")
    steps = swarm.servers[B].steps
    apply, found = steps.sums.apply, []

    def applied_unheard(record: Record, averaged: Any) -> None:
        apply(record, averaged)
        found.append(steps.stage(1).fingerprint())
        if len(found) == 1:
            raise Unreachable("the caller is gone")  # the handler would be cancelled here

    monkeypatch.setattr(steps.sums, "apply", applied_unheard)
    swarm.run(swarm.step(rows(0)))
    assert (steps.version, steps.stage(1).version) == (0, 1)
    swarm.settle()
    assert (steps.version, steps.stage(1).version) == (1, 1)
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_clipped_step_is_clipped_over_all_stages(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b", "c", clip=0.01)
    batch = [rows(i) for i in range(4)]
    record = swarm.run(swarm.step(*batch))

    for x in batch:
        (swarm.module(x).square().sum() / 2).backward()
    total_norm = torch.nn.utils.clip_grad_norm_(swarm.module.parameters(), 0.01)
    assert record.squared_norm == pytest.approx(float(total_norm) ** 2, rel=1e-12)
    assert record.clip_factor == pytest.approx(0.01 / (float(total_norm) + 1e-6), rel=1e-12)
    for name, parameter in swarm.module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(swarm.weights()[name], parameter.detach() - 0.1 * parameter.grad)


def test_a_numeric_target_weighs_samples_equally(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", target_batch_size=6)
    batches = [rows(0, 1), rows(1, 5)]

    assert swarm.run(swarm.batch(batches[0])) is False
    assert swarm.run(swarm.batch(batches[1])) is True
    record = swarm.run(swarm.record(0))

    assert (record.closing.num_samples, record.closing.total_weight) == (6, 6.0)
    optimizer = torch.optim.SGD(swarm.module.parameters(), lr=0.1)
    for x in batches:
        (len(x) / 6 * swarm.module(x).square().sum() / 2).backward()
    optimizer.step()
    torch.testing.assert_close(swarm.weights(), dict(swarm.module.state_dict()))


def test_no_step_opens_beyond_the_last(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", target_batch_size=2, max_steps=1)
    assert swarm.run(swarm.batch(rows(0))) is True
    swarm.run(swarm.record(0))
    with pytest.raises(RunOver, match="the run's last step is 0"):
        swarm.run(swarm.steps.grant(2))
    assert swarm.coordinator.generation.step_state.open.num_granted == 0


def test_who_comes_when_the_step_is_full_waits_for_the_next(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", target_batch_size=2)
    second = swarm.client(swarm.network.transport("second"))

    async def go() -> Grant:
        grant = await swarm.steps.grant(2)
        waiting = asyncio.create_task(second.grant(2))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        await swarm.through(key(), rows(1), weight=grant.weight)
        assert await swarm.steps.done(grant.lease, [key().receipt])
        await swarm.record(0)
        return await waiting

    grant = swarm.run(go())
    assert (grant.step, grant.first, second.version) == (1, 0, 1)


def test_a_withdrawn_batch_leaves_the_step_to_the_others(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", target_batch_size=4)

    async def go() -> Record:
        withdrawn = await swarm.steps.grant(2)
        assert await swarm.steps.withdraw(withdrawn.lease) is False
        assert await swarm.batch(rows(1)) is False
        assert await swarm.batch(rows(2)) is True
        return await swarm.record(0)

    assert swarm.counted(swarm.run(go())) == [(2, 0, 0), (4, 0, 0)]


def test_an_empty_step_changes_no_weights(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(swarm.step(rows(1)))
    before = {name: tensor.clone() for name, tensor in swarm.weights().items()}

    async def go() -> Record:
        assert await swarm.steps.close()
        return await swarm.record(1)

    assert swarm.counted(swarm.run(go())) == []
    assert {server.steps.version for server in swarm.servers.values()} == {2}
    assert all(torch.equal(before[name], tensor) for name, tensor in swarm.weights().items())


def test_a_window_divides_the_sum(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")

    async def go() -> None:
        await swarm.batch(rows(1))
        await swarm.steps.close(total_weight=4.0)
        await swarm.record(0)

    swarm.run(go())
    plain_steps(swarm.module, [[rows(1)]], divisors=[4.0])
    torch.testing.assert_close(swarm.weights(), dict(swarm.module.state_dict()))


# ---------------------------------------------------------------------- what trainers may not do


def batch_done(**changes: Any) -> BatchDone:
    fields: dict[str, Any] = {
        "step": 0,
        "lease": None,
        "completed": [],
        "withdrawn": False,
        "close": False,
        "total_weight": None,
        "generation": 0,
        "noted": EventLog().report(),
    }
    return BatchDone(**{**fields, **changes})


@pytest.mark.parametrize(
    ("caller", "request_", "words"),
    [
        (OTHER, batch_done(close=True), "the lead trainer closes"),
        (OTHER, batch_done(lease=1), "no open lease 1 of other"),
        (OTHER, batch_done(lease=1, withdrawn=True), "no open lease 1 of other"),
        (LEAD, batch_done(lease=2), "no open lease 2"),
        (LEAD, batch_done(lease=1, completed=[(5, 0, 0)]), "receipts of other places"),
        (LEAD, batch_done(lease=1, completed=[(0, 0, 0)] * 2), "one twice"),
        (LEAD, batch_done(step=1, close=True), "step 0 is open"),
        (LEAD, batch_done(close=True, total_weight=0.0), "total_weight"),
        (LEAD, batch_done(close=True, total_weight=math.nan), "total_weight"),
    ],
)
def test_what_a_trainer_may_not_say_changes_nothing(
    make_swarm: MakeSwarm, caller: PeerId, request_: BatchDone, words: str
) -> None:
    swarm = make_swarm("a")
    other = swarm.network.transport(OTHER)
    swarm.run(swarm.steps.grant(2))
    before = swarm.state()
    transport = swarm.trainer if caller == LEAD else other
    with pytest.raises(ProtocolError, match=words):
        swarm.run(transport.call(A, DONE.name, encode(request_), timeout=1.0))
    swarm.settle()
    assert swarm.state() == before


def test_a_request_to_close_that_comes_late_closes_no_later_step(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    swarm.run(swarm.step(rows(1)))
    before = swarm.state()
    request = batch_done(close=True, noted=swarm.steps.events.report())
    body = swarm.run(swarm.trainer.call(A, DONE.name, encode(request), timeout=1.0))
    assert decode(body, BatchDoneReply).closing, "whoever missed the answer finds the record"
    assert swarm.state() == before


def test_hyperparameters_come_from_the_lead_alone(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    other = swarm.client(swarm.network.transport(OTHER))
    other.hyperparameters = lambda: [{"lr": 1e9}]

    async def go() -> Record:
        await swarm.batch(rows(1))
        await swarm.steps.close()
        waiting = asyncio.create_task(other.wait_for_record(0))
        await asyncio.sleep(1.0)
        record = await swarm.record(0)
        assert await waiting == record
        return record

    assert swarm.run(go()).hyperparameters == HYPERPARAMETERS


def test_a_trainer_cannot_be_ahead_of_the_coordinator(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    with pytest.raises(ProtocolError, match="step 0 is open"):
        swarm.run(
            swarm.trainer.call(A, GRANT.name, encode(GrantRequest(step=1, num_samples=1, generation=0)), timeout=1.0)
        )
    with pytest.raises(ProtocolError, match="step 0 is open"):
        swarm.run(swarm.record(1))
    swarm.run(swarm.step(rows(1)))
    body = swarm.run(
        swarm.trainer.call(A, GRANT.name, encode(GrantRequest(step=0, num_samples=1, generation=0)), timeout=1.0)
    )
    wait = decode(body, GrantReply).wait
    assert wait is not None
    assert wait.step == 0, "one that is behind waits for what was decided"


# ---------------------------------------------------------------------- steps that fail


def assert_undecided(swarm: Swarm, words: str) -> None:
    """Check that the step fails for all its callers, no voter accepted a record, and no weight changed."""
    start = {name: tensor.clone() for name, tensor in swarm.weights().items()}
    with pytest.raises(StepError, match=words):
        swarm.run(swarm.step(rows(1), rows(2)))
    with pytest.raises(StepError, match=words):
        swarm.run(swarm.record(0))
    assert all(server.steps.version == 0 for server in swarm.servers.values())
    assert all(torch.equal(start[name], tensor) for name, tensor in swarm.weights().items())
    assert all(not server.voter._accepted for server in swarm.servers.values())


def step_without(swarm: Swarm, peer: PeerId) -> Event:
    """Run a step that excludes a server and repeats its batch; return the event with the reason."""

    async def step() -> Record:
        await swarm.batch(rows(1), rows(2))
        await swarm.steps.close()
        assert await swarm.steps.wait_for_record(0) is None
        swarm.rosters[1].remove(peer)
        return await swarm.step(rows(1), rows(2))

    record = swarm.run(step())
    assert [one.member.peer_id for one in record.left] == [peer]
    (event,) = (event for event in swarm.events(A) if event.kind == "gone")
    assert event.reason.startswith(str(record.left[0].reason))
    return event


def test_a_replica_whose_optimizer_state_differs_is_left_out(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "c b")
    stage = swarm.servers[B].steps.stage(1)
    momentum = {"momentum_buffer": torch.zeros(())}
    stage.optimizer.torch_optimizer.state[stage.trainable[0]] = momentum
    name = next(name for name, own in stage.optimizer._stepped.items() if own is stage.trainable[0])
    assert f"differ in 'optimizer state of {name}' from those of c, which has" in step_without(swarm, B).reason


def test_a_replica_whose_weights_differ_is_left_out_with_what_passed_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c")
    name, weight = next(iter(swarm.servers[C].steps.stage(1).module.named_stage_tensors().items()))
    with torch.no_grad():
        weight[0] += 1e-6
    assert f"differ in '{name}' from those of b, which has been in the stage longest. " in step_without(swarm, C).reason


def test_a_replica_that_says_no_hash_of_its_weights_is_left_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm("a", "b c")
    monkeypatch.setattr(swarm.servers[C].steps.sums, "_is_compared", lambda _: False)
    assert "of c differ from those of 1 of 2 replicas" in step_without(swarm, C).reason


def test_a_restarted_server_fails_the_step(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.servers[B].steps._me = Member(peer_id=B, boot_id=999)
    assert_undecided(swarm, "b was restarted")


def test_a_bug_while_closing_reaches_who_waits() -> None:
    """The server also ends."""
    swarm = Swarm("a")

    async def odd(*_: object, **__: object) -> float:
        raise ZeroDivisionError("a bug")

    swarm.coordinator.generation._step_commit._servers.average = odd  # type: ignore[method-assign]
    assert_undecided(swarm, "internal error: ZeroDivisionError")
    with pytest.raises(ExceptionGroup):
        swarm.close()


def test_a_negative_norm_is_no_norm(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = make_swarm("a", clip=1.0)
    average = swarm.servers[A].steps.rounds._average_stage

    async def negative(*args: Any) -> AveragingResult:
        return (await average(*args))._replace(squared_norm=-1.0)

    monkeypatch.setattr(swarm.servers[A].steps.rounds, "_average_stage", negative)
    assert_undecided(swarm, "must not be negative")


def test_a_step_needs_hyperparameters(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")

    async def go() -> None:
        await swarm.steps.close()
        await swarm.record(0)

    swarm.steps.hyperparameters = None
    with pytest.raises(ProtocolError, match="hyperparameters"):
        swarm.run(go())


def test_nobody_waits_for_the_record_of_a_step_that_takes_batches(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    assert swarm.run(swarm.steps.wait_for_record(0)) is None
    assert swarm.loop.time() < 1.0


def test_every_wait_for_a_record_has_a_deadline(make_swarm: MakeSwarm) -> None:
    """A live trainer that does not finish its batch is passed over."""
    swarm = make_swarm("a", target_batch_size=4)
    other = swarm.client(swarm.network.transport(OTHER))

    async def go() -> None:
        await swarm.batch(rows(1))
        late = await other.grant(2)
        assert await swarm.steps.wait_for_record(0) is None
        assert 30.0 <= swarm.loop.time() < 60.0
        await swarm.batch(rows(2))
        assert batches_of(await swarm.record(0)) == [0, 4]
        with pytest.raises(LeaseRevoked, match="struck from step 0, which is decided"):
            await other.done(late.lease, [])

    swarm.run(go())
    (event,) = swarm.events(A)
    assert (event.kind, event.peer, event.step) == ("strike", OTHER, 0)
    assert "not complete 30 s after its step was full. Raise `Limits.call_timeout`" in event.reason


# ---------------------------------------------------------------------- between freeze and record


def test_none_is_added_after_a_closing_that_does_not_name_it_here(make_swarm: MakeSwarm) -> None:
    """A late copy of a microbatch that counts on another replica would be in the mean twice."""
    swarm = make_swarm("a", "b c")
    refusals: list[Any] = []
    source = result_of(A, key(), 0, "forward")
    for phase in (FREEZE.name, AVERAGE.name):
        handler = swarm.servers[C]._transport._call_handlers[phase]  # type: ignore[attr-defined]

        async def late(caller: PeerId, body: bytes, handler: Any = handler) -> bytes:
            answer: bytes = await handler(caller, body)
            request = swarm.backward_request(key(), 1, [A, C], rows(1), again=(None, {}), inputs=source)
            await swarm.send(C, BACKWARD.name, request)
            with pytest.raises(LeaseRevoked, match="its closing does not name"):
                await swarm.tickets.wait(result_of(C, key(), 1, "backward"), timeout=1.0)
            refusals.append(caller)
            return answer

        swarm.servers[C]._transport._call_handlers[phase] = late  # type: ignore[attr-defined]

    swarm.run(swarm.step(rows(1)))

    assert len(refusals) == 2
    plain_steps(swarm.module, [[rows(1)]], divisors=[1.0])
    torch.testing.assert_close(swarm.weights(), dict(swarm.module.state_dict()))


def test_what_is_averaged_is_exactly_the_named_receipts(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    coordinator = swarm.servers[A]._transport
    swarm.run(swarm.through(key(), rows(1)))
    swarm.run(swarm.through(key(0, 1), rows(2)))

    def average(held: bytes, stage: int = 1, weight: float = 1.0, **changes: Any) -> AverageRequest:
        receipts, origins = ([(0, 0, held)], [(weight, LEAD, 1)]) if held else ([], [])
        named = NamedReceipts(stage_index=stage, receipts=receipts, origins=origins)
        return AverageRequest(closing=closing(num_samples=4, **changes), named=[named])

    def refused(method: str, request_: AverageRequest | FreezeRequest) -> None:
        before = swarm.state()
        with pytest.raises(ProtocolError):
            swarm.run(coordinator.call(B, method, encode(request_), timeout=1.0))
        assert swarm.state() == before

    refused(AVERAGE.name, average(b"\x03"))  # not frozen
    freeze = FreezeRequest(generation=0, step=0)
    late: list[dict[str, int]] = [{"generation": 1}, {"step": 1}]
    for changes in late:
        refused(FREEZE.name, replaced(freeze, **changes))
    expected = average(b"").closing
    for changes in ({"generation": 1}, {"step": 1}, {"round": 1}):
        refused(FREEZE.name, replaced(freeze, expected=replaced(expected, **changes)))
    swarm.run(coordinator.call(B, FREEZE.name, encode(freeze), timeout=1.0))
    for changes in late:
        refused(AVERAGE.name, average(b"\x03", **changes))
    for held in (b"\x01", b"\x02", b"\x07", b"\0", b"", b"\x03\x01"):
        refused(AVERAGE.name, average(held))
    refused(AVERAGE.name, average(b"\x03", stage=0))
    refused(AVERAGE.name, average(b"\x03", weight=2.0))
    refused(AVERAGE.name, average(b"\x03", absent=[B]))
    swarm.run(coordinator.call(B, AVERAGE.name, encode(average(b"\x03")), timeout=1.0))


def test_a_step_that_is_full_and_closed_at_once_is_decided_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", target_batch_size=2)
    frozen: list[bytes] = []
    handler = swarm.servers[B]._transport._call_handlers[FREEZE.name]  # type: ignore[attr-defined]

    async def counting(caller: PeerId, body: bytes) -> bytes:
        frozen.append(body)
        answer: bytes = await handler(caller, body)
        return answer

    swarm.servers[B]._transport._call_handlers[FREEZE.name] = counting  # type: ignore[attr-defined]

    async def go() -> None:
        assert await swarm.batch(rows(1))
        assert await swarm.steps.close()
        await swarm.record(0)

    swarm.run(go())
    swarm.settle()
    assert len(frozen) == 1
    assert swarm.run(swarm.step(rows(2))).step == 1


def test_a_step_frees_what_it_held(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b", "c")
    swarm.run(swarm.step(rows(1), rows(2)))
    for server in swarm.servers.values():
        assert not server._tickets._entries
        assert server.calls.cache.used_bytes == 0
        for index in server.steps.stages:
            stage = server.steps.stage(index)
            assert not stage.next_sum.values.any()
            assert not any(stage.next_sum.touched)
            assert all(parameter.grad is None for parameter in stage.trainable)
