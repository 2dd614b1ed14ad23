"""What all tests share."""

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
"""The files that take longest. Each worker begins with one of them."""

_OBJECTS_UNTIL_COLLECTED = 200_000
"""Thousands of small swarms make many short-lived objects; looking for cycles takes a tenth of the time."""


@pytest.fixture(autouse=True)
def _no_seed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `seed_everything` leaves in the environment, samplers of later runs in this process would take."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


@pytest.fixture
def loggers_as_before() -> Iterator[None]:
    """What a script sets for its own process is taken back."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning", "lightning_swarm")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def pytest_collection_finish() -> None:
    """What is imported by now stays, and so does what is installed, which each Trainer looks through."""
    from lightning.fabric.utilities import registry  # takes seconds, which who only deals out tests can do without

    registry.entry_points = functools.cache(importlib.metadata.entry_points)  # type: ignore[attr-defined, assignment]
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTED, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose cells of large tables. Where files are dealt out, begin with the long ones."""
    cells.mark_the_rest(items)
    folder = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(folder).as_posix()
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    items.sort(key=place)
