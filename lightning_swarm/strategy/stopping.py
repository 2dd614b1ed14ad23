"""Handles `trainer.should_stop` in a run of several trainers, which only the lead's loop ends."""

from __future__ import annotations

import contextlib
import logging

from lightning.pytorch import Trainer

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import RunOver
from lightning_swarm.core.readable import short_name

_log = logging.getLogger(__name__)


def ask_lead_to_stop(trainer: Trainer, session: Session, *, run_is_over: bool, joined_late: bool) -> None:
    """Ask the lead to end the run if user code stopped this trainer's loop. A trainer that joined late just leaves."""
    if session.is_lead or run_is_over or trainer.received_sigterm or not trainer.should_stop:
        return
    if not joined_late:
        with contextlib.suppress(RunOver):
            session.ask_to_stop()
    else:
        _log.warning("`trainer.should_stop` was set in a trainer that joined the run late: only this trainer leaves.")


def stop_with_others(trainer: Trainer, session: Session) -> None:
    """Stop the lead's loop if user code has stopped the loop of a trainer that its program started."""
    if session.is_lead and not trainer.should_stop and (trainer_ids := session.stopped_by):
        trainer.should_stop = True
        _log.warning(
            "Training ends, because `trainer.should_stop` was set in %s. Each trainer continues with its own batches "
            "until it is informed, so the plain Trainer may end some steps earlier.",
            ", ".join(map(short_name, trainer_ids)),
        )
