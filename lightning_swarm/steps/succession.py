"""Who takes a run over when its lead is gone, and how all come to know.

A peer that holds what the lead's loop was at goes back with the run, to the newest snapshot that there is of all stages
and of the loop. Who coordinates names it to all servers, which release the run on its word from then on. It begins the
next generation only if a majority of the voters did: they vote for no record of the old one any more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_swarm.errors import SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.steps import INHERIT
from lightning_swarm.steps.snapshot_orders import Held, ask_held, holders_of
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import InheritRequest
from lightning_swarm.types.wire import encode

_log = logging.getLogger(__name__)


def choose_heir(held: Held, seniority: Sequence[PeerId], num_stages: int) -> tuple[PeerId, int] | None:
    """Who goes on from where: the newest version that is whole, and of those who have its loop the oldest. Pure.

    Args:
        held: What those who live hold.
        seniority: Peers, the oldest first.
        num_stages: Of the run.
    """
    for version in sorted({version for one in held.values() for version in one.loops or ()}, reverse=True):
        if all(holders_of(held, version, index) for index in range(num_stages)):
            return next(peer for peer in seniority if peer in held and version in (held[peer].loops or ())), version
    return None


def seniority(run: RunState) -> list[PeerId]:
    """A run's servers, those first that came first: newcomers are the last of their rosters. Pure."""
    longest = max(map(len, run.rosters))
    in_turn = (roster[place] for place in range(longest) for roster in run.rosters if place < len(roster))
    return list(dict.fromkeys(member.peer_id for member in in_turn))


def has_majority(run: RunState, peers: Sequence[PeerId]) -> bool:
    """Whether these peers are a majority of a run's voters. Pure."""
    return 2 * sum(voter.peer_id in peers for voter in run.voters) > len(run.voters)


async def appoint(transport: Transport, run: RunState, *, timeout: float) -> str:
    """Have a peer take the run over. Returns why none does; nothing, if one was told to.

    Args:
        transport: Of who coordinates.
        run: As its server knows it.
        timeout: Seconds for each call.
    """
    held = await ask_held(transport, run.servers, timeout=timeout)
    held.pop(run.manifest.lead, None)
    chosen = choose_heir(held, seniority(run), len(run.rosters))
    if chosen is None:
        return "nobody who lives has what its loop was at, and a snapshot of all stages to go with it"
    heir, version = chosen
    body = encode(InheritRequest(generation=run.manifest.generation, heir=heir, first_step=version))

    async def tell(peer: PeerId) -> bool:
        try:
            await transport.call(peer, INHERIT, body, timeout=timeout)
        except SwarmError as error:
            _log.info("%s was not told that %s takes the run over: %s", peer, heir, error)
            return False
        return True

    others = [peer for peer in held if peer != heir]
    told = [peer for peer, heard in zip(others, await gather(map(tell, others)), strict=True) if heard]
    if not has_majority(run, [*told, heir]):
        return f"no majority of the {len(run.voters)} voters lives to let {heir} take it over"
    return "" if await tell(heir) else f"{heir}, which was to take it over, does not answer"
