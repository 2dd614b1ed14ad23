"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from lightning_swarm.core.clock import VirtualLoop
from tests.unit.swarm import Swarm

MakeSwarm = Callable[..., Swarm]

_FULL = Path("/dev/full")
needs_full_disk = pytest.mark.skipif(not _FULL.exists(), reason="no file is full here")


def on_a_full_disk(**_: object) -> IO[bytes]:
    """Replace `tempfile.TemporaryFile` on a full disk."""
    return _FULL.open("w+b", buffering=0)


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
