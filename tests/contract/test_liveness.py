"""Peers that fall silent, and peers that only take long, on every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from lightning_swarm.core.errors import Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.access import PING
from tests.contract.world import Peer, World

SILENCE_S = 0.4
EVENTUALLY_S = 20.0


@contextmanager
def impatient(peer: Peer, silence_s: float = SILENCE_S) -> Iterator[None]:
    liveness = peer.transport._liveness  # type: ignore[attr-defined]  # peers are shared by tests that need patience
    before, liveness.silence_s = liveness.silence_s, silence_s
    try:
        yield
    finally:
        liveness.silence_s = before


async def never(caller: PeerId, body: bytes) -> bytes:
    await asyncio.Event().wait()
    return body


async def never_with_tensors(caller: PeerId, message: Message) -> Message:
    await asyncio.Event().wait()
    return message


@pytest.mark.first_cells(1)
def test_a_call_to_a_peer_that_falls_silent_ends_long_before_its_deadline(world: World, method: str) -> None:
    victim = world.another(world.a)
    victim.transport.handle_call(method, never)
    world.run(world.a.transport.ping(victim.id))
    world.freeze(victim)
    with impatient(world.a), pytest.raises(Unreachable, match=rf"{victim.id} gave no sign of life for .* s during"):
        world.run(world.a.transport.call(victim.id, method, b"", timeout=1000.0))


@pytest.mark.each_value
@pytest.mark.parametrize("num_bytes", [1, 64 << 20], ids=["asking", "sending"])
def test_a_stream_to_a_peer_that_falls_silent(world: World, method: str, num_bytes: int) -> None:
    victim = world.another(world.a)
    victim.transport.handle_stream(method, never_with_tensors)
    world.run(world.a.transport.ping(victim.id))
    world.freeze(victim)
    message = Message(b"", (torch.zeros(num_bytes, dtype=torch.uint8),))
    with impatient(world.a), pytest.raises(Unreachable, match="no sign of life"):
        world.run(world.a.transport.stream(victim.id, method, message, timeout=1000.0))


def test_a_peer_that_takes_long_is_waited_for(world: World, method: str) -> None:
    """Its pings are answered, so a long deadline is no waste of time."""

    async def until_pinged(caller: PeerId, body: bytes) -> bytes:
        loop, silence_s = asyncio.get_running_loop(), float(body)
        end_s = loop.time() + 1.5 * silence_s
        pings = world.b.transport.traffic.received_bytes
        before = pings[world.a.id, PING]
        while pings[world.a.id, PING] < before + 6 or loop.time() < end_s:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(silence_s / 10)
        return b"done"

    world.b.transport.handle_call(method, until_pinged)
    answer = b""
    for silence_s in (SILENCE_S, 5 * SILENCE_S, 25 * SILENCE_S):  # a busy machine may answer a ping late
        with impatient(world.a, silence_s), suppress(Unreachable):
            answer = world.run(world.a.transport.call(world.b.id, method, b"%g" % silence_s, timeout=100 * SILENCE_S))
            break
    assert answer == b"done"


def test_who_lives_answers_a_ping(world: World) -> None:
    assert 0.0 <= world.run(world.a.transport.ping(world.b.id)) < EVENTUALLY_S
    assert world.run(world.a.transport.ping(world.a.id)) < EVENTUALLY_S


def test_who_is_frozen_or_dead_or_unknown_does_not(world: World) -> None:
    victim = world.another(world.a)
    world.run(world.a.transport.ping(victim.id))
    world.freeze(victim)
    with impatient(world.a), pytest.raises(Unreachable, match="no sign of life"):
        world.run(world.a.transport.ping(victim.id))
    world.thaw(victim)
    world.run(world.a.transport.ping(victim.id))
    world.kill(victim)
    for peer in (victim.id, world.stranger):
        with pytest.raises(Unreachable):
            world.run(world.a.transport.ping(peer))
