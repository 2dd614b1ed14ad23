"""Puts functions of tests around the package's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from lightning_swarm.peer.peer import Peer
from lightning_swarm.server.server import Server


def wrap(target: object, name: str, around: Callable[..., Any]) -> None:
    """Have a function of a module or an object be called by `around`, which gets it before the arguments."""
    setattr(target, name, partial(around, getattr(target, name)))


def on_new_server(peer: Peer, act: Callable[[Server], None]) -> None:
    """Have `act` be called with each server that a peer starts; after a rollback the peer goes on with its server."""

    async def start(own: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        before = peer.server
        await own(*arguments)
        assert peer.server is not None
        if peer.server is not before:
            act(peer.server)

    wrap(peer._host, "start", start)  # trainers that follow another's lead come this way, too
