"""Curves over a run's whole time in bounded memory, which become coarser as the time grows. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

MAX_POINTS: Final = 240
_WINDOW_S: Final = 60.0

_Sums = dict[str, tuple[float, int]]  # name -> sum and count


class Curves(Struct, frozen=True, kw_only=True):
    """Means of several numbers, over intervals of equal length."""

    width: float = 1.0  # length of an interval, in seconds or steps
    begins: tuple[float, ...] = ()  # at which each interval begins, without empty intervals
    series: dict[str, tuple[float | None, ...]] = {}  # None: unknown


class History:
    """Keeps curves over time or steps. If they have more than `MAX_POINTS` intervals, neighbouring ones are merged."""

    def __init__(self) -> None:
        self._width = 1.0
        self._bins: dict[int, _Sums] = {}  # number of the interval -> sums, ascending

    def add(self, now: float, values: Mapping[str, float | None]) -> None:
        """Add measurements at a time or step. If it went back, they belong to the newest interval."""
        index = max(int(now // self._width), next(reversed(self._bins), 0))
        first = next(iter(self._bins), index)
        while index - first >= MAX_POINTS:
            index, first = index // 2, first // 2
            self._width *= 2
            former, self._bins = self._bins, {}
            for number, sums in former.items():
                _add(self._bins.setdefault(number // 2, {}), sums)
        _add(self._bins.setdefault(index, {}), {name: (x, 1) for name, x in values.items() if x is not None})

    def truncate(self, now: float) -> None:
        """Remove the intervals after a time or step, because the run went back."""
        self._bins = {index: sums for index, sums in self._bins.items() if index <= now // self._width}

    def curves(self) -> Curves:
        """Return the curves so far."""
        sums = self._bins.values()
        names = dict.fromkeys(name for interval in sums for name in interval)
        return Curves(
            width=self._width,
            begins=tuple(index * self._width for index in self._bins),
            series={name: tuple(_mean(interval.get(name)) for interval in sums) for name in names},
        )


def _add(into: _Sums, sums: _Sums) -> None:
    for name, (total, count) in sums.items():
        before = into.get(name, (0.0, 0))
        into[name] = before[0] + total, before[1] + count


def _mean(sums: tuple[float, int] | None) -> float | None:
    return None if sums is None else float(f"{sums[0] / sums[1]:.6g}")


class StepRate:
    """Steps per minute over the last minute or, if steps take longer, over the last two steps."""

    def __init__(self) -> None:
        self._step: int | None = None  # last known
        self._seen = deque[tuple[float, int]](maxlen=128)  # time at which a step was first seen, and the step

    def add(self, now_s: float, step: int | None) -> float | None:
        """Add an observation. Return the rate, or None if it is unknown."""
        seen, before = self._seen, self._step
        if step is None:  # no coordinator answers now, but the run may go on
            return None
        self._step = step
        if before is not None and step < before:
            seen.clear()
        elif before is not None and step > before:  # the first known step began at an unknown time
            seen.append((now_s, step))
        while len(seen) > 2 and now_s - seen[1][0] > _WINDOW_S:
            seen.popleft()
        if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
            return None
        (begin_s, first), (end_s, last) = seen[0], seen[-1]
        step_s = (end_s - begin_s) / (last - first)
        return 60 * (last - first) / (max(end_s, now_s - step_s) - begin_s)  # the wait for an overdue step counts
