"""Joiners without the stage's state, donors of a false state, and joiners that occupy a place without progress."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.access import Permit, Role
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.protocol.messages.membership import (
    DrainRequest,
    FollowReply,
    FollowRequest,
    JoinReply,
    JoinRequest,
    ListenReply,
    ListenRequest,
    NextReply,
    NextRequest,
    ReadyReply,
    ReadyRequest,
)
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Candidate
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.rpc import APPLY, DRAIN, FOLLOW, JOIN, LISTEN, MEET, NEXT, READY
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

        self.transport.handle_call(MEET.name, nothing)
        self.transport.handle_call(APPLY.name, nothing)
        self.transport.handle_call(LISTEN.name, self._listen)

    async def join(self) -> int:
        """Ask to join; return the stage that it is assigned."""
        addresses = list(await self.transport.addresses())
        request = JoinRequest(protocol_version=PROTOCOL_VERSION, boot_id=1, addresses=addresses, stage_index=0)
        return decode(await self.transport.call(A, JOIN.name, encode(request), timeout=10.0), JoinReply).stage_index

    async def follow(self) -> FollowReply:
        """Return a member's description of its state; the state itself is not downloaded."""
        request = Message(encode(FollowRequest(stage_index=0, version=None, hold_s=0.0)))
        return decode((await self.transport.stream(A, FOLLOW.name, request, timeout=10.0)).body, FollowReply)

    async def next(self, version: int) -> None:
        request = NextRequest(generation=0, stage_index=0, version=version, hold_s=0.0)
        await self.transport.stream(A, NEXT.name, Message(encode(request)), timeout=10.0)

    async def say_ready(self) -> None:
        version = self.swarm.servers[A].steps.version
        await self.transport.call(A, READY.name, encode(ReadyRequest(generation=0, version=version)), timeout=10.0)

    async def _listen(self, caller: PeerId, body: bytes) -> bytes:
        self.listened += 1
        decode(body, ListenRequest)
        return encode(ListenReply(boot_id=1, version_hash=self.swarm.servers[A].steps.stage(0).fingerprint()))


def enter_first_stage(swarm: Swarm) -> asyncio.Task[None]:
    """Start an honest server that joins."""
    swarm.coordinator.joiners.lots.record_stage(J, 0)  # audited runs assign strangers' stages at random
    server = swarm.add_server("j")
    server.joiner.move_to(0, former=0)
    return entering(swarm, server)


def step(swarm: Swarm, seed: int) -> list[str]:
    """Run one more step; return the holders of each stage."""
    return swarm.names_after(swarm.run(swarm.step(rows(seed))))


def steps_until_done(swarm: Swarm, task: asyncio.Task[None], *, most: int, pause_s: float) -> list[str]:
    """Run steps from the second one on until a joiner is a member; return the holders of each stage then."""
    for number in range(1, most):
        swarm.run(asyncio.sleep(pause_s))
        members = step(swarm, number)
        if task.done():
            break
    return members


def test_a_hash_that_members_told_lets_nobody_in(make_swarm: MakeSwarm) -> None:
    """Its answer is the true hash of the weights, but the request's nonce makes a copied hash invalid."""
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
    """Its hash fits its false state; the joiner gets the run's weights from another donor."""
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
    members = steps_until_done(swarm, task, most=8, pause_s=20.0)
    assert poisoned, "it was asked"
    assert members == ["abj", "c"]
    for name, tensor in swarm.servers[A].steps.stage(0).weights().items():
        assert torch.equal(swarm.servers[J].steps.stage(0).weights()[name], tensor)


# ---------------------------------------------------------------------- in audited runs


def altered(reply: NextReply, tensors: Sequence[Tensor], how: str) -> tuple[NextReply, Sequence[Tensor]]:
    """Falsify a record that a donor sends a joiner."""
    record = reply.record
    assert record is not None
    false = {
        "a gradient": record,
        "a norm": replaced(record, squared_norm=7.0),
        "voters": replaced(record, next_voters=[Member(peer_id=B, boot_id=101)]),
        "a newcomer": replaced(
            record,
            newcomers=[Candidate(member=Member(peer_id=J, boot_id=104), stage_index=0, addresses=["memory/p2p/j"])],
        ),
        "nonsense": replaced(record, touched=[]),
    }[how]
    return replaced(reply, record=false), raised(tensors) if how == "a gradient" else tensors


def joined_beside_a_liar(make_swarm: MakeSwarm, lie: Callable[[Swarm], list[Any]]) -> Swarm:
    """Let a joiner ask the malicious `b` first; check that it gets the state of the run's servers."""
    swarm = make_swarm("a b", "c", audit_share=0.0)
    step(swarm, 0)
    lies = lie(swarm)
    swarm.add_server("k")  # changes the joiner's boot id, so that it begins with the second replica
    task = enter_first_stage(swarm)
    members = steps_until_done(swarm, task, most=12, pause_s=3.0)
    assert lies, "it was asked"
    assert members == ["abj", "c"]
    joiner = swarm.servers[J]
    for name, tensor in swarm.servers[A].steps.stage(0).weights().items():
        assert torch.equal(joiner.steps.stage(0).weights()[name], tensor)
    run = swarm.steps.run
    swarm.run(asyncio.sleep(1.0))
    assert joiner.membership.run.seats == swarm.servers[A].membership.run.seats
    assert joiner.membership.run.voters == run.voters
    step(swarm, 20)
    assert swarm.names_after(swarm.run(swarm.step(rows(21)))) == ["abj", "c"], "it computes what they do"
    return swarm


def unconfirmed(swarm: Swarm, peer: PeerId) -> list[str | None]:
    return [event.peer for event in swarm.events(peer) if event.kind == "unconfirmed"]


@pytest.mark.parametrize("poison", [raised, forged], ids=["other weights", "the same fingerprint"])
def test_after_a_donor_that_lied_the_coordinator_is_asked(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, poison: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> None:
    honest = donor._shared_copy

    def lie(swarm: Swarm) -> list[Any]:
        lying, lies = swarm.servers[B].donor._state, list[Any]()

        def shared_copy(state: Any, stage: Any, generation: int) -> StageCopy:
            copy = honest(state, stage, generation)
            if state is not lying:
                return copy
            lies.append(copy.version)
            tensors = tuple(poison(copy.tensors))
            assert not all(map(torch.equal, tensors, copy.tensors))
            snapshot = replaced(copy.head.snapshot, version_hash=fingerprint(tensors))
            return StageCopy(FollowReply(snapshot=snapshot, layouts=copy.head.layouts), tensors)

        monkeypatch.setattr(donor, "_shared_copy", shared_copy)
        return lies

    swarm = joined_beside_a_liar(make_swarm, lie)
    assert unconfirmed(swarm, J) == ["b"], "once: it is asked no more"


def test_a_donor_whose_word_does_not_fit_what_it_sends_ends_no_joiner(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = donor._shared_copy

    def lie(swarm: Swarm) -> list[Any]:
        lying, lies = swarm.servers[B].donor._state, list[Any]()

        def shared_copy(state: Any, stage: Any, generation: int) -> StageCopy:
            copy = honest(state, stage, generation)
            if state is not lying:
                return copy
            lies.append(copy.version)
            head = FollowReply(snapshot=replaced(copy.head.snapshot, version_hash=1), layouts=copy.head.layouts)
            return StageCopy(head, copy.tensors)

        monkeypatch.setattr(donor, "_shared_copy", shared_copy)
        return lies

    swarm = joined_beside_a_liar(make_swarm, lie)
    assert unconfirmed(swarm, J) == ["b"]


@pytest.mark.parametrize("how", ["a gradient", "a norm", "voters", "a newcomer", "nonsense"])
def test_records_that_were_not_decided_are_not_followed(make_swarm: MakeSwarm, how: str) -> None:
    def lie(swarm: Swarm) -> list[Any]:
        transport: Any = swarm.servers[B]._transport
        handler, *bounds = transport._stream_handlers[NEXT.name]
        lies = list[Any]()

        async def answer(caller: PeerId, message: Message) -> Message:
            reply = await handler(caller, message)
            head = decode(reply.body, NextReply)
            if head.record is None:
                return Message(reply.body, reply.tensors)
            lies.append(head.record.step)
            false, tensors = altered(head, reply.tensors, how)
            return Message(encode(false), tuple(tensors))

        transport._stream_handlers[NEXT.name] = answer, *bounds
        coordinator: Any = swarm.servers[A]._transport
        ready = coordinator._call_handlers[READY.name]

        async def later(caller: PeerId, body: bytes) -> bytes:
            """Hold the joiner's report that it is ready until it has followed a record."""
            answer: bytes = await ready(caller, body) if lies else encode(ReadyReply(num_before=0))
            return answer

        coordinator._call_handlers[READY.name] = later
        return lies

    swarm = joined_beside_a_liar(make_swarm, lie)
    assert unconfirmed(swarm, J) == ["b"]


def test_members_come_from_the_coordinator(make_swarm: MakeSwarm) -> None:
    def lie(swarm: Swarm) -> list[Any]:
        transport: Any = swarm.servers[B]._transport
        handler, *bounds = transport._stream_handlers[NEXT.name]
        lies = list[Any]()

        async def answer(caller: PeerId, message: Message) -> Message:
            reply = await handler(caller, message)
            head = decode(reply.body, NextReply)
            if head.seats is None:
                return Message(reply.body, reply.tensors)
            lies.append(head)
            false = replaced(head.seats, voters=[Member(peer_id=B, boot_id=101)])
            return Message(encode(replaced(head, seats=false)), reply.tensors)

        transport._stream_handlers[NEXT.name] = answer, *bounds
        return lies

    joined_beside_a_liar(make_swarm, lie)


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
        members = steps_until_done(swarm, task, most=30, pause_s=20.0)
        assert members == ["aj", "c"]
        if how == "begins again for ever":
            swarm.run(asyncio.sleep(100.0))
            begun = [swarm.servers[A].donor._backoff.missed(PeerId(one), now_s=0.0)[0] for one in "xyz"]
            assert all(3 <= number <= 7 for number in begun), "after the third they have to wait, longer each time"
    finally:
        for one in staying:
            one.cancel()
        swarm.run(asyncio.wait(staying))


@pytest.mark.parametrize(("options", "expected"), [({"audit_share": 0.0}, ["ab", "cj"]), ({}, ["abj", "c"])])
def test_strangers_choose_no_stage_in_an_audited_run(
    make_swarm: MakeSwarm, options: dict[str, Any], expected: list[str]
) -> None:
    """They could gather in one stage and form its majority, so each gets a random stage, not the requested one."""
    swarm = make_swarm("a b", "c", **options)
    step(swarm, 0)
    server = swarm.add_server("j")
    server.joiner.move_to(0, former=0)
    task = entering(swarm, server)
    members = steps_until_done(swarm, task, most=12, pause_s=3.0)
    assert members == expected
    assert list(server.steps.stages) == [1 if options else 0]


def test_a_stranger_draws_no_other_stage_under_other_names(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    permit = Permit(role=Role.SERVER, expires_at_s=math.inf, invitation=bytes(16), uses=1)
    monkeypatch.setattr(BaseTransport, "permit_of", lambda *_: permit)
    swarm = make_swarm("a", "b", audit_share=0.0)
    step(swarm, 0)
    drawn = set()
    for number in range(12):
        stranger = Stranger(swarm, f"z{number}")
        drawn.add(swarm.run(stranger.join()))
        leave = encode(DrainRequest(generation=0, boot_id=1))
        swarm.run(stranger.transport.call(A, DRAIN.name, leave, timeout=10.0))
    assert len(drawn) == 1
