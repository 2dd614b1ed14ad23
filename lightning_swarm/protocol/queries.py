"""Questions to other peers: which coordinator they follow, and which snapshots they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.messages.run import Member, WatchReply, WatchRequest
from lightning_swarm.protocol.messages.state import HeldSnapshots
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import HELD, WATCH
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ASK_TIMEOUT_S: Final = 10.0
GRACE_S: Final = 2.0
"""Seconds that peers which may be gone are waited for, if the others can go on without them."""

Held = Mapping[PeerId, HeldSnapshots]
"""The snapshots that each server reports to hold."""


async def call_each(
    transport: Transport,
    peers: Iterable[PeerId],
    method: str,
    body: bytes,
    read: Callable[[bytes], _T],
    *,
    timeout: float,
) -> dict[PeerId, _T]:
    """Call peers at once and return their answers, in the peers' order; one without an answer is logged, no error.

    `timeout` is in seconds, for each peer.
    """
    answers: dict[PeerId, _T] = {}

    async def ask(peer: PeerId) -> None:
        try:
            answers[peer] = read(await transport.call(peer, method, body, timeout=timeout))
        except SwarmError as error:
            _log.info("%s did not answer %s: %s", peer, method, error)

    asked = list(peers)
    await gather(map(ask, asked))
    return {peer: answers[peer] for peer in asked if peer in answers}


def newest_safe(held: Held, rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool]) -> int | None:
    """Return the newest version of which every stage has a copy that outlives the stage's servers. Pure."""
    servers = {member.peer_id for roster in rosters for member in roster}

    def is_safe(version: int, index: int) -> bool:
        own = {member.peer_id for member in rosters[index]}
        holders = set(holders_of(held, version, index))
        return bool(holders - own) or (bool(holders) and (on_trainers[index] or own >= servers))

    return max((v for v in _versions(held) if all(is_safe(v, i) for i in range(len(rosters)))), default=None)


def newest_complete(held: Held, num_stages: int) -> int | None:
    """Return the newest version of which servers hold every stage. Pure."""
    complete = (v for v in _versions(held) if all(holders_of(held, v, index) for index in range(num_stages)))
    return max(complete, default=None)


def version_to_keep(held: Held, rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool]) -> int | None:
    """Return the version to keep until the next snapshot is safe: `newest_safe`, else `newest_complete`. Pure.

    After a keeper's death no version may outlive every stage, but the next death may need the rest.
    """
    through = newest_safe(held, rosters, on_trainers)
    return through if through is not None else newest_complete(held, len(rosters))


def holders_of(held: Held, version: int, stage_index: int) -> list[PeerId]:
    """Return the servers that hold a stage at a version. Pure."""
    return sorted(
        peer
        for peer, own in held.items()
        if any((snapshot.version, snapshot.stage_index) == (version, stage_index) for snapshot in own.snapshots)
    )


def _versions(held: Held) -> set[int]:
    return {snapshot.version for own in held.values() for snapshot in own.snapshots}


async def ask_held(transport: Transport, servers: Sequence[PeerId], *, timeout: float) -> dict[PeerId, HeldSnapshots]:
    """Ask servers which snapshots they hold, and return the answers that come in time."""
    return await call_each(transport, servers, HELD, b"", partial(decode, kind=HeldSnapshots), timeout=timeout)


async def watch(transport: Transport, peer: PeerId, request: WatchRequest, *, timeout: float) -> WatchReply:
    """Ask a server at which version it is, and which coordinator it follows."""
    return decode(await transport.call(peer, WATCH, encode(request), timeout=timeout), WatchReply)


async def look_around(transport: Transport, run: RunState, *, timeout: float) -> dict[PeerId, WatchReply]:
    """Ask all other servers what `watch` asks, and return the answers that come soon."""
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
            for task in late:
                task.cancel()
    return replies
