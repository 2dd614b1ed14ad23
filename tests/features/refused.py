"""Refused settings are refused before any peer is asked to serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, digits, loader


def assert_refused(message: str, make_module: Callable[[], L.LightningModule] = DigitsMLP, **options: Any) -> None:
    """Check that `fit` raises an error with rule, value and remedy, and that no peer was admitted to a run.

    Args:
        message: A regular expression.
        make_module: Builds the module.
        options: Arguments of the Trainer.
    """
    strategy = InMemoryStrategy(num_stages=2)
    trainer = L.Trainer(**{**QUIET, "devices": 2, "max_steps": 1, **options}, strategy=strategy)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(make_module(), loader(digits()))
    assert all(peer.server is None and peer.lead.run is None for peer in strategy.peers)
