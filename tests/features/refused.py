"""What is refused is refused before anyone is asked to serve."""

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
    """`fit` raises an error that says rule, value and remedy, and no peer was admitted to a run.

    Args:
        message: A regular expression.
        make_module: Builds the module.
        options: Of the Trainer.
    """
    strategy = InMemoryStrategy(num_stages=2)
    trainer = L.Trainer(**{**QUIET, "devices": 2, "max_steps": 1, **options}, strategy=strategy)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(make_module(), loader(digits()))
    assert all(peer.server is None and peer.lead.run is None for peer in strategy.peers)
