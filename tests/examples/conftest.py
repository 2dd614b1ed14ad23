"""What every example's script sets for its own process is taken back here."""

import pytest


@pytest.fixture(autouse=True)
def _loggers_as_before(loggers_as_before: None) -> None:
    """Every example sets levels."""
