"""What the tests of faults share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def seldom_collected() -> Iterator[None]:
    """Hundreds of small swarms make many short-lived objects; looking for cycles takes a tenth of the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
