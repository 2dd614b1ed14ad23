"""A rollback: every server drops its state, and messages of the old generation count no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from msgspec import structs

from lightning_swarm.client import model_state
from lightning_swarm.client.run_generation import TrainerGeneration
from lightning_swarm.coordinator.rebalancing.balancer import Balancer
from lightning_swarm.coordinator.rebalancing.policy import StageRelease
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, PeerError, ProtocolError, SwarmError, Unreachable
from lightning_swarm.network import PeerId
from lightning_swarm.peer import discovery
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.batches import Grant, RecordRequest
from lightning_swarm.protocol.messages.run import RestartRequest, Selection, StepChange
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import APPLY, AVERAGE, FORWARD, FREEZE, RECORD, RESTART
from lightning_swarm.protocol.run_state import RunState
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import HYPERPARAMETERS, Swarm, key, make_module, plain_steps, rows

A, B, J = PeerId("a"), PeerId("b"), PeerId("j")


def restarting(swarm: Swarm, step: int = 0) -> RestartRequest:
    """Return a request to restart with the run's initial weights."""
    run = swarm.steps.run
    return RestartRequest(
        generation=run.manifest.generation + 1, first_step=step, seats=run.seats, selection=swarm.manifest.selection
    )


def go_back(swarm: Swarm, step: int = 0) -> None:
    """Restart the run at `step` with its initial weights."""
    asked = restarting(swarm, step)

    async def go() -> None:
        await discovery.restart(swarm.trainer, swarm.steps.run, asked, timeout=30.0)
        swarm.steps.enter_generation(asked)
        await model_state.scatter_weights(swarm.trainer, swarm.steps.run, swarm.stages, timeout=30.0)

    swarm.run(go())


async def step(swarm: Swarm, *seeds: int) -> Record:
    """Run a step of one batch in the current generation."""
    grant = await swarm.steps.grant(2 * len(seeds))
    done = []
    for index, seed in enumerate(seeds):
        k = key(grant.first, index, step=grant.step, generation=grant.generation)
        await swarm.through(k, rows(seed), route=swarm.route(index), weight=grant.weight)
        done.append(k.receipt)
    await swarm.steps.done(grant.lease, done, close=True)
    return await swarm.record(swarm.steps.version)


def assert_trains_as_from_the_beginning(swarm: Swarm, num_stages: int = 2) -> None:
    for seed in 1, 2, 3:
        swarm.run(step(swarm, seed, seed + 10))
    module = make_module(num_stages)
    plain_steps(module, [[rows(seed), rows(seed + 10)] for seed in (1, 2, 3)], divisors=[1.0] * 3)
    torch.testing.assert_close(swarm.weights(), dict(module.state_dict()))


@pytest.mark.parametrize("first_step", [0, 1, 2, 7])
def test_it_trains_as_if_nothing_had_been(make_swarm: MakeSwarm, first_step: int) -> None:
    """For any restart step, momenta, sums and books are reset."""
    swarm = make_swarm("a b", "c d")
    for seed in 5, 6:
        swarm.run(step(swarm, seed, seed + 1))
    go_back(swarm, first_step)
    assert_trains_as_from_the_beginning(swarm)
    assert {server.steps.version for server in swarm.servers.values()} == {first_step + 3}


def test_it_goes_back_again_and_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    for generation in range(1, 4):
        swarm.run(step(swarm, 5))
        go_back(swarm)
        assert {server.membership.run.manifest.generation for server in swarm.servers.values()} == {generation}
    assert_trains_as_from_the_beginning(swarm)


def test_a_server_that_missed_the_newest_record_goes_back_as_the_others_do(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That record admitted a server that also missed it, had another one give up a stage, and changed the voters."""
    swarm = make_swarm("a b", "b")
    swarm.join("j")
    handlers = {peer: swarm.network.find(peer)._call_handlers for peer in (B, J)}
    apply = {peer: one[APPLY.name] for peer, one in handlers.items()}
    sheds = [[StageRelease(B, 0)]]
    monkeypatch.setattr(Balancer, "releases", lambda *_, **__: sheds.pop() if sheds else [])

    async def lose(caller: PeerId, body: bytes) -> bytes:
        raise Unreachable("it was lost on its way")

    for one in handlers.values():
        one[APPLY.name] = lose
    swarm.run(step(swarm, 5, 6))
    assert [swarm.servers[peer].steps.version for peer in (A, B, J)] == [1, 0, 0]
    assert swarm.names_after(swarm.steps.generation.newest_record) == ["a", "bj"]
    go_back(swarm)
    for peer, one in handlers.items():
        one[APPLY.name] = apply[peer]
    swarm.rosters = [[A], [B, J]]
    assert_trains_as_from_the_beginning(swarm)
    assert all(server.membership.run.seats == swarm.steps.run.seats for server in swarm.servers.values())
    assert swarm.rosters_now == [[swarm.members[A]], [swarm.members[B], swarm.servers[J].membership.me]]
    assert [swarm.servers[peer].steps.stages for peer in (A, B, J)] == [(0,), (1,), (1,)]
    assert not swarm.servers[A].events.counts["gone"]


def test_how_long_a_stage_was_without_anybody_is_forgotten(make_swarm: MakeSwarm) -> None:
    """Otherwise this outage would shorten the wait in the next one."""
    swarm = make_swarm("a", "b")
    role = swarm.servers[A].admission.election.coordinator
    assert role is not None

    def wait(now_s: float) -> EventLog:
        context = role.generation.context
        context.outage.keep(1, {B: SwarmError("it is gone")}, step=0, address="here", now_s=now_s)
        return context.events

    wait(0.0)
    go_back(swarm)
    counts = wait(1e9).counts
    assert (counts["pause"], counts["resume"]) == (2, 1)


def test_what_trains_is_settled_anew(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(step(swarm, 5))
    groups = {name: 0 for name, _ in swarm.module.named_parameters()}
    swarm.run(swarm.steps.change(StepChange(selection=Selection(num_groups=1, groups=groups, frozen=["0.0.weight"]))))
    go_back(swarm)
    assert_trains_as_from_the_beginning(swarm)


def test_optimizer_state_comes_after_the_weights(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(step(swarm, 5))
    run = swarm.steps.run
    state = swarm.run(model_state.gather_optimizer(swarm.trainer, run, 1, timeout=1.0))
    copied = {name: {key: value.clone() for key, value in one.items()} for name, one in state.items()}
    go_back(swarm, 4)
    assert swarm.run(model_state.gather_optimizer(swarm.trainer, run, 4, timeout=1.0)) == {}
    swarm.run(model_state.scatter_optimizer(swarm.trainer, run, copied, timeout=1.0))
    found = swarm.run(model_state.gather_optimizer(swarm.trainer, run, 4, timeout=1.0))
    torch.testing.assert_close(found, copied, rtol=0.0, atol=0.0)


def test_a_microbatch_under_way_is_given_up(make_swarm: MakeSwarm) -> None:
    """One forward is cached, one gradient is in a sum, another call waits for an input that never comes."""
    swarm = make_swarm("a", "b")
    swarm.run(swarm.steps.grant(4))
    output = swarm.run(swarm.forward(key(), rows(5)))
    swarm.run(swarm.backward(key(), output))
    waiting = swarm.forward_request(key(0, 1), 1, [A, B], rows(6))
    swarm.run(swarm.send(B, FORWARD.name, waiting))
    assert swarm.servers[B].calls.under_way.tasks
    go_back(swarm)
    for server in swarm.servers.values():
        assert not server.calls.under_way.tasks
        assert not server._tickets._entries
        assert server.calls.cache.used_bytes == 0
        assert not server.steps.stage(server.steps.stages[0]).next_sum.values.any()
    assert_trains_as_from_the_beginning(swarm)


@pytest.mark.parametrize("method", [FREEZE.name, AVERAGE.name, APPLY.name])
def test_a_step_that_closes_is_given_up(make_swarm: MakeSwarm, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run rolls back while one server has not answered the coordinator yet; its answer comes too late."""
    swarm = make_swarm("a b", "c d")
    held, let_go = asyncio.Event(), asyncio.Event()
    handlers = swarm.servers[PeerId("d")]._transport._call_handlers  # type: ignore[attr-defined]
    handle = handlers[method]

    async def late(caller: PeerId, body: bytes) -> bytes:
        held.set()
        await let_go.wait()
        answer: bytes = await handle(caller, body)
        return answer

    monkeypatch.setitem(handlers, method, late)

    async def go() -> None:
        closing = asyncio.ensure_future(step(swarm, 5, 6))
        await held.wait()
        asked = restarting(swarm)
        await discovery.restart(swarm.trainer, swarm.steps.run, asked, timeout=30.0)
        let_go.set()
        with pytest.raises(ProtocolError, match="run generation is 1, got a call of 0"):
            await closing
        swarm.steps.enter_generation(asked)
        await model_state.scatter_weights(swarm.trainer, swarm.steps.run, swarm.stages, timeout=30.0)

    swarm.run(go())
    monkeypatch.undo()
    swarm.settle()
    assert_trains_as_from_the_beginning(swarm)


def old_calls(swarm: Swarm) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
    """Return the calls that a trainer of the old generation may still make for the open step."""
    steps = swarm.steps
    output = rows(7)
    old = RunState(swarm.manifest)
    state = {"0.0.weight": {"momentum_buffer": torch.ones(3, 3, dtype=torch.float64)}}
    return {
        "grant": lambda: steps.grant(2),
        "done": lambda: steps.close(),
        "record": lambda: steps.wait_for_record(0),
        "forward": lambda: swarm.forward(key(), rows(1)),
        "backward": lambda: swarm.backward(key(), output),
        "cancel": lambda: swarm.cancel(key(), 1, "forward", B),
        "state": lambda: model_state.gather_weights(swarm.trainer, old, 0, timeout=1.0),
        "weights": lambda: model_state.scatter_weights(swarm.trainer, old, swarm.stages, timeout=1.0),
        "optimizer": lambda: model_state.scatter_optimizer(swarm.trainer, old, state, timeout=1.0),
        "lend": lambda: model_state.set_evaluation_weights(swarm.trainer, old, swarm.stages, 1, timeout=1.0),
    }


OLD_CALLS = ["grant", "done", "record", "forward", "backward", "cancel", "state", "weights", "optimizer", "lend"]


@pytest.mark.parametrize("name", OLD_CALLS)
def test_the_old_generation_is_refused_and_changes_nothing(make_swarm: MakeSwarm, name: str) -> None:
    swarm = make_swarm("a", "b")
    go_back(swarm)
    swarm.steps.run.manifest = swarm.manifest  # it missed the restart
    swarm.steps.generation = TrainerGeneration(swarm.steps.run)
    before = swarm.state()
    with pytest.raises(ProtocolError, match="run generation is 1, got a call of 0"):
        swarm.run(old_calls(swarm)[name]())
    swarm.settle()
    assert swarm.state() == before


def test_who_waits_for_a_record_hears_of_the_next_generation_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    request = RecordRequest(step=0, generation=0, version=0, hyperparameters=HYPERPARAMETERS)

    async def go() -> None:
        await swarm.steps.grant(2)
        await swarm.steps.close()  # its batch is still under way
        waiting = asyncio.ensure_future(swarm.trainer.call(A, RECORD.name, encode(request), timeout=30.0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        begin_s = now_s()
        await discovery.restart(swarm.trainer, swarm.steps.run, restarting(swarm), timeout=30.0)
        with pytest.raises(ProtocolError, match="run generation is 1, got a call of 0"):
            await waiting
        assert now_s() - begin_s < 0.1

    swarm.run(go())


def test_what_an_old_call_still_does_begins_nothing_in_the_new_generation(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    first = swarm.run(swarm.steps.grant(2))
    assert isinstance(first, Grant)
    before = swarm.coordinator.generation
    go_back(swarm)
    assert swarm.coordinator.generation is not before
    with pytest.raises(Busy, match="rolled back meanwhile"):
        before.lease_expiry.fence(before.step_state.open, [0])
    second = swarm.run(swarm.steps.grant(2))
    assert isinstance(second, Grant)
    assert second.lease > first.lease, "a loop's state names by lease what was logged"


def test_what_the_old_generation_is_to_train_is_not_settled_in_the_next_one(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    groups = {name: 0 for name, _ in swarm.module.named_parameters()}
    asked = restarting(swarm)

    async def go() -> None:
        async with swarm.coordinator.generation.trainers._settling:
            selecting = asyncio.ensure_future(
                swarm.steps.change(StepChange(selection=Selection(num_groups=1, groups=groups, frozen=["0.0.weight"])))
            )
            await asyncio.sleep(0.1)
            await discovery.restart(swarm.trainer, swarm.steps.run, asked, timeout=30.0)
        with pytest.raises(ProtocolError, match="run generation is 1, got a call of 0"):
            await selecting
        swarm.steps.enter_generation(asked)
        await model_state.scatter_weights(swarm.trainer, swarm.steps.run, swarm.stages, timeout=30.0)

    swarm.run(go())
    assert_trains_as_from_the_beginning(swarm)


def test_weights_that_were_lent_are_gone(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(model_state.set_evaluation_weights(swarm.trainer, swarm.steps.run, swarm.stages, 1, timeout=1.0))
    go_back(swarm)
    with pytest.raises(PeerError, match="has no evaluation weights 1"):
        swarm.run(swarm.forward(key(generation=1, evaluation=True, weights=1), rows(1)))


def test_weights_that_come_as_the_run_goes_back_do_not_count(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm("a", "b")
    server = swarm.servers[B]
    submit = server._executor.submit

    async def go_back_now(*job: Any) -> Any:
        done = await submit(*job)
        monkeypatch.undo()
        await discovery.restart(swarm.trainer, swarm.steps.run, restarting(swarm), timeout=1.0)
        return done

    async def go() -> None:
        await discovery.restart(swarm.trainer, swarm.steps.run, restarting(swarm), timeout=1.0)
        swarm.steps.enter_generation(restarting(swarm))
        monkeypatch.setattr(server._executor, "submit", go_back_now)
        with pytest.raises(ProtocolError, match="run generation is 2, got a call of 1"):
            await model_state.scatter_weights(swarm.trainer, swarm.steps.run, swarm.stages, timeout=1.0)

    swarm.run(go())
    assert not server.membership.loaded


def test_nothing_is_computed_before_the_weights_come(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(discovery.restart(swarm.trainer, swarm.steps.run, restarting(swarm), timeout=1.0))
    with pytest.raises(ProtocolError, match="has no weights yet"):
        swarm.run(swarm.forward(key(generation=1), rows(1)))


@pytest.mark.parametrize(
    ("caller", "generation", "words"),
    [
        ("trainer", 0, "next generation is 1, got 0"),
        ("trainer", 2, "next generation is 1, got 2"),
        ("a", 1, "the lead trainer rolls a run back, not a"),
        ("other", 1, "the lead trainer rolls a run back, not other"),
    ],
)
def test_who_may_send_it_back_and_where_to(make_swarm: MakeSwarm, caller: str, generation: int, words: str) -> None:
    swarm = make_swarm("a", "b")
    transports = {"trainer": swarm.trainer, "a": swarm.servers[A]._transport}
    transport = transports.get(caller) or swarm.network.transport(PeerId(caller))
    before = swarm.state()
    body = encode(structs.replace(restarting(swarm), generation=generation))
    with pytest.raises(SwarmError, match=words):
        swarm.run(transport.call(B, RESTART.name, body, timeout=1.0))
    assert swarm.state() == before
