"""A session at one stage of a server: what it holds, and which steps are taken, computed and handed on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import WINDOW, SessionStep

_BUSY_S: Final = 5.0  # for so long after its last step a session counts as going on


@dataclass(eq=False)
class KeptOutput:
    """A step as the server of the next stage gets it."""

    step: SessionStep  # as it came here; of the next one the route begins one later
    tensors: tuple[Tensor, ...]
    structure: Any
    num_bytes: int
    length: int | None  # of the cache, in tokens


@dataclass(eq=False)
class StageSession:
    """A session at one stage here."""

    client: PeerId
    attempt: int
    route: list[PeerId]  # from this server on
    resume: int
    adapter: bytes | None = None  # of all of its steps
    cache: Any = None  # made by the first step
    taken: int = 0  # the newest step that is computed here, or will be
    done: int = 0
    kept: OrderedDict[int, KeptOutput] = field(default_factory=OrderedDict)  # by number
    cache_bytes: int = 0
    kept_bytes: int = 0
    used_s: float = field(default_factory=now_s)
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)  # `taken` or `done` has grown

    def follow(self, attempt: int, route: list[PeerId], resume: int) -> None:
        """Take another route, or the same one again: outputs from `resume` on go there."""
        if len(route) != len(self.route):
            raise ProtocolError(f"a session has a server for each of its {len(self.route)} stages, got {len(route)}")
        self.attempt, self.route, self.resume = attempt, route, resume

    @property
    def num_bytes(self) -> int:
        """Bytes of its cache, and of the outputs."""
        return self.cache_bytes + self.kept_bytes

    @property
    def goes_on(self) -> bool:
        """Return whether a step is under way, or one was a moment ago."""
        return self.done < self.taken or now_s() < self.used_s + _BUSY_S

    def takes(self, number: int) -> bool:
        """Return whether a step is not too far ahead of what is taken and done here."""
        return number <= self.taken + 1 and (number <= self.taken or self.taken < self.done + WINDOW)

    async def grow(self) -> None:
        """Let steps go on that wait for others."""
        async with self.changed:
            self.changed.notify_all()

    def keep(self, number: int, kept: KeptOutput) -> None:
        """Keep the output of a step."""
        self.kept[number] = kept
        self.kept_bytes += kept.num_bytes

    def drop_older(self) -> int:
        """Drop all outputs but the newest, which may be on its way; returns the bytes that were freed."""
        before = self.kept_bytes
        while len(self.kept) > 1:
            self.kept_bytes -= self.kept.popitem(last=False)[1].num_bytes
        return before - self.kept_bytes
