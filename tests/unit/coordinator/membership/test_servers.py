"""A joining server, and events during its join: the lead, a slower peer, a donor that leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch
from msgspec import structs

from lightning_swarm.core.errors import Busy, ConfigError, DeadlineExceeded, PeerError, ProtocolError, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.network.identity import Identity
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.peer import discovery
from lightning_swarm.protocol.messages.membership import FollowRequest, JoinRequest, ReadyRequest
from lightning_swarm.protocol.messages.run import Selection, StepChange
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, encode
from lightning_swarm.protocol.rpc import ADMIT, APPLY, FOLLOW, FREEZE, JOIN, LISTEN, NEXT, PROPOSE, READY
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer import snapshots, stage_copy
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.test_rollback import go_back
from tests.unit.coordinator.test_rollback import step as restart_step
from tests.unit.coordinator.test_trainer_handlers import batch, begun
from tests.unit.swarm import Swarm, make_module, plain_steps, rows

A, B, J = PeerId("a"), PeerId("b"), PeerId("j")


def entering(swarm: Swarm, joiner: Server) -> asyncio.Task[None]:
    """Start a server that joins."""

    async def find() -> Sequence[PeerId]:
        return [swarm.manifest.coordinator]

    swarm.joining.append(swarm.loop.create_task(joiner.joiner.enter(find)))
    return swarm.joining[-1]


def test_a_server_that_is_never_let_in_says_so(make_swarm: MakeSwarm) -> None:
    """It gives up after eight attempts within two minutes."""
    swarm = make_swarm("a", "b")
    joiner = swarm.add_server("j")
    asked_s: list[float] = []

    async def refuse(caller: PeerId, body: bytes) -> bytes:
        asked_s.append(swarm.loop.time())
        raise Unreachable("its cable is cut.")

    swarm.network.find(A)._call_handlers[JOIN.name] = refuse

    async def go() -> None:
        with pytest.raises(PeerError) as refusal:
            await joiner.joiner.enter(found)
        said = str(refusal.value)
        assert said.startswith("a run must admit a server within 8 attempts; a gave the last reason: ")
        assert "its cable is cut." in said
        assert "`lightning-swarm doctor --peer`" in said

    async def found() -> Sequence[PeerId]:
        return [A]

    swarm.run(go())
    assert len(asked_s) == 8
    assert asked_s[-1] - asked_s[0] == pytest.approx(127.0, abs=1.0)
    assert not joiner.membership.is_member


def test_a_joiner_that_announces_another_peers_address_is_refused_at_once(make_swarm: MakeSwarm) -> None:
    """For example, a script names the address of the run's first machine."""
    swarm = make_swarm("a", "b")
    own, other = (Identity.generate().peer_id for _ in range(2))
    joiner = swarm.add_server(own)
    transport, asked = swarm.network.find(own), list[str]()
    transport.address = f"/ip4/203.0.113.7/tcp/31337/p2p/{own}"

    async def identify(address: str) -> PeerId | None:
        asked.append(address)
        return other

    swarm.network.find(A).identify = identify  # type: ignore[method-assign]

    async def find() -> Sequence[PeerId]:
        return [A]

    async def go() -> None:
        with pytest.raises(ConfigError) as refusal:
            await joiner.joiner.enter(find)
        assert f"203.0.113.7:31337 answers as {other}, this peer is {own}." in str(refusal.value)
        assert "`--announce HOST:PORT`" in str(refusal.value)

    swarm.run(go())
    assert asked == ["/ip4/203.0.113.7/tcp/31337"]
    assert not joiner.membership.is_member


# ---------------------------------------------------------------------- announcements outlive runs


@pytest.mark.parametrize("waits", [A, B])
def test_a_coordinator_that_has_no_run_yet_is_not_joined(make_swarm: MakeSwarm, waits: PeerId) -> None:
    """It came back with its identity, an earlier run's announcement names it, and its own run has not begun."""
    swarm = make_swarm("a", "b", admit=False)
    task = entering(swarm, swarm.servers[waits])

    async def go() -> None:
        await asyncio.sleep(3.0)
        assert not task.done()
        await discovery.admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=10.0)
        await asyncio.wait_for(task, 10.0)
        await swarm.step(rows(0))

    swarm.run(go())


def test_an_admission_does_not_wait_for_a_join(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    joiner = swarm.add_server("j")
    swarm.network.freeze(B)  # every joiner must meet B
    entering(swarm, joiner)
    starter = swarm.network.transport(PeerId("starter"))

    async def go() -> None:
        await asyncio.sleep(1.0)
        with pytest.raises(ProtocolError, match="is joining the run of a already"):
            await starter.call(J, ADMIT.name, encode(structs.replace(swarm.manifest, lead="starter")), timeout=1.0)
        swarm.network.thaw(B)
        await asyncio.sleep(10.0)
        await swarm.step(rows(0))
        assert joiner.membership.is_member

    swarm.run(go())


def test_who_gave_up_joining_can_be_admitted(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", admit=False)
    server = swarm.servers[B]

    async def go() -> None:
        with pytest.raises(Unreachable):
            async with server.admission.joining_run(A):
                raise Unreachable("the coordinator is gone")
        await discovery.admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=10.0)
        await swarm.step(rows(0))

    swarm.run(go())


# ---------------------------------------------------------------------- what comes between a round and its record


@pytest.mark.parametrize("what", ["dies", "begins anew", "stays"])
def test_a_record_that_waits_for_the_lead_lets_in_who_is_there_then(make_swarm: MakeSwarm, what: str) -> None:
    swarm, other = begun(make_swarm, 4)
    joiner = swarm.join("j")

    async def go() -> None:
        await batch(swarm, other, 1)
        waiting = asyncio.create_task(other.wait_for_record(0))
        await asyncio.sleep(5.0)
        assert joiner.steps.rounds._held is not None, "the round is through, and the joiner holds it"
        if what == "dies":
            swarm.network.kill(J)
        elif what == "begins anew":
            swarm.servers[A].donor._state.followers.clear()  # makes it need older records than are kept
        await asyncio.sleep(60.0)
        record = await swarm.record(0)
        assert [newcomer.member.peer_id for newcomer in record.newcomers] == ([J] if what == "stays" else [])
        await waiting
        if what == "begins anew":
            await asyncio.sleep(60.0)
            await swarm.batch(rows(2))
            await batch(swarm, other, 3)
            await swarm.record(1)
        assert joiner.membership.is_member == (what != "dies")

    swarm.run(go())


def test_who_enters_with_the_record_that_is_being_decided_may_not_begin_anew(make_swarm: MakeSwarm) -> None:
    """Its donor drops it during a long vote, but its state must still be there when the record comes."""
    swarm = make_swarm("a", "b")
    joiner = swarm.join("j")
    handlers = swarm.servers[A]._transport._call_handlers  # type: ignore[attr-defined]
    propose = handlers[PROPOSE.name]

    async def late(caller: PeerId, body: bytes) -> bytes:
        swarm.servers[A].donor._state.followers.clear()
        await asyncio.sleep(20.0)
        answer: bytes = await propose(caller, body)
        return answer

    handlers[PROPOSE.name] = late
    record = swarm.run(swarm.step(rows(0)))
    assert [newcomer.member.peer_id for newcomer in record.newcomers] == [J]
    handlers[PROPOSE.name] = propose
    swarm.run(swarm.step(rows(1)))
    assert joiner.steps.version == 2


def test_who_is_ready_only_when_the_sums_are_frozen_enters_with_the_next_record(make_swarm: MakeSwarm) -> None:
    """No server was asked for the hash that its weights are compared with."""
    swarm = make_swarm("a", "b")
    joiner = swarm.join("j")
    waiting = swarm.coordinator.generation.server_membership._waiting[J]
    waiting.ready = False
    handlers = swarm.servers[A]._transport._call_handlers  # type: ignore[attr-defined]
    freeze = handlers[FREEZE.name]

    async def and_be_ready(caller: PeerId, body: bytes) -> bytes:
        waiting.ready = True
        answer: bytes = await freeze(caller, body)
        return answer

    handlers[FREEZE.name] = and_be_ready
    assert swarm.run(swarm.step(rows(0))).newcomers == []
    assert waiting.asked is None
    record = swarm.run(swarm.step(rows(1)))
    assert [newcomer.member.peer_id for newcomer in record.newcomers] == [J]
    assert joiner.membership.is_member


def test_a_changed_selection_is_over_with_the_step_that_lets_a_server_in(make_swarm: MakeSwarm) -> None:
    """The donor also sends the record, while the coordinator's call to apply it is under way."""
    swarm = make_swarm("a", "b")
    joiner = swarm.join("j")
    executor = joiner._executor
    submit, one_by_one = executor.submit, asyncio.Lock()

    def slowly(priority: Any, run: Any) -> Any:
        async def later() -> Any:
            async with one_by_one:
                await asyncio.sleep(0.05)
                return await submit(priority, run)

        return asyncio.ensure_future(later())

    executor.submit = slowly  # type: ignore[method-assign]
    groups = {name: 0 for name, _ in swarm.module.named_parameters()}

    async def go() -> None:
        await swarm.steps.change(StepChange(selection=Selection(num_groups=1, groups=groups, frozen=["0.0.weight"])))
        record = await swarm.step(rows(0), rows(1))
        assert [newcomer.member.peer_id for newcomer in record.newcomers] == [J]
        await asyncio.sleep(1.0)
        await swarm.step(rows(2), rows(3))

    swarm.run(go())
    assert joiner.steps.version == 2


# ---------------------------------------------------------------------- who is quicker than the coordinator


def test_ready_may_arrive_after_the_record_that_lets_it_in(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    joiner = swarm.join("j")
    call, held = joiner._transport.call, asyncio.Event()

    async def late(peer: PeerId, method: str, body: bytes, *, timeout: float) -> bytes:
        if method == READY.name:
            held.set()
            await asyncio.sleep(0.5)
        return await call(peer, method, body, timeout=timeout)

    joiner._transport.call = late  # type: ignore[method-assign]

    async def go() -> None:
        await held.wait()
        await swarm.step(rows(0), rows(1))
        assert joiner.membership.is_member
        await asyncio.wait_for(swarm.joining[0], 10.0)

    swarm.run(go())


def test_a_joiner_may_be_a_record_ahead_of_the_coordinator(make_swarm: MakeSwarm) -> None:
    """Its donor applies the record before the coordinator does."""
    swarm = make_swarm("a a2", "b")
    handlers = swarm.servers[A]._transport._call_handlers  # type: ignore[attr-defined]
    apply = handlers[APPLY.name]

    async def late(caller: PeerId, body: bytes) -> bytes:
        await asyncio.sleep(0.3)
        answer: bytes = await apply(caller, body)
        return answer

    handlers[APPLY.name] = late
    joiner = swarm.add_server("j")
    stream = joiner._transport.stream

    async def slow_download(peer: PeerId, method: str, message: Message, **more: Any) -> Message:
        answer = await stream(peer, method, message, **more)
        if method == FOLLOW.name:
            await asyncio.sleep(5.0)
        return answer

    joiner._transport.stream = slow_download  # type: ignore[method-assign]
    ahead = 0
    ready = handlers[READY.name]

    async def counted(caller: PeerId, body: bytes) -> bytes:
        nonlocal ahead
        ahead += joiner.steps.version > swarm.servers[A].steps.version
        answer: bytes = await ready(caller, body)
        return answer

    handlers[READY.name] = counted
    task = entering(swarm, joiner)

    async def go() -> None:
        for _ in range(60):
            await swarm.step(rows(0), rows(1))
            await asyncio.sleep(0.013)
        assert ahead, "it was quicker than the coordinator"
        await asyncio.wait_for(task, 10.0)
        assert joiner.membership.is_member

    swarm.run(go())


def test_who_is_in_may_change_while_a_joiner_downloads(make_swarm: MakeSwarm) -> None:
    """Its first records are older than its state: two servers joined its stage meanwhile, and one of them left it."""
    swarm = make_swarm("a", "b")
    joiner = swarm.add_server("j")
    stream = joiner._transport.stream

    async def slow_download(peer: PeerId, method: str, message: Message, **more: Any) -> Message:
        if method == FOLLOW.name:
            await asyncio.sleep(20.0)
        return await stream(peer, method, message, **more)

    joiner._transport.stream = slow_download  # type: ignore[method-assign]
    task = entering(swarm, joiner)
    swarm.run(asyncio.sleep(0.5))
    stage = swarm.coordinator.generation.server_membership.targets[joiner.membership.me.peer_id]
    others = [entering(swarm, swarm.add_server(name)) for name in "klm"]

    async def go() -> None:
        for _ in range(8):
            await swarm.step(rows(0), rows(1))
            await asyncio.sleep(1.0)
        assert all(one.done() for one in others)
        assert not task.done()
        before = swarm.rosters_now
        assert len(before[stage]) > 1
        swarm.network.kill(before[stage][-1].peer_id)
        while not task.done():
            await swarm.step(rows(0), rows(1))
            await asyncio.sleep(1.0)
        assert joiner.membership.is_member
        assert joiner.membership.run.seats == swarm.steps.run.seats
        await swarm.step(rows(0), rows(1))
        assert joiner.membership.run.seats == swarm.steps.run.seats
        assert swarm.loop.time() < 60.0

    swarm.run(go())


# ---------------------------------------------------------------------- who wastes the others' time or memory


def test_who_joins_anew_and_is_silent_again_delays_ever_fewer_steps(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    stranger = swarm.network.transport(PeerId("stranger"))

    async def be_silent(caller: PeerId, body: bytes) -> bytes:
        await asyncio.sleep(1000.0)
        return b""

    stranger.handle_call(LISTEN.name, be_silent)

    async def go() -> int:
        num_delayed = 0
        for step in range(40):
            with contextlib.suppress(Busy):
                await say_it_joins(stranger)
                await stranger.call(A, READY.name, encode(ReadyRequest(generation=0, version=step)), timeout=5.0)
            before_s = swarm.loop.time()
            await swarm.step(rows(0))
            num_delayed += swarm.loop.time() - before_s > 1.0
            await asyncio.sleep(1.0)
        return num_delayed

    assert swarm.run(go()) == 6, "three times, then after 5, 10 and 20 s, and not within 40 s after that"


def test_a_stage_is_copied_once_for_a_follower(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower requests the state a hundred times, and reads none of it."""
    swarm = make_swarm("a", "b")
    joiner = swarm.join("j")
    num_copies = counted_copies(monkeypatch)
    body = Message(encode(FollowRequest(stage_index=0, version=None, hold_s=0.0)))

    async def follow() -> None:
        with contextlib.suppress(Busy):
            await joiner._transport.stream(A, FOLLOW.name, body, timeout=5.0)

    swarm.run(gather(follow() for _ in range(100)))
    assert num_copies() == 1


def test_few_download_at_once_and_share_a_copy(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = make_swarm("a", "b")
    num_copies = counted_copies(monkeypatch)
    strangers = [swarm.network.transport(PeerId(f"stranger{number}")) for number in range(20)]

    async def follow(stranger: MemoryTransport) -> bool:
        await say_it_joins(stranger)
        body = encode(FollowRequest(stage_index=0, version=None, hold_s=0.0))
        try:
            await stranger.stream(A, FOLLOW.name, Message(body), timeout=5.0)
        except Busy:
            return False
        return True

    let_in = swarm.run(gather(follow(one) for one in strangers))
    assert sum(let_in) == 3
    assert num_copies() == 1
    assert swarm.run(follow(strangers[let_in.index(True)])), "who joins anew gives its place back"
    assert not swarm.run(follow(strangers[let_in.index(False)]))
    swarm.run(asyncio.sleep(61.0))
    assert swarm.run(follow(strangers[let_in.index(False)])), "who asks for no piece of it does so, too"
    held = swarm.servers[A].donor
    assert len(held._state.downloads) == 1
    swarm.run(asyncio.sleep(61.0))
    swarm.run(swarm.step(rows(0)))
    assert (held._state.downloads, held._state.copies) == ({}, {}), "nothing is held for nobody"


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("repeats", [False, True])
def test_places_that_are_held_by_words_alone_come_free(make_swarm: MakeSwarm, repeats: bool) -> None:
    """Repeated reports do not keep the place either. A joiner with a longer download begins anew after a while."""
    swarm = make_swarm("a", "b")
    slow = swarm.add_server("slow")
    stream = slow._transport.stream
    num_downloads = 0

    async def slow_download(peer: PeerId, method: str, message: Message, **more: Any) -> Message:
        nonlocal num_downloads
        answer = await stream(peer, method, message, **more)
        if method == FOLLOW.name:
            num_downloads += 1
            await asyncio.sleep(400.0 if num_downloads == 1 else 0.0)
        return answer

    slow._transport.stream = slow_download  # type: ignore[method-assign]
    entering(swarm, slow)
    strangers = [swarm.network.transport(PeerId(f"stranger{number}")) for number in range(63)]
    swarm.run(asyncio.sleep(1.0))
    swarm.run(gather(say_it_joins(one) for one in strangers))
    late = swarm.add_server("late")
    with pytest.raises(Busy, match="at most 64 servers may join at once, and 64 are joining"):
        swarm.run(say_it_joins(late._transport))
    for _ in range(3):
        swarm.run(asyncio.sleep(100.5))
        if repeats:
            swarm.run(gather(expected_busy(say_it_joins(one)) for one in strangers))
    entering(swarm, late)
    swarm.run(asyncio.sleep(1.0))
    for stranger in strangers[:3]:
        with pytest.raises(Busy, match=r"stalled or missed \d+ rounds while it was joining; it may join in \d+ s"):
            swarm.run(say_it_joins(stranger))
    swarm.run(asyncio.sleep(300.0))
    swarm.run(swarm.step(rows(0)))
    assert late.membership.is_member
    assert slow.membership.is_member
    assert num_downloads == 2


async def expected_busy(joining: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(Busy):
        await joining


async def say_it_joins(transport: Transport) -> None:
    addresses = list(await transport.addresses())
    request = JoinRequest(protocol_version=PROTOCOL_VERSION, boot_id=1, addresses=addresses, stage_index=0)
    await transport.call(A, JOIN.name, encode(request), timeout=5.0)


def counted_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    copies: list[Stage] = []
    copied = snapshots.copy_stage

    def counted(stage: Stage, generation: int) -> Any:
        copies.append(stage)
        return copied(stage, generation)

    monkeypatch.setattr(stage_copy, "copy_stage", counted)
    return lambda: len(copies)


# ---------------------------------------------------------------------- a run that goes back


@pytest.mark.parametrize("first_step", [0, 2])
def test_who_is_joining_when_the_run_goes_back_begins_anew(make_swarm: MakeSwarm, first_step: int) -> None:
    swarm = make_swarm("a", "b")
    for seed in 5, 6:
        swarm.run(restart_step(swarm, seed))
    joiner = swarm.join("j")
    go_back(swarm, first_step)
    swarm.run(restart_step(swarm, 1, 11))
    swarm.run(asyncio.sleep(60.0))
    swarm.run(restart_step(swarm, 2, 12))
    assert joiner.membership.is_member
    swarm.run(restart_step(swarm, 3, 13))
    module = make_module(2)
    plain_steps(module, [[rows(seed), rows(seed + 10)] for seed in (1, 2, 3)], divisors=[1.0] * 3)
    torch.testing.assert_close(swarm.weights(), dict(module.state_dict()))


def test_records_of_the_old_generation_are_kept_for_nobody(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.join("j")
    swarm.network.freeze(J)
    for seed in 5, 6:
        swarm.run(restart_step(swarm, seed))
    records = swarm.servers[A].donor
    assert records._state.kept
    assert records._state.followers
    go_back(swarm)
    assert not records._state.kept
    assert not records._state.followers


# ---------------------------------------------------------------------- donors


def test_the_next_attempt_asks_another_donor(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a a2", "b b2")
    joiner = swarm.add_server("j")
    asked: list[PeerId] = []
    stream = joiner._transport.stream

    async def watched(peer: PeerId, method: str, message: Message, **more: Any) -> Message:
        if method == FOLLOW.name:
            asked.append(peer)
        return await stream(peer, method, message, **more)

    joiner._transport.stream = watched  # type: ignore[method-assign]
    entering(swarm, joiner)

    async def go() -> None:
        await asyncio.sleep(0.5)
        for peer in swarm.rosters[0]:
            swarm.servers[peer].donor._state.followers.clear()
        await asyncio.sleep(60.0)

    swarm.run(go())
    assert sorted(asked[:2]) == sorted(swarm.rosters[0])


def test_a_donor_that_freezes_does_not_hold_its_joiner(make_swarm: MakeSwarm) -> None:
    limits = Limits(call_timeout=30.0, join_timeout=3600.0)
    swarm = make_swarm("a a2", "b b2", limits=limits)
    joiner = swarm.add_server("j")
    asked: list[tuple[PeerId, str]] = []
    stream = joiner._transport.stream

    async def watched(peer: PeerId, method: str, message: Message, **more: Any) -> Message:
        asked.append((peer, method))
        if method == NEXT.name and len({peer for peer, _ in asked}) == 1:
            await asyncio.sleep(more["timeout"])
            raise DeadlineExceeded("the donor did not answer")
        return await stream(peer, method, message, **more)

    joiner._transport.stream = watched  # type: ignore[method-assign]
    entering(swarm, joiner)
    swarm.run(asyncio.sleep(60.0))
    assert len({peer for peer, _ in asked}) == 2, "it went on to another one"
    swarm.run(swarm.step(rows(0), rows(1)))
    assert joiner.membership.is_member


# ---------------------------------------------------------------------- those that move


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("to_be_had", [True, False])
def test_a_mover_takes_its_former_stage_where_the_other_is_not_to_be_had(
    make_swarm: MakeSwarm, to_be_had: bool
) -> None:
    swarm = make_swarm("a b", "c")
    refused: list[PeerId] = []

    async def refuse(caller: PeerId, message: Message) -> Message:
        refused.append(caller)
        raise Unreachable("its line is down.")

    if not to_be_had:
        for peer in (A, B):
            handlers = swarm.network.find(peer)._stream_handlers
            handlers[FOLLOW.name] = (refuse, *handlers[FOLLOW.name][1:])
    joiner = swarm.add_server("j")
    joiner.joiner.move_to(0, former=1)

    async def go() -> None:
        task = entering(swarm, joiner)
        for number in range(40):
            await asyncio.sleep(5.0)
            await swarm.step(rows(number))
        await task
        assert joiner.membership.is_member
        assert joiner.steps.stages == ((0,) if to_be_had else (1,))
        assert len(refused) == (0 if to_be_had else 3)

    swarm.run(go())
