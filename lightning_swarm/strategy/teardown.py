"""Ends a strategy's part in its run, in order or after an error, and undoes its changes to the Trainer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from lightning_swarm.core.errors import PeerError, RunOver, StepError, SwarmError
from lightning_swarm.model.boundary_layers import add_hooks
from lightning_swarm.model.deferred_init import staying_on_meta
from lightning_swarm.strategy import stopping

if TYPE_CHECKING:
    from lightning_swarm.strategy.strategy import SwarmStrategy

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------ the loop


def end_loop(strategy: SwarmStrategy) -> None:
    """Finish a training loop that has ended: collect late records and files, or serve beside the lead."""
    strategy._trains = False
    if not strategy.is_global_zero:
        if strategy._session is not None and strategy._data is not None:
            stopping.tell(
                strategy._own_module.trainer,
                strategy._session,
                run_is_over=strategy._data.run_is_over,
                joined=strategy._joined is not None,
            )
        _serve_on(strategy)
        return
    if strategy._loop is not None:
        strategy._loop.finish()
    strategy._checkpoints.finish_files()
    if strategy._loop is not None and strategy._loop.pending_samples:
        _log.warning(
            "Training ended in mid-step: %d samples of the open step were in no update. Set `max_steps` or "
            "`max_epochs` so that the last batch closes it.",
            strategy._loop.pending_samples,
        )


def _serve_on(strategy: SwarmStrategy) -> None:
    """Serve, beside the lead, until the lead's loop has ended, too."""
    if strategy._joined is not None:
        _retire(strategy, "its loop has come to its end")
    if strategy._joined is None or strategy.config.role == "both":
        strategy._own_peer.follower.wait_until_dismissed()


def _retire(strategy: SwarmStrategy, reason: str) -> None:
    """Leave the run as a trainer; it continues without this trainer's batches."""
    if strategy._session is not None:
        with contextlib.suppress(RunOver):
            strategy._session.retire(reason)


def handle_exception(strategy: SwarmStrategy, exception: BaseException) -> None:
    """Leave an interrupted run in order. The lead gathers the trained weights into its module if that is possible."""
    strategy._trains = False
    try:
        strategy._checkpoints.close_files()
    except Exception as error:  # noqa: BLE001 - Lightning would not tear down; the run has ended for another reason
        exception.add_note(f"{error!r}: {' '.join(error.__notes__)}")
    if isinstance(exception, StepError | PeerError) and strategy._loop is not None:
        exception.add_note(_how_to_go_on(strategy._loop.trainer))
    if strategy.is_global_zero:
        _keep_weights(strategy)
    elif strategy.peer is not None and not isinstance(exception, StepError | PeerError | RunOver):
        # The run continues without this trainer.
        with contextlib.suppress(SwarmError):  # it may be over
            _retire(strategy, f"{type(exception).__name__}: {exception}")
        if strategy._swarm_launcher is not None:
            strategy._swarm_launcher.let_children_leave()
        strategy.peer.follower.leave_in_order()


def _how_to_go_on(trainer: Trainer) -> str:
    """Return the advice for a user whose run broke off: the newest checkpoint to start from."""
    saved = {
        Path(path)
        for callback in trainer.checkpoint_callbacks
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, "")) and Path(path).exists()
    }
    if not saved:
        return "No checkpoint of this run is left to go on from: start it again, with a ModelCheckpoint."
    newest = max(saved, key=lambda path: path.stat().st_mtime)
    return f"Start the run again with `ckpt_path={str(newest)!r}`: it goes on from there, with the peers that it finds."


def _keep_weights(strategy: SwarmStrategy) -> None:
    """Gather the weights trained so far into the lead's module, if it should hold them and the swarm can send them."""
    weights = strategy._weights
    if not strategy._gathers or weights is None or strategy._session is None or not weights.stale:
        return
    try:
        weights.gather_into_module(strategy.optimizers[0], timeout=strategy.config.limits.leave_timeout)
    except Exception as error:  # noqa: BLE001 - Lightning would not tear down, and the peers would go on
        _log.warning("The module keeps older weights than the swarm had when the run broke off: %r", error)


# ------------------------------------------------------------------ the run


def tear_down(strategy: SwarmStrategy, default: Callable[[], None]) -> None:
    """End the run around Lightning's own teardown; in a rollback, keep this machine's peers for the next run."""
    rolls_back = strategy._rollback.is_rolling_back
    if strategy._access is not None:  # Lightning moves the module
        strategy._access.close()
    try:
        try:
            if strategy._trains and not (rolls_back or strategy.is_global_zero):
                _serve_on(strategy)  # the loop had nothing left to do after its checkpoint
            if strategy._session is not None:
                strategy._session.pipeline.marks.clear()
            with staying_on_meta():
                default()
        finally:
            strategy._checkpoints.close_files()
    finally:
        if rolls_back:
            _release(strategy)
        else:
            strategy.leave()


def _release(strategy: SwarmStrategy) -> None:
    """End the run, but none of the peers."""
    first_step = strategy._rollback.first_step
    assert first_step is not None or not strategy.is_global_zero
    _end_run(strategy)
    strategy._rollback.end_run()
    strategy._weights = None
    strategy._own_peer.release(first_step or 0)


def _end_run(strategy: SwarmStrategy) -> None:
    """Restore module, loop and callbacks as they were before the run."""
    if strategy.lightning_module is not None:
        add_hooks(strategy.lightning_module)
    strategy._undo.close()
    strategy._checkpoints.forget_loaded()
    strategy._session, strategy._data = None, None
    strategy._loop, strategy._access = None, None
    if strategy._weights is not None:
        strategy._weights.end_run()


def leave(strategy: SwarmStrategy) -> None:
    """End the run and this machine's peers. May be called twice."""
    _end_run(strategy)
    strategy._rollback.end_fit()
    strategy._compiler, strategy._inherited_stages, strategy._run_log = None, (), None
    peer, strategy.peer = strategy.peer, None
    began = peer is not None and (peer.lead.run is not None or strategy._joined is not None)
    strategy._joined = None
    strategy._rank_override.restore()
    try:
        if peer is not None:
            try:
                peer.lead.dismiss_others()
            finally:
                peer.close()
    finally:
        if strategy._swarm_launcher is not None:
            strategy._swarm_launcher.end_children(strategy.config.limits.leave_timeout, dismissed=began)
