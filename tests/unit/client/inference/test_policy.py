"""Choice of sessions' routes through the servers of a model."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from lightning_swarm.client.inference.policy import TOLERANCE, ServerView, best_route, route_s
from lightning_swarm.network import PeerId

NUM_STAGES = 4
NAMES = [PeerId(name) for name in "abcdef"]


def view(stages: range, *, step_s: float = 0.01, num_sessions: int = 0, has_room: bool = True) -> ServerView:
    return ServerView(stages=stages, step_s=step_s, num_sessions=num_sessions, has_room=has_room)


def nowhere(one: PeerId | None, other: PeerId | None) -> float:
    return 0.0


@pytest.mark.parametrize("seed", range(60))
def test_a_route_is_at_most_a_tenth_longer_than_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    servers = {}
    for name in NAMES:
        first = rng.randrange(NUM_STAGES)
        end = rng.randint(first + 1, NUM_STAGES)
        servers[name] = view(
            range(first, end),
            step_s=rng.choice([0.0, rng.uniform(0.001, 0.05)]),
            num_sessions=rng.randrange(4),
            has_room=rng.random() < 0.8,
        )
    links = {frozenset(pair): rng.uniform(0.0, 0.1) for pair in itertools.combinations([None, *NAMES], 2)}

    def between(one: PeerId | None, other: PeerId | None) -> float:
        return 0.0 if one == other else links[frozenset((one, other))]

    choices = [
        [name for name, server in servers.items() if server.has_room and stage in server.stages]
        for stage in range(NUM_STAGES)
    ]
    all_routes = list(itertools.product(*choices))
    route = best_route(NUM_STAGES, servers, between, rng)
    if not all_routes:
        assert route is None
        return
    assert route is not None
    assert tuple(route) in all_routes
    best_s = min(route_s(one, servers, between) for one in all_routes)
    assert route_s(route, servers, between) <= best_s * (1 + TOLERANCE) * (1 + 1e-9)


def test_a_server_with_several_stages_costs_no_hops_between_them() -> None:
    servers = {name: view(stages) for name, stages in zip("abc", (range(2), range(2, 4), range(4)), strict=True)}
    known = {PeerId(name): server for name, server in servers.items()}
    route = best_route(NUM_STAGES, known, lambda one, other: 0.0 if one == other else 0.1, random.Random(0))
    assert route == ["c"] * NUM_STAGES


def test_clients_share_routes_that_are_alike() -> None:
    servers = {name: view(range(NUM_STAGES)) for name in NAMES}
    rng = random.Random(1)
    found = [best_route(NUM_STAGES, servers, lambda one, other: float(one != other), rng) for _ in range(300)]
    counts = Counter(route[0] for route in found if route is not None)
    assert counts.keys() == set(NAMES)
    assert min(counts.values()) > 300 / len(NAMES) / 3


def test_sessions_that_go_on_are_counted() -> None:
    servers = {PeerId("a"): view(range(1), num_sessions=8), PeerId("b"): view(range(1), step_s=0.03)}
    assert best_route(1, servers, nowhere, random.Random(0)) == ["b"], "its turn comes sooner there"


def test_without_room_somewhere_there_is_no_route() -> None:
    servers = {PeerId("a"): view(range(1)), PeerId("b"): view(range(1, 2), has_room=False)}
    assert best_route(2, servers, nowhere, random.Random(0)) is None
    assert best_route(2, {}, nowhere, random.Random(0)) is None
