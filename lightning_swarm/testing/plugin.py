"""The fixture `local_swarm`. In a ``conftest.py``: ``pytest_plugins = ["lightning_swarm.testing.plugin"]``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lightning_swarm import testing
from lightning_swarm.testing.local import MakeLocalSwarm


@pytest.fixture
def local_swarm() -> Iterator[MakeLocalSwarm]:
    """A function that makes local swarms; it takes the arguments of `lightning_swarm.testing.local_swarm`.

    When the test ends, all of their planned faults must have struck.
    """
    with ExitStack() as stack:
        yield lambda *arguments, **settings: stack.enter_context(testing.local_swarm(*arguments, **settings))
