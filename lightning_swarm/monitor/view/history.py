"""The view's memory between two moments of a run: peers that are gone, and rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from lightning_swarm.client.status import PeerStatus, SwarmStatus
from lightning_swarm.monitor.view.scene import PeerRow, State
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import Event

_RATE_WINDOW_S: Final = 10.0
_SHOW_GONE_S: Final = 60.0


class PeerPresence:
    """The peers of each stage, and the peers that disappeared during the last minute."""

    def __init__(self) -> None:
        self._present: dict[tuple[int, PeerId], PeerStatus] = {}
        self._gone: dict[tuple[int, PeerId], tuple[PeerStatus, float]] = {}

    def update(self, status: SwarmStatus, *, now_s: float) -> list[list[PeerRow]]:
        """Return the rows of each stage, gone peers last; a peer in another stage has moved, and is not gone."""
        present = {(stage.index, peer.peer_id): peer for stage in status.stages for peer in stage.peers}
        left = self._present.keys() - present.keys()
        self._gone |= {key: (self._present[key], now_s) for key in sorted(left)}
        members = {peer for _, peer in present}
        self._gone = {
            key: (peer, since_s)
            for key, (peer, since_s) in self._gone.items()
            if key[1] not in members and now_s - since_s < _SHOW_GONE_S
        }
        self._present = present
        rows = [[PeerRow(peer, _state(peer, status)) for peer in stage.peers] for stage in status.stages]
        for (stage, _), (peer, _) in self._gone.items():
            if stage < len(rows):
                rows[stage].append(PeerRow(peer, "gone"))
        return rows


def _state(peer: PeerStatus, status: SwarmStatus) -> State:
    return "failing" if peer.num_failures else "serving" if peer.samples_per_s or status.is_whole else "joining"


class RateWindow:
    """Steps and samples per second, over the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()
        self._newest: tuple[float, float] | None = None

    def pause(self) -> None:
        """Clear the window: a pause in training, such as a validation, must not lower the rates."""
        self._points.clear()

    def tick(self, now_s: float, step: int, num_samples: int) -> None:
        """Record the numbers of steps and samples so far."""
        if self._points and num_samples < self._points[-1][2]:
            self._points.clear()  # after a rollback the swarm counts from 0
        self._points.append((now_s, step, num_samples))
        while len(self._points) > 2 and now_s - self._points[0][0] > _RATE_WINDOW_S:
            self._points.popleft()

    @property
    def current(self) -> tuple[float, float] | None:
        """Steps/s and samples/s; after a pause, the earlier rates until there are two new points; None at first."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return self._newest
        (begin_s, first, before), (end_s, last, after) = self._points[0], self._points[-1]
        self._newest = (last - first) / (end_s - begin_s), (after - before) / (end_s - begin_s)
        return self._newest


def newer_than(last: Event | None, events: Sequence[Event]) -> Sequence[Event]:
    """Return the events after `last`, or all events if `last` is no longer among them."""
    known = next((i for i in reversed(range(len(events))) if events[i] is last), -1)
    return events[known + 1 :]
