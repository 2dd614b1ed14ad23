"""Lightning's hooks on ends: of the loop, by an error, and of the run; what was changed is put back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_swarm.core.errors import LeftOut, PeerError, RunOver, StepError, SwarmError
from lightning_swarm.model.boundary_layers import hook
from lightning_swarm.model.deferred_init import is_on_meta, staying_on_meta
from lightning_swarm.strategy import model_setup
from lightning_swarm.strategy.checkpointing import CheckpointHooks
from lightning_swarm.strategy.data import SharedData

_log = logging.getLogger(__name__)


class TeardownHooks(CheckpointHooks):
    """The part of `SwarmStrategy` that ends what it has begun."""

    def __init__(self, *args: Any) -> None:
        self._compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # of the stages
        super().__init__(*args)
        self._undo = contextlib.ExitStack()  # of what a run changes in module, loop and callbacks
        self._trains = False  # from a fit's setup to the end of its loop
        self._data: SharedData | None = None  # of the run

    # ------------------------------------------------------------------ of the loop

    @override
    def on_train_end(self) -> None:
        self._trains = False
        if not self.is_global_zero:
            self._serve_on()
            return
        if self._loop is not None:
            self._loop.finish()
        if self._files is not None:
            self._files.finish()
        if self._loop is not None and self._loop.pending_samples:
            _log.warning(
                "Training ended in mid-step: %d samples of the open step were in no update. Set `max_steps` or "
                "`max_epochs` so that the last batch closes it.",
                self._loop.pending_samples,
            )

    def _serve_on(self) -> None:
        """Beside the lead: this trainer's own loop has come to its end."""
        assert self.peer is not None
        self._retire("its loop has come to its end")
        if self._comes_to is None or self.config.role == "both":
            self.peer.follower.wait_until_dismissed()

    def _retire(self, reason: str) -> None:
        """Where this process came to a run under way: the others go on without it."""
        if self._comes_to is not None and self._session is not None:
            with contextlib.suppress(RunOver):
                self._session.retire(reason)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """An interrupted run leaves what it learned in the module, as on one machine, if the swarm can still say it."""
        self._trains = False
        try:
            self._close_files()
        except Exception as error:  # noqa: BLE001 - Lightning would not tear down; the run has ended for another reason
            exception.add_note(f"{error!r}: {' '.join(error.__notes__)}")
        if isinstance(exception, StepError | PeerError) and self._loop is not None:
            exception.add_note(model_setup.how_to_go_on(self._loop.trainer))
        if self._comes_to is not None:
            if not isinstance(exception, StepError | PeerError | RunOver):  # the run goes on
                self._go_out(exception)
        elif not self.is_global_zero:
            if self._session is not None and not isinstance(exception, LeftOut):  # the others go on without it
                with contextlib.suppress(SwarmError):  # the run may be over
                    self._session.quit(f"{type(exception).__name__}: {exception}")
        elif self._gathers and self._weights is not None and self._session is not None and self._weights.stale:
            try:
                self._weights.stay_home(self.optimizers[0], timeout=self.config.limits.leave_timeout)
            except Exception as error:  # noqa: BLE001 - Lightning would not tear down, and the peers would go on
                _log.warning("The module keeps older weights than the swarm had when the run broke off: %r", error)

    def _go_out(self, exception: BaseException) -> None:
        """Of a run that goes on, and had begun before this process came to it."""
        if self.peer is None:
            return
        self._retire(f"{type(exception).__name__}: {exception}")
        if self._swarm_launcher is not None:
            self._swarm_launcher.let_children_leave()
        self.peer.follower.leave_in_order()

    @property
    def _gathers(self) -> bool:
        """Whether the module is to hold what was trained, once training is over."""
        return self.config.gather_on_end and not is_on_meta(self._own_module)

    # ------------------------------------------------------------------ of the run

    @override
    def teardown(self) -> None:
        try:
            try:
                if self._trains and not (self._goes_back or self.is_global_zero):  # a checkpoint left it nothing to do
                    self._serve_on()
                with staying_on_meta():
                    super().teardown()
            finally:
                self._close_files()
        finally:
            if self._goes_back:
                self._release()
            else:
                self.leave()

    def _close_files(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.close()

    def _release(self) -> None:
        """End the run, but none of the peers."""
        assert self.peer is not None
        first_step = self._way_back.first_step
        assert first_step is not None or not self.is_global_zero
        self._end_run()
        self._way_back.let_go()
        self._weights = None
        self.peer.release(first_step or 0)

    def _end_run(self) -> None:
        """Leave module, loop and callbacks as they were."""
        if self.lightning_module is not None:
            hook(self.lightning_module)
        self._undo.close()
        self._session, self._restored_step, self._folder, self._data = None, None, None, None
        if self._weights is not None:
            self._weights.end_run()

    def leave(self) -> None:
        """End the run and this machine's peers. Twice is fine."""
        self._end_run()
        self._way_back.end_fit()
        self._compiler, self._inherited = None, ()
        peer, self.peer = self.peer, None
        began = peer is not None and (peer.lead.run is not None or self._comes_to is not None)
        self._comes_to = None
        self._leave_rank()
        try:
            if peer is not None:
                try:
                    peer.lead.dismiss_others()
                finally:
                    peer.close()
        finally:
            if self._swarm_launcher is not None:
                self._swarm_launcher.end_children(self.config.limits.leave_timeout, dismissed=began)
