"""What every example's script sets for its own process is taken back here."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning", "lightning_swarm")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
