"""Rolls a fit back: chooses a snapshot after an error, ends the run, and resumes the loop in the next run there."""

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
from lightning_swarm.core.errors import FalseWorkCounted, Replaced, StageLost, StepError, SwarmError, WentBack
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
    "The run cannot go on without the peers that are gone, and there is no snapshot to roll back to: one needs a "
    "server of another stage, and is taken at the run's first step and every `Limits.snapshot_interval` seconds."
)

_BEHIND: Final = (
    "The run rolls back to step {}, and this trainer kept nothing of its loop that belongs there. The others go on "
    "without it."
)


@dataclass
class RollbackTarget:
    """The snapshot and the state of the loop from which a run resumes."""

    version: int  # version of the weights
    path: Path  # an ordinary checkpoint; without weights at a trainer that does not lead
    resume_point: ResumePoint  # the state that such a file does not hold
    num_tries: int = 0


class Rollback:
    """Decides where a trainer's fit resumes after an error, ends the run, and resumes the next run's loop there."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy
        self.is_rolling_back = False  # Lightning's teardown is under way, and the fit will resume
        # At a trainer beside the lead: gives it back the decisions that such a trainer leaves to the lead.
        self.restore_lead_role: Callable[[], None] = lambda: None
        self.begins_anew = False  # the loop begins beside a new lead, like a trainer that joins the run
        self._recorder: LoopRecorder | None = None  # records the current run
        self.states: LoopStates | None = None  # states of the loop in this run
        self._position: DataPosition | None = None  # the loop's position in the current run
        self._offered: dict[int, ResumePoint] = {}  # version -> point that this trainer has offered to the lead
        self._target: RollbackTarget | None = None
        self.is_resuming = False  # the loop has not reached the target yet
        self._loaders: list[object] = []  # the training loop's loaders that have no iterators yet
        self._random_after_loaders: RandomState | None = None  # after the newest loader was made
        self._position_at: Callable[[int], BatchNumber | None] = lambda _: None
        self._finders: list[Any] = []  # callbacks that try values before training
        self._found: list[Override] = []  # disable finders that have found a value
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
        self._offered, self.begins_anew = {}, False
        self._position_at = session.run.position_at
        self._finders = callbacks_of(trainer, *checks.TRIAL_CALLBACKS)
        if session.is_lead:
            session.set_can_go_back(partial(self._can_go_back, trainer, peer))
            session.set_resumable_versions(lambda: states.versions)

        def arrive() -> None:
            """Restore the loop's state when the data are at the target's position."""
            # The loop has received these records, but not acted on them. It does so at its next batch, as if they had
            # come while that batch waited for a place.
            self.is_resuming = False
            assert self._target is not None
            version, point = self._target.version, self._target.resume_point
            restore_metrics(trainer, point.state)
            uncounted = point.news_at(version)
            loop.recall(point.loop_version, uncounted, point.state.pending)
            states.resume(ResumePoint(point.state, point.loop_version, version, completed=(), before=uncounted))

        resume_at = None if not self.is_resuming or self._target is None else self._target.resume_point.state.position
        self._position = DataPosition(
            trainer, resume_at, recorder.between_batches, arrive, take_early_state=self._take_random_after_loaders
        )

    def discard_snapshots(self) -> None:
        """Forget all states after a checkpoint was loaded in the middle of the run, which voids the snapshots."""
        if self._recorder is not None:
            self._recorder.clear()

    def loader_made(self, loader: object) -> None:
        """Record the random state, because Lightning makes the loaders' iterators as soon as it has all loaders."""
        self._loaders.append(loader)
        self._random_after_loaders = random_state(generators_of(self._loaders))

    def _take_random_after_loaders(self) -> RandomState | None:
        """Return the random state after the last loader was made, if any was made since the last call."""
        self._loaders = []
        made, self._random_after_loaders = self._random_after_loaders, None
        return made

    def load(self, path: object) -> dict[str, Any] | None:
        """Load the target's checkpoint; None if `path` is another one."""
        if self._target is None or str(path) != str(self._target.path):
            return None
        # This process has written the file, and callbacks may keep arbitrary objects in it.
        loaded: dict[str, Any] = torch.load(self._target.path, map_location="cpu", weights_only=False, mmap=True)
        return loaded

    @property
    def first_step(self) -> int | None:
        """Return the first step of the run that resumes at the target; the loop may have counted fewer records."""
        return None if self._target is None else self._target.version

    async def _can_go_back(self, trainer: Trainer, peer: Peer) -> bool:
        """Return, on the swarm's event loop of the lead, whether the run can roll back to a snapshot."""
        if any(finder not in trainer.callbacks for finder in self._finders):  # type: ignore[attr-defined]
            return False
        return await peer.lead.has_snapshot() or (self._target is not None and self._target.num_tries < _MAX_TRIES)

    def _offer_to_resume(self, version: int, counts: Counts) -> bool:
        """Return whether this loop can resume at a version, and keep that state. Runs on the swarm's event loop."""
        states = self.states  # read once, because the trainer's own thread may reset it meanwhile
        found = states.find(version, counts) if states is not None else None
        if found is not None:
            self._offered[version] = found
        return found is not None or version == self.first_step

    def _discard_states(self) -> None:
        """Forget the target and the offered states, so that the loop resumes from none of its own states."""
        self._forget_target()
        self._offered, self.is_resuming = {}, False

    def _follow_lead(self, version: int, error: SwarmError) -> RollbackTarget | None:
        """Return the target at the lead's version; None, with a note on the error, if this loop kept no such state."""
        found = self._offered.get(version)
        if found is not None:
            self._set_target(version, found, {}, {})
        if self._target is None or self._target.version != version:
            error.add_note(_BEHIND.format(version))
            return None
        self.is_resuming = True
        return self._target

    def take_over(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """Take over the run of a lead that is gone; return the target to resume at.

        The strategy's own role stays as it is; `_become_lead` changes it.
        """
        version, value = peer.take_over()
        try:
            point = loop_transfer.unpack(value, version, trainer)
            whole = peer.lead.gather_snapshots([version])
            if whole is None:
                raise StageLost(f"the servers have no snapshot of all stages at version {version}. {_NO_SNAPSHOT}")
            target = self._set_target(version, point, whole.weights, whole.optimizer)
        except Exception as error:
            peer.lead.give_up()
            raise StepError(f"this peer was to take the run over, and cannot: {error}") from error
        missing = loop_transfer.missing_files(point.state.checkpoint)
        if missing:
            _log.warning(
                "This run's former lead wrote files that are not on this machine, and are left where they are: %s",
                ", ".join(missing),
            )
        self.is_resuming = True
        assert peer.lead.run is not None
        strategy = self._strategy
        strategy.inherited_stages = peer.lead.run.manifest.stages
        strategy.config = replace(strategy.config, initial_peers=())  # this peer now starts the runs
        return target

    def _find_lead_target(self, trainer: Trainer, peer: Peer, error: SwarmError) -> RollbackTarget | None:
        """Choose, at the lead, the target after an error; None, maybe with a note on the error, if there is none."""
        if isinstance(error, Replaced) or (self.states is None and self._target is None):
            return None
        try:
            if peer.lead.run is not None:  # None if the run that should resume at the target could not begin
                is_spoilt = isinstance(error, FalseWorkCounted)
                if not is_spoilt and not peer.lead.why_cannot_continue(wait=not isinstance(error, StageLost)):
                    return None
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
        if self._target is None or self._target.num_tries >= _MAX_TRIES:
            error.add_note(_NO_SNAPSHOT)
            return None
        self._target.num_tries += 1
        self.is_resuming = True
        # The finders have found their values, which the run keeps.
        self._found += [Override(finder, "on_fit_start", lambda *_: None) for finder in self._finders]
        return self._target

    def _choose_target(self, peer: Peer, error: SwarmError) -> None:
        """Choose the newest snapshot of this run from which all other trainers can resume, too, if there is one.

        If false work counted, choose the newest snapshot from before it, or else the oldest.
        """
        states = self.states
        versions = peer.lead.versions_of_all(states.versions) if states is not None and states.versions else ()
        sound = error.sound if isinstance(error, FalseWorkCounted) else None
        whole = peer.lead.gather_snapshots(versions, sound) if versions else None
        found = states.find(whole.version) if states is not None and whole is not None else None
        if whole is not None and found is not None:
            self._set_target(whole.version, found, whole.weights, whole.optimizer)
        elif self._target is not None and not peer.lead.versions_of_all([self._target.version]):
            self._forget_target()  # other trainers can no longer resume at the former target either

    def _set_target(
        self, version: int, found: ResumePoint, weights: Mapping[str, Tensor], optimizer: Mapping[str, dict[str, Any]]
    ) -> RollbackTarget:
        """Write the checkpoint of a version to a file, and make it the target."""
        checkpoint = found.state.complete(weights, optimizer)
        set_position(checkpoint, self._position_at(version))
        path = _write(checkpoint, f"step={version}.ckpt")
        self._forget_target()
        self._target = RollbackTarget(version=version, path=path, resume_point=found)
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
        self.is_resuming, self.begins_anew = False, False
        while self._found:
            self._found.pop().remove()
        self._finders, self.membership = [], None

    def _forget_target(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            shutil.rmtree(target.path.parent, ignore_errors=True)

    # ------------------------------------------------------------------ after an error

    def prepare(self, trainer: Trainer, error: SwarmError) -> str | None:
        """Prepare to call the Trainer's function again after an error.

        Returns the checkpoint to resume from; empty to join the run anew; None if the run cannot or need not roll back.
        """
        strategy = self._strategy
        if strategy.peer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        found = self._find_target(trainer, strategy.peer, error)
        if found is None:
            return None
        version, path = found
        events = strategy.peer.events
        report = events.note if strategy.is_global_zero else events.log_only  # the lead counts it once for the swarm
        report("went_back", step=version, reason=str(error.__cause__ or error))
        trainer.training = True  # it may have been validating
        with changed(self, is_rolling_back=True):
            trainer._teardown()
        trainer.training, trainer.should_stop = True, False
        return path

    def _find_target(self, trainer: Trainer, peer: Peer, error: SwarmError) -> tuple[int, str] | None:
        """Return the version of the weights, and the checkpoint as in `prepare`. This peer may become the lead."""
        strategy = self._strategy
        if strategy.is_global_zero:
            target = self._find_lead_target(trainer, peer, error)
        elif isinstance(error, WentBack) and not peer.follower.is_rolling_back and strategy.joined is not None:
            # The run rolled back without this trainer, because its server was not in the run. Join the run again.
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
                self.begins_anew = True
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
    with contextlib.ExitStack() as undone:
        try:
            folder = Path(tempfile.mkdtemp(prefix="lightning-swarm-"))
            undone.callback(shutil.rmtree, folder, ignore_errors=True)
            torch.save(checkpoint, folder / name)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
            raise no_room(error) from error
        undone.pop_all()
    return folder / name
