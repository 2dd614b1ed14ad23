"""Questions to other peers: who coordinates a run, who is there, and which snapshots are held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.messages.run import Member, WatchReply, WatchRequest
from lightning_swarm.protocol.messages.state import HeldSnapshots
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import HELD, WATCH
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)
_ASK_TIMEOUT_S: Final = 10.0


Held = Mapping[PeerId, HeldSnapshots]
"""The snapshots that each server says it holds."""


def newest_through(held: Held, rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool]) -> int | None:
    """The newest version of which every stage is where the death of its servers cannot reach it. Pure."""
    servers = {one.peer_id for roster in rosters for one in roster}

    def is_safe(version: int, index: int) -> bool:
        own = {member.peer_id for member in rosters[index]}
        holders = set(holders_of(held, version, index))
        return bool(holders - own) or (bool(holders) and (on_trainers[index] or own >= servers))

    return max((v for v in _versions(held) if all(is_safe(v, i) for i in range(len(rosters)))), default=None)


def newest_complete(held: Held, num_stages: int) -> int | None:
    """The newest version of which somebody holds every stage. Pure."""
    complete = (v for v in _versions(held) if all(holders_of(held, v, index) for index in range(num_stages)))
    return max(complete, default=None)


def worth_keeping(held: Held, rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool]) -> int | None:
    """What is kept until the next snapshot is through: `newest_through`, and where none is, `newest_complete`. Pure.

    A keeper's death leaves nothing that outlives every stage, and what is left may be what the next death needs.
    """
    through = newest_through(held, rosters, on_trainers)
    return through if through is not None else newest_complete(held, len(rosters))


def holders_of(held: Held, version: int, stage_index: int) -> list[PeerId]:
    """Who holds a stage at a version. Pure."""
    return sorted(
        peer
        for peer, one in held.items()
        if any((snapshot.version, snapshot.stage_index) == (version, stage_index) for snapshot in one.snapshots)
    )


def _versions(held: Held) -> set[int]:
    return {snapshot.version for one in held.values() for snapshot in one.snapshots}


async def ask_held(transport: Transport, servers: Sequence[PeerId], *, timeout: float) -> dict[PeerId, HeldSnapshots]:
    """What the servers hold, of those that say so in time."""

    async def ask(peer: PeerId) -> tuple[PeerId, HeldSnapshots | None]:
        try:
            return peer, decode(await transport.call(peer, HELD, b"", timeout=timeout), HeldSnapshots)
        except SwarmError as error:
            _log.info("%s does not say which snapshots it holds: %s", peer, error)
            return peer, None

    return {peer: one for peer, one in await gather(ask(peer) for peer in servers) if one is not None}


GRACE_S: Final = 2.0
"""How long peers that may be gone are waited for where the others can go on without them."""


async def watch(transport: Transport, peer: PeerId, request: WatchRequest, *, timeout: float) -> WatchReply:
    """Ask a server how far it is and whom it follows."""
    return decode(await transport.call(peer, WATCH, encode(request), timeout=timeout), WatchReply)


async def look_around(transport: Transport, run: RunState, *, timeout: float) -> dict[PeerId, WatchReply]:
    """Ask all other servers, as far as they answer soon."""
    replies: dict[PeerId, WatchReply] = {}
    request = WatchRequest(term=run.term, version=run.version, hold_s=0.0)

    async def ask(peer: PeerId) -> None:
        try:
            replies[peer] = await watch(transport, peer, request, timeout=timeout)
        except SwarmError as error:
            _log.debug("%s does not say whom it follows: %s", peer, error)

    async with asyncio.TaskGroup() as group:
        asking = {group.create_task(ask(peer)) for peer in run.servers if peer != transport.peer_id}
        if asking:
            _, late = await asyncio.wait(asking, timeout=GRACE_S)
            for one in late:
                one.cancel()
    return replies
