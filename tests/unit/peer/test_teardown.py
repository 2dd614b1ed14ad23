"""A run whose lead is gone ends for all peers, by the coordinator's announcement."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lightning_swarm.core.errors import Busy, ProtocolError, RunOver, StepError, Unreachable
from lightning_swarm.core.event_loop import InlineRuntime, UntilRunEnds
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.peer.lifecycle import MembershipLifecycle, RunContacts
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import RunAborted
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import BREAK_OFF, LEAVE
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, Swarm, rows

A, B, C, D = map(PeerId, "abcd")
LEAD_S = 100.0
SILENCE_S = 10.0
LIMITS = Limits(call_timeout=30.0, silence_timeout=SILENCE_S, lead_timeout=LEAD_S)
WHY = (
    r"the run is over: the lead trainer was silent for 100 s, and no peer takes the run over: no live peer has the "
    r"state of the lead's loop.*Start the run again with `ckpt_path`.*Raise `Limits"
)


def begun(make_swarm: MakeSwarm) -> Swarm:
    """Return a swarm of two stages of two servers, with three voters and one decided step."""
    swarm = make_swarm("a b", "c d", limits=LIMITS, voters="a b c")
    swarm.run(swarm.step(rows(0)))
    return swarm


def live(swarm: Swarm) -> dict[PeerId, asyncio.Task[None]]:
    """Run the servers as their processes would; each closes when its task ends."""

    async def find() -> list[PeerId]:
        return [swarm.manifest.coordinator]

    async def last(name: PeerId) -> None:
        server = swarm.servers[name]
        contacts = RunContacts(run_id="run", find_runs=find)
        stay = MembershipLifecycle(server._transport, server, contacts, swarm.limits, EventLog())
        try:
            await stay.serve_run(lambda _: None)
        finally:
            await server.close()
            await server._transport.close()

    tasks = {name: swarm.loop.create_task(last(name)) for name in swarm.servers}
    swarm.joining += tasks.values()
    return tasks


async def within(seconds: float, *tasks: asyncio.Task[None]) -> None:
    """Check that the tasks end in time, with an error that names the lead."""
    _, late = await asyncio.wait(tasks, timeout=seconds)
    assert not late
    for task in tasks:
        with pytest.raises(StepError, match=WHY):
            task.result()


def test_all_servers_end_when_the_lead_is_gone(make_swarm: MakeSwarm) -> None:
    """No other trainer is there to detect it."""
    swarm = begun(make_swarm)
    lives = live(swarm)

    async def go() -> None:
        swarm.network.kill(LEAD)
        await asyncio.sleep(LEAD_S - 1.0)
        assert not any(task.done() for task in lives.values())
        await within(4 * SILENCE_S, *lives.values())

    swarm.run(go())


def test_the_next_coordinator_ends_it_when_the_first_is_gone_too(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    lives = live(swarm)
    dead = lives.pop(A)

    async def go() -> None:
        swarm.network.kill(LEAD)
        swarm.network.kill(A)
        dead.cancel()
        await within(LEAD_S + 8 * SILENCE_S, *lives.values())

    swarm.run(go())
    assert swarm.servers[B].events.counts["takeover"] == 1


@pytest.mark.parametrize("frozen_s", [LEAD_S / 2, LEAD_S - 1.0])
def test_a_lead_that_is_frozen_for_less_changes_nothing(make_swarm: MakeSwarm, frozen_s: float) -> None:
    swarm = begun(make_swarm)
    lives = live(swarm)

    async def go() -> Record:
        for _ in range(2):  # each time the count starts anew
            swarm.network.freeze(LEAD)
            await asyncio.sleep(frozen_s)
            swarm.network.thaw(LEAD)
            await asyncio.sleep(2 * SILENCE_S)
        assert not any(task.done() for task in lives.values())
        return await swarm.step(rows(1))

    assert swarm.run(go()).step == 1


def test_a_lead_whose_loop_is_busy_is_waited_for(make_swarm: MakeSwarm) -> None:
    """It may be in a debugger, or compute a metric for an hour: its process answers."""
    swarm = begun(make_swarm)
    lives = live(swarm)

    async def go() -> Record:
        await asyncio.sleep(10 * LEAD_S)
        assert not any(task.done() for task in lives.values())
        return await swarm.step(rows(1))

    assert swarm.run(go()).step == 1


def test_a_coordinator_that_was_frozen_itself_ends_nothing(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)

    async def go() -> None:
        watch = swarm.coordinator.generation.trainers.lead
        watching = asyncio.create_task(watch.watch_and_replace())
        await asyncio.sleep(SILENCE_S)
        swarm.network.freeze(LEAD)
        await asyncio.sleep(SILENCE_S)
        swarm.loop._now_s += 10 * LEAD_S  # this process was suspended
        await asyncio.sleep(3 * SILENCE_S)
        assert not watching.done()
        await asyncio.sleep(LEAD_S)
        assert "was silent" in await watching

    swarm.run(go())


def test_a_lead_that_comes_back_too_late_finds_the_run_over(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    lives = live(swarm)
    asking = swarm.steps._coordinator
    asking._timeouts = replace(asking._timeouts, alone_s=LEAD_S)

    async def go() -> None:
        swarm.network.freeze(LEAD)
        await within(LEAD_S + 8 * SILENCE_S, *lives.values())  # the coordinator last: it calls the lead, too
        await asyncio.sleep(LEAD_S)
        swarm.network.thaw(LEAD)
        with pytest.raises(StepError, match=r"the run is over for this peer, because no other peer answered"):
            await swarm.steps.grant(2)

    swarm.run(go())


def test_a_lead_that_somebody_answers_looks_on(make_swarm: MakeSwarm) -> None:
    """No majority of the voters is there, so no peer coordinates; but the voters may return."""
    swarm = begun(make_swarm)
    asking = swarm.steps._coordinator
    asking._timeouts = replace(asking._timeouts, successor_s=3 * LEAD_S, alone_s=LEAD_S)
    swarm.network.kill(A)
    swarm.network.kill(B)
    with pytest.raises(Unreachable, match="no other peer took its place within 300 s"):
        swarm.run(swarm.steps.renew())


def test_servers_end_where_nobody_may_coordinate(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lead and a majority of the voters are gone. The remaining servers answer each other."""
    monkeypatch.setattr("lightning_swarm.peer.lifecycle._SILENCE_S", 2 * LEAD_S)
    swarm = begun(make_swarm)
    lives = live(swarm)

    async def go() -> None:
        for peer in (LEAD, A, B):
            swarm.network.kill(peer)
        lives[A].cancel()
        lives[B].cancel()
        _, late = await asyncio.wait([lives[C], lives[D]], timeout=4 * LEAD_S)
        assert not late
        for name in (C, D):
            with pytest.raises(Unreachable, match="neither its lead nor a coordinator answered for 200 s"):
                lives[name].result()

    swarm.run(go())
    silent = sorted(text.split()[0] for text in caplog.messages if "does not answer:" in text)
    assert silent == ["a", "a", "b", "b", LEAD, LEAD], "each of the two says so once, at whatever number of looks"


def test_who_coordinates_ends_nothing_while_the_lead_answers(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    joiner = swarm.join("e")
    body = encode(RunAborted(reason="I am tired of it"))
    call = swarm.servers[A]._transport.call

    async def go() -> Record:
        for method, words in ((BREAK_OFF.name, body), (LEAVE.name, b"")):
            for peer in (B, C, D):
                with pytest.raises(Busy, match="the lead trainer answers this server"):
                    await call(peer, method, words, timeout=SILENCE_S)
                assert not swarm.servers[peer].admission.left.is_set()
        record = await swarm.step(rows(1))
        assert not joiner.admission.left.is_set()
        swarm.network.freeze(LEAD)
        await call(B, LEAVE.name, b"", timeout=SILENCE_S)
        await call(C, BREAK_OFF.name, body, timeout=SILENCE_S)
        assert all(swarm.servers[peer].admission.left.is_set() for peer in (B, C)), "then its word is enough"
        return record

    assert swarm.run(go()).step == 1


def test_only_who_coordinates_says_so(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    body = encode(RunAborted(reason="I am tired of it"))

    async def go() -> None:
        for liar in (C, D):
            with pytest.raises(ProtocolError, match="only the coordinator of a run may break it off"):
                await swarm.servers[liar]._transport.call(B, BREAK_OFF.name, body, timeout=1.0)
        assert not swarm.servers[B].admission.left.is_set()
        await swarm.trainer.call(B, LEAVE.name, b"", timeout=1.0)
        await swarm.servers[A]._transport.call(B, BREAK_OFF.name, body, timeout=1.0)  # although the lead answers
        assert isinstance(swarm.servers[B].admission.ending_error, RunOver), "what was said first holds"

    swarm.run(go())


def test_a_joiner_is_told_too(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    joiner = swarm.join("e")

    async def go() -> None:
        swarm.network.kill(LEAD)
        await asyncio.wait_for(joiner.admission.left.wait(), LEAD_S + 4 * SILENCE_S)

    swarm.run(go())
    assert isinstance(joiner.admission.ending_error, StepError)


def test_a_trainers_loop_ends_with_the_error(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    admission = swarm.servers[B].admission
    runtime = UntilRunEnds(
        InlineRuntime(swarm.loop),
        admission.left,
        admission.released,
        is_cut_off=lambda: False,
        ending_error=lambda: admission.ending_error,
        grace_s=0.0,
    )
    swarm.network.kill(LEAD)
    with pytest.raises(StepError, match=WHY):
        runtime.run(asyncio.sleep(3 * LEAD_S))
