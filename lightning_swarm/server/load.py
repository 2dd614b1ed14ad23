"""What a stage's computing takes on this server, as measured. Pure: it is told the time."""

from __future__ import annotations

from typing import Final

from lightning_swarm.moving_average import MovingAverage

_SMOOTHING: Final = 0.05
_OF_STEPS: Final = 0.3
_FEW: Final = 4
"""Microbatches: the first ones load and compile."""


class StageLoad:
    """Of one stage on one server."""

    def __init__(self) -> None:
        self._num_samples, self._busy_s, self._queued = (MovingAverage(_SMOOTHING) for _ in range(3))
        self._num_measured = 0
        self._busy_share = MovingAverage(_OF_STEPS)
        self._busy_in_step_s = 0.0
        self._step_began_s: float | None = None

    def note(self, num_samples: int, *, busy_s: float, queued: int) -> None:
        """A microbatch went through."""
        self._num_measured += 1
        self._num_samples.measure(num_samples)
        self._busy_s.measure(busy_s)
        self._queued.measure(queued)
        self._busy_in_step_s += busy_s

    def begin(self, *, now_s: float) -> None:
        """A step begins, the first one or the first after an absence, which counts as no step."""
        self._step_began_s, self._busy_in_step_s = now_s, 0.0

    def note_step(self, *, now_s: float) -> None:
        """A step is over, with all that belongs to it, and the next one begins."""
        if (share := self._so_far(now_s)) is not None:
            self._busy_share.measure(share)
        self.begin(now_s=now_s)

    @property
    def samples_per_s(self) -> float | None:
        """While it computes, of the last microbatches, forward and backward; None before a few were measured."""
        num_samples, busy_s = self._num_samples.value, self._busy_s.value
        return num_samples / busy_s if num_samples and busy_s and self._num_measured >= _FEW else None

    @property
    def microbatch_size(self) -> float | None:
        """Samples, of the last ones; None: there was none."""
        return self._num_samples.value

    @property
    def queued(self) -> float:
        """Jobs that waited when these were done."""
        return self._queued.value or 0.0

    def busy_share(self, *, now_s: float) -> float | None:
        """Of the last steps' time, the part in which it computed; in the first step, of that so far."""
        return self._busy_share.value if self._busy_share.value is not None else self._so_far(now_s)

    def _so_far(self, now_s: float) -> float | None:
        """Likewise of the open step; None: it has only begun."""
        began_s = self._step_began_s
        return min(self._busy_in_step_s / (now_s - began_s), 1.0) if began_s is not None and now_s > began_s else None
