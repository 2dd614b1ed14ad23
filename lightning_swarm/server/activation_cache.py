"""Keeps forwards whose backward is still to come, within a budget of bytes.

A pipeline's backward runs in the order of its forward, so the oldest entries are needed soonest: entries that no longer
fit are therefore not kept, rather than pushing out what is there. A lost entry is computed again, never missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.server.compute import SavedGraph


@dataclass
class CachedForward:
    """One forward as it is kept for its backward."""

    inputs: tuple[Any, ...]
    extras: dict[str, Any]
    wants_grad: Sequence[bool]
    mode: ComputeMode
    seed: int
    busy_s: float = 0.0
    graph: SavedGraph | None = None
    graph_bytes: int = 0
    input_bytes: int = 0


class ActivationCache:
    """Kept forwards by their ticket names, within a budget of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, CachedForward] = {}
        self.used_bytes = 0
        self.num_dropped_graphs = 0

    @property
    def full(self) -> bool:
        """True if finished outputs should be dropped as soon as they were fetched."""
        return self.used_bytes >= self._max_bytes

    def keep(self, name: str, kept: CachedForward) -> None:
        """Keep what fits: the inputs, and the graph if there is room for it, too."""
        self.pop(name)
        if self.used_bytes + kept.input_bytes + kept.graph_bytes > self._max_bytes:
            self.num_dropped_graphs += 1
            kept.graph, kept.graph_bytes = None, 0
        if self.used_bytes + kept.input_bytes > self._max_bytes:
            return
        self._kept[name] = kept
        self.used_bytes += kept.input_bytes + kept.graph_bytes

    def pop(self, name: str) -> CachedForward | None:
        """Remove and return an entry."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.used_bytes -= kept.input_bytes + kept.graph_bytes
        return kept

    def drop(self, prefix: str) -> None:
        """Remove all entries whose names begin with `prefix`."""
        for name in [name for name in self._kept if name.startswith(prefix)]:
            self.pop(name)
