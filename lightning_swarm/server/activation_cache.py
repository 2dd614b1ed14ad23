"""Keeps forwards for their backwards, within a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_swarm.server.compute import ForwardCall, SavedGraph


@dataclass(eq=False)
class CachedForward:
    """A forward that is kept for its backward."""

    call: ForwardCall
    busy_s: float = 0.0  # seconds that the forward took
    graph: SavedGraph | None = None
    graph_bytes: int = 0
    input_bytes: int = 0
    output_digest: bytes = b""  # set by a `WorkLog`

    def take_graph(self) -> SavedGraph | None:
        """Return the graph and drop it, because a backward frees it even if it fails half-way."""
        graph, self.graph = self.graph, None
        return graph


# Backwards come in the order of their forwards, so the oldest entries are needed first. New entries that do not fit
# are therefore not kept, rather than evicting older entries. A missing entry is computed again.
class ActivationCache:
    """Kept forwards by ticket name, within a byte budget; used on the event loop, not on the compute thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, CachedForward] = {}
        self.used_bytes = 0
        self.num_dropped_graphs = 0  # forwards that were not kept, or kept without a graph

    @property
    def full(self) -> bool:
        """Whether the budget is used up; if so, callers drop outputs as soon as they are fetched."""
        return self.used_bytes >= self._max_bytes

    def keep(self, name: str, kept: CachedForward) -> None:
        """Keep the inputs if they fit, and the graph if it fits beside them."""
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
