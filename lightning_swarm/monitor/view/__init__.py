"""`SwarmView`: shows a run on the trainer's terminal, as lines of text or as a panel."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_swarm.client.status import SwarmStatus
from lightning_swarm.core.curves import History
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.rebase import written_once
from lightning_swarm.monitor.view.history import PeerPresence, RateWindow, newer_than
from lightning_swarm.monitor.view.scene import NO_SWARM, PeerRow, Scene
from lightning_swarm.monitor.view.texts import event_line, plain_line
from lightning_swarm.protocol.events import Event

# At run time `written_once` derives `SwarmView` from the `ProgressBar` of `lightning` or of `pytorch_lightning`.
if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from lightning_swarm.monitor.view.panel import Terminal

    _ProgressBar = ProgressBar
else:
    _ProgressBar = object

__all__ = ["SwarmView"]

_log = logging.getLogger(__name__)


@runtime_checkable
class _ReportsStatus(Protocol):
    """A strategy that knows the state of its swarm."""

    def status(self) -> SwarmStatus:
        """Return the state of the run at this moment."""


@written_once(ProgressBar)
class SwarmView(_ProgressBar):
    """Shows a run while it trains: its stages and peers, loss, samples/s, and events as they happen.

    ``Trainer(callbacks=[SwarmView()])`` replaces Lightning's progress bar. On a terminal it is a panel below all other
    output, and needs rich (``pip install lightning-swarm[demo]``). Elsewhere it prints a line for each event, and lines
    about the run's state at intervals. An error in the view never ends the run.

    Args:
        refresh_per_second: How often the panel is drawn.
        plain_interval_s: Seconds between two lines of the run's state where the output is no terminal.
        num_events: Maximum number of events in the panel, which shows the newest.
    """

    def __init__(self, refresh_per_second: float = 4.0, plain_interval_s: float = 10.0, num_events: int = 6) -> None:
        super().__init__()
        self._refresh_per_second = refresh_per_second
        self._plain_interval_s = plain_interval_s
        self._num_events = num_events
        self._enabled = True
        self._hinted = False  # the advice to install rich was logged
        self._phase = ""
        self._live: Terminal | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # guards the attributes below, which the loop's and the panel's thread share
        self._start_s: float | None = None
        self._next_line_s = 0.0
        self._last_event: Event | None = None
        self._presence, self._rates, self._curve = PeerPresence(), RateWindow(), History()
        self._status = NO_SWARM
        self._rows: Sequence[Sequence[PeerRow]] = ()
        self._metrics: dict[str, float] = {}

    # ------------------------------------------------------------------ Lightning's hooks

    @override
    def disable(self) -> None:
        self._enabled = False
        self._close()

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_phase("training")

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._run_safely(self._show_progress)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phase = "done"
        self._run_safely(partial(self._show_progress, last=True))

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_phase("checking")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_phase("validating")

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._phase = f"validating {batch_idx + 1}"

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._begin_phase("training")

    @override
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._begin_phase(f"testing {batch_idx + 1}")

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._begin_phase(f"predicting {batch_idx + 1}")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._phase = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        self._run_safely(self._print_events)
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    # ------------------------------------------------------------------ showing

    def _run_safely(self, work: Callable[[], None]) -> None:
        """Run a part of the view. If it fails, close the view and let the run continue."""
        if not self._enabled:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the run matters more than its display
            self._note_failure(error)
            self._close()

    def _note_failure(self, error: Exception) -> None:
        self._enabled, self._failure = False, error

    def _begin_phase(self, phase: str) -> None:
        """Begin a phase, restart the measurement of rates, and open the panel."""
        self._phase = phase
        with self._lock:
            self._rates.pause()
        self._run_safely(self._open)

    def _open(self) -> None:
        if self._start_s is None:
            self._start_s = time.monotonic()
        console = self._console() if self._live is None else None
        if console is None:
            return
        from lightning_swarm.monitor.view.panel import Terminal

        live = Terminal(console, self._render, self._note_failure, refresh_per_second=self._refresh_per_second)
        live.open()
        self._live = live

    def _console(self) -> Console | None:
        """Return the terminal's console; None if there is no terminal, or rich is not installed."""
        if not sys.stdout.isatty():
            return None
        try:
            from rich.console import Console
        except ImportError:
            if not self._hinted:
                _log.warning("With rich this would be a panel: pip install rich.")
            self._hinted = True
            return None
        return Console()

    def _close(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                live.close()
        except Exception as error:  # noqa: BLE001 - as in `_run_safely`
            self._note_failure(error)
        failure, self._failure = self._failure, None
        if failure is not None:
            _log.warning("The view failed, and the run continues without it: %r", failure)

    def _show_progress(self, *, last: bool = False) -> None:
        """Show the run's progress; runs on the loop's thread, where metrics may be read."""
        self._update()
        if self._live is None:
            self._print_events()
            if last or time.monotonic() >= self._next_line_s:
                self._next_line_s = time.monotonic() + self._plain_interval_s
                print(plain_line(self._scene()), flush=True)  # noqa: T201 - the view's output
        if last:
            self._close()

    def _print_events(self) -> None:
        if self._live is not None:
            return
        for event in newer_than(self._last_event, self._status.events):
            self._last_event = event
            print(event_line(event), flush=True)  # noqa: T201 - as above

    def _render(self) -> RenderableType:
        """Render the panel; runs on the panel's own thread."""
        from lightning_swarm.monitor.view.panel import SwarmPanel

        self._update_swarm()
        return SwarmPanel(self._scene(), num_events=self._num_events)

    def _update_swarm(self) -> None:
        """Read the swarm's status and rates; keep the last status while no run is under way."""
        strategy, status = self.trainer.strategy, None
        if isinstance(strategy, _ReportsStatus):
            with contextlib.suppress(SwarmError):  # no run is under way yet, or any more
                status = strategy.status()
        now_s = time.monotonic()
        with self._lock:
            if status is not None:
                self._status, self._rows = status, self._presence.update(status, now_s=now_s)
            if self._phase == "training":
                self._rates.tick(now_s, self.trainer.global_step, self._status.total_samples)

    def _update(self) -> None:
        """Read the metrics and the swarm's status; on the loop's thread only."""
        values = self.get_metrics(self.trainer, self.trainer.lightning_module)
        metrics = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
        with self._lock:
            self._metrics = metrics
            # The first metric of the progress bar, usually the loss. Lightning may put a logger's `v_num` before it.
            if drawn := [value for name, value in metrics.items() if name != "v_num"]:
                self._curve.add(self.trainer.global_step, {"loss": drawn[0]})
        self._update_swarm()

    def _scene(self) -> Scene:
        trainer = self.trainer
        with self._lock:
            status, rows = self._status, self._rows
            steps_per_s, samples_per_s = self._rates.current or (None, None)
            losses = self._curve.curves().series.get("loss", ())
        return Scene(
            status=status,
            stages=rows,
            phase=self._phase,
            step=trainer.global_step,
            max_steps=trainer.max_steps if trainer.max_steps > 0 else None,
            epoch=trainer.current_epoch,
            progress=_progress(trainer),
            metrics=self._metrics,  # replaced as a whole, so reading it needs no lock
            losses=losses,
            samples_per_s=samples_per_s if status.num_samples else None,
            steps_per_s=steps_per_s,
            elapsed_s=time.monotonic() - self._start_s if self._start_s is not None else 0.0,
        )


def _progress(trainer: Trainer) -> float | None:
    """Return the share of the run that is done; None if the run has no end."""
    if trainer.max_steps > 0:
        return min(trainer.global_step / trainer.max_steps, 1.0)
    num_batches, max_epochs = trainer.num_training_batches, trainer.max_epochs
    if not max_epochs or max_epochs < 0 or not 0 < num_batches < float("inf"):
        return None
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return float(min((trainer.current_epoch + min(done / num_batches, 1.0)) / max_epochs, 1.0))
