"""Swarms for tests: all peers in one process and one thread, over the in-memory network, on a virtual clock."""

from lightning_swarm.testing.local import InMemoryStrategy

__all__ = ["InMemoryStrategy"]
