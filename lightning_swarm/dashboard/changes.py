"""Events of a run, derived from consecutive overviews: peers that come, go or move, and the time to recover. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from msgspec.structs import replace

from lightning_swarm.core.readable import short_name
from lightning_swarm.dashboard.overview import Observed, Overview, RunChange
from lightning_swarm.monitor.model_report import named_stages

MAX_EVENTS: Final = 200
MAX_OF_SOURCE: Final = 10  # newest events of one peer, or of one kind without a peer; they displace no others
MAX_ALIKE: Final = 5  # events of one kind that one survey lists one by one
_MAX_NAMES: Final = 60  # longest list of stages, in characters
_MANY: Final = {
    "joined": "joined",
    "left": "left",
    "forgotten": "are no longer listed",
    "silent": "do not answer",
    "answers": "answer",
    "moved": "changed their stages",
}


class ChangeLog:
    """Keeps the newest events, and completes losses when the step advances. Memory is bounded."""

    def __init__(self) -> None:
        self._events: list[tuple[str, RunChange]] = []  # each with its source: a peer's id, or the event's kind
        self._losses: list[tuple[RunChange, float]] = []  # losses without a later step, and the survey before each
        self._step: float | None = None  # last known
        self._coordinator: str | None = None

    def add(self, before: Overview, now: Overview) -> tuple[RunChange, ...]:
        """Add the changes between two surveys; return all events, newest last."""
        step = now.numbers.get("step")
        if step is not None and self._step is not None and step > self._step:
            self._complete(now.at_s)
        run_events = ((event.kind, event) for event in self._run_events(now, step))
        for source, event in (*_peer_events(before, now), *run_events):
            self._append(source, event)
            if event.kind in ("left", "silent") and now.kind == "run":
                self._losses = [*self._losses, (event, before.at_s)][-MAX_EVENTS:]
        self._step = self._step if step is None else step
        self._coordinator = now.coordinator or self._coordinator
        return tuple(event for _, event in self._events)

    def _append(self, source: str, event: RunChange) -> None:
        same = [place for place, (other, _) in enumerate(self._events) if other == source]
        if len(same) >= MAX_OF_SOURCE:
            del self._events[same[0]]
        self._events = [*self._events, (source, event)][-MAX_EVENTS:]

    def _complete(self, now_s: float) -> None:
        took_s = {id(event): round(now_s - since_s, 1) for event, since_s in self._losses}
        self._losses.clear()
        for place, (source, event) in enumerate(self._events):
            if id(event) in took_s:
                self._events[place] = source, replace(event, resumed_s=took_s[id(event)])

    def _run_events(self, now: Overview, step: float | None) -> Iterator[RunChange]:
        if self._coordinator and now.coordinator and now.coordinator != self._coordinator:
            text = f"{short_name(now.coordinator)} coordinates now, in place of {short_name(self._coordinator)}"
            yield RunChange(at_s=now.at_s, kind="coordinator", text=text)
        if step is not None and self._step is not None and step < self._step:
            text = f"The run went back from step {self._step} to step {step}"
            yield RunChange(at_s=now.at_s, kind="back", text=text)


def _peer_events(before: Overview, now: Overview) -> Iterator[tuple[str, RunChange]]:
    """Yield an event for each changed peer, or one for many peers with the same kind of change, with its source."""
    old, new = ({peer.peer_id: peer for peer in overview.report.peers} for overview in (before, now))
    changes = {peer: _change(old.get(peer), new.get(peer)) for peer in {**old, **new}}
    found = sorted((*change, peer) for peer, change in changes.items() if change is not None)
    for kind, group in groupby(found, key=lambda change: change[0]):
        texts = [(peer, text) for _, text, peer in group]
        if len(texts) > MAX_ALIKE:
            texts = [(kind, f"{len(texts)} peers {_MANY[kind]}")]
        yield from ((source, RunChange(at_s=now.at_s, kind=kind, text=text)) for source, text in texts)


def _change(old: Observed | None, new: Observed | None) -> tuple[str, str] | None:
    """Return the kind and the text of a peer's change, if any."""
    if new is None:
        assert old is not None, "a peer is in one of the two surveys"
        if old.problem is not None:
            return "forgotten", f"{short_name(old.peer_id)} is no longer listed"
        return "left", f"{short_name(old.peer_id)} left {_stages(old)}".strip()
    who = f"{short_name(new.peer_id)} at {new.place}"
    was_silent = old is not None and old.problem is not None
    if new.problem is not None:
        return ("silent", f"{who} does not answer") if old is not None and not was_silent else None
    if was_silent:
        return "answers", f"{who} answers, {_stages(new)}".strip(" ,")
    if old is None or (new.stages and not old.stages):
        return "joined", f"{who} joined {_stages(new)}".strip()
    if new.stages == old.stages:
        return None
    return "moved", f"{short_name(new.peer_id)} moved from {_stages(old)} to {_stages(new) or 'no stage'}"


def _stages(peer: Observed) -> str:
    names = named_stages(sorted(peer.stages)) if peer.stages else ""
    return names if len(names) <= _MAX_NAMES else f"{len(peer.stages)} stages"
