"""Peers of one machine communicate past their daemons, without impersonation."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.identity import load_identity
from lightning_swarm.peer import process
from tests.contract.world import HivemindWorld, NeighbourWorld, Peer

hivemind = pytest.importorskip("lightning_swarm.network.hivemind")
neighbours = pytest.importorskip("lightning_swarm.network.hivemind.local_streams")

WHO = "who"
PROOF = bytes(32)


@pytest.fixture
def world() -> Iterator[NeighbourWorld]:
    world = NeighbourWorld()
    world.open()
    for peer in (world.a, world.b):
        serve(peer)
    yield world
    world.close()


def serve(peer: Peer) -> None:
    """Answer calls with the caller's id, and streams with their message."""

    async def who(caller: PeerId, _: bytes) -> bytes:
        return caller.encode()

    async def echo(_: PeerId, message: Message) -> Message:
        return message

    peer.transport.handle_call(WHO, who)
    peer.transport.handle_stream(WHO, echo)


async def whom(asked: Peer, caller: Peer) -> bytes:
    return await caller.transport.call(asked.id, WHO, b"", timeout=20.0)


def inside(peer: Peer) -> Any:
    return peer.transport._neighbours  # type: ignore[attr-defined]


@contextmanager
def carried(peer: Peer) -> Iterator[list[PeerId]]:
    """Collect the peers to which the peer opens streams through its daemon."""
    daemon = peer.transport._daemon  # type: ignore[attr-defined]
    opened: list[PeerId] = []
    open_stream = daemon.open_stream

    async def spy(other: PeerId, protocol: str) -> Any:
        opened.append(other)
        return await open_stream(other, protocol)

    daemon.open_stream = spy
    yield opened
    daemon.open_stream = open_stream


def stand_in_for(peer: Peer) -> socket.socket:
    """Listen under a peer's name."""
    inside(peer).close()
    impostor = socket.socket(socket.AF_UNIX)
    impostor.bind(neighbours._socket_name(peer.id))
    impostor.listen()
    impostor.setblocking(False)
    return impostor


async def said(peer: Peer, *data: bytes) -> bytes:
    """Connect to a peer and send data; return its answer."""
    connected = neighbours._connect(peer.id)
    reader, writer = await asyncio.open_unix_connection(sock=connected)
    for piece in data:
        writer.write(piece)
    writer.write_eof()
    try:
        return bytes(await reader.read())
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def greeting(caller: PeerId, shown: bytes, magic: bytes = b"LSWN", protocol: bytes = b"lightning_swarm.call") -> bytes:
    name = caller.encode()
    return bytes(neighbours._GREETING.pack(magic, shown, len(protocol), len(name)) + protocol + name)


def test_all_but_the_introduction_goes_past_the_daemons(world: NeighbourWorld) -> None:
    async def go() -> None:
        tensor = torch.arange(1 << 20)
        with carried(world.a) as opened:
            assert await whom(world.b, world.a) == world.a.id.encode()
            answer = await world.a.transport.stream(world.b.id, WHO, Message(tensors=(tensor,)), timeout=20.0)
            assert torch.equal(answer.tensors[0], tensor)
        assert opened == [world.b.id]  # the introduction
        sent = world.a.transport.traffic.sent_bytes
        assert 0 < sent[world.b.id, neighbours.INTRODUCE] < 200
        assert sent[world.b.id, WHO] > tensor.nbytes  # counts as over a daemon

    world.run(go())


def test_who_is_on_no_other_machine_but_has_no_socket_is_asked_over_the_daemon(world: NeighbourWorld) -> None:
    async def go() -> None:
        lone = Peer(*await hivemind.start(initial_peers=await world.a.transport.addresses(), neighbours=False))
        serve(lone)
        try:
            with carried(world.a) as opened:
                assert await whom(lone, world.a) == world.a.id.encode()
                assert await whom(world.a, lone) == lone.id.encode()
            assert opened == [lone.id]
            with pytest.raises(ProtocolError, match="has no call method"):
                await world.a.transport.call(lone.id, neighbours.INTRODUCE, b"", timeout=20.0)
        finally:
            await lone.close()

    world.run(go())


@pytest.mark.parametrize("answer", [PROOF, b"", b"short", None], ids=["wrong", "hangs up", "short", "silent"])
def test_an_impostor_gets_no_calls(world: NeighbourWorld, answer: bytes | None) -> None:
    async def go() -> None:
        inside(world.a)._introductions[world.b.id] = await inside(world.a)._introduce(world.b.id)
        inside(world.a)._greeting_s = 1.0  # while it sends no greeting
        impostor = stand_in_for(world.b)
        heard = bytearray()
        loop = asyncio.get_running_loop()

        async def deceive() -> None:
            connected, _ = await loop.sock_accept(impostor)
            with connected:
                connected.setblocking(False)
                heard.extend(await loop.sock_recv(connected, 1000))
                if answer is not None:
                    await loop.sock_sendall(connected, answer)
                    if len(answer) < len(PROOF):
                        return
                heard.extend(await loop.sock_recv(connected, 1000))

        deceiving = asyncio.create_task(deceive())
        assert await whom(world.b, world.a) == world.a.id.encode()
        await deceiving
        impostor.close()
        assert heard.startswith(b"LSWN")
        assert WHO.encode() not in heard

    world.run(go())


def test_a_caller_without_the_secret_is_not_heard(world: NeighbourWorld) -> None:
    async def go() -> None:
        of_b = await world.b.transport.call(world.a.id, neighbours.INTRODUCE, b"", timeout=20.0)
        shown, proof = of_b[:32], of_b[32:]
        # The valid greeting; each of the following has one defect.
        assert await said(world.a, greeting(world.b.id, shown)) == proof
        assert await said(world.a, greeting(world.b.id, proof)) == b""  # the wrong one of the two
        assert await said(world.a, greeting(world.a.id, shown)) == b""  # another peer's
        assert await said(world.a, greeting(PeerId("nobody"), bytes(32))) == b""
        assert await said(world.a, greeting(world.b.id, shown, magic=b"HTTP")) == b""
        assert await said(world.a, greeting(world.b.id, shown)[:-1]) == b""
        assert await said(world.a, b"") == b""
        assert await said(world.a, bytes(range(256)) * 4) == b""
        # The answer is the proof, and then the stream ends.
        assert await said(world.a, greeting(world.b.id, shown, protocol=b"of my own")) == proof
        with pytest.raises(ProtocolError, match="no arguments"):
            await world.b.transport.call(world.a.id, neighbours.INTRODUCE, b"me", timeout=20.0)
        assert await whom(world.a, world.b) == world.b.id.encode()

    world.run(go())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0.01)


def test_many_who_say_nothing_keep_nobody_out_for_long(world: NeighbourWorld) -> None:
    async def go() -> None:
        greeting = inside(world.a)._greeting
        inside(world.a)._greeting_s = 1e6
        silent = [neighbours._connect(world.a.id) for _ in range(neighbours._MAX_GREETING)]
        await until(lambda: len(greeting) == neighbours._MAX_GREETING)
        with carried(world.b) as opened:
            assert await whom(world.a, world.b) == world.b.id.encode()
            assert len(opened) == 2  # introduced, but not let in
            for connected in silent:
                connected.close()
            await until(lambda: not greeting)
            await world.b.transport.stream(world.a.id, WHO, Message(tensors=(torch.ones(1 << 20),)), timeout=20.0)
            assert len(opened) == 3  # introduced once more, and let in

    world.run(go())


def test_a_peer_that_began_anew_is_found_again(world: NeighbourWorld, tmp_path: Path) -> None:
    async def go() -> None:
        async def begin() -> Peer:
            addresses = await world.a.transport.addresses()
            peer = Peer(*await hivemind.start(initial_peers=addresses, identity_path=str(tmp_path / "key")))
            serve(peer)
            return world.adopt(peer)

        first = await begin()
        await whom(first, world.a)
        await first.close()
        second = await begin()
        assert second.id == first.id == load_identity(tmp_path / "key").peer_id
        assert await whom(second, world.a) == world.a.id.encode()
        with carried(world.a) as opened:
            for _ in range(2):
                await world.a.transport.stream(second.id, WHO, Message(tensors=(torch.ones(1 << 20),)), timeout=20.0)
        assert opened == [second.id]  # the introduction, because the old one is invalid

    world.run(go())


def test_a_name_that_is_taken_leaves_the_daemon(caplog: Any) -> None:
    world = HivemindWorld()

    async def go() -> None:
        async def nothing(*_: Any) -> Any:
            raise AssertionError

        first, second = (neighbours.LocalPeers(PeerId("one"), nothing, nothing, greeting_s=1.0) for _ in range(2))
        await first.listen()
        with caplog.at_level(logging.WARNING):
            await second.listen()
        assert "through its daemon only" in caplog.text
        assert await second.open_stream(PeerId("one"), WHO) is None
        first.close()
        second.close()

    world.run(go())
    world.loop.close()


def test_elsewhere_than_on_linux_there_are_no_neighbours(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    world = NeighbourWorld()
    world.open()
    serve(world.b)
    with carried(world.a) as opened:
        assert world.run(whom(world.b, world.a)) == world.a.id.encode()
    assert opened == [world.b.id]
    world.close()


def test_the_environment_has_a_word(monkeypatch: Any) -> None:
    monkeypatch.delenv(process.NEIGHBOURS, raising=False)
    assert process.talks_to_neighbours()
    monkeypatch.setenv(process.NEIGHBOURS, "0")
    assert not process.talks_to_neighbours()
    monkeypatch.setenv(process.NEIGHBOURS, "no")
    with pytest.raises(ConfigError, match="SWARM_NEIGHBOURS must be 0 or 1, got 'no'"):
        process.talks_to_neighbours()


def test_who_greets_while_a_peer_closes_keeps_nothing_alive() -> None:
    world = NeighbourWorld()
    world.open()
    connected = neighbours._connect(world.a.id)
    world.run(until(lambda: len(inside(world.a)._greeting) == 1))
    world.run(world.a.transport.close())
    world.run(until(lambda: not inside(world.a)._greeting))
    assert connected.recv(1) == b""
    connected.close()
    world.close()
