"""Assigns a step's batches to trainers, by the time that each trainer's batches take. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.protocol.messages.run import BatchNumber

# Allowance for a trainer's next batch, relative to its newest, so that trainers of equal speed keep their own batches.
_MARGIN: Final = 1.25
_OWN_MARGIN: Final = 1.1  # factor by which other trainers must be faster before a trainer leaves its batch to them
_NUM_NEWEST: Final = 4  # newest batches that count, because a single batch may have been delayed
_MIN_COMPLETED: Final = 2  # completed batches needed for an estimate
_FORGETTING: Final = 0.8  # factor on a trainer's estimate for each batch left to others: it may be faster by now


@dataclass
class BatchTimes:
    """Durations of a trainer's batches, from the grant to the end."""

    granted_s: float | None = None  # grant of the current batch
    ended_s: float | None = None  # end of the newest batch
    took_s: float | None = None  # duration of the newest batch
    newest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_NEWEST))  # the newest durations
    num_left: int = 0  # own batches left to other trainers since its newest grant
    has_waited: bool = False  # the trainer asked for a place since its newest batch, and had to wait

    def granted(self, now_s: float) -> None:
        """Record the grant of a batch."""
        self.granted_s, self.num_left, self.has_waited = now_s, 0, False

    def ended(self, now_s: float) -> None:
        """Record the end of the current batch, if there is one."""
        if self.granted_s is not None:
            self.took_s, self.ended_s, self.granted_s = now_s - self.granted_s, now_s, None
            self.newest_s.append(self.took_s)

    @property
    def least_s(self) -> float | None:
        """Shortest time that its next batch may take; None before two batches, because the first is slower."""
        return None if len(self.newest_s) < _MIN_COMPLETED else min(self.newest_s) * _FORGETTING**self.num_left

    def free_s(self, now_s: float) -> float | None:
        """Return the time at which the trainer can begin another batch; None if that is unknown."""
        if self.took_s is None:
            return None
        if self.granted_s is not None:
            return max(now_s, self.granted_s + self.took_s)
        if self.has_waited:  # the trainer asks again as soon as the next step opens
            return now_s
        # Between two batches. A trainer that pauses longer may be validating, or saving a checkpoint.
        return now_s if self.ended_s is not None and now_s <= self.ended_s + self.took_s else None


@dataclass
class WaitingTrainer:
    """A trainer that waits with a numbered batch for a place in the step."""

    batch: BatchNumber  # its current batch, or the end of its epoch
    since_s: float  # beginning of its wait in this step
    patience_s: float  # seconds for which it leaves batches to other trainers
    took_s: float | None = None  # duration of its newest batch
    leaves_own: bool = False  # its batch is in the step, and other trainers would complete it sooner

    @property
    def until_s(self) -> float:
        """Time at which its patience ends."""
        return self.since_s + self.patience_s


@dataclass(frozen=True)
class Lane:
    """A working trainer's lane: the ungranted batches of a step that it would bring one after another."""

    last: BatchNumber  # its last ungranted batch
    end_s: float  # expected end of that batch


def leave_to_others(
    num_free: int, own_s: float | None, others: Iterable[tuple[float, float]], *, now_s: float
) -> float | None:
    """Return the seconds for which a trainer leaves its batch to other trainers; None if it brings the batch itself."""
    # It leaves the batch if the `others` would complete all `num_free` ungranted batches within the time that it needs
    # for one, `own_s`. Each of the `others` is a pair: when it begins its next batch, and the seconds that it takes.
    next_begins = list(others)
    if own_s is None or not next_begins:
        return None
    heapq.heapify(next_begins)
    leaves_s = 0.0
    for _ in range(num_free):  # the trainer that is free first gets the next batch
        begin_s, took_s = next_begins[0]
        leaves_s = max(leaves_s, _OWN_MARGIN * (begin_s + took_s - now_s))
        if leaves_s > own_s:
            return None
        heapq.heapreplace(next_begins, (begin_s + took_s, took_s))
    return leaves_s


def choose_additional(
    waiting: WaitingTrainer,
    free: Sequence[BatchNumber],
    unattended: Collection[BatchNumber],
    lanes: Iterable[Lane],
    *,
    now_s: float,
) -> BatchNumber | None:
    """Choose an additional batch for a waiting trainer, among the `free` (ungranted) batches before its own.

    First come `unattended` batches, whose own trainers are gone or will not bring them. Next comes the last batch of
    a slower trainer's lane, if that trainer would complete it later. Once the patience ends, the first of `free` comes.
    """
    earlier = [number for number in free if number < waiting.batch]
    for number in earlier:
        if number in unattended:
            return number
    if waiting.took_s is not None:
        end_s = now_s + _MARGIN * waiting.took_s
        slower = [lane for lane in lanes if end_s < lane.end_s and lane.last < waiting.batch]
        if slower:
            return max(slower, key=lambda lane: lane.end_s).last
    return earlier[0] if earlier and now_s >= waiting.until_s else None
