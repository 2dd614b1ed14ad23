"""Servers that leave a run by a record, and servers that a record excludes. A graceful leave causes no replay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch

from lightning_swarm.coordinator import commit
from lightning_swarm.coordinator.membership import rosters as rosters_module
from lightning_swarm.core.errors import Busy, DeadlineExceeded, ProtocolError, SwarmError, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.progress import ProgressLines
from lightning_swarm.network import PeerId
from lightning_swarm.peer import lifecycle
from lightning_swarm.peer.lifecycle import MembershipLifecycle, RunContacts
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.membership import DrainReply, DrainRequest
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import APPLY, DRAIN, LEAVE
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, Swarm, key, make_module, plain_steps, rows

A, B, C, J = (PeerId(name) for name in "abcj")


class Staying:
    """A server of the swarm with its lifecycle, as in its process."""

    def __init__(
        self, swarm: Swarm, name: PeerId, hosts: Collection[PeerId] = (), others: Collection[PeerId] = ()
    ) -> None:
        async def find() -> Sequence[PeerId]:
            return [swarm.manifest.coordinator]

        async def known() -> Collection[PeerId]:
            return [name, *others]

        server = swarm.servers[name]
        self.said: list[str] = []
        self.events = EventLog()
        contacts = RunContacts(run_id="run", find_runs=find, hosts=hosts, find_servers=known)
        self.stay = MembershipLifecycle(server._transport, server, contacts, swarm.limits, self.events)
        self.task = swarm.loop.create_task(self.stay.serve_run(ProgressLines(self.said.append)))
        swarm.joining.append(self.task)


async def step(swarm: Swarm, *seeds: int, among: str | None = None) -> Record:
    """Run one batch, with its microbatches in turn at the named servers of stage 0."""
    names = [PeerId(name) for name in among] if among is not None else swarm.rosters[0]
    grant = await swarm.steps.grant(2 * len(seeds))
    done = []
    for index, seed in enumerate(seeds):
        k = key(grant.first, index, step=grant.step)
        route = [names[index % len(names)], *swarm.route(index)[1:]]
        await swarm.through(k, rows(seed), route=route, weight=grant.weight)
        done.append(k.receipt)
    await swarm.steps.done(grant.lease, done)
    await swarm.steps.close()
    return await swarm.record(grant.step)


def assert_plain(swarm: Swarm, *batches: Sequence[int]) -> None:
    """Check the weights of all members against one machine's."""
    module = make_module(len(swarm.rosters))
    plain_steps(module, [[rows(seed) for seed in seeds] for seeds in batches], divisors=[1.0] * len(batches))
    expected = module.state_dict()
    members = {peer: swarm.servers[peer] for peer in swarm.servers[A].membership.run.servers}
    assert {index for server in members.values() for index in server.steps.stages} == set(range(len(swarm.rosters)))
    for server in members.values():
        for index in server.steps.stages:
            for name, tensor in server.steps.stage(index).weights().items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)


def num_forwards(swarm: Swarm) -> int:
    return sum(server.calls.num_forwards for server in swarm.servers.values())


# ---------------------------------------------------------------------- leaving


def test_a_server_leaves_by_the_next_record_and_nothing_is_computed_twice(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)

    async def go() -> None:
        assert swarm.names_after(await step(swarm, 0, 1, 2)) == ["ab", "c"]
        grant = await swarm.steps.grant(6)
        done = []
        for index in range(3):
            if index == 1:
                b.stay.leave()  # it has a microbatch of this step in its sum, and more will come
                await asyncio.sleep(1.0)
            k = key(grant.first, index, step=1)
            await swarm.through(k, rows(3 + index), route=[B, C], weight=grant.weight)
            done.append(k.receipt)
        await swarm.steps.done(grant.lease, done)
        assert not b.task.done(), "it serves until the record is applied"
        await swarm.steps.close()
        record = await swarm.record(1)
        assert swarm.names_after(record) == ["a", "c"]
        await asyncio.wait_for(b.task, 5.0)
        assert b.said[-1].startswith("Run 'run' has released this peer.")
        assert swarm.names_after(await step(swarm, 6, 7, among="a")) == ["a", "c"]

    swarm.run(go())
    assert num_forwards(swarm) == 2 * (3 + 3 + 2), "each microbatch once in each stage"
    assert swarm.servers[A].steps.version == 3
    assert swarm.servers[B].steps.version == 2, "it applied the record that let it go, and no later one"
    assert_plain(swarm, [0, 1, 2], [3, 4, 5], [6, 7])
    assert swarm.coordinator.generation.context.events.counts["left"] == 1


def test_a_last_copy_waits_until_another_has_joined(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b", "c")
    c = Staying(swarm, C)

    async def wait() -> None:
        await step(swarm, 0)
        c.stay.leave()
        await asyncio.sleep(1.0)
        assert swarm.names_after(await step(swarm, 1)) == ["ab", "c"]

    swarm.run(wait())
    assert c.said[-1] == "This peer has the only copy of stage 1: waiting for another server to join."
    joiner = swarm.join("j")
    assert joiner.steps.stages == (1,), "who leaves counts no more where somebody is needed"

    async def go() -> None:
        assert swarm.names_after(await step(swarm, 2)) == ["ab", "cj"]
        assert not c.task.done()
        assert swarm.names_after(await step(swarm, 3)) == ["ab", "j"]
        await asyncio.wait_for(c.task, 5.0)
        swarm.rosters[1] = [J]
        assert swarm.names_after(await step(swarm, 4)) == ["ab", "j"]

    swarm.run(go())
    assert sum("only copy" in line for line in c.said) == 1
    assert_plain(swarm, [0], [1], [2], [3], [4])


def test_who_is_not_let_go_in_time_goes_all_the_same(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "c", limits=Limits(call_timeout=30.0, drain_timeout=40.0))
    c = Staying(swarm, C)

    async def go() -> None:
        c.stay.leave()
        begin_s = swarm.loop.time()
        with pytest.raises(DeadlineExceeded, match=r"within 40 s: no other server holds stage 1\. The peer leaves"):
            await c.task
        assert swarm.loop.time() == pytest.approx(begin_s + 40.0, abs=1.0)
        assert not swarm.servers[C].admission.left.is_set()

    swarm.run(go())


def test_of_two_that_leave_a_stage_of_two_the_first_to_ask_goes(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c")
    one, other = Staying(swarm, C), Staying(swarm, B)

    async def go() -> None:
        one.stay.leave()
        await asyncio.sleep(1.0)
        other.stay.leave()
        await asyncio.sleep(1.0)
        assert swarm.names_after(await step(swarm, 0)) == ["a", "b"]
        await asyncio.wait_for(one.task, 5.0)
        assert swarm.names_after(await step(swarm, 1)) == ["a", "b"]
        assert not other.task.done()

    swarm.run(go())


def test_who_leaves_goes_though_the_record_is_not_told_to_it(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the run took it for dead while deciding, so it must not wait for the record."""
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)

    async def go() -> None:
        b.stay.leave()
        await asyncio.sleep(1.0)
        with deaf(swarm, monkeypatch, B):
            assert swarm.names_after(await step(swarm, 0, 1)) == ["a", "c"]
            await asyncio.wait_for(b.task, 10.0)

    swarm.run(go())
    assert swarm.servers[B].steps.version == 0
    assert b.said[-1].startswith("Run 'run' has released this peer.")


def test_who_leaves_is_told_when_the_run_ends_before(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "c")
    c = Staying(swarm, C)

    async def go() -> None:
        c.stay.leave()
        await asyncio.sleep(1.0)
        swarm.servers[C].admission.left.set()
        await asyncio.wait_for(c.task, 5.0)

    swarm.run(go())
    assert c.said[-1].startswith("Run 'run' is over.")


def test_who_is_still_joining_joins_no_more(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "c")
    swarm.add_server("j")
    j = Staying(swarm, J)

    async def go() -> None:
        await asyncio.sleep(1.0)
        assert J in swarm.coordinator.generation.server_membership._waiting
        j.stay.leave()
        await asyncio.wait_for(j.task, 5.0)
        assert J not in swarm.coordinator.generation.server_membership._waiting
        assert j.said[-1] == "This peer leaves before run 'run' has admitted it."
        begin_s = swarm.loop.time()
        assert swarm.names_after(await step(swarm, 0)) == ["a", "c"]
        assert swarm.loop.time() < begin_s + 1.0, "nobody waits for it"

    swarm.run(go())


def test_who_waits_for_a_run_leaves_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", admit=False)
    b = Staying(swarm, B)

    async def go() -> None:
        await asyncio.sleep(100.0)
        b.stay.leave()
        await asyncio.wait_for(b.task, 1.0)

    swarm.run(go())


@pytest.mark.parametrize(("others", "gives_up"), [((), True), ((C,), False)], ids=["nobody", "another one waits"])
def test_who_waits_for_a_run_that_nobody_could_name_gives_up(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, others: Sequence[PeerId], gives_up: bool
) -> None:
    """It waits as long as one of the peers that it knows answers, or another peer waits like itself."""
    monkeypatch.setattr(lifecycle, "_SILENCE_S", 60.0)
    swarm = make_swarm("a b", "c", admit=False)
    b = Staying(swarm, B, hosts={A}, others=others)

    async def go() -> None:
        await asyncio.sleep(2 * lifecycle._SILENCE_S)
        assert not b.task.done()
        swarm.network.freeze(A)
        await asyncio.sleep(lifecycle._SILENCE_S / 2)
        assert not b.task.done()
        if gives_up:
            with pytest.raises(Unreachable, match=r"no run 'run' has begun, and no.* for 60 s: neither a nor"):
                await asyncio.wait_for(b.task, lifecycle._SILENCE_S)
        else:
            await asyncio.sleep(2 * lifecycle._SILENCE_S)
            assert not b.task.done()
            b.stay.leave()
            await asyncio.wait_for(b.task, 30.0)

    swarm.run(go())


def test_who_enters_by_the_record_that_is_being_decided_leaves_by_a_later_one(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "c")
    swarm.add_server("j")
    j = Staying(swarm, J)

    async def go() -> None:
        await asyncio.sleep(1.0)
        gate = swarm.coordinator.generation.server_membership
        newcomers = gate.newcomers

        async def leave(*arguments: Any) -> Any:
            found = await newcomers(*arguments)
            j.stay.leave()
            await asyncio.sleep(2.0)
            return found

        gate.newcomers = leave  # type: ignore[method-assign]
        assert swarm.names_after(await step(swarm, 0)) == ["aj", "c"]
        gate.newcomers = newcomers  # type: ignore[method-assign]
        await asyncio.sleep(10.0)
        assert swarm.names_after(await step(swarm, 1)) == ["a", "c"]
        await asyncio.wait_for(j.task, 5.0)

    swarm.run(go())
    assert_plain(swarm, [0], [1])


async def drain(swarm: Swarm, peer: PeerId, boot_id: int, generation: int = 0) -> list[int]:
    request = encode(DrainRequest(generation=generation, boot_id=boot_id))
    transport = swarm.servers[peer]._transport if peer in swarm.servers else swarm.trainer
    return decode(await transport.call(A, DRAIN.name, request, timeout=10.0), DrainReply).alone


def test_only_a_member_that_holds_nothing_else_may_leave(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c", around="c")

    async def go() -> None:
        state = swarm.state()
        with pytest.raises(ProtocolError, match="b was restarted"):
            await drain(swarm, B, 1)
        with pytest.raises(Busy, match="a coordinates the run"):
            await drain(swarm, A, swarm.members[A].boot_id)
        with pytest.raises(ProtocolError, match="c trains, and may leave only when its loop ends"):
            await drain(swarm, C, swarm.members[C].boot_id)
        with pytest.raises(ProtocolError, match="run generation is 0"):
            await drain(swarm, B, swarm.members[B].boot_id, generation=1)
        with pytest.raises(ProtocolError, match="trainer is not in run 'run'"):
            await drain(swarm, LEAD, 5)
        assert swarm.coordinator.generation.server_membership.leaving == []
        assert swarm.state() == state
        assert await drain(swarm, B, swarm.members[B].boot_id) == []
        assert await drain(swarm, B, swarm.members[B].boot_id) == []
        assert swarm.coordinator.generation.server_membership.leaving == [B]

    swarm.run(go())


# ---------------------------------------------------------------------- left out, and back


@contextlib.contextmanager
def leaving_out(monkeypatch: pytest.MonkeyPatch, gone: Sequence[PeerId]) -> Iterator[None]:
    """Make records exclude `gone`, though these peers are healthy."""
    chosen = rosters_module.next_rosters
    with monkeypatch.context() as patch:
        patch.setattr(commit, "next_rosters", lambda rosters, **others: chosen(rosters, **{**others, "gone": gone}))
        yield


@contextlib.contextmanager
def deaf(swarm: Swarm, monkeypatch: pytest.MonkeyPatch, peer: PeerId) -> Iterator[None]:
    """Make records bypass a server, though it answers."""

    async def ignore(caller: PeerId, body: bytes) -> bytes:
        return b""

    with monkeypatch.context() as patch:
        patch.setitem(swarm.servers[peer]._transport._call_handlers, APPLY.name, ignore)  # type: ignore[attr-defined]
        yield


@pytest.mark.parametrize("knows", [True, False], ids=["it has the record", "the record passed it over"])
def test_a_server_that_was_left_out_joins_again(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)

    async def leave_out() -> None:
        await step(swarm, 0, 1)
        with leaving_out(monkeypatch, [B]), contextlib.nullcontext() if knows else deaf(swarm, monkeypatch, B):
            assert swarm.names_after(await step(swarm, 2, 3)) == ["a", "c"]
        assert swarm.names_after(await step(swarm, 4, 5, among="a")) == ["a", "c"]
        assert swarm.servers[B].steps.version == (2 if knows else 1)
        with pytest.raises(SwarmError):  # it computes for the run no more
            await step_at(swarm, B)

    async def step_at(swarm: Swarm, peer: PeerId) -> None:
        await swarm.forward(key(step=3), rows(0), route=[peer, C])

    swarm.run(leave_out())
    swarm.run(asyncio.sleep(30.0))
    assert b.events.counts["left"] == 1
    assert not b.task.done()

    async def back() -> None:
        assert swarm.names_after(await step(swarm, 6, among="a")) == ["ab", "c"]
        await asyncio.sleep(1.0)
        assert swarm.servers[B].membership.is_member
        assert swarm.names_after(await step(swarm, 7, 8)) == ["ab", "c"]

    swarm.run(back())
    entered = [said for said in b.said if said.startswith("In run")]
    assert entered == ["In run 'run' from step 0 on, with stage 0.", "In run 'run' from step 4 on, with stage 0."]
    assert_plain(swarm, [0, 1], [2, 3], [4, 5], [6], [7, 8])
    b.stay.leave()
    swarm.run(step(swarm, 9))
    swarm.run(asyncio.wait_for(b.task, 5.0))


def test_a_server_that_was_frozen_finds_out_soon_that_it_was_left_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_LOOK_S", 1000.0)
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)

    async def leave_out() -> None:
        await step(swarm, 0, 1)
        swarm.network.freeze(B)
        assert swarm.names_after(await step(swarm, 2, among="a")) == ["a", "c"]
        await step(swarm, 3, among="a")
        swarm.network.thaw(B)
        await asyncio.sleep(5.0)

    swarm.run(leave_out())
    assert b.events.counts["left"] == 1
    assert swarm.names_after(swarm.run(step(swarm, 4, among="a"))) == ["ab", "c"]
    assert_plain(swarm, [0, 1], [2], [3], [4])


def test_the_lead_ends_a_server_that_is_on_its_way_back(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer waits for the run's end at its server, which may be in no run at that moment."""
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)

    async def go() -> None:
        await step(swarm, 0, 1)
        with leaving_out(monkeypatch, [B]), deaf(swarm, monkeypatch, B):
            assert swarm.names_after(await step(swarm, 2, 3)) == ["a", "c"]
        while not b.events.counts["left"]:  # noqa: ASYNC110 - it tells nobody here
            await asyncio.sleep(0.5)
        assert not swarm.servers[B].membership.is_member
        await swarm.servers[B].step_out()  # the moment between two attempts
        with pytest.raises(ProtocolError, match="may be ended by"):
            await swarm.servers[C]._transport.call(B, LEAVE.name, b"", timeout=1.0)
        await swarm.trainer.call(B, LEAVE.name, b"", timeout=1.0)
        await asyncio.wait_for(b.task, 30.0)

    swarm.run(go())


def test_a_trainer_goes_on_though_its_server_may_not_come_back(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)
    b.task.cancel()

    async def last(say: object) -> None:
        raise Unreachable("it was left out again and again")

    monkeypatch.setattr(b.stay, "serve_run", last)
    swarm.run(b.stay.serve_beside_trainer())


def test_who_is_left_out_again_and_again_gives_up(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)
    seeds: list[list[int]] = []

    async def go() -> None:
        while not b.task.done():
            gone = [B] if swarm.servers[B].membership.is_member else []
            with leaving_out(monkeypatch, gone):
                seeds.append([len(seeds)])
                await step(swarm, *seeds[-1], among="a")
            await asyncio.sleep(30.0)
        with pytest.raises(Unreachable, match="has left this peer out 6 times, each time soon after its return"):
            b.task.result()

    swarm.run(go())
    assert b.events.counts["left"] == 6
    assert_plain(swarm, *seeds)


def test_a_server_that_hears_of_nobody_gives_up_after_a_while(make_swarm: MakeSwarm) -> None:
    """It waits before it gives up, because its own line may be broken."""
    swarm = make_swarm("a", "c")
    c = Staying(swarm, C)

    async def go() -> None:
        await asyncio.sleep(1.0)
        swarm.network.freeze(A)
        swarm.network.freeze(LEAD)
        await asyncio.sleep(lifecycle._SILENCE_S / 2)
        assert not c.task.done()
        with pytest.raises(Unreachable, match="none of its peers answered for 600 s"):
            await c.task

    swarm.run(go())


def test_a_server_that_was_killed_comes_back_under_its_name(make_swarm: MakeSwarm) -> None:
    """Its earlier process is in the roster until a record excludes it."""
    swarm = make_swarm("a b", "c")

    async def die() -> None:
        await step(swarm, 0, 1)
        swarm.network.kill(B)
        await swarm.servers[B].close()

    swarm.run(die())
    swarm.servers[B] = swarm._server(B, 555, swarm._optimizer)
    swarm.run(swarm.servers[B].start())
    b = Staying(swarm, B)

    async def back() -> None:
        await asyncio.sleep(5.0)
        assert B not in swarm.coordinator.generation.server_membership._waiting, "it has to wait"
        assert swarm.names_after(await step(swarm, 2, 3, among="a")) == ["a", "c"]
        await asyncio.sleep(60.0)
        assert swarm.names_after(await step(swarm, 4, among="a")) == ["ab", "c"]
        await asyncio.sleep(1.0)
        assert b.said[-1] == "In run 'run' from step 3 on, with stage 0."
        assert swarm.names_after(await step(swarm, 5, 6)) == ["ab", "c"]

    swarm.run(back())
    assert_plain(swarm, [0, 1], [2, 3], [4], [5, 6])
