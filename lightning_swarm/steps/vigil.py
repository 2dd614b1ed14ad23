"""Waiting for a stage of which nobody is there: what is said meanwhile, and until when.

The time comes with each call, so it asks no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.errors import StageLost, SwarmError
from lightning_swarm.events import EventLog
from lightning_swarm.network import PeerId

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 60.0


@dataclass
class _Wait:
    since_s: float
    told_s: float = float("-inf")
    lost_s: dict[PeerId, float] = field(default_factory=dict)  # when each was found to be gone


class Vigil:
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
            _log.warning(
                "Step %d waits for stage %d: nobody of it is there. %s was lost last, %.0f s ago (%s). The run goes on "
                "as soon as one of %s answers; others join with `lightning-swarm join %s`. It is given up in %.0f s.",
                step,
                stage,
                last,
                now_s - wait.lost_s[last],
                gone[last],
                ", ".join(sorted(gone)),
                address,
                self._stage_timeout - waited_s,
            )

    def end(self, *, step: int) -> None:
        """There is somebody of every stage."""
        for stage in self._waits:
            self._events.note("resume", stage=stage, step=step)
        self._waits.clear()
