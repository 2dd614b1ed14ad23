"""What goes another way than straight on, and what was done about it: said once, counted, kept for a while.

One `EventLog` a peer. Whoever handles a fault notes it; nobody decides anything by it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

_log = logging.getLogger(__name__)

EventKind: TypeAlias = Literal[
    "retry",  # a call was sent again
    "ban",  # no microbatch goes to a peer from here for a while
    "replay",  # a microbatch is computed again, for what was added elsewhere is gone or not named
    "discard",  # a server gave up a sum that is not what the closing names
    "void",  # a step begins anew
    "strike",  # a batch counts nowhere, and its places are free again
    "round_repeated",  # of averaging
    "gone",  # a peer died, or does not answer
    "left",  # a peer left on its own account, or was left out of a roster
    "joined",  # a peer is in a roster now
    "takeover",  # another peer coordinates
    "download",  # of a stage's weights
    "pause",  # nothing goes on for now
    "resume",  # it does again
    "went_back",  # the run goes on from an earlier step
]
EVENT_KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)

_WARNED: Final = frozenset({"void", "strike", "round_repeated", "gone", "takeover", "pause", "went_back"})
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
    """

    kind: EventKind
    peer: str | None = None
    stage: int | None = None
    step: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step is not None else []
        where += [f"stage {self.stage}"] if self.stage is not None else []
        where += [str(self.peer)] if self.peer is not None else []
        head = f"{self.kind}: {', '.join(where)}" if where else self.kind
        return f"{head}: {self.reason}" if self.reason else head


class EventLog:
    """What one peer saw.

    Attributes:
        counts: How often each kind was noted so far. It only grows: whoever wants what is new keeps what it has seen.
    """

    def __init__(self) -> None:
        self.counts: Counter[EventKind] = Counter()
        self._kept: deque[Event] = deque(maxlen=_MAX_KEPT)

    @property
    def newest(self) -> tuple[Event, ...]:
        """The last few hundred, oldest first; what was noted several times in a step is there once."""
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
        self.counts[kind] += 1
        if any((one.kind, one.peer, one.stage, one.step) == (kind, peer, stage, step) for one in self._kept):
            return
        event = Event(kind, peer, stage, step, reason)
        self._kept.append(event)
        _log.log(logging.WARNING if kind in _WARNED else logging.INFO, "%s", event)

    def since(self, seen: Mapping[EventKind, int]) -> Counter[EventKind]:
        """What was noted since the counts were `seen`."""
        return self.counts - Counter(seen)
