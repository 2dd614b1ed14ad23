"""Logs a run's events to the Trainer's loggers, and its changes of membership to the lead's terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, Final

from lightning.pytorch import Trainer
from tqdm import tqdm
from typing_extensions import override

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.rebase import written_part
from lightning_swarm.monitor.membership import Membership, MembershipLine
from lightning_swarm.monitor.view import SwarmView
from lightning_swarm.protocol.events import Event
from lightning_swarm.protocol.messages.step import Record

_package_log = logging.getLogger("lightning_swarm")
_log = logging.getLogger("lightning_swarm.membership")  # users filter by this name
_REPORTED: Final = ("joined", "left", "gone")  # kinds of events that membership lines report, too


class _TerminalHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which rich replaces while its progress bar is shown."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201 - a log handler may print
        except Exception:  # noqa: BLE001 - a terminal that is gone must not end the run
            self.handleError(record)


class RunLog:
    """Logs events and changes of a run's membership, once for each record."""

    def __init__(self, trainer: Trainer, session: Session, membership: Membership) -> None:
        self.membership = membership
        self._trainer = trainer
        self._session = session
        self._num_servers = session.num_servers

    def open(self) -> contextlib.ExitStack:
        """Show membership lines by default, as Lightning shows its logs. Closing the returned stack undoes this."""
        undo = contextlib.ExitStack()
        events = self._session.pipeline.context.events
        undo.callback(setattr, events, "is_reported", events.is_reported)
        events.is_reported = self._is_reported
        if not _log.level and not _package_log.level:  # neither the script nor `SWARM_LOG` has set a level
            _log.setLevel(logging.INFO)
            undo.callback(_log.setLevel, logging.NOTSET)
        if not _log.hasHandlers():
            handler = _TerminalHandler()
            _log.addHandler(handler)
            undo.callback(_log.removeHandler, handler)
        return undo

    def log_record(self, record: Record | None) -> None:
        """Log new events, and a record's changes of membership, if the trainer has the record."""
        self._log_events()
        if record is not None:
            self._show(self.membership.follow(record, self._session.run))

    def catch_up(self) -> None:
        """Log the peers that the run lost in a rollback."""
        self._show(self.membership.catch_up(self._session.run))

    def _is_reported(self, event: Event) -> bool:
        """Return whether a membership line will report the event, because the next record will name its peer."""
        run = self._session.run
        return event.kind in _REPORTED and (event.peer in run.servers or run.manifest.open_to_trainers)

    def _show(self, lines: list[MembershipLine]) -> None:
        bar: Any = self._trainer.progress_bar_callback
        if not lines or isinstance(bar, written_part(SwarmView)):  # `SwarmView` shows the changes itself
            return
        # Clear tqdm's bars meanwhile, so that lines do not begin behind a bar.
        with tqdm.external_write_mode(file=sys.stderr) if tqdm._instances else contextlib.nullcontext():
            for line in lines:
                _log.log(line.level, "%s", line.text)

    def _log_events(self) -> None:
        """Log counts of the events since the last call, and the number of servers, if it changed."""
        metrics = {f"swarm/{kind}": float(count) for kind, count in self._session.take_events().items()}
        num_servers = self._session.num_servers
        if metrics or num_servers != self._num_servers:
            metrics["swarm/peers"] = float(num_servers)
            step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics, step=step)
        self._num_servers = num_servers
