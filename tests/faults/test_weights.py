"""A trainer gives its gradients another weight than its lease's: none counts, and the run goes on without the lie."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.step import ReplayReply
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.methods import REPLAY
from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm, Trainer
from tests.faults.plans import STAGES, TRAINERS, VOTERS

LIAR = PeerId("other")


class MisweighingSwarm(FaultySwarm):
    """One of two trainers multiplies the weights of its batches, of the first `num_lies`, from the second step on."""

    def __init__(self, factor: float, *, num_lies: int) -> None:
        super().__init__(*STAGES, plan=FaultPlan(), trainers=TRAINERS, voters=VOTERS)
        self._left, self.num_lies, self.refusal = num_lies, 0, ""
        liar = self.trainers[LIAR]
        honest: Any = liar.steps.grant

        async def grant(*args: Any) -> Grant:
            found: Grant = await honest(*args)
            if found.step == 0 or self._left == self.num_lies:
                return found
            self.num_lies += 1
            return replaced(found, weight=found.weight * factor)

        liar.steps.grant = grant  # type: ignore[method-assign]

    async def _life(self, trainer: Trainer) -> None:
        try:
            await super()._life(trainer)
        except ConfigError as error:
            if trainer.peer_id != LIAR:
                raise
            self.refusal = str(error)

    def tell(self) -> None:
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


@pytest.mark.parametrize("factor", [1e6, 1e-6, 1 + 1e-9])
def test_a_batch_of_another_weight_counts_nowhere_and_is_granted_again(factor: float) -> None:
    swarm = MisweighingSwarm(factor, num_lies=1)
    swarm.tell()
    assert swarm.refusal == ""


@pytest.mark.parametrize("claims", [False, True], ids=["replays-alike", "claims-to-replay"])
def test_a_trainer_that_goes_on_so_gets_no_place_any_more(claims: bool) -> None:
    swarm = MisweighingSwarm(1e6, num_lies=1000)
    if claims:

        async def nothing(caller: PeerId, body: bytes) -> bytes:
            await asyncio.sleep(0.1)
            return encode(ReplayReply(lost=[], unreached=[]))

        swarm.trainers[LIAR].transport._call_handlers[REPLAY] = nothing
    swarm.tell()
    assert "struck for another weight" in swarm.refusal
    assert swarm.num_lies >= 3
