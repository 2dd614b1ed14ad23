"""A trainer gives its gradients another weight than its lease's: these do not count, and the run goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.step import ReplayReply
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import REPLAY
from tests.faults.liar import LIAR, LiarSwarm


class MisweighingSwarm(LiarSwarm):
    """One of two trainers multiplies the weights of its first `num_lies` batches, from the second step on."""

    def __init__(self, factor: float, *, num_lies: int) -> None:
        super().__init__()
        self._left = num_lies
        liar = self.trainers[LIAR]
        honest: Any = liar.steps.grant

        async def grant(*args: Any) -> Grant:
            found: Grant = await honest(*args)
            if found.step == 0 or self._left == self.num_lies:
                return found
            self.num_lies += 1
            return replaced(found, weight=found.weight * factor)

        liar.steps.grant = grant  # type: ignore[method-assign]


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

        swarm.trainers[LIAR].transport._call_handlers[REPLAY.name] = nothing
    swarm.tell()
    assert "struck, because they had another weight" in swarm.refusal
    assert swarm.num_lies >= 3
