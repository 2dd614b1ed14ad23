"""A server's data plane by raw calls: equal results for equal keys, each gradient once, late calls refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import force_setattr
from msgspec.structs import replace as replaced

from lightning_swarm.client import model_state
from lightning_swarm.coordinator import server_calls
from lightning_swarm.coordinator.coordinator import CoordinatorGeneration
from lightning_swarm.core.errors import (
    Busy,
    ConfigError,
    DeadlineExceeded,
    GradientMissing,
    InputMissing,
    LeaseRevoked,
    ProtocolError,
    StageError,
    SwarmError,
    TicketGone,
)
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId
from lightning_swarm.peer import discovery
from lightning_swarm.protocol.messages.calls import CallReport, CancelRequest, ForwardRequest, StageReport, Ticket
from lightning_swarm.protocol.messages.run import Member, StageManifest, WatchReply, WatchRequest
from lightning_swarm.protocol.messages.state import StageState, StateRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import ADMIT, BACKWARD, CANCEL, FORWARD, LEAVE, LOAD, STATE, WATCH
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.protocol.tickets import TicketStore, with_key
from lightning_swarm.server.executor import InlineExecutor, Priority
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer import handlers
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, MODE, RESULT_KEY, Swarm, key, make_module, plain_steps, result_of, rows

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def parameter_gradients(swarm: Swarm, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the sum of one machine's gradients for each stage."""
    module = make_module(len(swarm.rosters))
    for x in inputs:
        (module(x).square().sum() / 2).backward()
    return [torch.cat([p.grad.flatten() for p in block.parameters() if p.grad is not None]) for block in module]


def sums(swarm: Swarm, route: list[PeerId]) -> list[torch.Tensor]:
    return [swarm.servers[peer].steps.stage(i).next_sum.values.clone() for i, peer in enumerate(route)]


@pytest.mark.parametrize("rosters", [("a", "b"), ("a", "b", "c"), ("a", "a", "a"), ("a",)])
def test_forward_and_backward_give_what_one_machine_would(make_swarm: MakeSwarm, rosters: tuple[str, ...]) -> None:
    swarm, x = make_swarm(*rosters), rows(1)

    output = swarm.run(swarm.through(key(), x))

    leaf = x.clone().requires_grad_()
    expected = swarm.module(leaf)
    (expected.square().sum() / 2).backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(swarm.run(swarm.input_gradient(key(), swarm.route()[0])), leaf.grad)
    for found, wanted in zip(sums(swarm, swarm.route()), parameter_gradients(swarm, x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_gradient_enters_the_sum_times_its_weight(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    swarm.run(swarm.through(key(), x, weight=3.0))
    for found, wanted in zip(sums(swarm, [A, B]), parameter_gradients(swarm, x), strict=True):
        torch.testing.assert_close(found, 3 * wanted)


def test_the_data_goes_from_peer_to_peer_and_not_through_the_trainer(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", "c")
    swarm.run(swarm.through(key(), rows(1, 1000)))
    sent_bytes = swarm.servers[B]._transport.traffic.sent_bytes

    def b_to(peer: PeerId) -> int:
        return sum(num_bytes for (to, _), num_bytes in sent_bytes.items() if to == peer)

    activation_bytes = rows(1, 1000).nbytes
    assert b_to(C) > activation_bytes
    assert b_to(A) > activation_bytes
    assert b_to(LEAD) < activation_bytes / 10


def own(report: CallReport) -> StageReport:
    return StageReport(busy_s=report.busy_s, queued=report.queued, receipt=report.receipt)


def test_reports_hold_no_reports_and_are_not_many() -> None:
    def report(*others: StageReport) -> CallReport:
        return CallReport(busy_s=1.0, queued=0, others=others)

    for hostile in (report(report(report())), report(*[own(report())] * 2000)):
        with pytest.raises(ProtocolError):
            decode(encode(hostile), CallReport)
    assert decode(encode(report(own(report()))), CallReport) == report(own(report()))


def test_a_stage_reports_those_after_it(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b", "c"), rows(1)
    output = swarm.run(swarm.forward(key(), x))
    first, second, third = swarm.run(swarm.backward(key(), output))
    assert first.receipt
    assert first.others == (own(second), own(third))
    assert second.others == (own(third),)
    assert third.others == ()


def test_at_most_one_addition_per_key(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    output = swarm.run(swarm.through(key(), x))
    before = swarm.state()

    assert torch.equal(swarm.run(swarm.forward(key(), x)), output)
    for _ in range(3):
        swarm.run(swarm.send(A, BACKWARD.name, swarm.backward_request(key(), 0, [A, B], output)))
    for _ in range(3):
        assert again_from_nothing(swarm, x, output) == [True, True]

    assert swarm.state() == before


def again_from_nothing(swarm: Swarm, x: torch.Tensor, output: torch.Tensor) -> list[bool]:
    """Call backward with its inputs, after the servers have lost all caches."""
    for server in swarm.servers.values():
        server.calls.cache.drop("")
        server._tickets.drop(key().name(1, "backward", LEAD))
        server._tickets.drop(key().name(0, "backward", LEAD))
    source = result_of(A, key(), 0, "forward")

    async def go() -> list[bool]:
        message = swarm.backward_request(key(), 1, [A, B], output, again=(None, {}), inputs=source)
        await swarm.send(B, BACKWARD.name, message)
        message = swarm.backward_request(key(), 0, [A, B], output, again=((x,), {}))
        await swarm.send(A, BACKWARD.name, message)
        return [report.receipt for report in await swarm.receipts(key(), [A, B])]

    return swarm.run(go())


def test_a_repeated_call_is_computed_once(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)

    async def go() -> None:
        await asyncio.gather(*(swarm.forward(key(), x) for _ in range(5)))

    swarm.run(go())
    assert [server.calls.num_forwards for server in swarm.servers.values()] == [1, 1]


def test_a_recomputation_from_nothing_gives_the_same_sum(make_swarm: MakeSwarm) -> None:
    kept, x = make_swarm("a", "b"), rows(1)
    output = kept.run(kept.through(key(), x))
    lost = make_swarm("a", "b")
    lost.run(lost.forward(key(), x))

    assert again_from_nothing(lost, x, output) == [True, True]

    for one, other in zip(sums(kept, [A, B]), sums(lost, [A, B]), strict=True):
        assert torch.equal(one, other)


def test_what_is_not_kept_is_asked_for(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b", limits=Limits(cache_bytes=0, call_timeout=30.0)), rows(1)
    output = swarm.run(swarm.forward(key(), x))
    before = swarm.state()
    with pytest.raises(TicketGone, match="send its input with the backward"):
        swarm.run(swarm.backward(key(), output))
    assert swarm.state() == before


def test_recomputing_without_accumulating_adds_nothing(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    before = swarm.state()

    output = swarm.run(swarm.forward(key(), x))
    reports = swarm.run(swarm.backward(key(), output, accumulate=False))

    assert [report.receipt for report in reports] == [False, False]
    assert swarm.run(swarm.input_gradient(key(), A)) is not None
    assert swarm.state() == before


def test_an_evaluation_leaves_no_trace(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    before = swarm.state()
    mode = type(MODE)(training=False, grad=False, default_dtype="float64")

    output = swarm.run(swarm.forward(key(evaluation=True), x, mode=mode))

    torch.testing.assert_close(output, swarm.module(x))
    assert swarm.state() == before
    assert all(server.calls.cache.used_bytes == 0 for server in swarm.servers.values())
    with pytest.raises(ProtocolError, match="a backward must belong"):
        swarm.run(swarm.backward(key(evaluation=True), output, mode=mode, accumulate=False))


# ---------------------------------------------------------------------- cancelling


@pytest.mark.parametrize("changes", [{"evaluation": True}, {"input_only": 1}])
def test_a_backward_for_the_input_alone_adds_nothing_whatever_it_says(
    make_swarm: MakeSwarm, changes: dict[str, Any]
) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    k = key(**changes)
    output = swarm.run(swarm.forward(k, x))
    with pytest.raises(ProtocolError, match="must add nothing to a sum"):
        swarm.run(swarm.backward(k, output))

    reports = swarm.run(swarm.backward(k, output, accumulate=False))

    leaf = x.clone().requires_grad_()
    (swarm.module(leaf).square().sum() / 2).backward()
    torch.testing.assert_close(swarm.run(swarm.input_gradient(k, A)), leaf.grad)
    assert [report.receipt for report in reports] == [False, False]
    assert not any(values.any() for values in sums(swarm, swarm.route()))
    assert not any(server.steps.sums.ledgers[i].held for i, server in enumerate(swarm.servers.values()))


def test_each_backward_of_a_call_has_a_result_of_its_own(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a"), rows(1)
    output = swarm.run(swarm.forward(key(), x))
    again = ((x,), {})
    for number in (1, 2):
        k = key(input_only=number)
        swarm.run(swarm.backward(k, number * output, accumulate=False, again=again))
        found = swarm.run(swarm.input_gradient(k, A))
        assert found is not None
        torch.testing.assert_close(found, number * gradient_of(x))
    swarm.run(swarm.backward(key(), output, again=again))
    torch.testing.assert_close(swarm.run(swarm.input_gradient(key(), A)), gradient_of(x))
    torch.testing.assert_close(sums(swarm, [A])[0], parameter_gradients(swarm, x)[0])


def gradient_of(x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    (make_module(1)(leaf).square().sum() / 2).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_a_cancelled_call_adds_nothing_and_may_be_sent_again(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    output = swarm.run(swarm.forward(key(), x))
    before = swarm.state()

    async def cancelled() -> bool:
        # Its gradient never comes, so it waits.
        await swarm.send(A, BACKWARD.name, swarm.backward_request(key(), 0, [A, B], output))
        return await swarm.cancel(key(), 0, "backward", A)

    assert swarm.run(cancelled()) is False
    swarm.settle()
    assert swarm.state() == before
    num_forwards = swarm.servers[A].calls.num_forwards
    assert all(report.receipt for report in swarm.run(swarm.backward(key(), output)))
    assert swarm.servers[A].calls.num_forwards == num_forwards, "it gave away what it had kept, for nothing"


def test_no_peer_reads_results_that_it_was_not_told_of(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b c"), rows(1)
    stranger = TicketStore(swarm.network.transport("stranger"), max_bytes=1 << 20)
    names = [
        (A, key().name(0, "forward", LEAD)),
        (B, key().name(1, "forward", LEAD)),
        (A, key().name(0, "backward", LEAD)),
    ]

    async def guess() -> int:
        num_refused = 0
        for store in (stranger, swarm.servers[C]._tickets):  # a member is not entitled either
            for peer, name in names:
                for take in (store.wait, store.fetch):
                    with pytest.raises((TicketGone, DeadlineExceeded)):
                        await take(Ticket(peer_id=peer, name=name, key=None), timeout=1.0)
                    num_refused += 1
        return num_refused

    output = swarm.run(swarm.forward(key(), x))
    swarm.run(guess())
    reports = swarm.run(swarm.backward(key(), output))
    assert swarm.run(guess()) == 2 * 3 * 2
    assert all(report.receipt for report in reports)
    assert swarm.run(swarm.input_gradient(key(), A)) is not None


def test_a_malformed_gradient_adds_nothing_and_another_one_may_come(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    output = swarm.run(swarm.forward(key(), x))
    before = swarm.state()
    name, sender = key().name(1, "backward", LEAD), swarm.servers[B]._tickets
    sender.promise(name, with_key(RESULT_KEY))
    sender.fulfil(name, Message(b"nonsense"), encode(CallReport(busy_s=0.0, queued=0)), once=True)

    async def received() -> None:
        await swarm.send(A, BACKWARD.name, swarm.backward_request(key(), 0, [A, B], output))
        await swarm.tickets.wait(result_of(A, key(), 0, "backward"), timeout=30.0)

    with pytest.raises(GradientMissing, match=r"did not come from b: .* must hold one Computed"):
        swarm.run(received())
    assert swarm.state() == before
    sender.drop(name)
    assert all(report.receipt for report in swarm.run(swarm.backward(key(), output))), "what A had kept is still there"


def test_a_cancel_that_comes_too_late_says_so(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    swarm.run(swarm.through(key(), x))
    before = swarm.state()

    assert swarm.run(swarm.cancel(key(), 0, "backward", A)) is True
    assert swarm.run(swarm.cancel(key(0, 1), 0, "backward", A)) is False
    assert swarm.run(swarm.cancel(key(), 0, "forward", A)) is False

    assert swarm.state() == before


class Unstoppable(InlineExecutor):
    """Like a compute thread: a job that has begun runs to its end, even if its caller has given up."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[asyncio.Future[Any], Callable[[], Any]]] | None = None

    def submit(self, priority: Priority, run: Callable[[], Any]) -> asyncio.Future[Any]:
        if self.held is None:
            return super().submit(priority, run)
        future = asyncio.get_running_loop().create_future()
        self.held.append((future, run))
        return future

    def finish(self) -> None:
        held, self.held = self.held or [], None
        for future, run in held:
            result = run()
            if not future.cancelled():
                future.set_result((result, 0.0))


def test_none_is_added_after_a_cancel_that_said_so(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a"), rows(1)
    server, executor = swarm.servers[A], Unstoppable()
    server.calls._executor = executor
    output = swarm.run(swarm.forward(key(), x))

    async def go() -> bool:
        executor.held = []
        await swarm.send(A, BACKWARD.name, swarm.backward_request(key(), 0, [A], output))
        await asyncio.sleep(1.0)
        assert len(executor.held) == 1, "it computes"
        cancelling = asyncio.create_task(swarm.cancel(key(), 0, "backward", A))
        await asyncio.sleep(1.0)
        executor.finish()
        return await cancelling

    said_added = swarm.run(go())
    assert server.steps.stage(0).next_sum.values.any()
    assert said_added, "it said never, and added"


def test_nobody_who_waits_for_a_cancelled_call_is_sent_away(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b", "c"), rows(1)
    route = swarm.route()

    async def go() -> torch.Tensor:
        for stage in (1, 2):
            await swarm.send(route[stage], FORWARD.name, swarm.forward_request(key(), stage, route, x))
        await asyncio.sleep(1.0)
        assert await swarm.cancel(key(), 1, "forward", B) is False
        return await swarm.forward(key(), x)

    torch.testing.assert_close(swarm.run(go()), swarm.module(x))


def test_a_call_that_was_cancelled_and_sent_again_can_be_cancelled_again(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)

    async def go() -> None:
        here = swarm.servers[B]._transport  # a peer that calls itself, so that its calls have no time to end
        body = encode(CancelRequest(key=key(), stage_index=1, direction="forward"))
        for _ in range(3):
            await here.call(B, FORWARD.name, swarm.forward_request(key(), 1, [A, B], x).body, timeout=1.0)
            assert len(swarm.servers[B].calls.under_way.tasks) == 1
            await asyncio.sleep(1.0)
            await here.call(B, CANCEL.name, body, timeout=1.0)
            assert not swarm.servers[B].calls.under_way.tasks

    swarm.run(go())
    torch.testing.assert_close(swarm.run(swarm.forward(key(), x)), swarm.module(x))


def test_a_call_that_was_given_up_and_sent_again_at_once_can_be_cancelled(make_swarm: MakeSwarm) -> None:
    """The first call ends a little later, which must not remove the second call."""
    swarm, x = make_swarm("a", "b"), rows(1)
    server = swarm.servers[B]

    async def go() -> None:
        here = server._transport  # calls itself, as above
        request = swarm.forward_request(key(), 1, [A, B], x).body
        await here.call(B, FORWARD.name, request, timeout=1.0)
        (first,) = server.calls.under_way.tasks.values()
        await asyncio.sleep(1.0)
        server.calls.give_up(key().name(1, "forward", B))
        await here.call(B, FORWARD.name, request, timeout=1.0)
        assert not first.done()
        await asyncio.sleep(1.0)
        assert first.done()
        (second,) = server.calls.under_way.tasks.values()
        await here.call(
            B, CANCEL.name, encode(CancelRequest(key=key(), stage_index=1, direction="forward")), timeout=1.0
        )
        assert second.cancelled()

    swarm.run(go())


# ---------------------------------------------------------------------- limits and failures


def test_a_full_server_says_busy_but_takes_backwards_and_repetitions(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b", limits=Limits(max_pending_calls=1, call_timeout=30.0)), rows(1)
    output = swarm.run(swarm.forward(key(0, 1), x))

    async def go() -> None:
        await swarm.send(B, FORWARD.name, swarm.forward_request(key(), 1, [A, B], x))
        await swarm.send(B, FORWARD.name, swarm.forward_request(key(), 1, [A, B], x))
        with pytest.raises(Busy):
            await swarm.send(B, FORWARD.name, swarm.forward_request(key(0, 2), 1, [A, B], x))
        assert all(report.receipt for report in await swarm.backward(key(0, 1), output))

    swarm.run(go())


def test_an_input_that_never_comes_blames_its_sender(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)

    async def go() -> Message:
        await swarm.send(B, FORWARD.name, swarm.forward_request(key(), 1, [A, B], x))
        return await swarm.tickets.fetch(result_of(B, key(), 1, "forward"), timeout=100.0)

    with pytest.raises(InputMissing, match="did not come from a"):
        swarm.run(go())


def test_the_models_own_error_reaches_the_trainer_from_any_stage(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", "c")
    before = swarm.state()
    raised = "stage 0 raised RuntimeError on peer a"
    with pytest.raises(InputMissing, match=raised):
        swarm.run(swarm.forward(key(), torch.ones(2, 17, dtype=torch.float64)))
    with pytest.raises(StageError, match=raised):
        swarm.run(swarm.tickets.wait(result_of(A, key(), 0, "forward"), timeout=1.0))
    assert swarm.state() == before
    swarm.run(swarm.through(key(), rows(1)))  # a failure is not permanent


# ---------------------------------------------------------------------- late and foreign calls

FOREIGN = {
    "another generation": {"generation": 1},
    "a step that was decided": {"step": 0},
}


@pytest.mark.parametrize("changes", FOREIGN.values(), ids=FOREIGN.keys())
def test_forward_and_backward_share_version_and_generation(make_swarm: MakeSwarm, changes: dict[str, int]) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    swarm.run(swarm.step(x))
    foreign = key(**{"step": 1, **changes})
    before = swarm.state()

    # A server that was silent when the step was decided is notified that it may begin anew.
    refusal = LeaseRevoked if changes == {"step": 0} else ProtocolError
    with pytest.raises(refusal):
        swarm.run(swarm.forward(foreign, x))
    for stage, peer in enumerate("ab"):
        message = swarm.backward_request(foreign, stage, [A, B], x)
        with pytest.raises(refusal):
            swarm.run(swarm.send(PeerId(peer), BACKWARD.name, message))
        with pytest.raises(refusal):
            swarm.run(swarm.cancel(foreign, stage, "backward", PeerId(peer)))

    swarm.settle()
    assert swarm.state() == before


def test_a_call_of_a_later_step_waits_for_its_weights(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)

    async def go() -> torch.Tensor:
        early = asyncio.create_task(swarm.forward(key(step=1), x))
        await swarm.step(x)
        return await early

    output = swarm.run(go())
    plain_steps(swarm.module, [[x]], divisors=[1.0])
    torch.testing.assert_close(output, swarm.module(x))


def test_a_backward_of_a_later_step_is_refused(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a"), rows(1)
    before = swarm.state()
    for accumulate in (True, False):
        message = swarm.backward_request(key(step=1), 0, [A], x, accumulate=accumulate, again=((x,), {}))
        with pytest.raises(ProtocolError, match="one of the open steps \\[0\\]"):
            swarm.run(swarm.send(A, BACKWARD.name, message))
    assert swarm.state() == before


def test_a_stage_that_a_peer_does_not_hold_is_refused(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    for stage in (1, 2, 10**6):
        request = swarm.forward_request(key(), 0, [A, B], x)
        body = encode(replaced(decode(request.body, ForwardRequest), stage_index=stage))
        with pytest.raises(ProtocolError, match="this peer serves the stages"):
            swarm.run(swarm.send(A, FORWARD.name, Message(body, request.tensors)))


BAD_BACKWARDS: dict[str, dict[str, Any]] = {
    "NaN weight": {"weight": math.nan},
    "infinite weight": {"weight": math.inf},
    "negative weight": {"weight": -1.0},
    "no gradients kept": {"mode": type(MODE)(training=True, grad=False)},
    "more gradients named than came": {"structure": ["tuple", ["list", ["tensor", 0], ["tensor", 1]], None]},
    "more tensors than named": {"structure": ["tuple", ["list"], None]},
    "no list of gradients": {"structure": ["tuple", ["tensor", 0], None]},
    "no pair": {"structure": ["list", ["tensor", 0]]},
    "inputs from somewhere, and no extras": {"inputs": Ticket(peer_id=A, name="there", key=None)},
    "inputs from somewhere, and with it": {
        "structure": ["tuple", ["list"], ["tuple", ["tuple", ["tensor", 0]], {}]],
        "inputs": Ticket(peer_id=A, name="there", key=None),
    },
}


@pytest.mark.parametrize("changes", BAD_BACKWARDS.values(), ids=BAD_BACKWARDS.keys())
def test_a_malformed_backward_adds_nothing(make_swarm: MakeSwarm, changes: dict[str, Any]) -> None:
    swarm, x = make_swarm("a"), rows(1)
    output = swarm.run(swarm.forward(key(), x))
    before = swarm.state()
    with pytest.raises(ProtocolError):
        swarm.run(swarm.send(A, BACKWARD.name, swarm.backward_request(key(), 0, [A], output, **dict(changes))))
    swarm.settle()
    assert swarm.state() == before
    assert swarm.run(swarm.backward(key(), output))[0].receipt, "a refused call took what the right one needs"


@pytest.mark.parametrize(
    "gradient", [torch.ones(2, 9).double(), torch.ones(3).double(), torch.ones(2, 3), torch.ones(2, 3).int()]
)
def test_a_gradient_of_the_wrong_shape_or_dtype_adds_nothing(make_swarm: MakeSwarm, gradient: torch.Tensor) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    swarm.run(swarm.forward(key(), x))
    before = swarm.state()
    with pytest.raises(SwarmError, match="got a gradient of shape"):
        swarm.run(swarm.backward(key(), gradient))
    swarm.settle()
    assert swarm.state() == before


# ---------------------------------------------------------------------- entering the run, reading


def weights_of(swarm: Swarm) -> Message:
    """Return the starter's weights of the first stage."""
    stage = swarm.stages[0]
    named = stage.named_stage_tensors()
    state, tensors = model_state._first_state(swarm.manifest, 0, [*named], named.values())
    return Message(encode(state), tuple(tensors))


def test_nothing_is_computed_with_weights_that_are_not_the_starters(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", admit=False), rows(1)
    with pytest.raises(ProtocolError, match="not admitted"):
        swarm.run(swarm.forward(key(), x))
    swarm.run(swarm.trainer.call(A, ADMIT.name, encode(swarm.manifest), timeout=1.0))
    with pytest.raises(ProtocolError, match="no weights yet"):
        swarm.run(swarm.forward(key(), x))
    with pytest.raises(ProtocolError, match="already"):
        swarm.run(discovery.admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=1.0))
    swarm.run(swarm.trainer.stream(A, LOAD.name, weights_of(swarm), timeout=1.0))
    torch.testing.assert_close(swarm.run(swarm.forward(key(), x)), swarm.module(x))


def test_two_admissions_at_once_admit_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", admit=False)

    async def go() -> list[Any]:
        calls = (swarm.trainer.call(A, ADMIT.name, encode(swarm.manifest), timeout=1.0) for _ in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = swarm.run(go())
    assert first == b""
    assert isinstance(second, ProtocolError)


def test_a_server_is_busy_to_those_that_watch_until_it_coordinates(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, start = make_swarm("a", admit=False), CoordinatorGeneration.start

    async def slow(self: CoordinatorGeneration) -> None:
        await asyncio.sleep(1.0)
        await start(self)

    async def watch() -> WatchReply:
        request = WatchRequest(term=RunState(swarm.manifest).term, version=0, hold_s=0.0)
        return decode(await swarm.trainer.call(A, WATCH.name, encode(request), timeout=1.0), WatchReply)

    async def go() -> None:
        admitting = asyncio.create_task(swarm.trainer.call(A, ADMIT.name, encode(swarm.manifest), timeout=5.0))
        await asyncio.sleep(0.5)
        with pytest.raises(Busy, match="not admitted"):
            await watch()
        await admitting
        assert (await watch()).coordinates

    monkeypatch.setattr(CoordinatorGeneration, "start", slow)
    swarm.run(go())


# ---------------------------------------------------------------------- leaving a run


def test_the_next_run_begins_when_nothing_is_left_of_the_one_before(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, x = make_swarm("a"), rows(1)
    server = swarm.servers[A]
    abort_all = server.calls.under_way.abort_all

    async def slow() -> None:
        await asyncio.sleep(1.0)
        await abort_all()

    async def go() -> None:
        releasing = asyncio.create_task(server.release())
        await asyncio.sleep(0.5)
        assert not server.membership.has_run
        await discovery.admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=10.0)
        await releasing

    monkeypatch.setattr(server.calls.under_way, "abort_all", slow)
    swarm.run(go())
    assert server.steps.stages == (0,), "it dropped the stages of the run that it had just entered"
    torch.testing.assert_close(swarm.run(swarm.forward(key(), x)), swarm.module(x))


def test_a_server_that_is_to_leave_a_run_does_not_leave_the_next_one(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    server = swarm.servers[A]

    async def go() -> None:
        leaving = [asyncio.create_task(server.step_out()) for _ in range(2)]
        await asyncio.sleep(0)
        await discovery.admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=10.0)
        await asyncio.gather(*leaving)

    swarm.run(go())
    assert server.membership.is_member
    assert server.steps.stages == (0,)


def test_a_job_of_a_run_that_was_left_meanwhile_changes_nothing(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, executor = make_swarm("a"), Unstoppable()
    server = swarm.servers[A]
    stage, executor.held = server.steps.stage(0), []
    gradients: dict[str, torch.Tensor | None] = {name: torch.ones_like(p) for name, p in stage.parameters.items()}
    monkeypatch.setattr(server._executor, "submit", executor.submit)

    async def go() -> None:
        adding = asyncio.create_task(server.steps.add_batch(0, key(), gradients, 1.0))
        await asyncio.sleep(0)
        releasing = asyncio.create_task(server.release())
        await asyncio.sleep(1.0)
        (_, add), *_ = executor.held or []
        with pytest.raises(ProtocolError, match="is not in a run yet"):
            add()
        executor.held = (executor.held or [])[1:]
        executor.finish()
        adding.cancel()
        await releasing

    swarm.run(go())
    assert not stage.next_sum.values.any()
    assert not server.steps.stages


def test_weights_change_only_by_records(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    before = swarm.state()
    with pytest.raises(ProtocolError, match="accepts its initial weights once"):
        swarm.run(swarm.trainer.stream(A, LOAD.name, weights_of(swarm), timeout=1.0))
    assert swarm.state() == before


def of_another_model(stage: StageManifest) -> StageManifest:
    (name, shape, dtype), *others = stage.parameters
    return replaced(stage, parameters=[(name, [*shape, 1], dtype), *others])


def for_no_samples() -> RunSettings:
    settings = RunSettings(target_batch_size=1)
    force_setattr(settings, "target_batch_size", 0)  # its own checks would refuse this
    return settings


REFUSED_MANIFESTS: dict[str, tuple[str, Callable[[StageManifest], dict[str, Any]]]] = {
    "version": (
        "`protocol_version` must be equal on all peers, and is 99 at the caller",
        lambda stage: {"protocol_version": 99},
    ),
    "sender": ("comes from its lead", lambda stage: {"lead": A}),
    "boot id": ("restarted", lambda stage: {"stages": [replaced(stage, roster=[Member(peer_id=A, boot_id=1)])]}),
    "parameters": ("stage 0 differs in", lambda stage: {"stages": [of_another_model(stage)]}),
    "blocks": ("has 1 blocks", lambda stage: {"stages": [replaced(stage, end_block=2)]}),
    "absurd blocks": ("has 1 blocks", lambda stage: {"stages": [replaced(stage, end_block=10**18)]}),
    "no stages": ("must cover blocks", lambda stage: {"stages": []}),
    "target": ("target_batch_size", lambda stage: {"settings": for_no_samples()}),
    "clipping": ("gradient_clip_norm", lambda stage: {"gradient_clip_norm": math.nan}),
    "clipping by value": ("gradient_clip_value", lambda stage: {"gradient_clip_value": 0.0}),
}


@pytest.mark.parametrize(("words", "change"), REFUSED_MANIFESTS.values(), ids=REFUSED_MANIFESTS.keys())
def test_a_manifest_that_does_not_fit_is_refused(
    make_swarm: MakeSwarm, words: str, change: Callable[[StageManifest], dict[str, Any]]
) -> None:
    swarm = make_swarm("a", admit=False)
    changed = replaced(swarm.manifest, **change(swarm.manifest.stages[0]))
    with pytest.raises((ProtocolError, ConfigError), match=words):
        swarm.run(swarm.trainer.call(A, ADMIT.name, encode(changed), timeout=1.0))
    assert not swarm.servers[A].steps.stages
    swarm.run(discovery.admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=1.0))


def test_only_the_lead_loads_and_ends(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    stranger = swarm.network.transport("stranger")
    state = StageState(stage_index=0, version=0, generation=0, optimizer=False, names=[], structure=None)
    with pytest.raises(ProtocolError, match="the lead trainer sends weights, not stranger"):
        swarm.run(stranger.stream(A, LOAD.name, Message(encode(state)), timeout=1.0))
    with pytest.raises(ProtocolError, match="ended by one of"):
        swarm.run(stranger.call(A, LEAVE.name, b"", timeout=1.0))
    assert not swarm.servers[A].admission.left.is_set()
    swarm.run(swarm.trainer.call(A, LEAVE.name, b"", timeout=1.0))
    assert swarm.servers[A].admission.left.is_set()


def test_who_ends_a_server_that_waits(make_swarm: MakeSwarm) -> None:
    host, stranger = PeerId("host"), PeerId("stranger")
    swarm = make_swarm("a", admit=False, hosts=[host])
    admission = swarm.servers[A].admission
    transports = {name: swarm.network.transport(name) for name in (host, stranger)}

    def leave(caller: PeerId) -> None:
        swarm.run(transports[caller].call(A, LEAVE.name, b"", timeout=1.0))

    with pytest.raises(ProtocolError, match=r"ended by one of \['host'\], not by stranger"):
        leave(stranger)
    assert not admission.left.is_set()
    leave(host)
    assert admission.left.is_set()


def test_who_ends_a_server_that_asks_to_join(make_swarm: MakeSwarm) -> None:
    """Only the coordinator that it asks can end it."""
    host, coordinator = PeerId("host"), PeerId("coordinator")
    swarm = make_swarm("a", admit=False, hosts=[host])
    admission = swarm.servers[A].admission
    transports = {name: swarm.network.transport(name) for name in (host, coordinator)}

    async def go() -> None:
        async with admission.joining_run(coordinator):
            with pytest.raises(ProtocolError, match=r"ended by one of \['coordinator'\], not by host"):
                await transports[host].call(A, LEAVE.name, b"", timeout=1.0)
            assert not admission.left.is_set()
            await transports[coordinator].call(A, LEAVE.name, b"", timeout=1.0)
            assert admission.left.is_set()

    swarm.run(go())


def test_the_end_of_a_run_that_could_not_begin(make_swarm: MakeSwarm) -> None:
    """Its lead notifies all servers that it wanted; a server that it did not get goes on waiting."""
    swarm = make_swarm("a", "b", admit=False)
    swarm.run(swarm.trainer.call(A, ADMIT.name, encode(swarm.manifest), timeout=1.0))
    swarm.run(server_calls.dismiss(swarm.trainer, RunState(swarm.manifest).servers, timeout=1.0))
    assert [server.admission.left.is_set() for server in swarm.servers.values()] == [True, False]


def test_records_change_no_state_that_is_being_sent(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records wait while the lead reads, so only its tensors may be those of the stage."""
    swarm = make_swarm("a b", trainers="trainer other", target_batch_size=4)
    stage, other = swarm.servers[A].steps.stage(0), swarm.network.transport(PeerId("other"))
    read, shared = handlers._state, list[bool]()

    def noted(stage: Stage, request: StateRequest, *, copy: bool) -> Any:
        reply, tensors = read(stage, request, copy=copy)
        shared.extend(
            own.data_ptr() == sent.data_ptr() for own, sent in zip(stage.weights().values(), tensors, strict=True)
        )
        return reply, tensors

    monkeypatch.setattr(handlers, "_state", noted)
    request = StateRequest(stage_index=stage.index, version=0, optimizer=False, generation=0)
    for reader in (swarm.trainer, other):
        swarm.run(STATE.ask(reader, A, request, timeout=100.0))
    assert shared == [True, True, False, False]


def test_a_state_is_read_at_its_version_only(make_swarm: MakeSwarm) -> None:
    swarm, x = make_swarm("a", "b"), rows(1)
    swarm.run(swarm.step(x))

    def read(step: int) -> Message:
        request = StateRequest(stage_index=0, version=step, optimizer=False, generation=0)
        return swarm.run(swarm.trainer.stream(A, STATE.name, Message(encode(request)), timeout=100.0))

    assert len(read(1).tensors) == 2
    for step in (0, 2):
        with pytest.raises(SwarmError, match="at version 1"):
            read(step)
