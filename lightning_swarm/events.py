"""What goes another way than straight on, and what was done about it: said once, counted, kept for a while.

One `EventLog` a peer. Whoever handles a fault notes it; nobody decides anything by it. Peers tell who coordinates how
often they noted what, and that tells the lead, whose loggers get the sum.
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

from lightning_swarm.network import PeerId
from lightning_swarm.types.events import EventKind, Noted

_log = logging.getLogger(__name__)

_WARNED: Final = frozenset({"strike", "round_repeated", "gone", "takeover", "pause", "went_back"})
_FATES: Final = frozenset({"gone", "left", "joined"})  # of a peer: each ends another
_MAX_KEPT: Final = 256
_MAX_LOGS: Final = 4096
"""Peers whose counts are kept, those heard of last: far more than a run has at a time, but in weeks others come."""


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
        self._others: dict[PeerId, Noted] = {}  # what they counted, as far as they told it
        self._taken: dict[int, Counter[EventKind]] = {}  # by log: what `take` has given so far
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
        _log.log(logging.WARNING if event.kind in _WARNED else logging.INFO, "%s", event)

    # ------------------------------------------------------------------ what all peers counted

    def report(self) -> Noted:
        """What this peer counted so far."""
        return Noted(log=self._id, counts=dict(self.counts))

    def learn(self, reports: Mapping[PeerId, Noted]) -> None:
        """What other peers counted so far; of two reports of one log each kind's higher count is the newer one."""
        with self._lock:
            for peer, report in reports.items():
                known = self._others.pop(peer, None)  # who was heard of last comes last
                before = known.counts if known is not None and known.log == report.log else {}
                self._others[peer] = Noted(log=report.log, counts=dict(Counter(before) | Counter(report.counts)))
            while len(self._others) > _MAX_LOGS:
                del self._others[next(iter(self._others))]

    def learnt(self, own: PeerId) -> dict[PeerId, Noted]:
        """What is known of all peers, this one (`own`) among them."""
        report = self.report()
        with self._lock:
            return {**self._others, own: report}

    def keep_only(self, members: Collection[PeerId]) -> None:
        """Forget what was learnt of other peers than these."""
        with self._lock:
            self._others = {peer: report for peer, report in self._others.items() if peer in members}

    def take(self) -> Counter[EventKind]:
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
