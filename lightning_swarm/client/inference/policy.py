"""Chooses the servers of a session: the route with the least time for a token. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_swarm.network import PeerId

TOLERANCE: Final = 0.1
"""Routes that are slower than the best by up to this share are drawn, too, so that clients do not all choose one."""

_UNMEASURED_S: Final = 1e-3  # assumed seconds for a token at a stage, if a server has not measured them


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """A client's view of a server, for the choice of a route."""

    stages: range  # stages that it serves
    step_s: float  # seconds for a token at one stage; 0: not measured
    num_sessions: int  # sessions that are open there
    has_room: bool  # accepts a new session


Between = Callable[[PeerId | None, PeerId | None], float]
"""Seconds that a message takes from one peer to another; None is the client."""


def best_route(
    num_stages: int, servers: Mapping[PeerId, ServerView], between: Between, rng: random.Random
) -> list[PeerId] | None:
    """Return a server for each stage; None if a stage has none with room.

    The route takes at most `TOLERANCE` longer than the best one, and `rng` decides between such routes. A route's time
    is that of the links between its servers and the client, and of the computation at its servers.
    """
    # Dynamic programming over (stage, server). Each cost is raised at random by up to `TOLERANCE`, so the best route by
    # these costs is at most that much slower than the true best.
    reached: dict[PeerId | None, tuple[float, list[PeerId]]] = {None: (0.0, [])}
    for stage in range(num_stages):
        here = [peer for peer, view in servers.items() if view.has_room and stage in view.stages]
        if not here:
            return None
        costs = {peer: _drawn(_computing_s(servers[peer]), rng) for peer in here}
        reached = {
            peer: min(
                (
                    (
                        so_far + (0.0 if before == peer else _drawn(between(before, peer), rng)) + costs[peer],
                        [*route, peer],
                    )
                    for before, (so_far, route) in reached.items()
                ),
                key=lambda found: found[0],
            )
            for peer in here
        }
    return min(
        ((so_far + _drawn(between(peer, None), rng), route) for peer, (so_far, route) in reached.items()),
        key=lambda found: found[0],
        default=(math.inf, None),
    )[1]


def route_s(route: Sequence[PeerId], servers: Mapping[PeerId, ServerView], between: Between) -> float:
    """Return the expected seconds of a token on a route."""
    hops = sum(between(one, other) for one, other in itertools.pairwise(route) if one != other)
    ends = between(None, route[0]) + between(route[-1], None)
    return ends + hops + sum(_computing_s(servers[peer]) for peer in route)


def _computing_s(view: ServerView) -> float:
    """Return the seconds of a token at a stage there, where each open session takes its turn."""
    return (view.step_s or _UNMEASURED_S) * (1 + view.num_sessions)


def _drawn(seconds: float, rng: random.Random) -> float:
    return seconds * (1 + rng.random() * TOLERANCE)
