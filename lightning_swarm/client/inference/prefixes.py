"""Texts of this client whose beginnings servers may keep; finds the longest for a prompt, and asks the servers."""

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
"""Fewest tokens of a prefix: asking for a shorter one may take as long as to compute it."""

_MAX_BYTES: Final = 256 << 20  # of the steps of all texts
_MAX_TEXTS: Final = 1024
_PARTS: Final = range(1, MAX_PREFIXES + 1)
_ASKING_S: Final = 5.0  # then the text is sent whole


@dataclass(frozen=True, eq=False)
class KeptText:
    """A text whose steps the servers keep when its session ends."""

    tokens: Tensor  # [tokens], int64, on the CPU
    scope: Hashable
    session: InferenceSession
    ends: Sequence[int]  # tokens after each step
    num_bytes: int  # of the steps


class KeptTexts:
    """This client's newest texts, with the steps of their sessions. Any thread may use them."""

    def __init__(self, max_bytes: int = _MAX_BYTES, min_tokens: int = MIN_TOKENS) -> None:
        self._max_bytes, self.min_tokens = max_bytes, min_tokens
        self._texts: OrderedDict[str, KeptText] = OrderedDict()  # session -> text, least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def keep(self, session: InferenceSession, tokens: Tensor, scope: Hashable = "") -> None:
        """Keep a text of one row; texts that draw random numbers or change their cache otherwise are not kept."""
        ends = [*itertools.accumulate(one.num_tokens for one in session.log)]
        if not ends or not self.min_tokens <= ends[-1] <= len(tokens) or session.recipe is None:
            return
        if any(one.num_rows != 1 or one.operations or one.draws for one in session.log):
            return
        size = sum(t.nbytes for one in session.log for t in serialization.flatten((one.hidden, one.extras))[1])
        with self._lock:
            self._forget(session.id)
            if all(layer.kind == "full" for layer in session.recipe.layers or ()):
                self._drop_begun_by(session)
            self._texts[session.id] = KeptText(tokens[: ends[-1]].cpu().clone(), scope, session, ends, size)
            self._num_bytes += size
            session.is_kept = True
            while self._num_bytes > self._max_bytes or len(self._texts) > _MAX_TEXTS:
                self._forget(next(iter(self._texts)))

    def _forget(self, session: str) -> None:
        if session in self._texts:
            self._num_bytes -= self._texts.pop(session).num_bytes

    def _drop_begun_by(self, session: InferenceSession) -> None:
        """Drop texts all of whose steps are the first steps of a session, too, as its servers do."""
        for text in [*self._texts.values()]:
            number = len(text.ends)
            if number <= len(session.log) and text.session.log[number - 1] is session.log[number - 1]:
                self._forget(text.session.id)

    def find(
        self, tokens: Tensor, adapters: Sequence[PackedAdapter | None], scope: Hashable = "", *, exact: bool = False
    ) -> tuple[KeptText, int] | None:
        """Return the text with the longest common beginning with a prompt, and the number of its steps in common.

        At least one token of the prompt is left, because the first new token needs its output.
        """
        best: tuple[int, KeptText, int] | None = None
        with self._lock:
            own = names_of(adapters)
            texts = [one for one in self._texts.values() if one.scope == scope and one.session.exact == exact]
            for text in reversed([one for one in texts if names_of(one.session.adapters) == own]):
                number = bisect_right(text.ends, num_common(text.tokens, tokens[:-1]))
                length = text.ends[number - 1] if number else 0
                if length >= max(self.min_tokens, best[0] + 1 if best else 0):
                    best = length, text, number
            if best is not None:
                self._texts.move_to_end(best[1].session.id)
        return None if best is None else best[1:]


def num_common(one: Tensor, other: Tensor) -> int:
    """Return the number of first tokens that two texts have in common."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


async def branch(session: InferenceSession, routes: SessionRoutes, source: InferenceSession | None) -> int:
    """Let the servers begin a session with the longest prefix of its log that they keep; return its number of steps.

    The prefix is the whole log, which was a beginning of `source`; without a source any beginning of the log that a
    session of any client has in common. If servers do not answer, no prefix is used: a failure never ends a text.
    """
    like = () if source is None else source.route
    route = routes.begin(1, like)
    count, number = len(session.log), 0
    digests = [] if source is not None else _digests(session)
    # All beginnings of the log; of a long one some, as far apart as possible.
    numbers = [count] if source is not None else sorted({-(-count * part // MAX_PREFIXES) for part in _PARTS})
    if source is None or route == [*like]:
        request = SessionBranch(
            session=session.id,
            client=routes.transport.peer_id,
            stage_index=0,
            route=route,
            adapters=names_of(session.adapters),
            source=None if source is None else source.id,
            numbers=numbers,
            digests=[digests[one - 1] for one in numbers] if digests else [],
        )
        try:
            timeout = min(routes.timeout, _ASKING_S)
            reply = await rpc.SESSION_BRANCH.ask(routes.transport, route[0], request, timeout=timeout)
            number = reply.number if reply.number in numbers else 0
        except SwarmError:  # such as a server that has left: the text's steps will replace it
            number = 0
    session.adopt(route, number)
    return number


def _digests(session: InferenceSession) -> list[bytes]:
    """Return the digest of each beginning of a session's log, as the first stage's server computes it."""
    digest, found, names = b"", [], names_of(session.adapters)
    for one in session.log:
        digest = StageInput(
            stage_index=0,
            modes=one.modes,
            adapters=names,
            recipe=session.recipe,
            exact=session.exact,
            tree=(one.hidden, one.extras),
        ).digest(digest)
        found.append(digest)
    return found
