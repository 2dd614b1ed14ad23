"""A trainer's way back, from one run of a fit to the next."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_swarm.client.model_state import no_room
from lightning_swarm.client.session import RunNews, Session
from lightning_swarm.core.errors import Replaced, StageLost, StepError, SwarmError, TrainerFailed
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import BatchNumber
from lightning_swarm.protocol.messages.state import OrderedSnapshots
from lightning_swarm.strategy.data import STATE, at_position
from lightning_swarm.strategy.framework import callbacks_named
from lightning_swarm.strategy.metrics import Pending
from lightning_swarm.strategy.rollback import loop_transfer
from lightning_swarm.strategy.rollback.data_position import DataPosition, RandomState, generators_of, random_state
from lightning_swarm.strategy.rollback.loop_state import Counts, LoopStates, ResumePoint, restore_metrics

_NEARLY: Final = 0.9
"""The part of an interval for which no order can come. It is measured from when an order came to this peer's server,
which is some time after it was given."""


class KnownSnapshots:
    """What a trainer knows of them, as far as they are of use to its loop.

    Args:
        peer: Whose.
        session: In the run.
        interval_s: Between two orders; None: there are none.
    """

    def __init__(self, peer: Peer, session: Session, interval_s: float | None) -> None:
        self._peer = peer
        self._session = session
        self._interval_s = interval_s
        self._first_step = session.version
        self._newest: OrderedSnapshots | None = None

    def clear(self) -> None:
        """Those that came so far are void."""
        self._newest = None

    def refresh(self) -> None:
        """What this peer's server heard, which knows all records; else what the trainer heard."""
        record, ordered = self._session.newest_record, self._peer.ordered
        if record is not None and record.snapshot is not None and record.step >= self._first_step:
            heard = OrderedSnapshots(record.step + 1, record.snapshot.keep, time.monotonic())
            ordered = heard if ordered is None or ordered.version < heard.version else ordered
        if ordered is not None and (self._newest is None or ordered.version > self._newest.version):
            self._newest = ordered

    @property
    def versions(self) -> list[int]:
        """Of the snapshots."""
        newest = self._newest
        return [] if newest is None else [one for one in (newest.keep, newest.version) if one is not None]

    def may_be_at(self, version: int, through: Collection[int]) -> bool:
        """Whether there is one, or may come to be, that goes with a loop between two batches.

        Args:
            version: That the loop has counted to.
            through: The places of its batches in the open step.
        """
        newest = self._newest
        if newest is not None and newest.version == version and not through:
            return True
        if not self._session.is_shared or self._interval_s is None:
            return False
        # Others may fill the next steps before this trainer asks for a place again.
        return (
            newest is None or newest.version > version or time.monotonic() >= newest.at_s + _NEARLY * self._interval_s
        )


class LoopReplication:
    """Has others keep what the lead's loop is at.

    Of several trainers it can be gone on from where their place in the data is the run's. Others have each their own.

    Args:
        peer: The trainer's.
        session: In the run. If it does not lead, nothing is sent.
        states: Of its loop.
        orders: Of snapshots.
    """

    def __init__(self, peer: Peer, session: Session, states: LoopStates, orders: KnownSnapshots) -> None:
        self._peer = peer
        self._session = session
        self._states = states
        self._orders = orders
        self._newest: int | None = None  # that was sent
        self._left_out: set[str] = set()  # what was warned of

    def replicate(self) -> None:
        """The loop is between two batches, or its next one has a place: records may have come in between."""
        session, version = self._session, self._session.version
        if not session.is_lead or version == self._newest or version not in self._orders.versions:
            return
        between = self._states.find(version)
        if between is None or between.heard_at(version).lost or (session.is_shared and not _is_at_a_batch(between)):
            return
        self._newest = version
        position = session.run.position_at(version)
        self._peer.keep_loop(version, partial(loop_transfer.pack, between, version, position, self._left_out))


def _is_at_a_batch(between: ResumePoint) -> bool:
    """Whether its place in the data is a batch that all trainers know by its number."""
    return STATE in between.state.checkpoint["loops"]["fit_loop"]["state_dict"]


_log = logging.getLogger(__name__)

_MAX_TRIES: Final = 3
"""Runs that began at one step and came to no snapshot of their own."""

_TRIAL: Final = (
    "The run could not go back: `LearningRateFinder` was trying rates, and leaves the Trainer as its trial has it when "
    "that breaks off. Start the run again, with a new Trainer."
)

_NO_SNAPSHOT: Final = (
    "The run cannot go on without those that are gone, and there is no snapshot to go back to: one needs a server of "
    "another stage, and is taken at the run's first step and every `Limits.snapshot_interval` seconds."
)

_BEHIND: Final = (
    "The run goes back to step {}, and this trainer kept nothing of its loop that belongs there. The others go on "
    "without it."
)


class TrainingLoop(Protocol):
    """What is needed of the training loop."""

    on_place: Callable[[RunNews], None]

    @property
    def pending(self) -> Pending:
        """What is still to be shared of its batches."""

    def recall(self, num_counted: int, news: RunNews, pending: Pending) -> None:
        """Go on between two batches, as the loop of another run did."""


@dataclass
class RollbackTarget:
    """Where the run goes on.

    Args:
        version: Of the weights.
        path: An ordinary checkpoint; at another trainer than the lead, but for weights.
        between: What such a file does not hold.
        num_tries: So far.
    """

    version: int
    path: Path
    between: ResumePoint
    num_tries: int = 0


class Rollback:
    """What a trainer keeps, so that its fit can go on from a snapshot.

    Attributes:
        states: Of its loop; None: it is in no run.
        begins_anew: The loop begins beside another lead, as that of one that comes to the run.
    """

    def __init__(self) -> None:
        self.begins_anew = False
        self.states: LoopStates | None = None
        self._orders: KnownSnapshots | None = None
        self._said: dict[int, ResumePoint] = {}  # by version, what the lead was told that this loop could go on from
        self._goal: RollbackTarget | None = None
        self._arrived = True
        self._place: DataPosition | None = None
        self._loaders: list[object] = []  # of the training loop, whose iterators are still to be made
        self._made: RandomState | None = None
        self._position_at: Callable[[int], BatchNumber | None] = lambda _: None
        self._finders: list[Any] = []

    def watch(
        self, trainer: Trainer, peer: Peer, session: Session, loop: TrainingLoop, *, snapshot_interval: float | None
    ) -> None:
        """A run begins, or goes on at the goal.

        Args:
            trainer: Whose.
            peer: Its own.
            session: In the run.
            loop: The trainer's.
            snapshot_interval: As in `Limits`.
        """
        names = {name for stage in peer.lead.stages for name in stage.named_stage_tensors()}
        self.states = states = LoopStates(trainer, names, is_lead=session.is_lead)
        if session.is_lead:
            peer.lead.versions_kept = lambda: states.versions
        else:
            peer.follower.tell_loop(self._could_go_on)
        self._said, self.begins_anew = {}, False
        self._position_at = session.run.position_at
        self._finders = [one for one in trainer.callbacks if isinstance(one, callbacks_named("LearningRateFinder"))]  # type: ignore[attr-defined]
        orders = self._orders = KnownSnapshots(peer, session, snapshot_interval)
        elsewhere = LoopReplication(peer, session, states, orders)

        def placed(news: RunNews) -> None:
            states.placed(news)
            orders.refresh()
            elsewhere.replicate()

        def between() -> None:
            orders.refresh()
            states.prune(orders.versions)
            if orders.may_be_at(session.version, session.through):
                states.save(session.version, session.through, place.here, loop.pending)
                elsewhere.replicate()

        def arrived() -> None:
            self._arrive(trainer, loop, states)

        loop.on_place = placed
        goes_on = None if self._arrived or self._goal is None else self._goal.between.state.place
        place = self._place = DataPosition(trainer, goes_on, between, arrived, made=self._take_made)

    def _arrive(self, trainer: Trainer, loop: TrainingLoop, states: LoopStates) -> None:
        """The data are where they were at the goal: so shall the loop be."""
        self._arrived = True
        assert self._goal is not None
        goal, was = self._goal, self._goal.between
        restore_metrics(trainer, was.state)
        heard = was.heard_at(goal.version)
        loop.recall(was.num_counted, heard, was.state.pending)
        states.resume(ResumePoint(was.state, was.num_counted, goal.version, (), heard))

    def weights_replaced(self) -> None:
        """A checkpoint was loaded in the middle of the run: the servers forgot their snapshots."""
        if self.states is not None and self._orders is not None:
            self.states.clear()
            self._orders.clear()

    def loader_made(self, loader: object) -> None:
        """Lightning makes the iterators of the training loaders when it has them all."""
        self._loaders.append(loader)
        self._made = random_state(generators_of(self._loaders))

    def _take_made(self) -> RandomState | None:
        """Of loaders made since the last time."""
        self._loaders = []
        made, self._made = self._made, None
        return made

    def load(self, path: object) -> dict[str, Any] | None:
        """The goal's checkpoint, if it is asked for."""
        if self._goal is None or str(path) != str(self._goal.path):
            return None
        # Written by this process: it may hold whatever callbacks keep.
        loaded: dict[str, Any] = torch.load(self._goal.path, map_location="cpu", weights_only=False, mmap=True)
        return loaded

    @property
    def first_step(self) -> int | None:
        """Of the run that goes on at the goal, which the loop may have to catch up with."""
        return None if self._goal is None else self._goal.version

    @property
    def goes_on(self) -> bool:
        """Whether the loop is on its way to the goal."""
        return not self._arrived

    def _could_go_on(self, version: int, counts: Counts) -> bool:
        """On the swarm's loop: what is said now holds when this trainer hears of it."""
        states = self.states  # which the trainer's own thread may let go meanwhile
        found = states.find(version, counts) if states is not None else None
        if found is not None:
            self._said[version] = found
        return found is not None or version == self.first_step

    def begin_anew(self) -> None:
        """Not at the lead, where another peer came to lead: what this loop was at goes with nothing of that one's."""
        self.discard_states()
        self.begins_anew = True

    def discard_states(self) -> None:
        """Go on from nothing that this loop was at."""
        self._forget_goal()
        self._said, self._arrived = {}, True

    def follow(self, version: int, error: SwarmError) -> RollbackTarget | None:
        """Not at the lead: where to go on after an error. None: nowhere.

        Args:
            version: Of the weights that the run goes on with.
            error: What it found when the run was broken off, or had lost something.
        """
        found = self._said.get(version)
        if found is not None:
            self._aim_at(version, found, {}, {})
        if self._goal is None or self._goal.version != version:
            error.add_note(_BEHIND.format(version))
            return None
        self._arrived = False
        return self._goal

    def inherit(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """At a peer that did not lead: go on in the place of the lead, which is gone.

        Raises:
            StepError: What is needed for it could not be had, or read.
        """
        version, value = peer.inherit()
        try:
            between = loop_transfer.unpack(value, version, trainer)
            whole = peer.lead.gather_snapshots([version])
            if whole is None:
                raise StageLost(f"nobody has a snapshot of all stages at version {version} any more. {_NO_SNAPSHOT}")
            self._aim_at(version, between, whole.weights, whole.optimizer)
        except Exception as error:
            peer.lead.give_up()
            raise StepError(f"this peer was to take the run over, and cannot: {error}") from error
        missing = loop_transfer.missing_files(between.state.checkpoint)
        if missing:
            _log.warning(
                "This run's former lead wrote files that are not on this machine, and are left where they are: %s",
                ", ".join(missing),
            )
        assert self._goal is not None
        self._arrived = False
        return self._goal

    def find(self, trainer: Trainer, peer: Peer, error: SwarmError) -> RollbackTarget | None:
        """At the lead: where to go on after an error. None: nowhere; for want of a snapshot, the error gets a note.

        A trainer's own error is nothing to go back from: it would be hidden, and raised again perhaps.

        Args:
            trainer: The lead's.
            peer: Its own.
            error: What broke the run off.
        """
        if isinstance(error, (TrainerFailed, Replaced)) or (self.states is None and self._goal is None):
            return None
        try:
            if peer.lead.run is not None:  # else it was to go on from the goal, and did not come to begin
                if not peer.lead.what_is_lost(wait=not isinstance(error, StageLost)):
                    return None
                replaced = peer.lead.replaced_by()
                if replaced:
                    error.add_note(f"The run does not go back here: {replaced}")
                    return None
                if any(one not in trainer.callbacks for one in self._finders):  # type: ignore[attr-defined]
                    error.add_note(_TRIAL)
                    return None
                self._aim(peer)
        except SwarmError as failure:
            error.add_note(f"The run could not go back: {failure}")
            return None
        if self._goal is None or self._goal.num_tries >= _MAX_TRIES:
            error.add_note(_NO_SNAPSHOT)
            return None
        self._goal.num_tries += 1
        self._arrived = False
        for finder in self._finders:  # it found a rate, which the run goes on with
            finder.on_fit_start = lambda *_: None
        return self._goal

    def _aim(self, peer: Peer) -> None:
        """At the newest snapshot, if there is one of this run. No other trainer that is there may stay behind."""
        states = self.states
        versions = peer.lead.versions_of_all(states.versions) if states is not None and states.versions else ()
        whole = peer.lead.gather_snapshots(versions) if versions else None
        found = states.find(whole.version) if states is not None and whole is not None else None
        if whole is not None and found is not None:
            self._aim_at(whole.version, found, whole.weights, whole.optimizer)
        elif self._goal is not None and not peer.lead.versions_of_all([self._goal.version]):
            self._forget_goal()

    def _aim_at(
        self, version: int, found: ResumePoint, weights: Mapping[str, Tensor], optimizer: Mapping[str, dict[str, Any]]
    ) -> None:
        checkpoint = found.state.complete(weights, optimizer)
        at_position(checkpoint, self._position_at(version))
        path = _written(checkpoint, f"step={version}.ckpt")
        self._forget_goal()
        self._goal = RollbackTarget(version=version, path=path, between=found)

    def let_go(self) -> None:
        """The run is over; another one may go on at the goal."""
        if self._place is not None:
            self._place.close()
        self.states = self._place = self._orders = None

    def end_fit(self) -> None:
        """The fit is over."""
        self.let_go()
        self._forget_goal()
        self._arrived, self.begins_anew = True, False
        for finder in self._finders:
            vars(finder).pop("on_fit_start", None)
        self._finders = []

    def _forget_goal(self) -> None:
        goal, self._goal = self._goal, None
        if goal is not None:
            shutil.rmtree(goal.path.parent, ignore_errors=True)


def _written(checkpoint: Mapping[str, Any], name: str) -> Path:
    """A file in a folder of its own.

    Raises:
        SwarmError: It cannot be written. Nothing is left of it.
    """
    with contextlib.ExitStack() as undone:
        try:
            folder = Path(tempfile.mkdtemp(prefix="lightning-swarm-"))
            undone.callback(shutil.rmtree, folder, ignore_errors=True)
            torch.save(checkpoint, folder / name)
        except (OSError, RuntimeError) as error:  # torch's own, of a full disk
            raise no_room(error) from error
        undone.pop_all()
    return folder / name
