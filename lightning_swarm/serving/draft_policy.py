"""Policy of drafts: how many tokens of a draft are sent ahead of their verification, and in which pieces. Pure."""

from __future__ import annotations

import math
from typing import Final

from lightning_swarm.core.moving_average import MovingAverage

MOST_CHUNKS: Final = 8
"""Most chunks of a text under way. After a mismatch as many outdated ones may be, and servers take 16 steps ahead."""

_SMOOTHING: Final = 0.1  # weight of the newest measurement
_FIRST_ACCEPTANCE: Final = 0.8
_MAX_ACCEPTANCE: Final = 0.99
_USEFUL: Final = 0.1  # probability of being needed, below which a token is not sent
_CHEAP: Final = 0.25  # share of the client's own time for a token, within which drafting one counts as free
_PROBES: Final = 8  # while drafts are of no use, a token is drafted after as many mismatches


class DraftPolicy:
    """Measures a text's drafts and round trips, and chooses how far to send ahead.

    More than the tokens that can be taken within a round trip is of no use. Nor are tokens that are unlikely to be
    needed, because all drafts before must be accepted.

    Args:
        most: The maximum number of tokens of a chunk.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.acceptance = _FIRST_ACCEPTANCE  # share of drafted tokens that the model accepts
        self._num_begun = 0  # drafts
        self._round_trip_s = MovingAverage(_SMOOTHING)
        self._fastest_s = math.inf  # the shortest round trip
        self._busy_s = MovingAverage(_SMOOTHING)  # in which a chunk keeps the servers from the next one
        self._token_s = MovingAverage(_SMOOTHING)  # what the client itself needs for a token
        self._draft_s = MovingAverage(_SMOOTHING)  # for a drafted token

    def measure_draft(self, took_s: float, num_tokens: int) -> None:
        """Learn how long a draft of so many tokens took."""
        self._draft_s.measure(took_s / num_tokens)

    def measure_token(self, took_s: float) -> None:
        """Learn how long the client took for a token beside its drafts and waits."""
        self._token_s.measure(took_s)

    def measure_chunk(self, round_trip_s: float, since_last_s: float) -> None:
        """Learn how long a chunk was under way that the client waited for, and the seconds since the last output."""
        self._round_trip_s.measure(round_trip_s)
        self._fastest_s = min(self._fastest_s, round_trip_s)
        self._busy_s.measure(min(since_last_s, round_trip_s - self._fastest_s))

    def begin(self) -> None:
        """Begin a draft, perhaps an empty one, at a token that no draft foresaw."""
        self._num_begun += 1

    def verify(self, *, accepted: bool) -> None:
        """Learn whether a drafted token was the model's."""
        self.acceptance += _SMOOTHING * (accepted - self.acceptance)

    @property
    def _pace_s(self) -> float:
        """The seconds that the client takes for a token, at least."""
        return max((self._token_s.value or 0.0) + (self._draft_s.value or 0.0), 1e-6)

    @property
    def num_ahead(self) -> int:
        """The number of drafted tokens to have under way."""
        acceptance = min(max(self.acceptance, 1e-6), _MAX_ACCEPTANCE)
        useful = int(math.log(_USEFUL) / math.log(acceptance))
        if self._round_trip_s.value is not None and self._token_s.value is not None:
            useful = min(useful, math.ceil(self._round_trip_s.value / self._pace_s) + self._fewest)
        is_probe = self._num_begun % _PROBES == 0  # the acceptance may have changed
        return max(int(is_probe), min(useful, MOST_CHUNKS * self._most))

    @property
    def _fewest(self) -> int:
        """The fewest tokens of a chunk that keep servers from being slower than the client."""
        return math.ceil((self._busy_s.value or 0.0) / self._pace_s)

    @property
    def chunk(self) -> int:
        """The number of drafted tokens to send at once: few if drafts take long, so that they leave early."""
        ahead = self.num_ahead
        few = self._most if self.is_cheap else max(self._fewest, math.ceil(ahead / MOST_CHUNKS))
        return max(1, min(few, self._most, ahead))

    @property
    def is_cheap(self) -> bool:
        """Whether drafts take hardly any time, so that the newest token may wait for one and leave with it."""
        draft_s, token_s = self._draft_s.value, self._token_s.value
        return draft_s is not None and token_s is not None and draft_s <= _CHEAP * token_s
