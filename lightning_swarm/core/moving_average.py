"""An exponential moving average."""

from __future__ import annotations


class MovingAverage:
    """Exponential moving average of the measurements so far, without a bias towards an initial value."""

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing  # weight of a new measurement, from 0 to 1
        self._sum = 0.0
        self._weight = 0.0
        self.value: float | None = None  # the average; None before the first measurement

    def measure(self, value: float) -> None:
        """Add a measurement to the average."""
        self._sum += self._smoothing * (value - self._sum)
        self._weight += self._smoothing * (1.0 - self._weight)
        self.value = self._sum / self._weight if self._weight else None
