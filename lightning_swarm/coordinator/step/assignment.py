"""Who brings which batch of a step, by how long each trainer's batches take. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.protocol.messages.run import BatchNumber

_MARGIN: Final = 1.25
"""So much more than its newest one may a trainer's next batch take: equal trainers leave each other theirs."""

_OWN_MARGIN: Final = 1.1
"""So much sooner must others be through for a trainer to leave its own batch to them."""

_NUM_NEWEST: Final = 4  # batches of a trainer that count: one alone may have waited for something else
_LEAST_KNOWN: Final = 2  # batches that tell how slow a trainer is
_FORGETS: Final = 0.8
"""Factor of a trainer's time with each batch that it leaves to others: it may be faster by now."""


@dataclass
class BatchTimes:
    """How long a trainer's batches take, from the grant to the end."""

    granted_s: float | None = None  # when it got the one in hand
    ended_s: float | None = None  # when its newest one was through
    took_s: float | None = None  # what that one took
    newest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_NEWEST))  # likewise of those before
    num_left: int = 0  # batches of its own that it left to others since
    has_waited: bool = False  # it has asked for a place since its newest batch, and was told to wait

    def granted(self, now_s: float) -> None:
        """Begin a batch."""
        self.granted_s, self.num_left, self.has_waited = now_s, 0, False

    def ended(self, now_s: float) -> None:
        """End the batch in hand, if there is one."""
        if self.granted_s is not None:
            self.took_s, self.ended_s, self.granted_s = now_s - self.granted_s, now_s, None
            self.newest_s.append(self.took_s)

    @property
    def believed_s(self) -> float | None:
        """What its next batch takes at least. None: too little is known, for a first batch is slower than others."""
        return None if len(self.newest_s) < _LEAST_KNOWN else min(self.newest_s) * _FORGETS**self.num_left

    def free_s(self, now_s: float) -> float | None:
        """When it would begin another batch. None: nobody can tell."""
        if self.took_s is None:
            return None
        if self.granted_s is not None:
            return max(now_s, self.granted_s + self.took_s)
        if self.has_waited:  # so it asks again as soon as the next step opens
            return now_s
        # Between two batches. One that pauses for longer validates, perhaps, or saves a checkpoint.
        return now_s if self.ended_s is not None and now_s <= self.ended_s + self.took_s else None


@dataclass
class WaitingTrainer:
    """A trainer that was told to wait."""

    batch: BatchNumber  # that it has in hand, or the end of its epoch
    since_s: float  # when it was told so first, in this step
    patience_s: float  # how long it leaves others' batches to them, or its own to others
    took_s: float | None = None  # what its newest batch took
    leaves_own: bool = False  # its batch is in the step, and others are through with it sooner

    @property
    def until_s(self) -> float:
        """When its patience ends."""
        return self.since_s + self.patience_s


@dataclass(frozen=True)
class Lane:
    """The batches of a step that a working trainer still has to bring."""

    last: BatchNumber  # the last batch that nobody has
    end_s: float  # when it would be through with that one


def leave_to_others(
    num_free: int, own_s: float | None, others: Iterable[tuple[float, float]], *, now_s: float
) -> float | None:
    """Seconds for which a trainer leaves its batch to others; None if it brings the batch itself.

    It leaves the batch where the step would wait for it: `others`, by when they begin another batch and how long that
    takes them, would be through with all that nobody has before it is through with one.
    """
    free = list(others)
    if own_s is None or not free:
        return None
    heapq.heapify(free)
    left_s = 0.0
    for _ in range(num_free):
        begin_s, took_s = free[0]
        left_s = max(left_s, _OWN_MARGIN * (begin_s + took_s - now_s))
        if left_s > own_s:
            return None
        heapq.heapreplace(free, (begin_s + took_s, took_s))
    return left_s


def choose_besides(
    waiting: WaitingTrainer,
    free: Sequence[BatchNumber],
    unattended: Collection[BatchNumber],
    lanes: Iterable[Lane],
    *,
    now_s: float,
) -> BatchNumber | None:
    """Choose what a waiting trainer brings besides, of the `free` batches before its own.

    First come those that are `unattended`: in lanes of trainers that are gone, or are further on. Then comes the end
    of a slower trainer's lane, if that one would be through with it later; at last what nobody has begun for a while.
    """
    before = [one for one in free if one < waiting.batch]
    for number in before:
        if number in unattended:
            return number
    if waiting.took_s is not None:
        end_s = now_s + _MARGIN * waiting.took_s
        slower = [lane for lane in lanes if end_s < lane.end_s and lane.last < waiting.batch]
        if slower:
            return max(slower, key=lambda lane: lane.end_s).last
    return before[0] if before and now_s >= waiting.until_s else None
