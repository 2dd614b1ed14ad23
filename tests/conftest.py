"""Fixtures and hooks of all tests."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cells

_FIRST = ("p2p/test_processes.py", "faults/test_matrix.py", "p2p/test_killed.py")
"""The slowest files. Each worker begins with one of them."""

_OBJECTS_UNTIL_COLLECTED = 200_000
"""A higher threshold, because thousands of small swarms make many short-lived objects; it saves a tenth of the time."""


@pytest.fixture(autouse=True)
def _no_seed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the seeds that `seed_everything` leaves in the environment, which later runs' samplers would use."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


@pytest.fixture
def loggers_as_before() -> Iterator[None]:
    """Restore the log levels that a script sets for its own process."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning", "lightning_swarm")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def pytest_collection_finish() -> None:
    """Exclude all imported objects from collection, and cache the installed plugins, which each Trainer searches."""
    from lightning.fabric.utilities import registry  # takes seconds, so not in processes that only distribute tests

    registry.entry_points = functools.cache(importlib.metadata.entry_points)  # type: ignore[attr-defined, assignment]
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTED, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose cells of large tables, and sort the slow files first, for workers that get whole files."""
    cells.mark_the_rest(items)
    folder = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(folder).as_posix()
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    items.sort(key=place)
