"""Announcements, in every directory."""

from __future__ import annotations

import asyncio

import pytest

from lightning_swarm.core.errors import ProtocolError, Unreachable
from lightning_swarm.network import MAX_RECORD_BYTES
from tests.contract.world import GROWING_S, World

LONG_S = 60.0


def test_all_peers_read_what_each_announced(world: World, method: str) -> None:
    async def go() -> None:
        await world.a.directory.announce(method, b"\0from a", ttl_s=LONG_S)
        await world.b.directory.announce(method, b"", ttl_s=LONG_S)
        for peer in (world.a, world.b):
            assert dict(await peer.directory.read(method)) == {world.a.id: b"\0from a", world.b.id: b""}

    world.run(go())


def test_nothing_was_announced(world: World, method: str) -> None:
    assert dict(world.run(world.a.directory.read(method))) == {}


@pytest.mark.parametrize("ttl_s", [LONG_S, 2 * LONG_S, LONG_S / 2], ids=["same", "longer", "shorter"])
def test_a_later_announcement_replaces_the_earlier(world: World, method: str, ttl_s: float) -> None:
    async def go() -> None:
        await world.a.directory.announce(method, b"old", ttl_s=LONG_S)
        await world.a.directory.announce(method, b"new", ttl_s=ttl_s)
        for peer in (world.a, world.b):
            assert dict(await peer.directory.read(method)) == {world.a.id: b"new"}

    world.run(go())


def test_announcements_expire_also_if_an_earlier_one_would_have_lived_longer(world: World, method: str) -> None:
    async def go() -> None:
        await world.b.directory.announce(method, b"stays", ttl_s=LONG_S)
        for ttl_s in GROWING_S:
            await world.a.directory.announce(method, b"old", ttl_s=LONG_S)
            await world.a.directory.announce(method, b"brief", ttl_s=ttl_s)
            if is_read := world.a.id in await world.b.directory.read(method):
                break
        assert is_read
        await asyncio.sleep(ttl_s)
        for peer in (world.a, world.b):
            assert dict(await peer.directory.read(method)) == {world.b.id: b"stays"}

    world.run(go())


def test_the_largest_value_and_one_more(world: World, method: str) -> None:
    value = bytes(range(256)) * (MAX_RECORD_BYTES // 256)
    world.run(world.a.directory.announce(method, value, ttl_s=LONG_S))
    assert dict(world.run(world.b.directory.read(method))) == {world.a.id: value}
    with pytest.raises(ProtocolError, match=str(MAX_RECORD_BYTES)):
        world.run(world.a.directory.announce(method, value + b"\0", ttl_s=LONG_S))


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 1e9, float("nan")])
def test_impossible_lives_are_refused(world: World, method: str, ttl_s: float) -> None:
    with pytest.raises(ProtocolError, match="lives"):
        world.run(world.a.directory.announce(method, b"", ttl_s=ttl_s))


def test_who_joins_later_reads_it_too(world: World, method: str) -> None:
    world.run(world.a.directory.announce(method, b"early", ttl_s=LONG_S))
    late = world.another(world.a)
    assert dict(world.run(late.directory.read(method))) == {world.a.id: b"early"}
    world.run(late.directory.announce(method, b"late", ttl_s=LONG_S))
    assert dict(world.run(world.b.directory.read(method))) == {world.a.id: b"early", late.id: b"late"}


def test_what_a_dead_peer_announced_stays_until_it_expires(world: World, method: str) -> None:
    victim = world.another(world.a)
    world.run(victim.directory.announce(method, b"will", ttl_s=LONG_S))
    world.kill(victim)
    assert dict(world.run(world.b.directory.read(method))) == {victim.id: b"will"}


def test_a_lone_peer_is_its_own_directory(world: World, method: str) -> None:
    loner = world.another()
    world.run(loner.directory.announce(method, b"me", ttl_s=LONG_S))
    assert world.run(loner.directory.read(method))[loner.id] == b"me"


def test_who_is_cut_off_learns_that_nobody_stored_it(world: World, method: str) -> None:
    victim = world.another(world.a)
    world.freeze(victim)
    with pytest.raises(Unreachable):
        world.run(victim.directory.announce(method, b"", ttl_s=LONG_S))


def test_closing_twice_is_fine(world: World, method: str) -> None:
    leaver = world.another(world.a)
    world.run(leaver.directory.close())
    world.run(leaver.directory.close())
    with pytest.raises(Unreachable):
        world.run(leaver.directory.read(method))
    with pytest.raises(Unreachable):
        world.run(leaver.directory.announce(method, b"", ttl_s=LONG_S))
