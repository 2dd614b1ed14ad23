"""Keeps what a trainer's loop is at, in one run, and has standby leads keep what the lead's loop is at."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from lightning.pytorch import Trainer

from lightning_swarm.client.session import RunNews, Session
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.state import OrderedSnapshots
from lightning_swarm.strategy.data import STATE
from lightning_swarm.strategy.optimization_loop import SwarmOptimization
from lightning_swarm.strategy.rollback import loop_transfer
from lightning_swarm.strategy.rollback.data_position import BatchPosition, DataPosition, RandomState
from lightning_swarm.strategy.rollback.loop_state import LoopStates, ResumePoint

_NEARLY: Final = 0.9
"""The part of an interval in which no order of snapshots can come. The interval is measured from when an order came to
this peer's server, which is some time after it was given."""


class LoopRecorder:
    """Records one trainer's loop in one run, for the versions that have snapshots or may come to have one."""

    def __init__(
        self, trainer: Trainer, peer: Peer, session: Session, loop: SwarmOptimization, snapshot_interval: float | None
    ) -> None:
        names = {name for stage in peer.lead.stages for name in stage.named_stage_tensors()}
        self.states = LoopStates(trainer, names, is_lead=session.is_lead)
        self._trainer = trainer
        self._peer = peer
        self._session = session
        self._loop = loop
        self._snapshot_interval_s = snapshot_interval  # None: no snapshots are ordered
        self._first_step = session.version
        self._position: DataPosition | None = None
        self._newest: OrderedSnapshots | None = None  # that are of use to the loop
        self._newest_sent: int | None = None  # version of the state that standby leads have
        self._left_out: set[str] = set()  # parts that cannot travel, of which a warning was logged
        loop.on_grant = self._granted

    def follow_data(
        self,
        resume_at: BatchPosition | None,
        on_arrival: Callable[[], None],
        *,
        made: Callable[[], RandomState | None],
    ) -> None:
        """Follow the loop through its data, until `close`. The arguments are those of `DataPosition`."""
        self._position = DataPosition(self._trainer, resume_at, self._between_batches, on_arrival, made=made)

    def close(self) -> None:
        """Leave the loop's data as they were."""
        if self._position is not None:
            self._position.close()

    def clear(self) -> None:
        """Forget all states, and all snapshots so far: they are void."""
        self.states.clear()
        self._newest = None

    def _granted(self, news: RunNews) -> None:
        self.states.granted(news)
        self._find_newest()
        self._replicate()

    def _between_batches(self) -> None:
        self._find_newest()
        self.states.prune(self._versions)
        version, completed = self._session.version, self._session.completed_leases
        if self._may_have_snapshot(version, completed):
            assert self._position is not None
            self.states.save(version, completed, self._position.here, self._loop.pending)
            self._replicate()

    # ------------------------------------------------------------------ snapshots

    def _find_newest(self) -> None:
        """Take what this peer's server heard, which knows all records, or else what the trainer heard."""
        record, ordered = self._session.newest_record, self._peer.ordered
        if record is not None and record.snapshot is not None and record.step >= self._first_step:
            heard = OrderedSnapshots(record.step + 1, record.snapshot.keep, time.monotonic())
            ordered = heard if ordered is None or ordered.version < heard.version else ordered
        if ordered is not None and (self._newest is None or ordered.version > self._newest.version):
            self._newest = ordered

    @property
    def _versions(self) -> list[int]:
        """The versions of snapshots that servers keep."""
        newest = self._newest
        return [] if newest is None else [version for version in (newest.keep, newest.version) if version is not None]

    def _may_have_snapshot(self, version: int, completed: Collection[int]) -> bool:
        """True if a snapshot that goes with the loop between two batches exists, or may come to.

        The loop has counted to `version`, and its batches of these leases are complete in the open step.
        """
        newest = self._newest
        if newest is not None and newest.version == version and not completed:
            return True
        if not self._session.is_shared or self._snapshot_interval_s is None:
            return False
        # Others may fill the next steps before this trainer asks for a grant again.
        return (
            newest is None
            or newest.version > version
            or time.monotonic() >= newest.at_s + _NEARLY * self._snapshot_interval_s
        )

    # ------------------------------------------------------------------ standby leads

    def _replicate(self) -> None:
        """Send the lead's state to standby leads: the loop is between batches, or records came before its next one.

        Of several trainers' runs it can be used where the position in the data is the run's. Else each has its own.
        """
        session, version = self._session, self._session.version
        if not session.is_lead or version == self._newest_sent or version not in self._versions:
            return
        point = self.states.find(version)
        if point is None or point.news_at(version).lost or (session.is_shared and not _has_shared_position(point)):
            return
        self._newest_sent = version
        position = session.run.position_at(version)
        self._peer.keep_loop(version, partial(loop_transfer.pack, point, version, position, self._left_out))


def _has_shared_position(point: ResumePoint) -> bool:
    """True if the position in the data is a batch that all trainers know by its number."""
    return STATE in point.state.checkpoint["loops"]["fit_loop"]["state_dict"]
