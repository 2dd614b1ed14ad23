"""As `lightning_swarm.testing`, for ``import pytorch_lightning``."""

from lightning_swarm.pytorch_lightning import SwarmStrategy
from lightning_swarm.testing.local import InMemoryHooks

__all__ = ["InMemoryStrategy"]


class InMemoryStrategy(InMemoryHooks, SwarmStrategy):  # type: ignore[misc]  # noqa: D101 - checked and documented in its first base
    __doc__ = InMemoryHooks.__doc__
