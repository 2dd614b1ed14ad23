"""Surveys a run again and again, by another of its peers if the asked peer is gone."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Final, TypeAlias

from msgspec.structs import replace

from lightning_swarm.core.curves import History, StepRate
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.core.readable import shorten
from lightning_swarm.dashboard.changes import ChangeLog
from lightning_swarm.dashboard.overview import Overview, Report, completed, overview_of
from lightning_swarm.monitor.model_report import ModelReport
from lightning_swarm.monitor.swarm_report import ObservedNumber, ObservedPeer
from lightning_swarm.network.addresses import Address
from lightning_swarm.protocol.messages.reports import MAX_LOGGED

_AT_S: Final = ""  # no name of a logged number
_SMOOTHING: Final = 0.3  # weight of the newest rate, because rates over one second vary much

Reports: TypeAlias = Generator[Report]


class Board:
    """Combines reports into overviews with curves and events. Its memory does not grow with time."""

    def __init__(self, address: str) -> None:
        self.address = address  # for other machines to join
        self._history, self._log, self._steps = History(), ChangeLog(), StepRate()
        self._logged, self._logged_steps, self._began_s = History(), dict[str, int](), 0.0
        self._rates: dict[str, MovingAverage] = {}  # peer id -> samples/s
        self.newest: Overview | None = None

    def add(self, report: Report, now_s: float) -> Overview:
        """Add a report; return its overview."""
        steps_per_minute = None
        if not isinstance(report, ModelReport):
            known = {peer.peer_id: peer for peer in self.newest.report.peers} if self.newest is not None else {}
            peers = tuple(self._smoothed(completed(peer, known.get(peer.peer_id))) for peer in report.peers)
            self._rates = {peer.peer_id: self._rates[peer.peer_id] for peer in peers}
            report = dataclasses.replace(report, peers=peers)
            steps_per_minute = self._steps.add(now_s, report.step)
            self._add_logged(report.logged, now_s)
        found = overview_of(report, self.address, now_s, steps_per_minute)
        self._history.add(now_s, found.numbers)
        events = self._log.add(self.newest or found, found)
        logged = self._logged.curves()
        times = [self._began_s + after_s for after_s in logged.series.pop(_AT_S, ()) if after_s is not None]
        self.newest = replace(
            found, curves=self._history.curves(), events=events, logged=logged, logged_at_s=tuple(times)
        )
        return self.newest

    def _add_logged(self, logged: Sequence[ObservedNumber], now_s: float) -> None:
        """Add new logged numbers to the curves. Curves continue if another peer leads, and end at a run's new step."""
        self._began_s = self._began_s or now_s
        for number in sorted(logged, key=lambda number: number.step):
            name, step = number.name, number.step
            is_known = name in self._logged_steps or len(self._logged_steps) < MAX_LOGGED
            if is_known and self._logged_steps.get(name) != step:
                self._logged_steps[name] = step
                self._logged.truncate(step)
                self._logged.add(step, {name: number.value, _AT_S: now_s - number.age_s - self._began_s})

    def _smoothed(self, peer: ObservedPeer) -> ObservedPeer:
        average = self._rates.setdefault(peer.peer_id, MovingAverage(_SMOOTHING))
        if peer.problem is None:
            average.measure(peer.samples_per_s)
        return dataclasses.replace(peer, samples_per_s=round(average.value or 0.0, 3))


def watch(
    address: Address,
    open_reports: Callable[[Address], Reports],
    publish: Callable[[Overview], None],
    stopped: threading.Event,
    *,
    every_s: float,
) -> None:
    """Publish an overview every `every_s` seconds until `stopped` is set; raises the error of the first survey.

    `open_reports` surveys by the peer at an address, each time that its result is advanced.
    """
    board, known, others = Board(str(address)), [address], [address]
    while not stopped.is_set():
        asked, *others = others or known  # if no peer answers, ask all of them again
        try:
            with closing(open_reports(asked)) as reports:
                for report in reports:
                    board.address = str(asked)
                    found = board.add(report, time.time())
                    publish(found)
                    texts = [f"{peer.place}/{peer.peer_id}" for peer in found.report.peers if peer.problem is None]
                    known = others = [*Address.parse_all(texts), address]
                    if stopped.wait(every_s):
                        return
        except SwarmError as error:
            if board.newest is None:
                raise
            board.newest = replace(board.newest, problem=shorten(str(error)))
            publish(board.newest)
        stopped.wait(every_s)
