"""What goes over the wires of a network in memory, and through its directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from lightning_swarm.network import Directory, PeerId
from lightning_swarm.network.framing import Head
from lightning_swarm.network.memory import MemoryDirectory
from lightning_swarm.network.rpc import Responder

OF_TENSORS: Final = ("stage.", "ticket.", "averaging.")
"""How the methods begin that are left out."""


class Calls:
    """Counts calls at all wires, by who makes one, who answers, and which; and has the largest body of each."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[PeerId, PeerId, str]] = Counter()
        self.largest: Counter[str] = Counter()

    def answer(self, caller: PeerId, peer: PeerId, head: Head, respond: Responder, /) -> Responder:
        """See `Tap`."""
        if caller != peer:
            self.counts[caller, peer, head.method] += 1
        return respond

    async def arrived(self, caller: PeerId, peer: PeerId, method: str, request: bytes, answer: bytes, /) -> None:
        """See `Tap`."""
        if not method.startswith(OF_TENSORS):
            self.largest[method] = max(self.largest[method], len(request), len(answer))

    @property
    def may_damage(self) -> bool:
        """See `WireTap`."""
        return False

    def damages(self, *_: object, answer: bytes | None, is_answer: bool) -> bool:
        """See `WireTap`."""
        return False


class CountedDirectory(Directory):
    """A directory that knows what went through it."""

    def __init__(self, directory: MemoryDirectory, totals: Counter[str]) -> None:
        self._directory = directory
        self._totals = totals

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """See `Directory`."""
        self._totals.update({"records": 1, "record bytes": len(value)})
        await self._directory.announce(key, value, ttl_s=ttl_s)

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """See `Directory`."""
        found = await self._directory.read(key)
        self._totals.update({"reads": 1, "read bytes": sum(map(len, found.values()))})
        return found

    async def close(self) -> None:
        """See `Directory`."""
        await self._directory.close()
