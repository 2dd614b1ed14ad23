"""A log of faults and recoveries, which are deduplicated and counted; and the wait for stages without servers."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from lightning_swarm.core.errors import StageLost, SwarmError
from lightning_swarm.core.readable import printable, short_name, shorten
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.reports import EventCounts, EventKind

_log = logging.getLogger("lightning_swarm.events")  # users filter by this name
_outage_log = logging.getLogger(__name__)

# Kinds of events that are logged as warnings.
_WARNED: Final = frozenset(
    {
        *("strike", "round_repeated", "gone", "convicted", "disputed", "expelled", "unconfirmed", "takeover", "pause"),
        *("went_back", "out_of_memory"),
    }
)
# A peer's newest event of these kinds shows whether it is a member.
_MEMBERSHIP: Final = frozenset({"gone", "left", "joined"})
_MAX_KEPT: Final = 256  # newest events
# Most peers whose counts are kept, the latest reporters. A run has fewer peers at a time, but many over weeks.
_MAX_LOGS: Final = 4096


@dataclass(frozen=True)
class Event:
    """A fault or a recovery.

    Args:
        kind: The kind of event.
        peer: The peer concerned, if there is one.
        stage: The stage concerned, if there is one.
        step: The step of the run, if the event belongs to one.
        reason: The reason, as text.
        unix_time_s: The time of the event. Comparisons ignore it.
    """

    kind: EventKind
    peer: str | None = None
    stage: int | None = None
    step: int | None = None
    reason: str = ""
    unix_time_s: float = field(default_factory=time.time, compare=False)

    def is_like(self, other: Event) -> bool:
        """Return whether both have the same kind, peer, stage and step; their reasons may differ."""
        return (self.kind, self.peer, self.stage, self.step) == (other.kind, other.peer, other.stage, other.step)

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step is not None else []
        where += [f"stage {self.stage}"] if self.stage is not None else []
        where += [str(self.peer)] if self.peer is not None else []
        head = f"{self.kind}: {', '.join(where)}" if where else self.kind
        return f"{head}: {self.reason}" if self.reason else head


# Each peer has one `EventLog`. Code that handles a fault adds an event, but no code decides by events. Peers report
# their counts to the coordinator, which reports them to the lead, whose loggers get the sums.
class EventLog:
    """A peer's log of events, with other peers' counts. Thread-safe: the trainer's thread uses it, too."""

    def __init__(self) -> None:
        self._id = secrets.randbits(62)  # identifies this log in reports, because a restarted peer counts anew
        self._counts: Counter[EventKind] = Counter()
        self._reported: dict[PeerId, EventCounts] = {}  # the counts that other peers reported
        self._drained: dict[int, Counter[EventKind]] = {}  # log -> counts that `drain` has returned so far
        self._kept: deque[Event] = deque(maxlen=_MAX_KEPT)
        self._lock = threading.Lock()
        # Whether another log line of this process reports the event, so that this log does not warn of it.
        self.is_reported: Callable[[Event], bool] = lambda _: False

    @property
    def counts(self) -> Counter[EventKind]:
        """A copy of the number of events of each kind so far."""
        with self._lock:
            return self._counts.copy()

    @property
    def newest(self) -> tuple[Event, ...]:
        """The newest few hundred events, oldest first. Similar events of one step are listed once."""
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
        times: int = 1,
    ) -> None:
        """Count an event. Log and keep it unless it is like an earlier event: a thousand retries make one line."""
        with self._lock:
            self._counts[kind] += times
        self._keep(Event(kind, peer, stage, step, reason))

    def log_only(
        self, kind: EventKind, *, peer: str | None = None, stage: int | None = None, step: int, reason: str = ""
    ) -> None:
        """Log and keep another peer's event, which that peer counts, unless this log has it already."""
        with self._lock:
            known = next(
                (old.kind for old in reversed(self._kept) if old.peer == peer and old.kind in _MEMBERSHIP), None
            )
        # Skip it if the newest event about the peer already agrees on whether the peer is a member.
        if kind in _MEMBERSHIP and known is not None and (kind == "joined") == (known == "joined"):
            return
        self._keep(Event(kind, peer, stage, step, reason))

    def _keep(self, event: Event) -> None:
        with self._lock:
            if any(other.is_like(event) for other in self._kept):
                return
            self._kept.append(event)
        text = str(event)
        warns = event.kind in _WARNED and not self.is_reported(event)
        _log.log(logging.WARNING if warns else logging.INFO, "%s", shorten(text))
        if shorten(text) != text:
            _log.debug("In full: %s", printable(text))

    # ------------------------------------------------------------------ counts of all peers

    def report(self) -> EventCounts:
        """Return this peer's counts so far."""
        return EventCounts(log=self._id, counts=dict(self.counts))

    def learn(self, reports: Mapping[PeerId, EventCounts]) -> None:
        """Merge other peers' counts. For two reports of one log, the higher count of each kind is the newer one."""
        with self._lock:
            for peer, report in reports.items():
                known = self._reported.pop(peer, None)  # moves the peer to the end, as the latest reporter
                before = known.counts if known is not None and known.log == report.log else {}
                self._reported[peer] = EventCounts(
                    log=report.log, counts=dict(Counter(before) | Counter(report.counts))
                )
            while len(self._reported) > _MAX_LOGS:
                del self._reported[next(iter(self._reported))]

    def known_counts(self, own: PeerId) -> dict[PeerId, EventCounts]:
        """Return the known counts of all peers, including this one (`own`)."""
        report = self.report()
        with self._lock:
            return {**self._reported, own: report}

    def noted_by(self, kind: EventKind, peers: Collection[PeerId]) -> list[PeerId]:
        """Return the peers among these that have reported an event of this kind."""
        with self._lock:
            return [peer for peer in peers if peer in self._reported and self._reported[peer].counts.get(kind)]

    def keep_only(self, members: Collection[PeerId]) -> None:
        """Forget the counts of all peers except `members`."""
        with self._lock:
            self._reported = {peer: report for peer, report in self._reported.items() if peer in members}

    def drain(self) -> Counter[EventKind]:
        """Return the counts of all peers' events since the last call."""
        new: Counter[EventKind] = Counter()
        with self._lock:
            for log, counts in [
                *((other.log, other.counts) for other in self._reported.values()),
                (self._id, self._counts),
            ]:
                drained = self._drained.pop(log, Counter())  # moves the log to the end, as the latest used
                fresh = Counter(counts) - drained
                self._drained[log] = drained + fresh
                new.update(fresh)
            # Keep more logs than reports, because a peer that returns after a long time continues its counts.
            while len(self._drained) > 2 * _MAX_LOGS:
                del self._drained[next(iter(self._drained))]
        return new


_WARNING_INTERVAL_S: Final = 60.0


@dataclass
class _Outage:
    since_s: float
    logged_s: float = float("-inf")
    lost_s: dict[PeerId, float] = field(default_factory=dict)  # server -> time when it was found to be gone


@dataclass
class OutageWait:
    """A peer's wait for stages without servers. Callers pass the time."""

    events: EventLog
    _: KW_ONLY
    stage_timeout: float  # longest time without a server for a stage, in seconds
    _outages: dict[int, _Outage] = field(default_factory=dict)

    def keep(self, stage: int, gone: Mapping[PeerId, SwarmError], *, step: int, address: str, now_s: float) -> None:
        """Continue to wait for a stage whose servers are all `gone`; warn once a minute, or raise `StageLost`."""
        outage = self._outages.get(stage)
        if outage is None:
            outage = self._outages[stage] = _Outage(now_s)
            self.events.note("pause", stage=stage, step=step, reason="; ".join(map(str, gone.values())))
        for peer in gone:
            outage.lost_s.setdefault(peer, now_s)
        last = max(gone, key=lambda peer: outage.lost_s[peer])
        waited_s = now_s - outage.since_s
        if waited_s >= self.stage_timeout:
            raise StageLost(
                f"step {step} waits for stage {stage}, which had no server for `Limits.stage_timeout` = "
                f"{self.stage_timeout:g} s; {last} was lost last: {gone[last]}"
            )
        if now_s >= outage.logged_s + _WARNING_INTERVAL_S:
            outage.logged_s = now_s
            _outage_log.warning(
                "Step %d waits for stage %d: none of its servers answers. %s was lost last, %.0f s ago (%s). The run "
                "goes on as soon as one of %s answers, or another server joins with `lightning-swarm join %s`. "
                "Otherwise it ends in %.0f s.",
                step,
                stage,
                short_name(last),
                now_s - outage.lost_s[last],
                shorten(str(gone[last])),
                ", ".join(map(short_name, sorted(gone))),
                address,
                self.stage_timeout - waited_s,
            )

    def stage_found(self, *, step: int) -> None:
        """End all waiting: every stage has a server."""
        for stage in self._outages:
            self.events.note("resume", stage=stage, step=step)
        self._outages.clear()
