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
"""Routes up to this share slower than the best are chosen at random, too, so that clients spread over servers."""

_UNMEASURED_S: Final = 1e-3  # assumed seconds for a token at a stage, if a server has not measured the time


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """A client's view of a server, for the choice of a route."""

    stages: range  # stages that it serves
    step_s: float  # seconds for a token at one stage; 0: not measured
    num_sessions: int  # sessions that are open at the server
    has_room: bool  # accepts a new session


Between = Callable[[PeerId | None, PeerId | None], float]
"""Returns the seconds that a message takes from one peer to another; None stands for the client."""


def best_route(
    num_stages: int, servers: Mapping[PeerId, ServerView], between: Between, rng: random.Random
) -> list[PeerId] | None:
    """Return a server for each stage; None if a stage has no server with room.

    The route takes at most `TOLERANCE` longer than the best route, and `rng` decides between such routes. A route's
    time is the time of the links between its servers and the client, and of the computation at its servers.
    """
    # Dynamic programming over (stage, server). Each cost is raised at random by up to `TOLERANCE`, so the best route by
    # these costs is at most that much slower than the true best.
    best: dict[PeerId | None, tuple[float, list[PeerId]]] = {None: (0.0, [])}  # last server -> (seconds, route)
    for stage in range(num_stages):
        candidates = [peer for peer, view in servers.items() if view.has_room and stage in view.stages]
        if not candidates:
            return None
        costs = {peer: _raised(_computing_s(servers[peer]), rng) for peer in candidates}
        best = {
            peer: min(
                (
                    (
                        so_far_s + (0.0 if last == peer else _raised(between(last, peer), rng)) + costs[peer],
                        [*route, peer],
                    )
                    for last, (so_far_s, route) in best.items()
                ),
                key=lambda timed_route: timed_route[0],
            )
            for peer in candidates
        }
    return min(
        ((so_far_s + _raised(between(peer, None), rng), route) for peer, (so_far_s, route) in best.items()),
        key=lambda timed_route: timed_route[0],
        default=(math.inf, None),
    )[1]


def route_s(route: Sequence[PeerId], servers: Mapping[PeerId, ServerView], between: Between) -> float:
    """Return the expected seconds of a token on a route."""
    hops = sum(between(sender, receiver) for sender, receiver in itertools.pairwise(route) if sender != receiver)
    ends = between(None, route[0]) + between(route[-1], None)
    return ends + hops + sum(_computing_s(servers[peer]) for peer in route)


def _computing_s(view: ServerView) -> float:
    """Return a token's expected seconds at one stage of a server, whose open sessions take turns."""
    return (view.step_s or _UNMEASURED_S) * (1 + view.num_sessions)


def _raised(seconds: float, rng: random.Random) -> float:
    """Return a time, raised at random by up to `TOLERANCE`."""
    return seconds * (1 + rng.random() * TOLERANCE)
