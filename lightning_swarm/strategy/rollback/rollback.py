"""Rolls a fit back after an error: chooses a snapshot, ends the run, and resumes the loop from it in the next run.

`prepare` is called with the error. It chooses the target by this process's role: the lead chooses the snapshot, another
trainer follows the lead's choice, a standby takes over the run of a dead lead, and a trainer that the rollback left out
joins again. Then `prepare` tears the run down, and returns the path of the target's checkpoint for the next call of the
Trainer's function. In the next run, `begin_run` restores the loop's state at its position in the data.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_swarm.client.model_state import no_room
from lightning_swarm.core.errors import (
    Diverged,
    FalseWorkCounted,
    Replaced,
    StageLost,
    StepError,
    SwarmError,
    WentBack,
)
from lightning_swarm.core.override import Override, changed
from lightning_swarm.monitor.membership import Membership
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import BatchNumber
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.base import StrategyBase
from lightning_swarm.strategy.data.shared import set_position
from lightning_swarm.strategy.framework import callbacks_of
from lightning_swarm.strategy.rollback import loop_transfer
from lightning_swarm.strategy.rollback.data_position import DataPosition, RandomState, generators_of, random_state
from lightning_swarm.strategy.rollback.loop_state import Counts, LoopStates, ResumePoint, restore_metrics
from lightning_swarm.strategy.rollback.loop_transfer import LoopRecorder
from lightning_swarm.strategy.run import SwarmRun

_log = logging.getLogger(__name__)

_MAX_TRIES: Final = 3  # most runs that may begin at the same step without reaching a snapshot of their own

_TRIAL: Final = (
    "The run could not roll back: `LearningRateFinder` or `BatchSizeFinder` was still trying values, and "
    "has not restored the Trainer. Start the run again, with a new Trainer."
)

_NO_SNAPSHOT: Final = (
    "The run cannot continue without the lost peers, and there is no snapshot to roll back to. Snapshots need servers "
    "of other stages, and are made at the run's first step and every `Limits.snapshot_interval` seconds."
)

_NO_SOUND_SNAPSHOT: Final = (
    "The run cannot roll back to before the divergence, because no snapshot of step {} or earlier is left. Snapshots "
    "need servers of other stages; the two newest are kept, `Limits.snapshot_interval` seconds apart. Raise it, lower "
    "`patience` of `SkipDivergence`, or continue from an older checkpoint."
)

_NO_STATE: Final = (
    "The run rolls back to step {}, but this trainer kept no state of its loop for that step. The other trainers "
    "continue without it."
)


@dataclass
class RollbackTarget:
    """The snapshot and the state of the loop from which a run resumes."""

    version: int  # version of the weights
    path: Path  # an ordinary checkpoint; without weights at a trainer that does not lead
    resume_point: ResumePoint  # the loop's state, which such a file does not hold
    num_tries: int = 0  # number of runs that began here


class Rollback:
    """Chooses the snapshot from which a trainer's fit resumes after an error, and resumes the next run's loop there."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy
        self.is_rolling_back = False  # Lightning's teardown is under way, and the fit will resume
        # On a trainer that is not the lead: restores the callbacks and limits that only a lead uses.
        self.restore_lead_role: Callable[[], None] = lambda: None
        # The run has a new lead, which this loop's states do not fit: the loop begins like a joining trainer's.
        self.follows_new_lead = False
        self._recorder: LoopRecorder | None = None  # records the current run
        self.states: LoopStates | None = None  # states of the loop in the current run
        self._position: DataPosition | None = None  # the loop's position in the current run's data
        self._offered: dict[int, ResumePoint] = {}  # version -> point that this trainer has offered to the lead
        self._target: RollbackTarget | None = None
        self.is_resuming = False  # the loop has not reached the target yet
        self._loaders: list[object] = []  # the training loop's loaders that have no iterators yet
        self._random_after_loaders: RandomState | None = None  # after the newest loader was made
        self._position_at: Callable[[int], BatchNumber | None] = lambda _: None
        self._finders: list[Any] = []  # callbacks that try values before training
        self._disabled_finders: list[Override] = []  # these have found their values, and must not run again
        self.membership: Membership | None = None  # the members of the run, through all its generations

    def __reduce__(self) -> tuple[type[Rollback], tuple[StrategyBase]]:  # a copy must not refer to the run
        return Rollback, (self._strategy,)

    def begin_run(self, run: SwarmRun) -> None:
        """Begin to record the loop in a run that begins, or that resumes at the target."""
        assert run.loop is not None
        trainer, peer, session, loop = run.trainer, run.peer, run.session, run.loop
        recorder = self._recorder = LoopRecorder(trainer, peer, session, loop, run.config.limits.snapshot_interval)
        states = self.states = recorder.states
        if session.is_lead:
            peer.lead.versions_kept = lambda: states.versions
        else:
            peer.follower.set_can_resume(self._offer_to_resume)
        self._offered, self.follows_new_lead = {}, False
        self._position_at = session.run.position_at
        self._finders = callbacks_of(trainer, *checks.TRIAL_CALLBACKS)
        if session.is_lead:
            session.set_can_go_back(partial(self._can_roll_back, trainer, peer))
            session.set_resumable_versions(lambda: states.versions)

        def arrive() -> None:
            """Restore the loop's state once the data are at the target's position."""
            self.is_resuming = False
            assert self._target is not None
            version, point = self._target.version, self._target.resume_point
            restore_metrics(trainer, point.state)
            # The loop counts these records at its next batch, as if they came while that batch waited for its grant.
            uncounted = point.uncounted_at(version)
            loop.resume(point.loop_version, uncounted, point.state.pending)
            states.resume(ResumePoint(point.state, point.loop_version, version, completed=(), uncounted=uncounted))

        resume_at = None if not self.is_resuming or self._target is None else self._target.resume_point.state.position
        self._position = DataPosition(
            trainer, resume_at, recorder.between_batches, arrive, take_early_state=self._take_random_after_loaders
        )

    def discard_snapshots(self) -> None:
        """Forget all states after a checkpoint was loaded in the middle of the run, which voids the snapshots."""
        if self._recorder is not None:
            self._recorder.clear()

    def record_loader(self, loader: object) -> None:
        """Record the random state after a loader was made: Lightning makes the iterators right after all loaders."""
        self._loaders.append(loader)
        self._random_after_loaders = random_state(generators_of(self._loaders))

    def _take_random_after_loaders(self) -> RandomState | None:
        """Return the random state after the last loader was made, if any was made since the last call."""
        self._loaders = []
        state, self._random_after_loaders = self._random_after_loaders, None
        return state

    def load(self, path: object) -> dict[str, Any] | None:
        """Load the target's checkpoint; None if `path` is another checkpoint."""
        if self._target is None or str(path) != str(self._target.path):
            return None
        # This process has written the file, and callbacks may keep arbitrary objects in it.
        loaded: dict[str, Any] = torch.load(self._target.path, map_location="cpu", weights_only=False, mmap=True)
        return loaded

    @property
    def first_step(self) -> int | None:
        """Return the first step of the run that resumes at the target; the loop may have counted fewer records."""
        return None if self._target is None else self._target.version

    async def _can_roll_back(self, trainer: Trainer, peer: Peer) -> bool:
        """Return whether the run can roll back to a snapshot. Runs at the lead, on the swarm's event loop."""
        if any(finder not in trainer.callbacks for finder in self._finders):  # type: ignore[attr-defined]
            return False
        return await peer.lead.has_snapshot() or (self._target is not None and self._target.num_tries < _MAX_TRIES)

    def _offer_to_resume(self, version: int, counts: Counts) -> bool:
        """Return whether this loop can resume at a version, and keep its state. Runs on the swarm's event loop."""
        states = self.states  # read once, because the trainer's own thread may reset it meanwhile
        point = states.find(version, counts) if states is not None else None
        if point is not None:
            self._offered[version] = point
        return point is not None or version == self.first_step

    def _discard_states(self) -> None:
        """Forget the target and the offered states, so that the loop resumes from none of its own states."""
        self._forget_target()
        self._offered, self.is_resuming = {}, False

    def _follow_lead(self, version: int, error: SwarmError) -> RollbackTarget | None:
        """Return the target at the lead's version; None, with a note on the error, if this loop kept no such state."""
        point = self._offered.get(version)
        if point is not None:
            self._set_target(version, point, {}, {})
        if self._target is None or self._target.version != version:
            error.add_note(_NO_STATE.format(version))
            return None
        self.is_resuming = True
        return self._target

    def take_over(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """Take over the run of a lead that is gone; return the target to resume at. The caller changes the rank.

        Raises StepError if the run cannot resume here.
        """
        version, value = peer.take_over()
        try:
            point = loop_transfer.unpack(value, version, trainer)
            snapshot = peer.lead.gather_snapshots([version])
            if snapshot is None:
                raise StageLost(f"the servers have no snapshot of all stages at version {version}. {_NO_SNAPSHOT}")
            target = self._set_target(version, point, snapshot.weights, snapshot.optimizer)
        except Exception as error:
            peer.lead.give_up()
            raise StepError(f"this peer must take over the run, but cannot: {error}") from error
        missing = loop_transfer.missing_files(point.state.checkpoint)
        if missing:
            _log.warning(
                "The run's former lead wrote files that are not on this machine; they stay where they are: %s",
                ", ".join(missing),
            )
        self.is_resuming = True
        assert peer.lead.run is not None
        strategy = self._strategy
        strategy.inherited_stages = peer.lead.run.manifest.stages
        strategy.config = replace(strategy.config, initial_peers=())  # this peer now starts the runs
        return target

    def _find_lead_target(self, trainer: Trainer, peer: Peer, error: SwarmError) -> RollbackTarget | None:
        """Choose, at the lead, the target after an error; None if the run cannot roll back (a note says why)."""
        if isinstance(error, Replaced) or (self.states is None and self._target is None):
            return None
        if isinstance(error, Diverged) and error.sound is None:
            return None
        try:
            if peer.lead.run is not None:  # otherwise the next run could not begin, so try its target again
                is_spoiled = isinstance(error, FalseWorkCounted | Diverged)
                if not is_spoiled and not peer.lead.why_cannot_continue(wait=not isinstance(error, StageLost)):
                    return None  # the run lacks nothing, so a rollback would not help
                replaced = peer.lead.why_replaced()
                if replaced:
                    error.add_note(f"The run does not roll back here: {replaced}")
                    return None
                if any(finder not in trainer.callbacks for finder in self._finders):  # type: ignore[attr-defined]
                    error.add_note(_TRIAL)
                    return None
                self._choose_target(peer, error)
        except SwarmError as failure:
            error.add_note(f"The run could not roll back: {failure}")
            return None
        if isinstance(error, Diverged) and (self._target is None or self._target.version > (error.sound or 0)):
            error.add_note(_NO_SOUND_SNAPSHOT.format(error.sound))
            return None
        if self._target is None or self._target.num_tries >= _MAX_TRIES:
            error.add_note(_NO_SNAPSHOT)
            return None
        self._target.num_tries += 1
        self.is_resuming = True
        # The finders have found their values, which the run keeps.
        self._disabled_finders += [Override(finder, "on_fit_start", lambda *_: None) for finder in self._finders]
        return self._target

    def _choose_target(self, peer: Peer, error: SwarmError) -> None:
        """Choose this run's newest snapshot from which all trainers can resume; without one, keep the former target.

        If false work counted, choose the newest snapshot from before it, or else the oldest. If the loss diverged, only
        snapshots from before that are of use.
        """
        states = self.states
        versions = peer.lead.versions_of_all(states.versions) if states is not None and states.versions else ()
        last_sound = error.sound if isinstance(error, FalseWorkCounted | Diverged) else None
        if isinstance(error, Diverged):
            versions = [version for version in versions if version <= (error.sound or 0)]
        snapshot = peer.lead.gather_snapshots(versions, last_sound) if versions else None
        point = states.find(snapshot.version) if states is not None and snapshot is not None else None
        if snapshot is not None and point is not None:
            self._set_target(snapshot.version, point, snapshot.weights, snapshot.optimizer)
        elif self._target is not None and not peer.lead.versions_of_all([self._target.version]):
            self._forget_target()  # other trainers can no longer resume at the former target either

    def _set_target(
        self, version: int, point: ResumePoint, weights: Mapping[str, Tensor], optimizer: Mapping[str, dict[str, Any]]
    ) -> RollbackTarget:
        """Write the checkpoint of a version to a file, and make it the target."""
        checkpoint = point.state.complete(weights, optimizer)
        set_position(checkpoint, self._position_at(version))
        path = _write(checkpoint, f"step={version}.ckpt")
        self._forget_target()
        self._target = RollbackTarget(version=version, path=path, resume_point=point)
        return self._target

    def end_run(self) -> None:
        """Stop recording when the run is over; another run may resume at the target."""
        if self._position is not None:
            self._position.close()
        self._recorder = self.states = self._position = None

    def end_fit(self) -> None:
        """Forget the target and all states when the fit is over."""
        self.end_run()
        self._forget_target()
        self.is_resuming, self.follows_new_lead = False, False
        while self._disabled_finders:
            self._disabled_finders.pop().remove()
        self._finders, self.membership = [], None

    def _forget_target(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            shutil.rmtree(target.path.parent, ignore_errors=True)

    # ------------------------------------------------------------------ after an error

    def prepare(self, trainer: Trainer, error: SwarmError) -> str | None:
        """Prepare to call the Trainer's function again after an error.

        Returns the checkpoint to resume from; empty to join the run again without a checkpoint; None if the run cannot
        or need not roll back, so that the error must be raised.
        """
        strategy = self._strategy
        if strategy.peer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        version_and_path = self._find_target(trainer, strategy.peer, error)
        if version_and_path is None:
            return None
        version, path = version_and_path
        events = strategy.peer.events
        report = events.note if strategy.is_global_zero else events.log_only  # the lead counts a rollback once for all
        report("went_back", step=version, reason=str(error.__cause__ or error))
        trainer.training = True  # the error may have come in a validation
        with changed(self, is_rolling_back=True):
            trainer._teardown()
        trainer.training, trainer.should_stop = True, False
        return path

    def _find_target(self, trainer: Trainer, peer: Peer, error: SwarmError) -> tuple[int, str] | None:
        """Return the version of the weights to resume at, and `prepare`'s result. This peer may become the lead."""
        strategy = self._strategy
        if strategy.is_global_zero:
            target = self._find_lead_target(trainer, peer, error)
        elif isinstance(error, WentBack) and not peer.follower.is_rolling_back and strategy.joined is not None:
            # The run rolled back without this trainer, because this peer's server was not in it. Join the run again.
            view = peer.follower.find_run_again()
            if view is None:
                return None
            strategy.take_rank(view)
            self._discard_states()
            return view.manifest.first_step, ""
        else:
            version = peer.follower.rollback_step()
            if version is None:
                return None
            if not peer.must_take_over and peer.follower.has_new_lead:
                self._discard_states()  # this loop's states do not fit a new lead's state
                self.follows_new_lead = True
                return version, ""
            target = self._become_lead(trainer, peer) if peer.must_take_over else self._follow_lead(version, error)
        return None if target is None else (target.version, str(target.path))

    def _become_lead(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """Make this process, which trained beside the former lead, the new lead."""
        strategy = self._strategy
        target = self.take_over(trainer, peer)
        _log.warning(
            "The lead of run %r is gone. This peer takes the run over, from step %d on.",
            strategy.config.run_id,
            target.version,
        )
        strategy.take_rank(None)
        self.restore_lead_role()
        return target


def _write(checkpoint: Mapping[str, Any], name: str) -> Path:
    """Write a file into a new folder; if this fails, remove the folder."""
    with contextlib.ExitStack() as on_failure:
        try:
            folder = Path(tempfile.mkdtemp(prefix="lightning-swarm-"))
            on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
            torch.save(checkpoint, folder / name)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
            raise no_room(error) from error
        on_failure.pop_all()
    return folder / name
