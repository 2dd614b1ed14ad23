"""Keyed randomness: the same draws for the same key, on any peer and any device."""

from lightning_swarm.model.random.dispatch import KeyedOnDemand, KeyedRandom, checkpoint_contexts
from lightning_swarm.model.random.keyed_stream import key_seed

__all__ = ["KeyedOnDemand", "KeyedRandom", "checkpoint_contexts", "key_seed"]
