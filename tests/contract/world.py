"""The same peers twice: in memory on virtual time, and as real daemons on real time."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import DeadlineExceeded
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.network.memory import MemoryNetwork

T = TypeVar("T")
GROWING_S = (0.3, 3.0, 30.0)
"""Deadlines of further attempts, for busy machines."""


@dataclass(frozen=True)
class Peer:
    transport: Transport
    directory: Directory

    @property
    def id(self) -> PeerId:
        return self.transport.peer_id

    async def close(self) -> None:
        await self.directory.close()
        await self.transport.close()


class World(ABC):
    """Some peers on one loop, and ways to harm them. `a` and `b` live as long as the module's tests."""

    loop: asyncio.AbstractEventLoop
    stranger: PeerId
    """A well-formed identity without a peer."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def open(self) -> None:
        self.others: list[Peer] = []
        self.a = self.run(self.start())
        self.b = self.run(self.start(self.a))

    def close(self) -> None:
        self.close_others()
        self.run(self.b.close())
        self.run(self.a.close())
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.run(_settle(left))
        self.loop.close()

    def another(self, *known: Peer) -> Peer:
        """Start another peer for this test only, which may be harmed. It shares a directory with `known`."""
        return self.adopt(self.run(self.start(*known)))

    def adopt(self, peer: Peer) -> Peer:
        """Close a peer at the end of this test, even if it fails: uvloop waits for ever for open handles."""
        self.others.append(peer)
        return peer

    def close_others(self) -> None:
        for peer in self.others:
            self.thaw(peer)
            self.run(peer.close())
        self.others.clear()

    @abstractmethod
    async def start(self, *known: Peer) -> Peer: ...

    @abstractmethod
    def kill(self, peer: Peer) -> None: ...

    @abstractmethod
    def freeze(self, peer: Peer) -> None: ...

    @abstractmethod
    def thaw(self, peer: Peer) -> None: ...


async def miss_deadline(call: Callable[[float], Coroutine[Any, Any, Any]], begun: asyncio.Event) -> None:
    """Let a call miss its deadline while its handler runs, which a busy machine may begin late."""
    for timeout_s in GROWING_S:
        with pytest.raises(DeadlineExceeded):
            await call(timeout_s)
        if begun.is_set():
            return
    raise AssertionError("the handler did not begin")


async def _settle(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class MemoryWorld(World):
    stranger = PeerId("stranger")

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self._network = MemoryNetwork(latency_s=0.001)

    async def start(self, *known: Peer) -> Peer:
        transport = self._network.transport()
        return Peer(transport, self._network.directory(transport))

    def kill(self, peer: Peer) -> None:
        self._network.kill(peer.id)

    def freeze(self, peer: Peer) -> None:
        self._network.freeze(peer.id)

    def thaw(self, peer: Peer) -> None:
        self._network.thaw(peer.id)


class HivemindWorld(World):
    """Peers that communicate over their daemons, as peers of different machines do."""

    stranger = PeerId("12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR")
    neighbours = False

    def __init__(self) -> None:
        uvloop = pytest.importorskip("uvloop")
        pytest.importorskip("hivemind")
        self.loop = uvloop.new_event_loop()

    async def start(self, *known: Peer) -> Peer:
        from lightning_swarm.network.hivemind import start

        initial_peers = [address for peer in known for address in await peer.transport.addresses()]
        return Peer(*await start(initial_peers=initial_peers, neighbours=self.neighbours))

    def kill(self, peer: Peer) -> None:
        self._signal(peer, signal.SIGKILL)

    def freeze(self, peer: Peer) -> None:
        if pid := self._signal(peer, signal.SIGSTOP):
            # The signal is sent before it has stopped all threads.
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self, peer: Peer) -> None:
        self._signal(peer, signal.SIGCONT)

    def _signal(self, peer: Peer, number: signal.Signals) -> int | None:
        daemon = peer.transport._p2p._child  # type: ignore[attr-defined]  # the harm is done to the process itself
        # The pid of a reaped child may belong to another process.
        if daemon.returncode is not None:
            return None
        os.kill(daemon.pid, number)
        return int(daemon.pid)


class NeighbourWorld(HivemindWorld):
    """Peers of one machine."""

    neighbours = True

    def freeze(self, peer: Peer) -> None:
        pytest.skip("they share a process, and their daemons carry nothing")


W = TypeVar("W", bound=World)


def opened(world: W) -> Iterator[W]:
    """A world for the length of a fixture."""
    world.open()
    yield world
    world.close()
