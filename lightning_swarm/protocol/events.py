"""Events of a peer, noted and counted; and the wait for a stage that nobody serves, with what is said meanwhile.

The wait is told the time with each call, so it asks no clock.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.core.errors import StageLost, SwarmError
from lightning_swarm.core.readable import short_name, shorten
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.events import EventCounts, EventKind

_log = logging.getLogger("lightning_swarm.events")  # users filter by this name
_outage_log = logging.getLogger(__name__)

_WARNED: Final = frozenset({"strike", "round_repeated", "gone", "takeover", "pause", "went_back"})
_FATES: Final = frozenset({"gone", "left", "joined"})  # of a peer: each ends another
_MAX_KEPT: Final = 256
_MAX_LOGS: Final = 4096
"""Peers whose counts are kept, those heard of last: far more than a run has at a time, but in weeks others come."""


# Each peer has one `EventLog`. The code that handles a fault notes it, and decides nothing by it. Peers tell the
# coordinator how often they noted what; the coordinator tells the lead, whose loggers get the sum.
@dataclass(frozen=True)
class Event:
    """One of them.

    Args:
        kind: What happened.
        peer: To whom, if it is about one.
        stage: Where, if it is about one.
        step: Of the run, if it belongs to one.
        reason: Why, in words.
        unix_time_s: When it was noted; two are equal without it.
    """

    kind: EventKind
    peer: str | None = None
    stage: int | None = None
    step: int | None = None
    reason: str = ""
    unix_time_s: float = field(default_factory=time.time, compare=False)

    def is_like(self, other: Event) -> bool:
        """Whether the same happened to the same, for whatever reason."""
        return (self.kind, self.peer, self.stage, self.step) == (other.kind, other.peer, other.stage, other.step)

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step is not None else []
        where += [f"stage {self.stage}"] if self.stage is not None else []
        where += [str(self.peer)] if self.peer is not None else []
        head = f"{self.kind}: {', '.join(where)}" if where else self.kind
        return f"{head}: {self.reason}" if self.reason else head


class EventLog:
    """What one peer saw, and how often others did. The swarm's loop and a trainer's own thread both note and read."""

    def __init__(self) -> None:
        self._id = secrets.randbits(62)
        self._counts: Counter[EventKind] = Counter()
        self._others: dict[PeerId, EventCounts] = {}  # what they counted, as far as they told it
        self._taken: dict[int, Counter[EventKind]] = {}  # by log: what `drain` has given so far
        self._kept: deque[Event] = deque(maxlen=_MAX_KEPT)
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[EventKind]:
        """How often each kind was noted so far: a copy, to see later what is new."""
        with self._lock:
            return self._counts.copy()

    @property
    def newest(self) -> tuple[Event, ...]:
        """The last few hundred, oldest first; what was noted several times in a step is there once."""
        with self._lock:
            return tuple(self._kept)

    def note(
        self,
        kind: EventKind,
        *,
        peer: str | None = None,
        stage: int | None = None,
        step: int | None = None,
        reason: str = "",
    ) -> None:
        """Count it; say and keep it unless the same happened to the same before: one word about a thousand retries."""
        with self._lock:
            self._counts[kind] += 1
        self._keep(Event(kind, peer, stage, step, reason))

    def hear(
        self, kind: EventKind, *, peer: str | None = None, stage: int | None = None, step: int, reason: str = ""
    ) -> None:
        """Say and keep what others noted too, unless it was noted here: it is theirs to count."""
        with self._lock:
            known = next((one.kind for one in reversed(self._kept) if one.peer == peer and one.kind in _FATES), None)
        if known is not None and (kind == "joined") == (known == "joined"):
            return
        self._keep(Event(kind, peer, stage, step, reason))

    def _keep(self, event: Event) -> None:
        with self._lock:
            if any(one.is_like(event) for one in self._kept):
                return
            self._kept.append(event)
        text = str(event)
        _log.log(logging.WARNING if event.kind in _WARNED else logging.INFO, "%s", shorten(text))
        if shorten(text) != text:
            _log.debug("In full: %s", text)

    # ------------------------------------------------------------------ what all peers counted

    def report(self) -> EventCounts:
        """What this peer counted so far."""
        return EventCounts(log=self._id, counts=dict(self.counts))

    def learn(self, reports: Mapping[PeerId, EventCounts]) -> None:
        """What other peers counted so far; of two reports of one log each kind's higher count is the newer one."""
        with self._lock:
            for peer, report in reports.items():
                known = self._others.pop(peer, None)  # who was heard of last comes last
                before = known.counts if known is not None and known.log == report.log else {}
                self._others[peer] = EventCounts(log=report.log, counts=dict(Counter(before) | Counter(report.counts)))
            while len(self._others) > _MAX_LOGS:
                del self._others[next(iter(self._others))]

    def learnt(self, own: PeerId) -> dict[PeerId, EventCounts]:
        """What is known of all peers, this one (`own`) among them."""
        report = self.report()
        with self._lock:
            return {**self._others, own: report}

    def keep_only(self, members: Collection[PeerId]) -> None:
        """Forget what was learnt of other peers than these."""
        with self._lock:
            self._others = {peer: report for peer, report in self._others.items() if peer in members}

    def drain(self) -> Counter[EventKind]:
        """What was noted since this was asked last, here or by others that were learnt of."""
        new: Counter[EventKind] = Counter()
        with self._lock:
            for log, counts in [*((one.log, one.counts) for one in self._others.values()), (self._id, self._counts)]:
                taken = self._taken.pop(log, Counter())  # as in `learn`
                fresh = Counter(counts) - taken
                self._taken[log] = taken + fresh
                new.update(fresh)
            # What was taken of a log is known for longer: who was away that long goes on counting where it stood.
            while len(self._taken) > 2 * _MAX_LOGS:
                del self._taken[next(iter(self._taken))]
        return new


_INTERVAL_S: Final = 60.0


@dataclass
class _Wait:
    since_s: float
    told_s: float = float("-inf")
    lost_s: dict[PeerId, float] = field(default_factory=dict)  # when each was found to be gone


class OutageWait:
    """One peer's, over all stages.

    Args:
        events: Of the peer.
        stage_timeout: Seconds that a stage may have nobody.
    """

    def __init__(self, events: EventLog, *, stage_timeout: float) -> None:
        self._events = events
        self._stage_timeout = stage_timeout
        self._waits: dict[int, _Wait] = {}

    def keep(self, stage: int, gone: Mapping[PeerId, SwarmError], *, step: int, address: str, now_s: float) -> None:
        """Nobody of a stage is there (still); say so once a minute.

        Args:
            stage: Its index.
            gone: All of its peers, and how each was found to be gone.
            step: What waits.
            address: Under which others reach this peer.
            now_s: On the loop's clock.

        Raises:
            StageLost: That lasts for too long.
        """
        wait = self._waits.get(stage)
        if wait is None:
            wait = self._waits[stage] = _Wait(now_s)
            self._events.note("pause", stage=stage, step=step, reason="; ".join(map(str, gone.values())))
        for peer in gone:
            wait.lost_s.setdefault(peer, now_s)
        last = max(gone, key=lambda peer: wait.lost_s[peer])
        waited_s = now_s - wait.since_s
        if waited_s >= self._stage_timeout:
            raise StageLost(
                f"step {step} waits for stage {stage}, of which nobody was there for `Limits.stage_timeout` = "
                f"{self._stage_timeout:g} s; {last} was lost last: {gone[last]}"
            )
        if now_s >= wait.told_s + _INTERVAL_S:
            wait.told_s = now_s
            _outage_log.warning(
                "Step %d waits for stage %d: nobody of it is there. %s was lost last, %.0f s ago (%s). The run goes on "
                "as soon as one of %s answers; others join with `lightning-swarm join %s`. It is given up in %.0f s.",
                step,
                stage,
                short_name(last),
                now_s - wait.lost_s[last],
                shorten(str(gone[last])),
                ", ".join(map(short_name, sorted(gone))),
                address,
                self._stage_timeout - waited_s,
            )

    def stage_found(self, *, step: int) -> None:
        """There is somebody of every stage."""
        for stage in self._waits:
            self._events.note("resume", stage=stage, step=step)
        self._waits.clear()
