"""Finds out where a process goes on after an error, and makes its strategy ready for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_swarm.core.errors import SwarmError, WentBack
from lightning_swarm.peer.peer import Peer
from lightning_swarm.strategy.rollback.rollback import RollbackTarget

if TYPE_CHECKING:
    from lightning_swarm.strategy.strategy import SwarmStrategy

_log = logging.getLogger(__name__)


class RunRecovery:
    """Rolls a strategy's run back after an error, as its lead, as its next lead, or beside its lead."""

    def __init__(self, strategy: SwarmStrategy) -> None:
        self._strategy = strategy
        self.is_rolling_back = False  # what is torn down goes on
        self.restore_lead_role: Callable[[], None] = lambda: (
            None
        )  # undoes what was left to the lead, at another trainer

    def prepare(self, trainer: Trainer, error: SwarmError) -> str | None:
        """Make ready to run the Trainer's function again, with what is left of the swarm.

        Returns the checkpoint to go on from; empty: from none, as a trainer that joins the run. None: the run cannot
        roll back, or has lost nothing that it needs.
        """
        strategy = self._strategy
        if strategy.peer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        found = self._find_target(trainer, strategy.peer, error)
        if found is None:
            return None
        version, path = found
        say = strategy.peer.events.note if strategy.is_global_zero else strategy.peer.events.hear  # once for the swarm
        say("went_back", step=version, reason=str(error.__cause__ or error))
        trainer.training = True  # it may have been validating
        self.is_rolling_back = True
        try:
            trainer._teardown()
        finally:
            self.is_rolling_back = False
        if strategy._swarm_launcher is not None:
            strategy._swarm_launcher.forget_ended()
        trainer.training, trainer.should_stop = True, False
        return path

    def _find_target(self, trainer: Trainer, peer: Peer, error: SwarmError) -> tuple[int, str] | None:
        """The version of the weights, and the checkpoint as `prepare` returns it. This peer may be the lead then."""
        strategy, rollback = self._strategy, self._strategy._rollback
        if strategy.is_global_zero:
            target = rollback.find_target(trainer, peer, error)
        elif isinstance(error, WentBack) and not peer.follower.is_rolling_back and strategy._joined is not None:
            return self._join_again(peer)
        else:
            version = peer.follower.rollback_step()
            if version is None:
                return None
            if not peer.inherits and peer.follower.has_new_lead:
                rollback.begin_anew()
                return version, ""
            target = self._become_lead(trainer, peer) if peer.inherits else rollback.follow_lead(version, error)
        return None if target is None else (target.version, str(target.path))

    def _join_again(self, peer: Peer) -> tuple[int, str] | None:
        """Join a run again that rolled back without this trainer, whose server was not in it to be told."""
        view = peer.follower.find_run_again()
        if view is None:
            return None
        self._strategy._joined = view
        self._strategy._rollback.discard_states()
        return view.manifest.first_step, ""

    def take_over(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """Go on with the run that another peer led, with this peer as its lead."""
        strategy = self._strategy
        target = strategy._rollback.take_over(trainer, peer)
        assert peer.lead.run is not None
        strategy._inherited_stages = peer.lead.run.manifest.stages
        strategy.config = replace(strategy.config, initial_peers=())  # from here on it is the starter of runs
        return target

    def _become_lead(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """Lead from here on, where this process trained beside another one."""
        strategy = self._strategy
        target = self.take_over(trainer, peer)
        _log.warning(
            "The lead of run %r is gone. This peer takes the run over, from step %d on.",
            strategy.config.run_id,
            target.version,
        )
        strategy._joined = None
        strategy._rank_override.set(strategy.global_rank)
        self.restore_lead_role()
        return target
