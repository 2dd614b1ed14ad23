"""Decides which servers leave a stage because its microbatches do not fit into their memory. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from lightning_swarm.coordinator.rebalancing.policy import Move, StageRelease
from lightning_swarm.network import PeerId

# A server tries at most this many stages: each costs a download, and most stages need about the same memory.
_MAX_TRIED: Final = 2


def plan_relief(
    rosters: Sequence[Sequence[PeerId]],
    too_large: Mapping[PeerId, Collection[int]],  # server -> stages for which it has reported too little memory
    state_bytes: Sequence[int],  # stage -> bytes of its weights and optimizer state
    *,
    fixed: Collection[PeerId] = (),  # servers that neither move nor give up a stage
) -> tuple[list[Move], list[StageRelease]]:
    """Plan which servers move to another stage, and which give up one of several."""
    # A server moves only to a stage with no more bytes, and never to a stage that was too large for it. If every server
    # of a stage lacks memory, none leaves. If no stage is left for a server, no move is planned, and it leaves the run
    # by itself.
    moves: list[Move] = []
    releases: list[StageRelease] = []
    for index, roster in enumerate(rosters):
        lacking = [peer for peer in roster if index in too_large.get(peer, ())]
        if len(lacking) == len(roster):
            continue
        for peer in (server for server in lacking if server not in fixed):
            if sum(peer in any_roster for any_roster in rosters) > 1:
                releases.append(StageRelease(peer, index))
                continue
            targets = [
                target
                for target in range(len(rosters))
                if target not in too_large[peer] and state_bytes[target] <= state_bytes[index]
            ]
            # The memory for microbatches is unknown, so choose the stage with the fewest bytes, which most likely fits.
            if targets and len(too_large[peer]) < _MAX_TRIED:
                moves.append(Move(peer, index, min(targets, key=state_bytes.__getitem__)))
    return moves, releases
