"""Swarms for tests: all peers in one process and one thread, over the in-memory network, on a virtual clock."""

from lightning_swarm.testing.faults import Fault, FaultPlan
from lightning_swarm.testing.local import InMemoryStrategy
from lightning_swarm.testing.phases import Phase

__all__ = ["Fault", "FaultPlan", "InMemoryStrategy", "Phase"]
