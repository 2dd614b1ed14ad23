"""What servers say of their load, as far as it can be true, and how far it scatters. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from lightning_swarm.rebalancing.policy import SCATTER

_SLOWEST: Final = 1e-9
"""Samples/s; as many seconds are the fastest's."""

_SMOOTHING: Final = 0.3
_OF_SCATTER: Final = 0.1
_FIRST_SCATTER: Final = 0.2
_SIGMAS: Final = 2.0
"""What is off by more is an error of measuring once in twenty times."""


@dataclass(frozen=True)
class Load:
    """What a server says of one of its stages.

    Args:
        samples_per_s: Forward and backward, while it computes; None: not measured yet.
        queued: Jobs that wait, on the average.
        busy_share: Of the last steps' time, the part in which it computed; None: not measured yet.
    """

    samples_per_s: float | None
    queued: float = 0.0
    busy_share: float | None = None

    @classmethod
    def said(cls, samples_per_s: float | None, queued: float, busy_share: float | None) -> Load:
        """What a server says, as far as it can be true: nothing that it says may harm who coordinates."""
        believed = samples_per_s is not None and _SLOWEST <= samples_per_s <= 1.0 / _SLOWEST
        share = None if busy_share is None else min(busy_share, 1.0)
        return cls(samples_per_s if believed else None, min(queued, 1.0 / _SLOWEST), share)


class Rate:
    """One peer's, as it says it step after step. What it says scatters most where a stage computes for milliseconds.

    Attributes:
        stage: Where it is, or was when it said something last; None: it holds several.
    """

    def __init__(self, samples_per_s: float, stage: int | None) -> None:
        self.stage = stage
        self._log = math.log(samples_per_s)
        self._variance, self._num_heard = (_FIRST_SCATTER / _SIGMAS) ** 2, 1

    def hear(self, samples_per_s: float, stage: int | None) -> None:
        """It has said it again."""
        said = math.log(samples_per_s)
        if stage != self.stage:  # which may be more work
            self.stage, self._log = stage, said
            return
        off = said - self._log
        self._log += _SMOOTHING * off
        self._num_heard += 1
        self._variance += max(_OF_SCATTER, 1.0 / self._num_heard) * (off**2 - self._variance)

    @property
    def samples_per_s(self) -> float:
        """On the average of what it said last; equal peers' are equal."""
        return float(f"{math.exp(self._log):.3g}")

    @property
    def scatter(self) -> float:
        """The share by which that may be off."""
        return max(SCATTER, _SIGMAS * math.sqrt(self._variance))
