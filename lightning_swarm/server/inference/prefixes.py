"""Keeps the caches of ended sessions as prefixes for further sessions, until their memory is needed."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from msgspec.structs import replace

from lightning_swarm.core.clock import now_s
from lightning_swarm.model.inference.prefix_digest import StageInput
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import SessionBranch, SessionBranched, SessionStep
from lightning_swarm.server.inference.stage_session import KeptOutput, StageSession

SessionKey: TypeAlias = tuple[str, int]
"""The id of a session and the index of the stage."""

_KEPT_S: Final = 3600.0  # seconds without use after which a prefix is dropped


@dataclass(frozen=True, kw_only=True)
class PrefixPolicy:
    """Which prefixes a server keeps."""

    keeps: bool = False  # keep the caches of sessions that end; only if weights never change
    shares: bool = False  # also use the prefixes of one client for the sessions of others


@dataclass(eq=False)
class PrefixStore:
    """The caches of ended sessions at this server, the least recently used first."""

    policy: PrefixPolicy
    _kept: OrderedDict[SessionKey, StageSession] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """The bytes of all prefixes."""
        return sum(session.cache_bytes for session in self._kept.values())

    def keep(self, key: SessionKey, session: StageSession) -> int | None:
        """Keep the cache of a session that has ended; return the bytes that this frees, or None if it is not kept."""
        number = session.computed
        if not self.policy.keeps or number == session.num_branched or not session.can_branch(number):
            return None
        former_bytes = session.num_bytes + self.num_bytes
        session.kept.clear()
        session.kept_bytes, session.used_s = 0, now_s()
        self._kept.pop(key, None)
        self._kept[key] = session
        source = self._kept.get((session.source or "", key[1]))
        if source is not None and source.computed == session.num_branched and session.can_branch(session.num_branched):
            del self._kept[session.source or "", key[1]]  # the new prefix contains this one
        return former_bytes - self.num_bytes

    async def branch(
        self,
        request: SessionBranch,
        live: Iterable[tuple[SessionKey, StageSession]],
        ask: Callable[[SessionBranch], Awaitable[SessionBranched]],
    ) -> StageSession | None:
        """Return a session that begins with the longest requested prefix that all servers of the route keep.

        `ask` sends the request to the next stage's server. `live` are the sessions that have not ended.
        """
        sources = self._find(request, live)
        number = max(sources, default=0)
        if number and len(request.route) > 1:
            number = (await ask(_for_next(request, sources))).number
        source = sources[number][0] if number in sources else None
        if source is None or not source.can_branch(number):  # the prefix may have been dropped meanwhile
            return None
        for key in [key for key, prefix in self._kept.items() if prefix is source]:
            source.used_s = now_s()
            self._kept.move_to_end(key)
        branch = source.branch(request.client, request.route, number)
        branch.source = request.source
        return branch

    def _find(
        self, request: SessionBranch, live: Iterable[tuple[SessionKey, StageSession]]
    ) -> dict[int, tuple[StageSession, bytes | None]]:
        """Return number of steps -> session that can branch there, and the prefix's digest at the next stage."""
        sources: dict[int, tuple[StageSession, bytes | None]] = {}
        for key, session in itertools.chain(self._kept.items(), live):
            if key[1] != request.stage_index or session.adapter != request.adapter:
                continue
            if request.source is not None:
                if key[0] == request.source and session.client == request.client:
                    sources |= {number: (session, None) for number in request.numbers if session.can_branch(number)}
            elif self.policy.shares and session.digests is not None:
                for number, digest in zip(request.numbers, request.digests, strict=True):
                    known_number, sent = session.digests.by_received.get(digest, (0, b""))
                    if known_number == number and session.can_branch(number):
                        sources[number] = session, sent
        return sources

    def drop_oldest(self) -> int:
        """Drop the least recently used prefix; return its bytes."""
        _, session = self._kept.popitem(last=False)
        session.cache = None  # a branch in progress may still refer to the session
        return session.cache_bytes

    def drop_unused(self) -> int:
        """Drop prefixes that were not used for an hour; return their bytes."""
        freed = 0
        while self._kept and next(iter(self._kept.values())).used_s + _KEPT_S <= now_s():
            freed += self.drop_oldest()
        return freed

    def clear(self) -> None:
        """Drop all prefixes."""
        while self._kept:
            self.drop_oldest()


def record(session: StageSession, step: SessionStep, received: serialization.Tree, sent: KeptOutput) -> None:
    """Add a computed step to the digests of a session, by which other clients' sessions find its prefixes."""
    if session.digests is None:
        return
    if step.operations or step.draws or serialization.leaves(received[0])[0].shape[0] != 1:
        session.digests = None
        return
    digest = _input_of(step, received).digest(session.digests.received)
    next_digest = b""
    if len(step.route) > 1:
        tree = serialization.unflatten(sent.structure, sent.tensors)
        next_digest = _input_of(onward(step), tree).digest(session.digests.sent)
    session.digests.add(step.number, digest, next_digest)


def _input_of(step: SessionStep, tree: serialization.Tree) -> StageInput:
    return StageInput(
        stage_index=step.stage_index,
        modes=step.modes,
        adapters=step.adapters,
        recipe=step.recipe,
        exact=step.exact,
        tree=tree,
    )


def onward(step: SessionStep) -> SessionStep:
    """Return a step as the next stage's server receives it, but with this step's tensors."""
    return replace(
        step,
        stage_index=step.stage_index + 1,
        route=step.route[1:],
        modes=step.modes[1:],
        adapters=step.adapters[1:],
        drops=step.drops[1:],
    )


def _for_next(request: SessionBranch, sources: Mapping[int, tuple[StageSession, bytes | None]]) -> SessionBranch:
    """Return the request to the next stage's server, for the prefixes that this server keeps."""
    numbers = sorted(sources)
    return replace(
        request,
        stage_index=request.stage_index + 1,
        route=request.route[1:],
        adapters=request.adapters[1:],
        numbers=numbers,
        digests=[sent for number in numbers if (sent := sources[number][1]) is not None],
    )
