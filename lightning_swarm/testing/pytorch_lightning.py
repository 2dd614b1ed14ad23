"""`lightning_swarm.testing` for projects that ``import pytorch_lightning``."""

from typing import TYPE_CHECKING

from lightning_swarm.core.rebase import rebased
from lightning_swarm.pytorch_lightning import SwarmStrategy
from lightning_swarm.testing import local

__all__ = ["InMemoryStrategy"]

if TYPE_CHECKING:

    class _InMemoryStrategy(local.InMemoryStrategy, SwarmStrategy):  # type: ignore[misc]
        pass

    InMemoryStrategy = _InMemoryStrategy
else:
    InMemoryStrategy = rebased(local.InMemoryStrategy, SwarmStrategy, __name__)
