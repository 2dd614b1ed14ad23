"""Ends a strategy's part in its run, in order or after an error, and undoes its changes to the Trainer.

After an error, Lightning calls `handle_exception` first. `tear_down` runs in each case. It either releases the run's
peers for the next run, if the fit rolls back, or leaves the run and ends the peers (`leave`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from lightning_swarm.core.errors import PeerError, RunOver, StepError, SwarmError
from lightning_swarm.model.boundary_layers import add_hooks
from lightning_swarm.model.deferred_init import StayOnMeta

if TYPE_CHECKING:
    from lightning_swarm.strategy.strategy import SwarmStrategy

_log = logging.getLogger(__name__)


def handle_exception(strategy: SwarmStrategy, exception: BaseException) -> None:
    """Leave an interrupted run in order. The lead gathers the trained weights into its module if that is possible."""
    run = strategy.run
    if run is not None:
        run.is_training = False
    try:
        strategy.checkpoints.close_files()
    except Exception as error:  # noqa: BLE001 - raised here, it would keep Lightning from its teardown
        exception.add_note(": ".join((repr(error), *getattr(error, "__notes__", ()))))
    if isinstance(exception, StepError | PeerError) and run is not None and run.loop is not None:
        exception.add_note(_resume_advice(run.trainer))
    if strategy.is_global_zero:
        _gather_weights(strategy)
    elif strategy.peer is not None and not isinstance(exception, StepError | PeerError | RunOver):
        if run is not None:  # the run continues without this trainer
            with contextlib.suppress(SwarmError):  # the run may be over
                run.retire(f"{type(exception).__name__}: {exception}")
        if strategy.swarm_launcher is not None:
            strategy.swarm_launcher.let_children_leave()
        strategy.peer.follower.leave_in_order()


def _resume_advice(trainer: Trainer) -> str:
    """Advise the user of a failed run to resume from its newest checkpoint."""
    names = ("last_model_path", "best_model_path")
    paths = [getattr(callback, name, "") for callback in trainer.checkpoint_callbacks for name in names]
    saved = {Path(path) for path in paths if path and Path(path).exists()}
    if not saved:
        return "This run has no checkpoint to resume from: start it again, with a ModelCheckpoint."
    newest = max(saved, key=lambda path: path.stat().st_mtime)
    return f"Start the run again with `ckpt_path={str(newest)!r}`: it resumes there, with the peers that are available."


def _gather_weights(strategy: SwarmStrategy) -> None:
    """Gather the weights trained so far into the lead's module, if it should hold them and the swarm can send them."""
    run, weights = strategy.run, strategy.weights
    if run is None or weights is None or not run.gathers_weights or not weights.stale:
        return
    try:
        weights.gather_into_module(strategy.optimizers[0], timeout=run.config.limits.leave_timeout)
    except Exception as error:  # noqa: BLE001 - raised here, it would keep Lightning from its teardown
        _log.warning("The module keeps older weights than the swarm had when the run failed: %r", error)


def tear_down(strategy: SwarmStrategy, default: Callable[[], None]) -> None:
    """End the run around Lightning's own teardown; in a rollback, keep this machine's peers for the next run."""
    run, rolls_back = strategy.run, strategy.rollback.is_rolling_back
    if run is not None:
        run.access.close()  # stops watching the module's tensors, because Lightning is about to move them
    try:
        try:
            if run is not None:
                if run.is_training and not (rolls_back or strategy.is_global_zero):
                    # The fit began at a checkpoint of a finished loop, so the loop and `end_loop` were never called.
                    run.serve_until_dismissed()
                run.session.pipeline.marks.clear()  # user code may use gradients again, which the marks prevented
            with StayOnMeta():
                default()
        finally:
            strategy.checkpoints.close_files()
    finally:
        if rolls_back:
            _release_peers(strategy)
        else:
            strategy.leave()


def leave(strategy: SwarmStrategy) -> None:
    """End the run and this machine's peers. May be called twice."""
    _end_run(strategy)
    strategy.rollback.end_fit()
    peer, strategy.peer = strategy.peer, None
    was_in_run = peer is not None and (peer.lead.run is not None or strategy.joined is not None)
    strategy.restore_rank()
    try:
        if peer is not None:
            try:
                peer.lead.dismiss_others()
            finally:
                peer.close()
    finally:
        if strategy.swarm_launcher is not None:
            strategy.swarm_launcher.end_children(strategy.config.limits.leave_timeout, dismissed=was_in_run)


def _release_peers(strategy: SwarmStrategy) -> None:
    """End the run, but keep its peers for the next one."""
    first_step = strategy.rollback.first_step
    assert first_step is not None or not strategy.is_global_zero
    _end_run(strategy)
    strategy.rollback.end_run()
    strategy.weights = None
    strategy.own_peer.release(first_step or 0)  # only the lead's number is used


def _end_run(strategy: SwarmStrategy) -> None:
    """Restore module, loop and callbacks as they were before the run."""
    if strategy.lightning_module is not None:
        add_hooks(strategy.lightning_module)  # hooks of boundary layers, which the run removed to cut the model
    with contextlib.ExitStack() as stack:
        if strategy.data is not None:
            stack.callback(strategy.data.close)
        if strategy.run is not None:
            stack.callback(strategy.run.undo.close)
    strategy.checkpoints.forget_loaded()
    strategy.run = strategy.data = None
    if strategy.weights is not None:
        strategy.weights.end_run()
