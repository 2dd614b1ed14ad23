"""Restores the process settings that the examples' scripts change."""

import pytest


@pytest.fixture(autouse=True)
def _loggers_as_before(loggers_as_before: None) -> None:
    """Every example sets levels."""
