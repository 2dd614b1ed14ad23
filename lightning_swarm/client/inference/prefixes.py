"""Finds the longest prefix of a prompt that servers may keep from earlier texts, and begins a session with it."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lightning_swarm.client.inference.adapters import PackedAdapter, names_of
from lightning_swarm.client.inference.routes import SessionRoutes
from lightning_swarm.client.inference.session import InferenceSession
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.model.inference.prefix_digest import StageInput
from lightning_swarm.protocol import rpc, serialization
from lightning_swarm.protocol.messages.inference import MAX_PREFIXES, SessionBranch

MIN_TOKENS: Final = 64
"""Fewest tokens of a prefix: asking for a shorter prefix may take as long as computing it."""

_MAX_BYTES: Final = 256 << 20  # bytes of the steps of all texts
_MAX_TEXTS: Final = 1024
_PARTS: Final = range(1, MAX_PREFIXES + 1)
_BRANCH_TIMEOUT_S: Final = 5.0  # without an answer by then, the text is sent whole


@dataclass(frozen=True, eq=False)
class KeptText:
    """A text whose steps the servers keep when its session ends."""

    tokens: Tensor  # [tokens], int64, on the CPU
    scope: Hashable  # only texts of the same scope may begin with this text
    session: InferenceSession
    ends: Sequence[int]  # length after each step, in tokens
    num_bytes: int  # bytes of the steps


class KeptTexts:
    """This client's recent texts, with the steps of their sessions. Safe from any thread."""

    def __init__(self, max_bytes: int = _MAX_BYTES, min_tokens: int = MIN_TOKENS) -> None:
        self._max_bytes, self.min_tokens = max_bytes, min_tokens
        self._texts: OrderedDict[str, KeptText] = OrderedDict()  # session id -> text, least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def keep(self, session: InferenceSession, tokens: Tensor, scope: Hashable = "") -> None:
        """Keep a text, unless it has several rows, draws random numbers, or changes its cache by `crop` or the like."""
        ends = [*itertools.accumulate(step.num_tokens for step in session.log)]
        if not ends or not self.min_tokens <= ends[-1] <= len(tokens) or session.recipe is None:
            return
        if any(step.num_rows != 1 or step.operations or step.draws for step in session.log):
            return
        tensors = [tensor for step in session.log for tensor in serialization.flatten((step.hidden, step.extras))[1]]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        with self._lock:
            self._forget(session.id)
            if all(layer.kind == "full" for layer in session.recipe.layers or ()):  # servers can cut such caches
                self._drop_prefixes_of(session)
            self._texts[session.id] = KeptText(tokens[: ends[-1]].cpu().clone(), scope, session, ends, num_bytes)
            self._num_bytes += num_bytes
            session.is_kept = True
            while self._num_bytes > self._max_bytes or len(self._texts) > _MAX_TEXTS:
                self._forget(next(iter(self._texts)))

    def _forget(self, session_id: str) -> None:
        if session_id in self._texts:
            self._num_bytes -= self._texts.pop(session_id).num_bytes

    def _drop_prefixes_of(self, session: InferenceSession) -> None:
        """Drop texts that are prefixes of a session's text, as its servers do."""
        for text in [*self._texts.values()]:
            num_steps = len(text.ends)
            if num_steps <= len(session.log) and text.session.log[num_steps - 1] is session.log[num_steps - 1]:
                self._forget(text.session.id)

    def find(
        self, tokens: Tensor, adapters: Sequence[PackedAdapter | None], scope: Hashable = "", *, exact: bool = False
    ) -> tuple[KeptText, int] | None:
        """Return the text that shares the longest prefix with a prompt, and the number of its steps in the prefix.

        The prefix never includes the prompt's last token, because its output must be computed for the first new token.
        """
        best: tuple[int, KeptText, int] | None = None  # length of the prefix, its text, its number of steps
        with self._lock:
            wanted = scope, exact, names_of(adapters)
            for text in reversed(self._texts.values()):
                if (text.scope, text.session.exact, names_of(text.session.adapters)) != wanted:
                    continue
                num_steps = bisect_right(text.ends, num_common(text.tokens, tokens[:-1]))
                length = text.ends[num_steps - 1] if num_steps else 0
                if length >= max(self.min_tokens, best[0] + 1 if best else 0):
                    best = length, text, num_steps
            if best is not None:
                self._texts.move_to_end(best[1].session.id)
        return None if best is None else best[1:]


def num_common(first: Tensor, second: Tensor) -> int:
    """Return the length of the longest common prefix of two texts, in tokens."""
    length = min(len(first), len(second))
    differing = (first[:length] != second[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


async def branch(session: InferenceSession, routes: SessionRoutes, source: InferenceSession | None) -> int:
    """Ask servers to begin a session with the longest prefix of its log that they keep; return its number of steps.

    `source` is a session of this client that began with the whole log, so the prefix is the whole log. Without it, the
    prefix may be any part of the log with which a session of any client began. If servers do not answer, no prefix is
    used, and no error is raised.
    """
    source_route = () if source is None else source.route
    route = routes.begin(1, source_route)
    num_steps, num_kept = len(session.log), 0
    digests = [] if source is not None else _digests(session)
    # All prefixes of the log, or if there are too many, some that are evenly spaced.
    numbers = [num_steps] if source is not None else sorted({-(-num_steps * part // MAX_PREFIXES) for part in _PARTS})
    if source is None or route == [*source_route]:  # other servers have no caches of `source`
        request = SessionBranch(
            session=session.id,
            client=routes.transport.peer_id,
            stage_index=0,
            route=route,
            adapters=names_of(session.adapters),
            source=None if source is None else source.id,
            numbers=numbers,
            digests=[digests[number - 1] for number in numbers] if digests else [],
        )
        try:
            timeout = min(routes.timeout, _BRANCH_TIMEOUT_S)
            reply = await rpc.SESSION_BRANCH.ask(routes.transport, route[0], request, timeout=timeout)
            num_kept = reply.number if reply.number in numbers else 0
        except SwarmError:  # the server may have left; the text's first step will replace it
            num_kept = 0
    session.adopt(route, num_kept)
    return num_kept


def _digests(session: InferenceSession) -> list[bytes]:
    """Return the digest of each prefix of a session's log, as the first stage's server computes it."""
    digest, digests, names = b"", [], names_of(session.adapters)
    for step in session.log:
        digest = StageInput(
            stage_index=0,
            modes=step.modes,
            adapters=names,
            recipe=session.recipe,
            exact=session.exact,
            tree=(step.hidden, step.extras),
        ).digest(digest)
        digests.append(digest)
    return digests
