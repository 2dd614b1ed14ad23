"""Keyed randomness: the same draws for the same key, on any peer and any device."""

from lightning_swarm.randomness.keyed import KeyedRandom, checkpoint_contexts
from lightning_swarm.randomness.on_demand import KeyedOnDemand
from lightning_swarm.randomness.stream import key_seed

__all__ = ["KeyedOnDemand", "KeyedRandom", "checkpoint_contexts", "key_seed"]
