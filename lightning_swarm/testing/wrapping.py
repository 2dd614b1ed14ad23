"""Wraps the package's functions in functions of tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from lightning_swarm.peer.peer import Peer
from lightning_swarm.server.server import Server


def wrap(target: object, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a module or an object by `around`, which gets the original before the arguments."""
    setattr(target, name, partial(around, getattr(target, name)))


def on_new_server(peer: Peer, act: Callable[[Server], None]) -> None:
    """Call `act` with each server that a peer starts; a peer keeps its server in a rollback."""

    async def start(own: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        before = peer.server
        await own(*arguments)
        assert peer.server is not None
        if peer.server is not before:
            act(peer.server)

    wrap(peer._host, "start", start)  # trainers that follow another's lead start here, too
