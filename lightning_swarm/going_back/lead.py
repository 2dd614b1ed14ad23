"""The lead's way back, from one run of a fit to the next."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Trainer

from lightning_swarm.assembly import Peer
from lightning_swarm.errors import StageLost, SwarmError
from lightning_swarm.framework import callbacks_named
from lightning_swarm.going_back.place import DataPlace, RandomState, random_state
from lightning_swarm.going_back.states import LoopState, LoopStates, restore_metrics
from lightning_swarm.session import Session

_MAX_TRIES: Final = 3
"""Runs that began at one step and came to no snapshot of their own."""

_TRIAL: Final = (
    "The run could not go back: `LearningRateFinder` was trying rates, and leaves the Trainer as its trial has it when "
    "that breaks off. Start the run again, with a new Trainer."
)


@dataclass
class Goal:
    """Where the run goes on.

    Args:
        version: Of the weights.
        path: An ordinary checkpoint.
        state: What such a file does not hold.
        num_tries: So far.
    """

    version: int
    path: Path
    state: LoopState
    num_tries: int = 0


class WayBack:
    """What the lead keeps, so that its fit can go on from a snapshot."""

    def __init__(self) -> None:
        self.states: LoopStates | None = None
        self._goal: Goal | None = None
        self._arrived = True
        self._place: DataPlace | None = None
        self._made: RandomState | None = None
        self._finders: list[Any] = []

    def watch(self, trainer: Trainer, peer: Peer, session: Session, num_pending: Callable[[], int]) -> None:
        """A run begins, or goes on at the goal.

        Args:
            trainer: The lead's.
            peer: It has begun the run.
            session: In it.
            num_pending: How many samples the open step has.
        """
        names = {name for stage in peer.stages for name in stage.named_stage_tensors()}
        self.states = states = LoopStates(trainer, names)
        peer.versions_kept = lambda: states.versions
        self._finders = [one for one in trainer.callbacks if isinstance(one, callbacks_named("LearningRateFinder"))]  # type: ignore[attr-defined]

        def batch_ended() -> None:
            record = session.newest_record
            if record is None or record.snapshot is None or session.version != record.step + 1 or num_pending():
                return
            if session.version not in states.versions:
                states.take(session.version, record.snapshot.keep, place.here)

        def arrived() -> None:
            self._arrived = True
            assert self._goal is not None
            restore_metrics(trainer, self._goal.state)

        goes_on = None if self._arrived or self._goal is None else self._goal.state.place
        place = self._place = DataPlace(trainer, goes_on, batch_ended, arrived, made=lambda: self._made)

    def weights_replaced(self) -> None:
        """A checkpoint was loaded in the middle of the run: the servers forgot their snapshots."""
        if self.states is not None:
            self.states.clear()

    def loader_made(self) -> None:
        """Lightning makes the iterator of a training loader next."""
        self._made = random_state()

    def load(self, path: object) -> dict[str, Any] | None:
        """The goal's checkpoint, if it is asked for."""
        if self._goal is None or str(path) != str(self._goal.path):
            return None
        # Written by this process: it may hold whatever callbacks keep.
        loaded: dict[str, Any] = torch.load(self._goal.path, map_location="cpu", weights_only=False)
        return loaded

    def find(self, trainer: Trainer, peer: Peer, error: SwarmError) -> Goal | None:
        """Where to go on after an error. None: nowhere; if it is for want of a snapshot, the error gets a note.

        Args:
            trainer: The lead's.
            peer: Its own.
            error: What broke the run off.
        """
        if self.states is None and self._goal is None:
            return None
        try:
            if peer.run is not None:  # else it was to go on from the goal, and did not come to begin
                if not peer.what_is_lost(wait=not isinstance(error, StageLost)):
                    return None
                if any(one not in trainer.callbacks for one in self._finders):  # type: ignore[attr-defined]
                    error.add_note(_TRIAL)
                    return None
                self._aim(peer)
        except SwarmError as failure:
            error.add_note(f"The run could not go back: {failure}")
            return None
        if self._goal is None or self._goal.num_tries >= _MAX_TRIES:
            error.add_note(
                "The run cannot go on without those that are gone, and there is no snapshot to go back to: one needs a "
                "server of another stage, and is taken at the run's first step and every `Limits.snapshot_interval` "
                "seconds."
            )
            return None
        self._goal.num_tries += 1
        self._arrived = False
        for finder in self._finders:  # it found a rate, which the run goes on with
            finder.on_fit_start = lambda *_: None
        return self._goal

    def _aim(self, peer: Peer) -> None:
        """At the newest snapshot, if there is one of this run."""
        states = self.states
        whole = peer.gather_snapshots(states.versions) if states is not None and states.versions else None
        if whole is None or states is None:
            return
        state = states[whole.version]
        path = _written(state.complete(whole.weights, whole.optimizer), f"step={whole.version}.ckpt")
        self._forget_goal()
        self._goal = Goal(version=whole.version, path=path, state=state)

    def let_go(self) -> None:
        """The run is over; another one may go on at the goal."""
        if self._place is not None:
            self._place.close()
        self.states = self._place = None

    def end(self) -> None:
        """The fit is over."""
        self.let_go()
        self._forget_goal()
        self._arrived = True
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
            raise SwarmError(
                "the way back leads through a checkpoint, which must be written to the folder for temporary files: "
                f"{error}. Make room in {tempfile.gettempdir()}, or name another folder in the variable TMPDIR."
            ) from error
        undone.pop_all()
    return folder / name
