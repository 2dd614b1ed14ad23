"""A swarm in which one of two trainers reports false batches."""

from __future__ import annotations

from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm, Trainer
from tests.faults.plans import STAGES, TRAINERS, VOTERS

LIAR = PeerId("other")


class LiarSwarm(FaultySwarm):
    """One of two trainers, `LIAR`, reports false batches: these are struck, and the run may refuse it."""

    def __init__(self) -> None:
        super().__init__(*STAGES, plan=FaultPlan(), trainers=TRAINERS, voters=VOTERS)
        self.num_lies, self.refusal = 0, ""

    @override
    async def _life(self, trainer: Trainer) -> None:
        try:
            await super()._life(trainer)
        except ConfigError as error:
            if trainer.peer_id != LIAR:
                raise
            self.refusal = str(error)

    def tell(self) -> None:
        """Train, and check that no false batch counts and that no server is accused."""
        try:
            self.train()
            assert self.num_lies > 0
            assert self.count("strike") >= self.num_lies, "its batches counted"
            assert self.count("gone") == 0, "it is no server's fault"
            self.audit_state()
            if not self.refusal:
                self.audit_samples()
        finally:
            self.close()
