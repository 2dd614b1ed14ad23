"""One of two trainers reports batches that it never computed: none counts, and the run goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.step import ReplayReply, ReplayRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import REPLAY
from lightning_swarm.testing import FaultPlan
from tests.faults.harness import LIMITS, NUM_MICROBATCHES, FaultySwarm, Trainer
from tests.faults.plans import STAGES, TRAINERS, VOTERS

LIAR = PeerId("other")
FIRST_LIE = 1  # step
Answer = Callable[[PeerId, bytes], Awaitable[bytes]]


class ClaimingSwarm(FaultySwarm):
    """One of two trainers reports its batches right after their grants from the second step on."""

    def __init__(self, answer: Answer, *, num_microbatches: int = NUM_MICROBATCHES) -> None:
        super().__init__(*STAGES, plan=FaultPlan(), trainers=TRAINERS, voters=VOTERS)
        self.num_lies, self.refusal = 0, ""
        self._num_microbatches = num_microbatches
        liar = self.trainers[LIAR]
        self._honest = liar._in_a_place
        liar._in_a_place = self._claim  # type: ignore[method-assign]
        liar.transport._call_handlers[REPLAY] = answer

    async def _claim(self, grant: Grant, number: int) -> None:
        if grant.step < FIRST_LIE:
            await self._honest(grant, number)
            return
        self.num_lies += 1
        liar, receipts = self.trainers[LIAR], [(grant.first, index, 0) for index in range(self._num_microbatches)]
        closing = await liar.steps.done(grant.lease, receipts)
        liar._through[grant.lease] = number
        self.books.done.add((LIAR, number))
        if closing and liar.steps.generation.step_ended is None:
            await liar.steps.wait_closed(liar.steps.open)

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
        finally:
            self.close()


async def claims_to_replay(caller: PeerId, body: bytes) -> bytes:
    await asyncio.sleep(0.1)
    return encode(ReplayReply(lost=[], unreached=[]))


async def has_lost_it(caller: PeerId, body: bytes) -> bytes:
    await asyncio.sleep(0.1)
    return encode(ReplayReply(lost=[one.receipt for one in decode(body, ReplayRequest).work], unreached=[]))


async def reaches_nobody(caller: PeerId, body: bytes) -> bytes:
    await asyncio.sleep(0.1)
    holders = {peer for one in decode(body, ReplayRequest).work for peer in one.holders.values()}
    return encode(ReplayReply(lost=[], unreached=sorted(holders)))


async def is_silent(caller: PeerId, body: bytes) -> bytes:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


@pytest.mark.parametrize("answer", [claims_to_replay, has_lost_it, reaches_nobody, is_silent])
def test_batches_that_were_never_computed_end_no_run(answer: Answer) -> None:
    swarm = ClaimingSwarm(answer)
    swarm.tell()
    assert "because no sum had them" in swarm.refusal
    assert swarm.num_lies == 3


@pytest.mark.parametrize("answer", [claims_to_replay, is_silent])
def test_many_microbatches_that_were_never_computed_hold_a_step_up_for_a_few_call_timeouts(answer: Answer) -> None:
    swarm = ClaimingSwarm(answer, num_microbatches=1000)
    swarm.tell()
    took_s = max(swarm.books.decided_s.values()) - min(swarm.books.decided_s.values())
    assert took_s < 3 * 8 * LIMITS.call_timeout, "three lies, each with two silences of three call timeouts"
