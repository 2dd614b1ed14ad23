"""One of two trainers reports batches that it never computed, or interferes with the other one's.

These batches do not count, the other trainer's do, and the run goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import BackwardRequest, CallKey, CancelRequest, Direction, ForwardRequest
from lightning_swarm.protocol.messages.step import ReplayReply, ReplayRequest
from lightning_swarm.protocol.messages.wire import WireMessage, decode, encode
from lightning_swarm.protocol.rpc import BACKWARD, CANCEL, FORWARD, REPLAY
from lightning_swarm.testing import FaultPlan
from tests.faults.harness import LIMITS, MODE, NUM_MICROBATCHES, ROWS, FaultySwarm, Trainer
from tests.faults.liar import LIAR, LiarSwarm
from tests.faults.plans import LEAD, STAGES, TRAINERS, VOTERS
from tests.unit.swarm import WIDTH

FIRST_LIE = 1  # step
Answer = Callable[[PeerId, bytes], Awaitable[bytes]]


class ClaimingSwarm(LiarSwarm):
    """One of two trainers reports its batches immediately after their grants, from the second step on."""

    def __init__(self, answer: Answer, *, num_microbatches: int = NUM_MICROBATCHES) -> None:
        super().__init__()
        self._num_microbatches = num_microbatches
        liar = self.trainers[LIAR]
        self._honest = liar._in_a_place
        liar._in_a_place = self._claim  # type: ignore[method-assign]
        liar.transport._call_handlers[REPLAY.name] = answer

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
            await liar.steps.wait_closed(liar.steps.open_step)


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
    assert "or were in no sum" in swarm.refusal
    assert swarm.num_lies == 3


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("answer", [claims_to_replay, is_silent])
def test_many_microbatches_that_were_never_computed_hold_a_step_up_for_a_few_call_timeouts(answer: Answer) -> None:
    swarm = ClaimingSwarm(answer, num_microbatches=1000)
    swarm.tell()
    took_s = max(swarm.books.decided_s.values()) - min(swarm.books.decided_s.values())
    assert took_s < 3 * 8 * LIMITS.call_timeout, "three lies, each with two silences of three call timeouts"


class MeddlingSwarm(FaultySwarm):
    """One of two trainers sends servers calls for the other one's batches, whose places it guesses."""

    def __init__(self, *meddling: str) -> None:
        super().__init__(*STAGES, plan=FaultPlan(), trainers=TRAINERS, voters=VOTERS)
        self._meddling = meddling
        self.num_calls, self.num_refused = 0, 0
        self._meddler = self.trainers[LIAR]
        lead = self.trainers[PeerId(LEAD)]
        honest = lead._in_a_place

        async def in_a_place(grant: Grant, number: int) -> None:
            await self._meddle(grant)
            async with asyncio.TaskGroup() as tasks:
                going_on = tasks.create_task(self._go_on(grant))
                await honest(grant, number)
                going_on.cancel()
            await self._meddle(grant)

        lead._in_a_place = in_a_place  # type: ignore[method-assign]

    async def _life(self, trainer: Trainer) -> None:
        try:
            await super()._life(trainer)
        except SwarmError:
            if trainer.peer_id != LIAR:
                raise

    async def _go_on(self, grant: Grant) -> None:
        while "cancel" in self._meddling:
            await self._meddle(grant)
            await asyncio.sleep(0.001)

    async def _meddle(self, grant: Grant) -> None:
        keys = [
            CallKey(generation=grant.generation, step=grant.step, first=grant.first, index=index, call=0)
            for index in range(NUM_MICROBATCHES)
        ]
        await gather(
            self._call(peer, kind, key, stage, grant.weight)
            for kind in self._meddling
            for key in keys
            for stage, roster in enumerate(self.rosters)
            for peer in roster
        )

    async def _call(self, peer: PeerId, kind: str, key: CallKey, stage: int, weight: float) -> None:
        own = torch.full((ROWS, WIDTH), 1e3, dtype=torch.float64)
        common: dict[str, Any] = {"key": key, "stage_index": stage}
        called: dict[str, Any] = {**common, "mode": MODE, "source": None, "result_key": b"key of meddlers "}
        requests: list[tuple[str, WireMessage, tuple[torch.Tensor, ...]]]
        if kind == "cancel":
            directions: tuple[Direction, ...] = ("forward", "backward")
            requests = [(CANCEL.name, CancelRequest(**common, direction=one), ()) for one in directions]
        elif kind == "forward":
            structure, tensors = serialization.flatten(((own,), {}))
            requests = [(FORWARD.name, ForwardRequest(**called, structure=structure), tuple(tensors))]
        else:
            structure, tensors = serialization.flatten(([own], ((own,), {})))
            weighs = weight if kind == "backward" else 1e6
            backward = BackwardRequest(**called, weight=weighs, accumulate=True, structure=structure)
            requests = [(BACKWARD.name, backward, tuple(tensors))]
        for method, request, sent in requests:
            self.num_calls += 1
            try:
                if sent:
                    await self._meddler.transport.stream(peer, method, Message(encode(request), sent), timeout=5.0)
                else:
                    await self._meddler.transport.call(peer, method, encode(request), timeout=5.0)
            except SwarmError:
                self.num_refused += 1


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "meddling",
    [("cancel",), ("forward",), ("backward",), ("misweigh",), ("forward", "misweigh"), ("backward", "cancel")],
    ids="-".join,
)
def test_no_trainer_takes_away_or_spoils_what_another_one_computes(meddling: tuple[str, ...]) -> None:
    swarm = MeddlingSwarm(*meddling)
    try:
        swarm.train()
        assert swarm.num_calls > 0
        assert swarm.count("strike") == 0, "nobody lost a batch"
        assert swarm.count("gone") == 0, "it is no server's fault"
        swarm.audit_samples()
        swarm.audit_state()
    finally:
        swarm.close()
