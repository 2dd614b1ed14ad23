"""Limits the graphs that a server keeps between forwards and backwards, once its device has run out of memory."""

from __future__ import annotations

import logging
import math
import threading
from typing import Final
from weakref import WeakSet

from lightning_swarm.server.activation_cache import CachedForward

_log = logging.getLogger(__name__)

_GROWTH: Final = 1 / 64  # graphs by which each backward raises the limit


class GraphLimit:
    """The number of graphs that may be kept: halved when memory runs out, and raised slowly by backwards."""

    def __init__(self) -> None:
        self.most = math.inf

    def halve(self, num_kept: int) -> None:
        """Lower the limit to half of the graphs that were kept when memory ran out; if there were none, leave it."""
        if num_kept:
            self.most = min(self.most, num_kept // 2)

    def note_backward(self) -> None:
        """Raise the limit a little after a successful backward, so that one more graph is tried after 64 of them."""
        self.most += _GROWTH

    def allows(self, num_kept: int) -> bool:
        """Return whether one more graph may be kept."""
        return num_kept + 1 <= self.most


# `ActivationCache` has a byte budget, but other code uses memory, too. This class can drop every graph, even if its
# forward has just ended or its backward waits for a gradient. A dropped graph is computed again.
class KeptGraphs:
    """All graphs of a server, which its compute thread adds and drops."""

    def __init__(self) -> None:
        self._forwards = WeakSet[CachedForward]()
        self._lock = threading.Lock()  # for `enter` and `drop_all`; the loop may free forwards at any time
        self.limit = GraphLimit()
        self.num_dropped = 0  # dropped because memory ran out

    def enter(self, kept: CachedForward) -> None:
        """Keep a forward's graph, or drop it if as many are kept as the limit allows."""
        with self._lock:
            if kept.graph is None:
                return
            # The first number is cheap, but may include dropped graphs; the second is exact.
            if self.limit.allows(len(self._forwards)) or self.limit.allows(len(self._present())):
                self._forwards.add(kept)
            else:
                kept.graph, kept.graph_bytes = None, 0
                self.num_dropped += 1

    def drop_all(self, stage: int, error: Exception) -> None:
        """Drop all graphs, because a computation of a stage ran out of memory."""
        with self._lock:
            present = self._present()
            for kept in present:
                kept.graph = None  # `graph_bytes` stays, because only the loop may change the cache's used bytes
            self._forwards.clear()
            self.num_dropped += len(present)
            self.limit.halve(len(present))
        if present:
            _log.warning(
                "Stage %d ran out of memory with the graphs of %d microbatches, which are computed again. This server "
                "now keeps at most %d graphs: %s",
                stage,
                len(present),
                self.limit.most,
                error,
            )

    def _present(self) -> list[CachedForward]:
        return [kept for kept in self._forwards if kept.graph is not None]
