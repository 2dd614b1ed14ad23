"""A microbatch's pass through peers that are busy, have lost its state, or are far from the trainer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
import torch

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun
from lightning_swarm.client.pipeline.replay_buffer import Microbatch
from lightning_swarm.client.pipeline.router import StageRouter
from lightning_swarm.client.pipeline.stage_calls import StageCalls
from lightning_swarm.core.errors import DeadlineExceeded, LeaseRevoked, OutOfMemory, StageError, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.calls import CallReport, StageReport, Ticket
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import FORWARD
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, MODE, Swarm, key, prefer, rows

X = PeerId("x")


def make_context(swarm: Swarm) -> PipelineContext:
    routers = [StageRouter(random.Random(0)) for _ in swarm.rosters]
    for router, roster in zip(routers, swarm.rosters, strict=True):
        router.set_peers(roster)
    return PipelineContext(swarm.trainer, swarm.tickets, routers, 30.0, EventLog())


def make_run(context: PipelineContext, x: torch.Tensor, index: int = 0) -> MicrobatchRun:
    extras: list[dict[str, Any]] = [{} for _ in context.routers]
    microbatch = Microbatch(
        key=key(0, index), num_rows=len(x), inputs=(x,), extras=extras, modes=[MODE] * len(extras), weight=1.0
    )
    return MicrobatchRun(context, microbatch)


async def through(run: MicrobatchRun) -> torch.Tensor:
    output, _ = await run.forward()
    await run.backward([output])
    return output


def banned(swarm: Swarm, context: PipelineContext) -> set[PeerId]:
    async def look() -> set[PeerId]:
        return {
            peer for stage, roster in enumerate(swarm.rosters) for peer in roster if context.is_ejected(stage, peer)
        }

    return swarm.run(look())


def assert_sums(swarm: Swarm, inputs: list[torch.Tensor]) -> None:
    """Check that all sums of a stage together contain each input's gradient once."""
    for x in inputs:
        (swarm.module(x).square().sum() / 2).backward()
    for index, roster in enumerate(swarm.rosters):
        expected = torch.cat([p.grad.flatten() for p in swarm.module[index].parameters() if p.grad is not None])
        found = sum(swarm.servers[peer].steps.stage(index).next_sum.values for peer in roster)
        torch.testing.assert_close(found, expected)


def test_nobody_is_believed_to_have_taken_longer_than_the_whole_passage(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may report false times for the previous stages."""
    swarm = make_swarm("ab", "c")
    context = make_context(swarm)
    fetch = swarm.tickets.fetch_reported

    async def lying(ticket: Ticket, *, timeout: float) -> tuple[Message, bytes]:
        message, report = await fetch(ticket, timeout=timeout)
        others = (StageReport(busy_s=1e9, queued=0),)
        return message, encode(msgspec.structs.replace(decode(report, CallReport), others=others))

    monkeypatch.setattr(swarm.tickets, "fetch_reported", lying)
    run = make_run(context, rows(1))
    swarm.run(run.forward())
    assert 0.0 < max(load.left_s for load in context.routers[0].peers.values()) < 10.0


@pytest.mark.parametrize("busy_stage", [0, 1, 2])
def test_a_busy_peer_is_replaced_and_whoever_waits_for_it_is_told(make_swarm: MakeSwarm, busy_stage: int) -> None:
    rosters = ["a", "b", "c"]
    rosters[busy_stage] += " free"
    swarm = make_swarm(*rosters, limits=Limits(max_pending_calls=1, call_timeout=100.0))
    busy = swarm.rosters[busy_stage][0]
    context = make_context(swarm)
    prefer(context.routers[busy_stage], [busy])  # it is called first
    x = rows(1)

    async def go() -> torch.Tensor:
        # Its input, or its step, never comes, so it stays.
        blocked = key(100) if busy_stage else key(100, step=1)
        blocking = swarm.forward_request(blocked, busy_stage, [LEAD] * 3, x)
        await swarm.send(busy, FORWARD.name, blocking)
        return await through(make_run(context, x))

    output = swarm.run(go())

    assert context.fault_counts["busy"] >= 1
    torch.testing.assert_close(output, swarm.module(x))
    assert_sums(swarm, [x])


def test_when_everyone_is_busy_it_waits(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=Limits(max_pending_calls=1, call_timeout=100.0))
    context, x = make_context(swarm), rows(1)

    async def go() -> torch.Tensor:
        await swarm.send(PeerId("b"), FORWARD.name, swarm.forward_request(key(100), 1, swarm.route(), x))
        passing = asyncio.create_task(through(make_run(context, x)))
        await asyncio.sleep(10.0)
        assert not passing.done()
        await swarm.cancel(key(100), 1, "forward", PeerId("b"))
        return await passing

    torch.testing.assert_close(swarm.run(go()), swarm.module(x))
    assert_sums(swarm, [x])


def test_it_does_not_wait_for_ever(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=Limits(max_pending_calls=1, call_timeout=1000.0))
    context, x = make_context(swarm), rows(1)

    async def go() -> float:
        await swarm.send(PeerId("b"), FORWARD.name, swarm.forward_request(key(100), 1, swarm.route(), x))
        with pytest.raises(DeadlineExceeded, match="all peers of a stage were busy for 30 s"):
            await through(make_run(context, x))
        return asyncio.get_running_loop().time()

    assert 30.0 <= swarm.run(go()) < 35.0


@pytest.mark.parametrize("cache_bytes", [0, 100])
def test_servers_that_keep_nothing_compute_again(make_swarm: MakeSwarm, cache_bytes: int) -> None:
    swarm = make_swarm("a b", "c", "d", limits=Limits(cache_bytes=cache_bytes, call_timeout=100.0))
    context = make_context(swarm)
    inputs = [rows(i) for i in range(6)]

    async def go() -> None:
        await gather(through(make_run(context, x, i)) for i, x in enumerate(inputs))

    swarm.run(go())
    assert context.fault_counts["repeated"] > 0
    assert_sums(swarm, inputs)


class Far(MemoryNetwork):
    """A network in which the trainer is far from servers that are near each other."""

    async def wait_latency(self, sender: PeerId, receiver: PeerId) -> None:
        await asyncio.sleep(1.0 if LEAD in (sender, receiver) else 0.001)


def test_a_far_trainer_has_nothing_computed_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", "c", network=Far())
    context = make_context(swarm)
    inputs = [rows(i) for i in range(4)]

    async def go() -> None:
        await gather(through(make_run(context, x, i)) for i, x in enumerate(inputs))

    swarm.run(go())
    assert context.fault_counts["repeated"] == 0
    assert [server.calls.num_forwards for server in swarm.servers.values()] == [4, 4, 4]
    assert_sums(swarm, inputs)


def test_the_models_error_is_raised_once_all_servers_of_the_stage_have_met_with_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b", "c d")
    context = make_context(swarm)
    with pytest.raises(StageError, match="stage 0 raised"):
        swarm.run(through(make_run(context, torch.ones(2, 17).double())))
    assert context.fault_counts == {"replaced": 1}
    assert len(banned(swarm, context)) == 1, "the second stage passed on what it got"


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("stages", [("a x", "c"), ("a", "x c"), ("a", "x c", "d")])
def test_another_server_computes_what_one_raises_on(
    make_swarm: MakeSwarm, direction: str, stages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a server whose memory is full raises."""
    swarm = make_swarm(*stages)
    context = make_context(swarm)
    (stage,) = (index for index, roster in enumerate(swarm.rosters) if X in roster)
    out_of_memory = Mock(side_effect=RuntimeError("out of memory"))
    monkeypatch.setattr(swarm.servers[X].steps.stage(stage).computation, direction, out_of_memory)
    inputs = [rows(i) for i in range(6)]
    swarm.run(gather(through(make_run(context, x, i)) for i, x in enumerate(inputs)))
    assert out_of_memory.called
    assert banned(swarm, context) == {X}
    assert_sums(swarm, inputs)


# ---------------------------------------------------------------------- servers that join


def joined(swarm: Swarm) -> tuple[Record, Record]:
    """Return the record that admits two servers, one for each stage, and the next record."""
    swarm.join("c")
    swarm.join("d")
    first = swarm.run(swarm.step(rows(0), rows(1)))
    assert {one.member.peer_id for one in first.newcomers} == {"c", "d"}
    return first, swarm.run(swarm.step(rows(2), rows(3)))


def test_who_is_in_no_roster_any_more_is_forgotten(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    context = make_context(swarm)
    _, record = joined(swarm)
    rosters = [[one for one in roster if one.peer_id != "a"] for roster in swarm.rosters_now]

    async def go() -> None:
        for peer in map(PeerId, "ac"):
            swarm.network.kill(peer)
            await context.check_reachable(peer)
        await context.follow(record, swarm.rosters_now)
        assert context._silent.keys() == {"a", "c"}
        await context.follow(record, rosters)
        assert context._silent.keys() == {"c"}

    swarm.run(go())


def test_a_trainer_that_passed_over_a_record_routes_to_those_who_joined_by_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    context = make_context(swarm)
    _, second = joined(swarm)
    swarm.run(context.follow(second, swarm.rosters_now))
    assert [sorted(router.peers) for router in context.routers] == [["a", "c"], ["b", "d"]]


def test_servers_that_join_and_cannot_be_reached_are_waited_for_together(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's next batch waits once for both. They are avoided until they join again or some time has passed."""
    swarm = make_swarm("a", "b")
    context = make_context(swarm)
    first, second = joined(swarm)
    under_way = []

    async def hang(addresses: Sequence[str]) -> None:
        under_way.append(addresses)
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(swarm.trainer, "connect", hang)
        began_s = swarm.loop.time()
        swarm.run(context.follow(first, swarm.rosters_now))
        assert len(under_way) == 2
        assert swarm.loop.time() - began_s < 15.0
    swarm.run(context.follow(second, swarm.rosters_now))
    assert [sorted(router.peers) for router in context.routers] == [["a"], ["b"]]
    swarm.run(context.follow(first, swarm.rosters_now))
    assert [sorted(router.peers) for router in context.routers] == [["a", "c"], ["b", "d"]]


def cut_off(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> tuple[PipelineContext, Record, list[str]]:
    """Return a trainer that could not reach two joiners, the next record, and the list of later connection attempts."""
    context = make_context(swarm)
    first, second = joined(swarm)
    tried: list[str] = []

    async def refuse(addresses: Sequence[str]) -> None:
        tried.extend(address.rpartition("/")[2] for address in addresses)
        raise Unreachable("there is no way")

    monkeypatch.setattr(swarm.trainer, "connect", refuse)
    swarm.run(context.follow(first, swarm.rosters_now))
    assert [list(router.peers) for router in context.routers] == [["a"], ["b"]]
    tried.clear()
    return context, second, tried


def test_a_server_that_was_not_reached_is_tried_again_when_its_stage_has_nobody_else(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm("a", "b")
    context, second, tried = cut_off(swarm, monkeypatch)
    rosters = swarm.rosters_now
    swarm.run(context.follow(second, [rosters[0], rosters[1][1:]]))
    assert tried == ["d"]
    assert [list(router.peers) for router in context.routers] == [["a"], ["d"]]
    assert context.routers[1].choose(1, now_s=0.0).peer == "d", "a last resort is better than none"


def test_a_server_that_was_not_reached_is_tried_again_after_a_while(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm("a", "b")
    context, second, tried = cut_off(swarm, monkeypatch)
    swarm.run(context.follow(second, swarm.rosters_now))
    assert not tried, "not at every record, for each of them may wait for it"
    monkeypatch.undo()
    swarm.run(asyncio.sleep(301.0))
    swarm.run(context.follow(second, swarm.rosters_now))
    assert not context.unreached
    assert [sorted(router.peers) for router in context.routers] == [["a", "c"], ["b", "d"]]


@pytest.mark.parametrize("replays", [False, True], ids=["batch", "replay"])
def test_a_replay_that_comes_too_late_says_nothing_of_the_server(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, replays: bool
) -> None:
    swarm = make_swarm("ab")
    context = make_context(swarm)
    holders = {0: PeerId("a")} if replays else None
    calls = StageCalls(context, make_run(context, rows(1)).microbatch, holders)
    calls.route.append(context.routers[0].charge(PeerId("a"), 1))

    async def revoked(*_: Any, **__: Any) -> bytes:
        raise LeaseRevoked("step 0 is decided")

    monkeypatch.setattr(swarm.tickets, "wait", revoked)
    with pytest.raises(LeaseRevoked):
        swarm.run(calls.wait(0, "forward", timeout=1.0))
    assert context.revokers == (set() if replays else {"a"})


# ---------------------------------------------------------------------- servers without memory


def test_what_finds_no_memory_beside_others_is_sent_once_more_alone(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    context = make_context(swarm)
    seen: list[str] = []

    async def work(name: str, *, needs_all: bool) -> str:
        async def attempt() -> str:
            seen.append(name)
            await asyncio.sleep(1.0)
            if needs_all and context.num_under_way:
                raise OutOfMemory("no memory")
            return name

        with context.under_way():
            return await context.with_memory(attempt)

    async def go() -> list[str]:
        return await gather([work("a", needs_all=True), work("b", needs_all=False), work("c", needs_all=True)])

    assert swarm.run(go()) == ["a", "b", "c"]
    assert seen == ["a", "b", "c", "a", "c"]
    assert context.num_under_way == 0


def test_what_finds_no_memory_alone_is_the_users_error(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a")
    context = make_context(swarm)
    attempt = AsyncMock(side_effect=OutOfMemory("no memory"))

    async def go() -> None:
        with context.under_way():
            await context.with_memory(attempt)

    with pytest.raises(OutOfMemory):
        swarm.run(go())
    assert attempt.await_count == 2
