"""Replaces functions of the package by wrappers, for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from lightning_swarm.peer.peer import Peer
from lightning_swarm.server.server import Server


def wrap(target: object, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a module or an object by `around`, whose first argument is the original function."""
    setattr(target, name, partial(around, getattr(target, name)))


def on_new_server(peer: Peer, act: Callable[[Server], None]) -> None:
    """Call `act` with each server that a peer starts, once even if a rollback starts the server again."""

    async def start(original: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        former = peer.server
        await original(*arguments)
        assert peer.server is not None
        if peer.server is not former:
            act(peer.server)

    wrap(peer._host, "start", start)  # also called for trainers that follow another lead
