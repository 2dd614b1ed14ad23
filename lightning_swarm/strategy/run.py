"""`SwarmRun`: a trainer's part in one run, from its start to the strategy's teardown."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from lightning.pytorch import Trainer

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import RunOver
from lightning_swarm.model.deferred_init import is_on_meta
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.peer import Peer
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.strategy import stopping
from lightning_swarm.strategy.data.shared import SharedData
from lightning_swarm.strategy.module_access import ModuleAccess
from lightning_swarm.strategy.optimization_loop import SwarmOptimization

_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class SwarmRun:
    """A trainer's part in one run: its session, its loop and its access to the weights; `undo` ends it."""

    trainer: Trainer
    peer: Peer
    config: SwarmConfig
    session: Session
    model: PeerModel
    access: ModuleAccess  # user code's access to the module's weights
    data: SharedData
    is_late: bool  # this trainer joined the run when it was under way
    written: frozenset[str]  # keys of the optimizer's parameter groups that its steps write
    undo: contextlib.ExitStack  # undoes the run's changes to module, loop and callbacks
    loop: SwarmOptimization | None = None  # None if the Trainer only evaluates
    trains: bool = False  # True from the loop's connection to its end

    def __reduce__(self) -> tuple[type[None], tuple[()]]:  # a copy of the strategy has no part in the run
        return type(None), ()

    @property
    def gathers_weights(self) -> bool:
        """Return whether the module should hold the trained weights after training."""
        return self.config.gather_on_end and not is_on_meta(self.trainer.lightning_module)

    def end_loop(self) -> None:
        """Finish a training loop that has ended: the lead counts late records; other trainers serve on or leave."""
        self.trains = False
        if not self.session.is_lead:
            over = self.data.run_is_over
            stopping.ask_lead_to_stop(self.trainer, self.session, run_is_over=over, joined=self.is_late)
            self.serve_on()
        elif self.loop is not None:
            self.loop.finish()
            if self.loop.pending_samples:
                _log.warning(
                    "Training ended in mid-step: %d samples of the open step were in no update. Set `max_steps` or "
                    "`max_epochs` so that the last batch closes it.",
                    self.loop.pending_samples,
                )

    def serve_on(self) -> None:
        """Serve, beside the lead, until the lead's loop has ended, too."""
        if self.is_late:
            self.retire("its loop has come to its end")
        if not self.is_late or self.config.role == "both":
            self.peer.follower.wait_until_dismissed()

    def retire(self, reason: str) -> None:
        """Leave the run as a trainer; it continues without this trainer's batches."""
        with contextlib.suppress(RunOver):
            self.session.retire(reason)
