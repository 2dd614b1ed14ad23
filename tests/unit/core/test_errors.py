"""The tree of exceptions."""

from __future__ import annotations

import pickle

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_swarm.core.errors import ConfigError, from_wire, to_wire


@pytest.mark.parametrize("kind", [FileNotFoundError, IsADirectoryError, MisconfigurationException, TypeError])
def test_an_error_is_one_of_the_kind_that_it_replaces(kind: type[Exception]) -> None:
    error = ConfigError.like(kind, "`x` must be 1, got 2.")
    assert {ConfigError, ValueError, kind} <= set(type(error).__mro__)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, kind)
    assert str(again) == str(error) == "`x` must be 1, got 2."
    assert type(from_wire(*to_wire(error))) is ConfigError
