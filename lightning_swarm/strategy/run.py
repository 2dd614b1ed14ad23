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
    joined_late: bool  # this trainer joined the run when it was under way
    written_keys: frozenset[str]  # keys of the optimizer's parameter groups that its steps write
    undo: contextlib.ExitStack  # undoes the run's changes to module, loop and callbacks
    loop: SwarmOptimization | None = None  # None if the Trainer only evaluates
    is_training: bool = False  # True from the loop's connection to its end

    def __reduce__(self) -> tuple[type[None], tuple[()]]:  # None in a copy of the strategy: it has no run
        return type(None), ()

    @property
    def gathers_weights(self) -> bool:
        """Return whether the module should hold the trained weights after training."""
        return self.config.gather_on_end and not is_on_meta(self.trainer.lightning_module)

    def end_loop(self) -> None:
        """Finish a training loop that has ended: the lead counts late records; other trainers wait or leave."""
        self.is_training = False
        if not self.session.is_lead:
            is_over = self.data.run_is_over
            stopping.ask_lead_to_stop(self.trainer, self.session, run_is_over=is_over, joined_late=self.joined_late)
            self.serve_until_dismissed()
        elif self.loop is not None:
            self.loop.finish()
            if self.loop.pending_samples:
                _log.warning(
                    "Training ended in mid-step: %d samples of the open step count in no update. Set `max_steps` or "
                    "`max_epochs` so that the last batch closes the step.",
                    self.loop.pending_samples,
                )

    def serve_until_dismissed(self) -> None:
        """Wait, and serve, until the lead dismisses this peer. A trainer that joined late waits only if it serves."""
        if self.joined_late:
            self.retire("its loop has ended")
        if not self.joined_late or self.config.role == "both":
            self.peer.follower.wait_until_dismissed()

    def retire(self, reason: str) -> None:
        """Leave the run as a trainer; the run continues without this trainer's batches."""
        with contextlib.suppress(RunOver):
            self.session.retire(reason)
