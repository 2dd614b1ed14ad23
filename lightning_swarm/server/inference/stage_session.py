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

_ACTIVE_S: Final = 5.0  # a session counts as active for so many seconds after its last step


@dataclass(eq=False)
class KeptOutput:
    """The output of a step, in the form in which the next stage's server receives it."""

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
    resume: int  # outputs from this step on are sent; later servers and the client have the outputs before it
    adapter: bytes | None = None  # digest of its steps' adapter
    source: str | None = None  # id of the session from which it branched
    cache: Any = None  # built by the first step
    num_branched: int = 0  # steps of the prefix from which it branched; 0: it began without one
    accepted: int = 0  # the newest step that was accepted, to be computed after the steps before it
    computed: int = 0  # the newest step that has been computed
    kept: OrderedDict[int, KeptOutput] = field(default_factory=OrderedDict)  # step number -> output
    cache_bytes: int = 0
    kept_bytes: int = 0
    lengths: list[int] = field(default_factory=list)  # tokens in the cache after each step
    first_state: int = 1  # the first step to which the cache can be cut back
    digests: PrefixDigests | None = None  # set if other clients may share the session's prefixes
    used_s: float = field(default_factory=now_s)  # time of the newest step's arrival
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    replaying: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a replacement server gets all outputs
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)  # notified when a step has progressed
    waiting: Counter[int] = field(default_factory=Counter)  # step -> how often it waits; a step may be sent again
    num_repeated: int = 0  # repetitions of outputs that are under way at the moment

    def follow(self, attempt: int, route: list[PeerId], resume: int) -> None:
        """Adopt a route, which may be the present one, for outputs from step `resume` on."""
        if len(route) != len(self.route):
            raise ProtocolError(f"a route must have a server for each of {len(self.route)} stages, got {len(route)}")
        self.attempt, self.route, self.resume = attempt, route, resume

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache and of the kept outputs."""
        return self.cache_bytes + self.kept_bytes

    @property
    def is_active(self) -> bool:
        """Whether a step is being computed, or the newest step came a moment ago."""
        return self.computed < self.accepted or now_s() < self.used_s + _ACTIVE_S

    def accepts(self, number: int) -> bool:
        """Return whether a step was accepted, or is the next one and fewer than `WINDOW` steps wait to be computed."""
        return number <= self.accepted or (number == self.accepted + 1 and self.accepted < self.computed + WINDOW)

    async def notify(self) -> None:
        """Wake the steps that wait for earlier steps, or for the end of the session."""
        async with self.changed:
            self.changed.notify_all()

    def keep(self, number: int, kept: KeptOutput) -> None:
        """Keep the output of a step."""
        if kept.step.operations:
            self.first_state = number  # its operations changed the cache, and cannot be undone
        self.lengths.append(kept.length or 0)
        self.kept[number] = kept
        self.kept_bytes += kept.num_bytes

    def can_branch(self, number: int) -> bool:
        """Return whether a branch can begin now with the cache's state after a step."""
        if self.cache is None or self.computed < self.accepted or not self.first_state <= number <= self.computed:
            return False
        return number == self.computed or attention_cache.can_be_cut(self.cache)

    def branch(self, client: PeerId, route: list[PeerId], number: int) -> StageSession:
        """Return a client's session that begins with the first steps of this session; `can_branch` must be true."""
        cache = attention_cache.branch_of(self.cache, remove=self.lengths[-1] - self.lengths[number - 1])
        return StageSession(
            client,
            0,
            route,
            number + 1,
            self.adapter,
            cache=cache,
            num_branched=number,
            accepted=number,
            computed=number,
            cache_bytes=attention_cache.num_bytes(cache),
            lengths=self.lengths[:number],
            first_state=self.first_state,
            digests=None if self.digests is None else self.digests.upto(number),
        )

    def drop_older_outputs(self) -> int:
        """Drop all outputs but those that may be in transit; return the number of bytes freed."""
        former_bytes, newest = self.kept_bytes, next(reversed(self.kept), 0)
        first = min(max(self.resume, newest - WINDOW + 1), newest)
        while self.kept and next(iter(self.kept)) < first:
            self.kept_bytes -= self.kept.popitem(last=False)[1].num_bytes
        return former_bytes - self.kept_bytes
