"""Keyed randomness: the same draws for the same key, on any peer and any device."""

from lightning_swarm.randomness.keyed import KeyedRandom, checkpoint_contexts
from lightning_swarm.randomness.stream import key_seed

__all__ = ["KeyedRandom", "checkpoint_contexts", "key_seed"]
