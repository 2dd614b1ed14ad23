"""`SwarmStrategy` for ``import pytorch_lightning``, whose classes are others than those of `lightning.pytorch`.

``strategy="swarm"`` needs ``import lightning_swarm`` only.
"""

from pytorch_lightning.strategies import Strategy

from lightning_swarm.framework import PYTORCH_LIGHTNING
from lightning_swarm.strategy import SwarmHooks

__all__ = ["SwarmStrategy"]


class SwarmStrategy(SwarmHooks, Strategy):  # type: ignore[misc]  # noqa: D101 - checked and documented in its first base
    framework = PYTORCH_LIGHTNING
    __doc__ = SwarmHooks.__doc__
