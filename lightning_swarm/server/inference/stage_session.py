"""A session at one stage of a server: its cache, its kept outputs, and the numbers of its steps."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.model.inference import attention_cache
from lightning_swarm.model.inference.prefix_digest import PrefixDigests
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import WINDOW, SessionStep

_BUSY_S: Final = 5.0  # seconds after its last step in which a session counts as active


@dataclass(eq=False)
class KeptOutput:
    """A step in the form that the next stage's server receives."""

    step: SessionStep  # the received step, whose route begins with this server
    tensors: tuple[Tensor, ...]
    structure: Any
    num_bytes: int
    length: int | None  # tokens in the cache


@dataclass(eq=False)
class StageSession:
    """A session at one stage of this server."""

    client: PeerId
    attempt: int  # rises with each change of the route
    route: list[PeerId]  # begins with this server
    resume: int  # outputs from this step on are sent along the route; the client has the outputs before
    adapter: bytes | None = None  # digest of its steps' adapter
    source: str | None = None  # session of this client from which it branched
    cache: Any = None  # made by the first step
    begun: int = 0  # steps of the prefix with which it began
    taken: int = 0  # the newest step that is computed or will be
    done: int = 0  # the newest step that is computed
    kept: OrderedDict[int, KeptOutput] = field(default_factory=OrderedDict)  # step number -> output
    cache_bytes: int = 0
    kept_bytes: int = 0
    lengths: list[int] = field(default_factory=list)  # tokens in the cache after each step
    first_state: int = 1  # the first step whose state later steps have only extended
    digests: PrefixDigests | None = None  # set if other clients may share the session's prefixes
    used_s: float = field(default_factory=now_s)  # time of the newest step's arrival
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    replaying: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while another server gets all outputs
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)  # `taken` or `done` has grown
    waiting: Counter[int] = field(default_factory=Counter)  # numbers of received steps that wait for earlier steps
    num_repeated: int = 0  # outputs that are being sent again

    def follow(self, attempt: int, route: list[PeerId], resume: int) -> None:
        """Adopt a route, perhaps the same again: outputs from step `resume` on go there."""
        if len(route) != len(self.route):
            raise ProtocolError(f"a session has a server for each of its {len(self.route)} stages, got {len(route)}")
        self.attempt, self.route, self.resume = attempt, route, resume

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache and of the kept outputs."""
        return self.cache_bytes + self.kept_bytes

    @property
    def goes_on(self) -> bool:
        """Whether a step is being computed, or the last was a moment ago."""
        return self.done < self.taken or now_s() < self.used_s + _BUSY_S

    def takes(self, number: int) -> bool:
        """Return whether a step is known, or is the next step and few accepted steps are still to be computed."""
        return number <= self.taken + 1 and (number <= self.taken or self.taken < self.done + WINDOW)

    async def grow(self) -> None:
        """Wake the steps that wait for earlier steps."""
        async with self.changed:
            self.changed.notify_all()

    def keep(self, number: int, kept: KeptOutput) -> None:
        """Keep the output of a step."""
        if kept.step.operations:
            self.first_state = number
        self.lengths.append(kept.length or 0)
        self.kept[number] = kept
        self.kept_bytes += kept.num_bytes

    def can_branch(self, number: int) -> bool:
        """Return whether the cache's state after a step can be restored now."""
        if self.cache is None or self.done < self.taken or not self.first_state <= number <= self.done:
            return False
        return number == self.done or attention_cache.can_be_cut(self.cache)

    def branch(self, client: PeerId, route: list[PeerId], number: int) -> StageSession:
        """Return a session of a client that begins with the first steps of this one, if it `can_branch` there."""
        cache = attention_cache.branch_of(self.cache, remove=self.lengths[-1] - self.lengths[number - 1])
        return StageSession(
            client,
            0,
            route,
            number + 1,
            self.adapter,
            cache=cache,
            begun=number,
            taken=number,
            done=number,
            cache_bytes=attention_cache.num_bytes(cache),
            lengths=self.lengths[:number],
            first_state=self.first_state,
            digests=None if self.digests is None else self.digests.upto(number),
        )

    def drop_older(self) -> int:
        """Drop all outputs but those that may be in transit; return the number of bytes freed."""
        before, newest = self.kept_bytes, next(reversed(self.kept), 0)
        first = min(max(self.resume, newest - WINDOW + 1), newest)
        while self.kept and next(iter(self.kept)) < first:
            self.kept_bytes -= self.kept.popitem(last=False)[1].num_bytes
        return before - self.kept_bytes
