"""The Lightning integration: `SwarmStrategy`, its launcher, loop, checks, data, metrics, checkpoints and rollback."""

from lightning_swarm.strategy.strategy import SwarmStrategy

__all__ = ["SwarmStrategy"]
