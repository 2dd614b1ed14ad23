"""Sessions that have ended: their caches are kept as prefixes of further sessions, until their memory is needed."""

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
    shares: bool = False  # let a client's sessions begin with prefixes of other clients


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
        return sum(held.cache_bytes for held in self._kept.values())

    def keep(self, key: SessionKey, held: StageSession) -> int | None:
        """Keep the cache of a session that has ended; return the bytes that this frees, or None if it is not kept."""
        if not self.policy.keeps or held.done == held.begun or not held.can_branch(held.done):
            return None
        before = held.num_bytes + self.num_bytes
        held.kept.clear()
        held.kept_bytes, held.used_s = 0, now_s()
        self._kept.pop(key, None)
        self._kept[key] = held
        source = self._kept.get((held.source or "", key[1]))
        if source is not None and source.done == held.begun and held.can_branch(held.begun):
            del self._kept[held.source or "", key[1]]  # `held` can restore all of its states
        return before - self.num_bytes

    async def branch(
        self,
        request: SessionBranch,
        live: Iterable[tuple[SessionKey, StageSession]],
        ask: Callable[[SessionBranch], Awaitable[SessionBranched]],
    ) -> StageSession | None:
        """Return a session that begins with the longest of these prefixes that all servers of the route keep.

        `ask` asks the next stage's server. `live` are the sessions that have not ended.
        """
        found = self._find(request, live)
        number = max(found, default=0)
        if number and len(request.route) > 1:
            number = (await ask(_for_next(request, found))).number
        source = found[number][0] if number in found else None
        if source is None or not source.can_branch(number):  # the prefix may have been dropped meanwhile
            return None
        for key in [key for key, one in self._kept.items() if one is source]:
            source.used_s = now_s()
            self._kept.move_to_end(key)
        branch = source.branch(request.client, request.route, number)
        branch.source = request.source
        return branch

    def _find(
        self, request: SessionBranch, live: Iterable[tuple[SessionKey, StageSession]]
    ) -> dict[int, tuple[StageSession, bytes | None]]:
        """Return sessions that can branch after a number of steps: number -> (session, digest at the next stage)."""
        found: dict[int, tuple[StageSession, bytes | None]] = {}
        for key, held in itertools.chain(self._kept.items(), live):
            if key[1] != request.stage_index or held.adapter != request.adapter:
                continue
            if request.source is not None:
                if key[0] == request.source and held.client == request.client:
                    found |= {number: (held, None) for number in request.numbers if held.can_branch(number)}
            elif self.policy.shares and held.digests is not None:
                for number, digest in zip(request.numbers, request.digests, strict=True):
                    own, sent = held.digests.by_received.get(digest, (0, b""))
                    if own == number and held.can_branch(number):
                        found[number] = held, sent
        return found

    def drop_oldest(self) -> int:
        """Drop the least recently used prefix; return its bytes."""
        _, held = self._kept.popitem(last=False)
        held.cache = None  # a branch that is being made may still hold the session
        return held.cache_bytes

    def drop_unused(self) -> int:
        """Drop prefixes that were not used for a long time; return their bytes."""
        freed = 0
        while self._kept and next(iter(self._kept.values())).used_s + _KEPT_S <= now_s():
            freed += self.drop_oldest()
        return freed

    def clear(self) -> None:
        """Drop all prefixes."""
        while self._kept:
            self.drop_oldest()


def record(held: StageSession, step: SessionStep, received: serialization.Tree, sent: KeptOutput) -> None:
    """Add a computed step to the digests of a session whose prefixes other clients may share."""
    if held.digests is None:
        return
    if step.operations or step.draws or serialization.leaves(received[0])[0].shape[0] != 1:
        held.digests = None
        return
    own = _input_of(step, received).digest(held.digests.received)
    after = b""
    if len(step.route) > 1:
        tree = serialization.unflatten(sent.structure, sent.tensors)
        after = _input_of(onward(step), tree).digest(held.digests.sent)
    held.digests.add(step.number, own, after)


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
    """Return a step as the next stage's server receives it, apart from its route and what it brings."""
    return replace(
        step,
        stage_index=step.stage_index + 1,
        route=step.route[1:],
        modes=step.modes[1:],
        adapters=step.adapters[1:],
        drops=step.drops[1:],
    )


def _for_next(request: SessionBranch, found: Mapping[int, tuple[StageSession, bytes | None]]) -> SessionBranch:
    """Return the request to the next stage's server, for the prefixes that were found here."""
    numbers = sorted(found)
    return replace(
        request,
        stage_index=request.stage_index + 1,
        route=request.route[1:],
        adapters=request.adapters[1:],
        numbers=numbers,
        digests=[sent for number in numbers if (sent := found[number][1]) is not None],
    )
