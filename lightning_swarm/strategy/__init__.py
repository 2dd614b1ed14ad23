"""The Lightning integration: `SwarmStrategy`, its launcher, loop, checks, data, metrics, checkpoints and rollback."""

from typing import TYPE_CHECKING

from lightning_swarm.core.import_hook import lazy_attributes

if TYPE_CHECKING:
    from lightning_swarm.strategy.strategy import SwarmStrategy as SwarmStrategy
else:
    __all__ = ["SwarmStrategy"]
    __getattr__ = lazy_attributes(__name__, {"SwarmStrategy": "lightning_swarm.strategy.strategy:SwarmStrategy"})
