"""Who is left of a run that cannot go on, and how they come to be free for the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from lightning_swarm.errors import SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.server import RELEASE
from lightning_swarm.steps.snapshots import ask_held
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import ReleaseRequest
from lightning_swarm.types.wire import encode

_log = logging.getLogger(__name__)

_POLL_S: Final = 1.0


async def release(transport: Transport, run: RunState, *, timeout: float) -> list[PeerId]:
    """Have all servers be in no run any more, and wait for the next. Returns those that do; the others are gone."""
    body = encode(ReleaseRequest(generation=run.manifest.generation))

    async def one(peer: PeerId) -> bool:
        try:
            await transport.call(peer, RELEASE, body, timeout=timeout)
        except SwarmError as error:
            _log.info("Server %s was not released: %s", peer, error)
            return False
        return True

    servers = run.servers
    released = await gather(one(peer) for peer in servers)
    return [peer for peer, there in zip(servers, released, strict=True) if there]


async def what_is_lost(
    transport: Transport, run: RunState, num_known_dead: Callable[[], int], *, timeout: float, silence_s: float
) -> str:
    """What the run cannot go on without, after a while in which it might come back: a stage, or a majority of voters.

    Args:
        transport: The lead's.
        run: As the lead knows it.
        num_known_dead: Peers of this machine whose processes have ended: for them nobody waits.
        timeout: Seconds of that while.
        silence_s: For each question.

    Returns:
        In words; nothing if it can go on.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        servers = sorted({*run.servers, *(voter.peer_id for voter in run.voters)})
        # One that was started again answers, too, but is in no run.
        alive = set(await ask_held(transport, servers, timeout=silence_s))
        found = lost(run, alive)
        if not found or loop.time() >= deadline or num_known_dead() >= len(servers) - len(alive):
            return found
        await asyncio.sleep(_POLL_S)


def lost(run: RunState, alive: Collection[PeerId]) -> str:
    """What a run cannot go on without. Pure."""
    empty = [index for index, roster in enumerate(run.rosters) if not any(one.peer_id in alive for one in roster)]
    if empty:
        return f"nobody of stage{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))} answers"
    num_voters, num_left = len(run.voters), sum(voter.peer_id in alive for voter in run.voters)
    return f"only {num_left} of {num_voters} voters answer" if num_left * 2 <= num_voters else ""


async def alive_among(transport: Transport, peers: Iterable[PeerId], *, timeout: float) -> set[PeerId]:
    """Those that answer."""

    async def answers(peer: PeerId) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await transport.ping(peer)
        except (SwarmError, TimeoutError):
            return False
        return True

    asked = list(peers)
    return {peer for peer, there in zip(asked, await gather(map(answers, asked)), strict=True) if there}
