"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_swarm.core.clock import VirtualLoop
from tests.unit.swarm import Swarm

MakeSwarm = Callable[..., Swarm]


@pytest.fixture
def make_swarm() -> Iterator[MakeSwarm]:
    """Makes swarms and closes them; a bug in a server's task fails the test there."""
    made: list[Swarm] = []

    def make(*rosters: str, **settings: Any) -> Swarm:
        made.append(Swarm(*rosters, **settings))
        return made[-1]

    yield make
    for swarm in made:
        swarm.close()


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()
