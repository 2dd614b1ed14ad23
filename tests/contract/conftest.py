"""Fixtures of the contract suite: every test runs in all worlds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.world import HivemindWorld, MemoryWorld, NeighbourWorld, World, opened


@pytest.fixture(
    scope="module", params=[MemoryWorld, HivemindWorld, NeighbourWorld], ids=["memory", "hivemind", "neighbours"]
)
def shared_world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from opened(request.param())


@pytest.fixture
def world(shared_world: World) -> Iterator[World]:
    yield shared_world
    shared_world.close_others()


@pytest.fixture
def method(request: pytest.FixtureRequest) -> str:
    """Return a new name for the method under test, because the peers are shared and a method is registered once."""
    return str(request.node.name)[:200]
