"""What goes another way than straight on, and what was done about it: said once, counted, kept for a while.

One `EventLog` a peer. Whoever handles a fault notes it; nobody decides anything by it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.types.events import EventKind

_log = logging.getLogger(__name__)

_WARNED: Final = frozenset({"strike", "round_repeated", "gone", "takeover", "pause", "went_back"})
_FATES: Final = frozenset({"gone", "left", "joined"})  # of a peer: each ends another
_MAX_KEPT: Final = 256


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
    """What one peer saw. The swarm's loop and a trainer's own thread both note and read."""

    def __init__(self) -> None:
        self._counts: Counter[EventKind] = Counter()
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

    def hear(self, kind: EventKind, *, peer: str, stage: int | None = None, step: int, reason: str = "") -> None:
        """Say and keep what a record tells of a peer, unless it was noted here: who noted it elsewhere counts it."""
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

    def take(self, seen: Counter[EventKind]) -> Counter[EventKind]:
        """What was noted since the counts were `seen`, which are brought up to date: no event is lost in between."""
        counts = self.counts
        new = counts - seen
        seen.update(new)
        return new
