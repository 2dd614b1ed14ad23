"""The fixture `local_swarm`. In a ``conftest.py``: ``pytest_plugins = ["lightning_swarm.testing.plugin"]``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_swarm import testing
from lightning_swarm.testing.faults import FaultPlan
from lightning_swarm.testing.local import LocalSwarm, MakeLocalSwarm


@pytest.fixture
def local_swarm() -> Iterator[MakeLocalSwarm]:
    """A function that makes local swarms; it takes the arguments of `lightning_swarm.testing.local_swarm`.

    When the test ends, all of their planned faults must have struck.
    """
    with ExitStack() as stack:

        def make(num_peers: int = 2, *, faults: FaultPlan | None = None, **settings: Any) -> LocalSwarm:
            return stack.enter_context(testing.local_swarm(num_peers, faults=faults, **settings))

        yield make
