"""Policy of drafts: how many drafted tokens are sent before they are verified, and in chunks of which size. Pure."""

from __future__ import annotations

import math
from typing import Final

from lightning_swarm.core.moving_average import MovingAverage

MAX_CHUNKS: Final = 8
"""Most chunks of a text in transit. As many outdated chunks may precede them, because servers queue 16 steps."""

_SMOOTHING: Final = 0.1  # weight of the newest measurement
_FIRST_ACCEPTANCE: Final = 0.8
_MAX_ACCEPTANCE: Final = 0.99
_USEFUL: Final = 0.1  # a token is not sent if it is less likely than this to be needed
_CHEAP: Final = 0.25  # drafting a token counts as free within this share of the client's own time for a token
_PROBES: Final = 8  # while drafts are useless, a token is still drafted at each 8th mismatch


class DraftPolicy:
    """Measures a text's drafts and round trips, and chooses how many tokens to send ahead.

    Tokens that the text cannot reach within a round trip are useless. So are tokens that are unlikely to be
    needed: a drafted token is needed only if all drafted tokens before it are accepted.

    Args:
        max_chunk: The maximum number of tokens of a chunk.
    """

    def __init__(self, max_chunk: int) -> None:
        self._max_chunk = max_chunk
        self.acceptance = _FIRST_ACCEPTANCE  # share of drafted tokens that the model accepts
        self._num_begun = 0  # number of drafts
        self._round_trip_s = MovingAverage(_SMOOTHING)
        self._fastest_s = math.inf  # the shortest round trip
        self._busy_s = MovingAverage(_SMOOTHING)  # the servers' time for a chunk
        self._token_s = MovingAverage(_SMOOTHING)  # the client's own time for a token
        self._draft_s = MovingAverage(_SMOOTHING)  # time to draft a token

    def measure_draft(self, took_s: float, num_tokens: int) -> None:
        """Record how long a draft of this many tokens took."""
        self._draft_s.measure(took_s / num_tokens)

    def measure_token(self, took_s: float) -> None:
        """Record how long the client took for a token, without its drafts and waits."""
        self._token_s.measure(took_s)

    def measure_chunk(self, round_trip_s: float, since_last_s: float) -> None:
        """Record the round trip of a chunk that the client waited for, and the seconds since the output before it."""
        self._round_trip_s.measure(round_trip_s)
        self._fastest_s = min(self._fastest_s, round_trip_s)
        self._busy_s.measure(min(since_last_s, round_trip_s - self._fastest_s))

    def begin(self) -> None:
        """Count a draft, perhaps an empty one, which begins at a token that no draft has predicted."""
        self._num_begun += 1

    def verify(self, *, accepted: bool) -> None:
        """Record whether the model has accepted a drafted token."""
        self.acceptance += _SMOOTHING * (accepted - self.acceptance)

    @property
    def _pace_s(self) -> float:
        """The client's seconds per token if it never waits."""
        return max((self._token_s.value or 0.0) + (self._draft_s.value or 0.0), 1e-6)

    @property
    def num_ahead(self) -> int:
        """The number of drafted tokens to have in transit."""
        acceptance = min(max(self.acceptance, 1e-6), _MAX_ACCEPTANCE)
        useful = int(math.log(_USEFUL) / math.log(acceptance))
        if self._round_trip_s.value is not None and self._token_s.value is not None:
            useful = min(useful, math.ceil(self._round_trip_s.value / self._pace_s) + self._min_chunk)
        is_probe = self._num_begun % _PROBES == 0  # drafts may have become useful
        return max(int(is_probe), min(useful, MAX_CHUNKS * self._max_chunk))

    @property
    def _min_chunk(self) -> int:
        """The smallest chunk that takes the servers no longer than its tokens take the client."""
        return math.ceil((self._busy_s.value or 0.0) / self._pace_s)

    @property
    def chunk(self) -> int:
        """The number of drafted tokens to send at once: a small one if drafting is slow, so that tokens leave early."""
        ahead = self.num_ahead
        few = self._max_chunk if self.is_cheap else max(self._min_chunk, math.ceil(ahead / MAX_CHUNKS))
        return max(1, min(few, self._max_chunk, ahead))

    @property
    def is_cheap(self) -> bool:
        """Whether drafting takes hardly any time, so that the newest token may wait for a draft and leave with it."""
        draft_s, token_s = self._draft_s.value, self._token_s.value
        return draft_s is not None and token_s is not None and draft_s <= _CHEAP * token_s
