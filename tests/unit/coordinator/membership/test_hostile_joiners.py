"""Who joins without the stage's state, sends a joiner another one, or keeps a place and does not go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.protocol.messages.membership import (
    FollowReply,
    FollowRequest,
    JoinReply,
    JoinRequest,
    ListenReply,
    ListenRequest,
    NextRequest,
    ReadyRequest,
)
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.methods import APPLY, FOLLOW, JOIN, LISTEN, MEET, NEXT, READY
from lightning_swarm.server.state_transfer import donor
from lightning_swarm.server.state_transfer.stage_copy import StageCopy
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.membership.test_servers import entering
from tests.unit.model.forged import forged
from tests.unit.swarm import Swarm, rows

A, B, J = PeerId("a"), PeerId("b"), PeerId("j")


class Stranger:
    """Speaks the protocol, and has no model."""

    def __init__(self, swarm: Swarm, name: str = "z") -> None:
        self.swarm = swarm
        self.transport: MemoryTransport = swarm.network.transport(name)
        self.listened = 0

        async def nothing(caller: PeerId, body: bytes) -> bytes:
            return b""

        self.transport.handle_call(MEET, nothing)
        self.transport.handle_call(APPLY, nothing)
        self.transport.handle_call(LISTEN, self._listen)

    async def join(self) -> None:
        addresses = list(await self.transport.addresses())
        request = JoinRequest(protocol_version=PROTOCOL_VERSION, boot_id=1, addresses=addresses, stage_index=0)
        decode(await self.transport.call(A, JOIN, encode(request), timeout=10.0), JoinReply)

    async def follow(self) -> FollowReply:
        """What a member says of its state; that it is the state, nobody has seen."""
        request = Message(encode(FollowRequest(stage_index=0, version=None, hold_s=0.0)))
        return decode((await self.transport.stream(A, FOLLOW, request, timeout=10.0)).body, FollowReply)

    async def next(self, version: int) -> None:
        request = NextRequest(generation=0, stage_index=0, version=version, hold_s=0.0)
        await self.transport.stream(A, NEXT, Message(encode(request)), timeout=10.0)

    async def say_ready(self) -> None:
        version = self.swarm.servers[A].steps.version
        await self.transport.call(A, READY, encode(ReadyRequest(generation=0, version=version)), timeout=10.0)

    async def _listen(self, caller: PeerId, body: bytes) -> bytes:
        self.listened += 1
        decode(body, ListenRequest)
        return encode(ListenReply(boot_id=1, version_hash=self.swarm.servers[A].steps.stage(0).fingerprint()))


def enter_first_stage(swarm: Swarm) -> asyncio.Task[None]:
    """Have an honest server join."""
    server = swarm.add_server("j")
    server.joiner.move_to(0, former=0)
    return entering(swarm, server)


def step(swarm: Swarm, seed: int) -> list[str]:
    """Who holds which stage after one more step."""
    return swarm.names_after(swarm.run(swarm.step(rows(seed))))


def test_a_hash_that_members_told_lets_nobody_in(make_swarm: MakeSwarm) -> None:
    """It answers with the very hash of the weights; but they are asked for under a number that nobody knew before."""
    swarm = make_swarm("a b", "c")
    stranger = Stranger(swarm)
    swarm.run(stranger.join())
    for number in range(3):
        swarm.run(_tolerant(stranger.say_ready()))
        assert step(swarm, number) == ["ab", "c"]
    assert stranger.listened > 0
    enter_first_stage(swarm)
    swarm.run(asyncio.sleep(1.0))
    assert step(swarm, 3) == ["abj", "c"], "who has the stage is let in"


async def _tolerant(work: Any) -> None:
    try:
        await work
    except SwarmError:
        return


def raised(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor + 1 if tensor.is_floating_point() else tensor for tensor in tensors]


@pytest.mark.parametrize("poison", [raised, forged], ids=["other weights", "the same fingerprint"])
def test_a_donor_that_sends_another_state_lets_nobody_in(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, poison: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> None:
    """It says a hash that fits what it sends; the joiner comes to hold the run's weights by another donor."""
    swarm = make_swarm("a b", "c")
    step(swarm, 0)
    lying = swarm.servers[A].donor._state
    honest, poisoned = donor._shared_copy, []

    def shared_copy(state: Any, stage: Any, generation: int) -> StageCopy:
        copy = honest(state, stage, generation)
        if state is not lying:
            return copy
        poisoned.append(copy.version)
        tensors = tuple(poison(copy.tensors))
        assert not all(map(torch.equal, tensors, copy.tensors))
        assert (fingerprint(tensors) == fingerprint(copy.tensors)) == (poison is forged)
        snapshot = copy.head.snapshot
        head = FollowReply(
            snapshot=type(snapshot)(
                **{
                    **{name: getattr(snapshot, name) for name in snapshot.__struct_fields__},
                    "version_hash": fingerprint(tensors),
                }
            ),
            layouts=copy.head.layouts,
        )
        return StageCopy(head, tensors)

    monkeypatch.setattr(donor, "_shared_copy", shared_copy)
    task = enter_first_stage(swarm)
    members: Sequence[str] = ()
    for number in range(1, 8):
        swarm.run(asyncio.sleep(20.0))
        members = step(swarm, number)
        if task.done():
            break
    assert poisoned, "it was asked"
    assert members == ["abj", "c"]
    for name, tensor in swarm.servers[A].steps.stage(0).weights().items():
        assert torch.equal(swarm.servers[J].steps.stage(0).weights()[name], tensor)


@pytest.mark.parametrize("how", ["downloads for ever", "follows for ever", "begins again for ever"])
def test_who_does_not_go_on_gives_its_place_to_others(make_swarm: MakeSwarm, how: str) -> None:
    swarm = make_swarm("a", "c", limits=Limits(call_timeout=30.0))
    strangers = [Stranger(swarm, name) for name in ("x", "y", "z")]
    step(swarm, 0)

    async def park() -> None:
        for one in strangers:
            await one.join()
            await one.follow()

    swarm.run(park())

    async def stay(one: Stranger) -> None:
        while True:
            await asyncio.sleep(10.0)
            if how == "begins again for ever":
                await _tolerant(one.next(swarm.servers[A].steps.version))
                await _tolerant(one.join())
                await _tolerant(one.follow())
            elif how == "follows for ever":
                await _tolerant(one.next(swarm.servers[A].steps.version))

    staying = [swarm.loop.create_task(stay(one)) for one in strangers]
    task = enter_first_stage(swarm)
    try:
        for number in range(1, 30):
            swarm.run(asyncio.sleep(20.0))
            members = step(swarm, number)
            if task.done():
                break
        assert members == ["aj", "c"]
        if how == "begins again for ever":
            swarm.run(asyncio.sleep(100.0))
            begun = [swarm.servers[A].donor._backoff.missed(PeerId(one), now_s=0.0)[0] for one in "xyz"]
            assert all(3 <= number <= 7 for number in begun), "after the third they have to wait, longer each time"
    finally:
        for one in staying:
            one.cancel()
        swarm.run(asyncio.wait(staying))
