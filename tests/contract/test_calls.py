"""Unary calls, on every transport."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from lightning_swarm.core.errors import (
    Busy,
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    StageError,
    SwarmError,
    TicketGone,
    Unreachable,
)
from lightning_swarm.network import MAX_CALL_BYTES, SMALL_BYTES, Message, PeerId
from lightning_swarm.network.admission import ByteBudget
from lightning_swarm.network.framing import Kind, encode
from tests.contract.world import World, miss_deadline

SOON_S = 0.3
"""A deadline that is meant to pass."""
EVENTUALLY_S = 20.0
"""A deadline that is not meant to pass."""


async def echo(caller: PeerId, body: bytes) -> bytes:
    return caller.encode() + b" says " + body


def test_a_call_reaches_the_handler_and_names_its_caller(world: World, method: str) -> None:
    world.b.transport.handle_call(method, echo)
    answer = world.run(world.a.transport.call(world.b.id, method, b"\0hello", timeout=EVENTUALLY_S))
    assert answer == world.a.id.encode() + b" says \0hello"


def test_empty_and_largest_bodies(world: World, method: str) -> None:
    async def same(caller: PeerId, body: bytes) -> bytes:
        return body

    world.b.transport.handle_call(method, same)
    for body in (b"", bytes(range(256)) * (MAX_CALL_BYTES // 256)):
        assert world.run(world.a.transport.call(world.b.id, method, body, timeout=EVENTUALLY_S)) == body


def test_both_sides_count_the_same_bytes(world: World, method: str) -> None:
    world.b.transport.handle_call(method, echo)
    world.run(world.a.transport.call(world.b.id, method, b"x" * 1000, timeout=EVENTUALLY_S))
    mine, theirs = world.a.transport.traffic, world.b.transport.traffic
    sent, received = mine.sent_bytes[world.b.id, method], mine.received_bytes[world.b.id, method]
    framed = b"".join(encode(Kind.CALL, 1, method, Message(b"x" * 1000)))
    assert sent == theirs.received_bytes[world.a.id, method] == len(framed)
    assert received == theirs.sent_bytes[world.a.id, method] > sent


@pytest.mark.parametrize("kind", [Busy, TicketGone, StageError, ConfigError, Unreachable, SwarmError])
def test_errors_travel_by_name(world: World, method: str, kind: type[SwarmError]) -> None:
    async def fail(caller: PeerId, body: bytes) -> bytes:
        raise kind("what happened, in detail")

    world.b.transport.handle_call(method, fail)
    with pytest.raises(kind, match="what happened, in detail") as caught:
        world.run(world.a.transport.call(world.b.id, method, b"", timeout=EVENTUALLY_S))
    assert type(caught.value) is kind


def test_a_bug_over_there_is_a_plain_swarm_error(world: World, method: str) -> None:
    async def fail(caller: PeerId, body: bytes) -> bytes:
        raise KeyError("bug")

    for peer in (world.a, world.b):
        peer.transport.handle_call(method, fail)
        with pytest.raises(SwarmError, match="KeyError") as caught:
            world.run(world.a.transport.call(peer.id, method, b"", timeout=EVENTUALLY_S))
        assert type(caught.value) is SwarmError


def test_an_unknown_method_is_refused(world: World, method: str) -> None:
    for peer in (world.a, world.b):
        with pytest.raises(ProtocolError, match="no call method"):
            world.run(world.a.transport.call(peer.id, method, b"", timeout=EVENTUALLY_S))
    assert (world.a.id, method) not in world.b.transport.traffic.received_bytes, "strangers can fill the memory"


def test_a_method_is_registered_once(world: World, method: str) -> None:
    world.b.transport.handle_call(method, echo)
    with pytest.raises(ConfigError, match="already"):
        world.b.transport.handle_call(method, echo)


def test_bodies_that_are_too_long_are_refused(world: World, method: str) -> None:
    async def long_answer(caller: PeerId, body: bytes) -> bytes:
        return bytes(MAX_CALL_BYTES + 1)

    for peer in (world.a, world.b):
        peer.transport.handle_call(method, long_answer)
        with pytest.raises(ProtocolError, match=str(MAX_CALL_BYTES)):
            world.run(world.a.transport.call(peer.id, method, bytes(MAX_CALL_BYTES + 1), timeout=EVENTUALLY_S))
        with pytest.raises(ProtocolError, match=str(MAX_CALL_BYTES)):
            world.run(world.a.transport.call(peer.id, method, b"", timeout=EVENTUALLY_S))


def test_a_peer_may_call_itself_for_free(world: World, method: str) -> None:
    world.a.transport.handle_call(method, echo)
    answer = world.run(world.a.transport.call(world.a.id, method, b"hi", timeout=EVENTUALLY_S))
    assert answer == world.a.id.encode() + b" says hi"
    assert (world.a.id, method) not in world.a.transport.traffic.sent_bytes


def test_three_hundred_calls_at_once(world: World, method: str) -> None:
    everybody_is_here = asyncio.Event()
    here: list[bytes] = []

    async def meet(caller: PeerId, body: bytes) -> bytes:
        here.append(body)
        if len(here) == 300:
            everybody_is_here.set()
        await everybody_is_here.wait()
        return body

    async def go() -> list[bytes]:
        calls = (world.a.transport.call(world.b.id, method, b"%d" % i, timeout=EVENTUALLY_S) for i in range(300))
        return await asyncio.gather(*calls)

    world.b.transport.handle_call(method, meet)
    assert world.run(go()) == [b"%d" % i for i in range(300)]


def test_nobody_there(world: World, method: str) -> None:
    for peer in (world.stranger, PeerId("not a peer id")):
        with pytest.raises(Unreachable):
            world.run(world.a.transport.call(peer, method, b"", timeout=EVENTUALLY_S))


def test_a_slow_answer_is_given_up_and_its_handler_cancelled(world: World, method: str) -> None:
    async def go() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def sleepy(caller: PeerId, body: bytes) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return b""

        world.b.transport.handle_call(method, sleepy)
        await miss_deadline(lambda s: world.a.transport.call(world.b.id, method, b"", timeout=s), begun)
        async with asyncio.timeout(EVENTUALLY_S):
            await cancelled.wait()

    world.run(go())


def test_an_answer_that_comes_too_late_disturbs_nobody(world: World, method: str) -> None:
    async def go() -> None:
        begun, given_up, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def stubborn(caller: PeerId, body: bytes) -> bytes:
            if body == b"first":
                begun.set()
                while not given_up.is_set():
                    try:
                        await given_up.wait()
                    except asyncio.CancelledError:
                        continue
                answered.set()
            return body

        world.b.transport.handle_call(method, stubborn)
        await miss_deadline(lambda s: world.a.transport.call(world.b.id, method, b"first", timeout=s), begun)
        given_up.set()
        async with asyncio.timeout(EVENTUALLY_S):
            await answered.wait()
        assert await world.a.transport.call(world.b.id, method, b"second", timeout=EVENTUALLY_S) == b"second"

    world.run(go())


def test_a_cancelled_call_cancels_its_handler(world: World, method: str) -> None:
    async def go() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def sleepy(caller: PeerId, body: bytes) -> bytes:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return b""

        world.b.transport.handle_call(method, sleepy)
        async with asyncio.timeout(EVENTUALLY_S):
            call = asyncio.create_task(world.a.transport.call(world.b.id, method, b"", timeout=EVENTUALLY_S))
            await started.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await cancelled.wait()

    world.run(go())


def test_a_peer_that_dies_during_a_call(world: World, method: str) -> None:
    victim = world.another(world.a)

    async def go() -> None:
        started = asyncio.Event()

        async def sleepy(caller: PeerId, body: bytes) -> bytes:
            started.set()
            await asyncio.Event().wait()
            return b""

        victim.transport.handle_call(method, sleepy)
        call = asyncio.create_task(world.a.transport.call(victim.id, method, b"", timeout=EVENTUALLY_S))
        await started.wait()
        world.kill(victim)
        with pytest.raises(Unreachable):
            await call
        with pytest.raises(Unreachable):
            await world.a.transport.call(victim.id, method, b"", timeout=EVENTUALLY_S)

    world.run(go())


def test_a_peer_that_is_dead_itself_reaches_nobody(world: World, method: str) -> None:
    victim = world.another(world.a)

    async def go() -> None:
        started = asyncio.Event()

        async def sleepy(caller: PeerId, body: bytes) -> bytes:
            started.set()
            await asyncio.Event().wait()
            return b""

        world.a.transport.handle_call(method, sleepy)
        call = asyncio.create_task(victim.transport.call(world.a.id, method, b"", timeout=EVENTUALLY_S))
        await started.wait()
        world.kill(victim)
        with pytest.raises(Unreachable):
            await call
        with pytest.raises(Unreachable):
            await victim.transport.call(world.a.id, method, b"", timeout=EVENTUALLY_S)

    world.run(go())


def test_a_frozen_peer_misses_the_deadline_and_may_return(world: World, method: str) -> None:
    victim = world.another(world.a)
    victim.transport.handle_call(method, echo)
    world.run(world.a.transport.call(victim.id, method, b"", timeout=EVENTUALLY_S))
    world.freeze(victim)
    with pytest.raises(DeadlineExceeded):
        world.run(world.a.transport.call(victim.id, method, b"", timeout=SOON_S))
    world.thaw(victim)
    assert world.run(world.a.transport.call(victim.id, method, b"back", timeout=EVENTUALLY_S)).endswith(b"back")


def test_closing_ends_what_is_under_way_on_both_sides(world: World, method: str) -> None:
    leaver = world.another(world.a)

    async def go() -> None:
        started = asyncio.Queue[None]()

        async def sleepy(caller: PeerId, body: bytes) -> bytes:
            started.put_nowait(None)
            await asyncio.Event().wait()
            return b""

        for peer in (world.a, leaver):
            peer.transport.handle_call(method, sleepy)
        calls = [
            asyncio.create_task(source.transport.call(target.id, method, b"", timeout=EVENTUALLY_S))
            for source, target in ((world.a, leaver), (leaver, world.a), (leaver, leaver))
        ]
        for _ in calls:
            await started.get()
        await leaver.transport.close()
        for call in calls:
            with pytest.raises(Unreachable):
                await call
        with pytest.raises(Unreachable):
            await leaver.transport.call(world.a.id, method, b"", timeout=EVENTUALLY_S)
        await leaver.transport.close()

    world.run(go())


def test_peers_that_were_strangers_become_reachable(world: World, method: str) -> None:
    newcomer = world.another()
    newcomer.transport.handle_call(method, echo)
    addresses = world.run(newcomer.transport.addresses())
    assert all(address.endswith(f"/p2p/{newcomer.id}") for address in addresses)
    world.run(world.a.transport.connect(addresses))
    assert world.run(world.a.transport.call(newcomer.id, method, b"hi", timeout=EVENTUALLY_S)).endswith(b"hi")


@pytest.mark.parametrize("where", ["nonsense", "/ip4/1.2.3/tcp/5", "/ip4/127.0.0.1/tcp/99999"])
def test_what_is_no_address(world: World, where: str) -> None:
    with pytest.raises((ProtocolError, Unreachable)):
        world.run(world.a.transport.connect([f"{where}/p2p/{world.stranger}"]))


def test_an_address_where_nobody_answers(world: World) -> None:
    with pytest.raises(Unreachable):
        world.run(world.a.transport.connect([f"/ip4/127.0.0.1/tcp/1/p2p/{world.stranger}"]))


def test_who_answers_at_an_address_is_found_out(world: World) -> None:
    """This includes a peer's own address, which it cannot dial."""
    for peer in (world.a, world.b):
        [address, *_] = world.run(peer.transport.addresses())
        assert world.run(world.a.transport.identify(address.rpartition("/p2p/")[0])) == peer.id
    assert world.run(world.a.transport.identify("/ip4/127.0.0.2/tcp/1")) is None


def test_the_bytes_of_calls_that_one_peer_may_have_under_way_are_bounded(world: World, method: str) -> None:
    victim, friend = world.another(world.a), world.another()
    world.run(friend.transport.connect(world.run(victim.transport.addresses())))
    body = b"x" * (SMALL_BYTES + 1)
    budget = ByteBudget(1 << 30, 2 * len(body) + SMALL_BYTES)
    assert isinstance(victim.transport._unadmitted_budget, ByteBudget)  # type: ignore[attr-defined]
    victim.transport._unadmitted_budget = budget  # type: ignore[attr-defined]
    num_held, all_held, released = 0, asyncio.Event(), asyncio.Event()

    async def hold(caller: PeerId, body: bytes) -> bytes:
        nonlocal num_held
        if caller == world.a.id and len(body) > SMALL_BYTES:
            num_held += 1
            if num_held == 2:
                all_held.set()
            await released.wait()
        return b"%d" % len(body)

    victim.transport.handle_call(method, hold)

    async def go() -> None:
        call = partial(world.a.transport.call, victim.id, method, timeout=EVENTUALLY_S)
        waiting = [asyncio.create_task(call(body)) for _ in range(2)]
        await all_held.wait()
        with pytest.raises(Busy, match="too many unanswered bytes"):
            await call(body)
        assert await call(b"short") == b"5", "short ones are not counted"
        assert await friend.transport.call(victim.id, method, body, timeout=EVENTUALLY_S) == b"%d" % len(body)
        released.set()
        assert await asyncio.gather(*waiting) == [b"%d" % len(body)] * 2
        assert await call(body) == b"%d" % len(body)

    world.run(go())
    assert not budget._by_peer
